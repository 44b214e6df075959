"""`bench --jobs`: which tasks there are, what their processes are told, and what is kept of them. The processes here
are scripts that write what a bench would."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import jobs, options, record, registry
from harness.commands import bench
from harness.jobs import Crew, Task

from .fake_records import row, run_line, samples


def test_groups_of_a_kernel_and_mode_are_dealt_out_in_their_order():
    groups = [("gelu", f"c{i}", mode) for i in range(4) for mode in ("fwd", "bwd")] + [("rope", "c0", "fwd")]
    assert jobs.tasks(groups, size=3) == [
        Task("gelu", "fwd", ("c0", "c1", "c2")),
        Task("gelu", "fwd", ("c3",)),
        Task("gelu", "bwd", ("c0", "c1", "c2")),
        Task("gelu", "bwd", ("c3",)),
        Task("rope", "fwd", ("c0",)),
    ]


def test_cases_of_several_gpus_are_left_out():
    spec = registry.load("gradient_compression")
    selection = options.Selection(spec, spec.cases, spec.modes, ())
    chosen = {case for _, case, _ in jobs.of_selections([selection])}
    assert chosen == {case.name for case in spec.cases if case.world_size == 1} != {case.name for case in spec.cases}


def test_a_process_is_told_its_task_and_the_options_that_were_given(tmp_path):
    task = Task("gelu", "bwd", ("a", "b"))
    words = jobs.command(task, "h200", tmp_path / "out", tmp_path / "turns", ["--impl", "auto", "--samples", "5"])
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    told = parser.parse_args(words[words.index("bench") + 1 :])
    assert (told.kernel, told.mode, told.case, told.impl) == (["gelu"], ["bwd"], ["a", "b"], ["auto"])
    assert (told.gpu, told.out, told.turns) == ("h200", tmp_path / "out", tmp_path / "turns")
    assert (told.samples, told.host, told.jobs) == (5, "no", None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--missing"], "--missing cannot be used with a bench without --jobs"),
        (["--minutes", "3"], "--minutes cannot be used with a bench without --jobs"),
        (["--jobs", "0"], "at least 1, got 0"),
        (["--gpus", "0"], "--gpus: at least 1, got 0"),
        (["--jobs", "2", "--resume", "--host", "no"], "--host and --resume cannot be used with --jobs"),
        (["--gpus", "2", "--jobs", "2"], "--jobs cannot be used with --gpus"),
        (["--jobs", "2", "--device", "cpu", "--kernel", "gelu"], "--jobs needs a GPU"),
    ],
)
def test_options_that_do_not_go_together(words, message):
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    with pytest.raises(ValueError, match=message):
        bench.main(parser.parse_args(words))


def test_what_was_not_given_is_not_passed():
    words = [word for name, value in (("impl", None), ("timer", "cupti")) for word in jobs._words(name, value)]
    assert words == ["--timer", "cupti"]


#: Writes a run with a row for each case that it is given, the last after a while; an interrupt ends it.
BENCH = """
import json, signal, sys, time
out, seconds, *cases = sys.argv[1:]
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
with open(out, "a") as file:
    for line in json.loads(cases.pop()):
        if line["type"] == "row" and line["case"] == cases[-1]:
            time.sleep(float(seconds))
        file.write(json.dumps(line) + "\\n")
        file.flush()
"""


def lines_of(task: Task) -> list[dict]:
    name = f"run-{task.kernel}-{task.mode}"
    rows = [row(task.kernel, case, task.mode, "triton", samples(10.0), run=name) for case in task.cases]
    return [run_line(task.kernel, name), *rows]


@pytest.fixture
def crew(tmp_path):
    """Of two tasks, whose last rows take so many seconds each. `short`: the cases for which a shared GPU has too little
    memory."""

    def make(*seconds: float, short: tuple[str, ...] = ()) -> Crew:
        def start(task: Task, gpu: int, own: Path, shared: bool) -> subprocess.Popen[bytes]:
            make.started.append((task, shared))
            (own / "records").mkdir()
            path = own / "records" / f"{task.kernel}.jsonl"
            wait = seconds[waiting.index(task)] if task in waiting else 0
            lines = lines_of(task)
            for line in lines:
                if shared and line.get("case") in short:
                    line |= {"status": "oom", "reason": "out of memory"}
            words = [sys.executable, "-c", BENCH, str(path), str(wait), *task.cases, json.dumps(lines)]
            return subprocess.Popen(words)

        waiting = [Task("gelu", "fwd", ("a", "b")), Task("gelu", "bwd", ("a", "c"))][: len(seconds)]
        (tmp_path / "own").mkdir()
        said.clear()
        return Crew(list(waiting), tmp_path / "out", tmp_path / "own", start, True, said.append)

    said: list[str] = []
    make.said, make.started = said, []
    return make


def measured(tmp_path: Path) -> set[tuple[str, str]]:
    return {(r.case, r.mode) for r in record.load(tmp_path / "out").rows} if (tmp_path / "out").exists() else set()


def test_records_of_all_processes_are_kept(crew, tmp_path):
    at_work = crew(0, 0)
    assert at_work.work(gpus=2, each=1, seconds=None) and not at_work.failed
    assert measured(tmp_path) == {("a", "fwd"), ("b", "fwd"), ("a", "bwd"), ("c", "bwd")}
    assert [text.split(":")[0] for text in crew.said] == ["1 of 2", "2 of 2"]
    assert all("exit 0 after 0 s, 2 rows" in text for text in crew.said)


def test_cases_that_lack_memory_are_repeated_alone_on_a_gpu(crew, tmp_path):
    at_work = crew(0, 1, short=("b", "c"))
    assert at_work.work(gpus=1, each=2, seconds=None) and not at_work.failed
    assert measured(tmp_path) == {("a", "fwd"), ("b", "fwd"), ("a", "bwd"), ("c", "bwd")}
    assert [shared for _, shared in crew.started] == [True, True, False, False]
    assert [task for task, _ in crew.started[2:]] == [Task("gelu", "fwd", ("b",)), Task("gelu", "bwd", ("c",))]
    assert "1 rows, 1 cases out of memory, to be repeated alone" in crew.said[0]
    assert [text.split(":")[0] for text in crew.said] == ["1 of 3", "2 of 4", "3 of 4", "4 of 4"]


def test_finished_rows_are_kept_when_time_is_up(crew, tmp_path):
    begun = time.monotonic()
    assert not crew(0, 60).work(gpus=1, each=2, seconds=5)
    assert time.monotonic() - begun < 30
    assert measured(tmp_path) == {("a", "fwd"), ("b", "fwd"), ("a", "bwd")}


def test_an_interrupt_ends_all_and_keeps_finished_rows(crew, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "PATIENCE_SECONDS", 0.0)
    at_work = crew(60, 60)

    def look(seconds: float) -> None:
        if (path := tmp_path / "own" / "1" / "records" / "gelu.jsonl").exists() and '"row"' in path.read_text():
            raise KeyboardInterrupt
        time.sleep(seconds)

    at_work.look = look
    with pytest.raises(KeyboardInterrupt):
        at_work.work(gpus=1, each=1, seconds=None)
    assert measured(tmp_path) == {("a", "fwd")} and len(at_work.waiting) == 1 and not at_work.failed


def test_a_process_that_fails_is_named_and_the_others_go_on(crew, tmp_path):
    at_work = crew(0, 0)
    start = at_work.start
    broken = [sys.executable, "-c", "raise SystemExit(3)"]
    at_work.start = lambda task, *more: subprocess.Popen(broken) if task.mode == "fwd" else start(task, *more)
    assert not at_work.work(gpus=1, each=1, seconds=None)
    assert [task.mode for task in at_work.failed] == ["fwd"] and measured(tmp_path) == {("a", "bwd"), ("c", "bwd")}


def test_a_torn_line_is_left_out(tmp_path):
    (tmp_path / "own" / "records").mkdir(parents=True)
    lines = [json.dumps(line) for line in lines_of(Task("gelu", "fwd", ("a", "b")))]
    (tmp_path / "own" / "records" / "gelu.jsonl").write_text("\n".join([*lines[:-1], lines[-1][:30]]))
    assert jobs.take_over(tmp_path / "own", tmp_path / "out", shared=True) == (1, ())
    assert measured(tmp_path) == {("a", "fwd")}


@pytest.mark.parametrize(("shared", "cases"), [(True, {("b", "fwd")}), (False, {("a", "fwd"), ("b", "fwd")})])
def test_where_a_shared_gpu_has_too_little_memory_the_group_counts_as_not_measured(tmp_path, shared, cases):
    (tmp_path / "own" / "records").mkdir(parents=True)
    start, *rows = lines_of(Task("gelu", "fwd", ("a", "b")))
    peer = {**rows[0], "implementation": "compile", "kind": "baseline", "status": "oom", "reason": "out of memory"}
    lines = [start, rows[0], peer, rows[1]]
    (tmp_path / "own" / "records" / "gelu.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    taken = jobs.take_over(tmp_path / "own", tmp_path / "out", shared)
    assert taken == ((1, ("a",)) if shared else (3, ())) and measured(tmp_path) == cases


@pytest.mark.parametrize(
    ("groups", "places", "size"), [(505, 40, 3), (309, 40, 1), (5, 40, 1), (505, 2, 3), (90, 10, 2)]
)
def test_few_groups_are_dealt_out_one_by_one(groups, places, size):
    assert jobs.batch(groups, places) == size


def write(out: Path, lines: list[dict]) -> None:
    (out / "records").mkdir()
    (out / "records" / "gelu.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_what_has_rows_of_all_implementations_is_not_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("harness.reporting.declared.peers", lambda kernel: ())
    groups = [("gelu", case, "fwd") for case in ("a", "b")]
    start, row = lines_of(Task("gelu", "fwd", ("a",)))
    ours = row["implementation"]
    assert jobs.unmeasured(tmp_path / "none", groups, {"gelu": [ours]}) == groups
    write(tmp_path, [start, row])
    assert jobs.unmeasured(tmp_path, groups, {"gelu": [ours]}) == groups[1:]
    assert jobs.unmeasured(tmp_path, groups, {"gelu": [ours, "another-of-ours"]}) == groups
    monkeypatch.setattr("harness.reporting.declared.peers", lambda kernel: ("compile",))
    assert jobs.unmeasured(tmp_path, groups, {"gelu": [ours]}) == groups


@pytest.mark.parametrize(("reason", "repeated"), [("withdrawn: it took another path", True), ("no such module", False)])
def test_a_group_with_a_withdrawn_row_is_missing(tmp_path, monkeypatch, reason, repeated):
    monkeypatch.setattr("harness.reporting.declared.peers", lambda kernel: ("compile",))
    start, ours = lines_of(Task("gelu", "fwd", ("a",)))
    peer = {**ours, "implementation": "compile", "kind": "baseline", "status": "error", "reason": reason}
    write(tmp_path, [start, ours, peer])
    groups = [("gelu", "a", "fwd")]
    assert jobs.unmeasured(tmp_path, groups, {"gelu": [ours["implementation"], "compile"]}) == groups * repeated

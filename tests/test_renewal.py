"""A bench outlives its process: what is known of one that died, and what the next one does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness import options, record, registry, renewal
from harness.commands.bench import Group
from harness.measure.turns import Turns
from tests.fake_records import row, run_line, write

ROOT = Path(__file__).parent.parent
A, B = ("norm", "small", "bwd", "compile"), ("norm", "small", "bwd", "compile-max")


def run(folder: Path, body: str, command: str = "bench") -> subprocess.CompletedProcess[str]:
    return subprocess.run(started(folder, body, command), capture_output=True, text=True, timeout=300)


def started(folder: Path, body: str, command: str = "bench") -> list[str]:
    """A program whose `bench` is `body`, which has a `journal`."""
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    text = f"import os, signal, sys, time\nsys.path.insert(0, {str(ROOT)!r})\nfrom harness import renewal\n\n"
    text += f"def main():\n    journal = renewal.journal()\n{lines}\n\nsys.exit(renewal.supervised(main))\n"
    path = folder / "program.py"
    path.write_text(text, encoding="utf-8")
    return [sys.executable, str(path), command]


TRIES_ALL = """
for name in ("auto", "compile", "compile-max", "padded"):
    try:
        journal.begin("norm", "small", "bwd", name)
    except renewal.Crashed as error:
        print(name, error)
        continue
    if name in {dying}:
        {death}
    print(name, "ran")
journal.note(at=None)
return 3
"""


def test_the_next_process_leaves_out_what_one_died_of(tmp_path: Path) -> None:
    body = TRIES_ALL.format(dying=("compile", "padded"), death="os.abort()")
    done = run(tmp_path, body)
    reason = "the process crashed (SIGABRT); not tried again"
    assert done.returncode == 3
    assert done.stdout.splitlines()[-4:] == ["auto ran", f"compile {reason}", "compile-max ran", f"padded {reason}"]
    told = [
        f"norm small bwd {name}: {reason}. The bench continues in another process" for name in ("compile", "padded")
    ]
    assert [line for line in done.stderr.splitlines() if "norm" in line] == told


def test_a_lost_context_ends_the_process_with_its_reason(tmp_path: Path) -> None:
    body = TRIES_ALL.format(dying=("compile-max",), death='journal.lost("CUDA error: an illegal memory access")')
    done = run(tmp_path, body)
    assert done.returncode == 3
    assert "compile-max CUDA error: an illegal memory access; not tried again" in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("return 1", 1),
        ("raise SystemExit(130)", 130),
        ("os.abort()", 134),  # at nothing: another process would do the same
        ("journal.begin(*'abcd'); os.kill(os.getpid(), signal.SIGKILL)", 137),  # which somebody has sent
        ("journal.begin(*'abcd'); journal.note(at=None); os.abort()", 134),
    ],
)
def test_other_ends_are_those_of_the_bench(tmp_path: Path, body: str, code: int) -> None:
    done = run(tmp_path, f"print('once')\nsys.stdout.flush()\n{body}")
    assert (done.returncode, done.stdout) == (code, "once\n")


def test_other_commands_run_in_one_process(tmp_path: Path) -> None:
    body = "print(renewal.VARIABLE in os.environ, journal.begin(*'abcd'))\njournal.lost('nothing')\nos.abort()"
    done = run(tmp_path, body, "report")
    assert done.returncode == -signal.SIGABRT and "another process" not in done.stderr


# Sleeps shortly: a signal that comes just before a call that waits would be seen at its end.
WAITS = """
seen = []

def end(*_):
    sys.exit(130 + len(seen) - 1)

def count(*_):
    seen.append(1)
    if len(seen) == 1:
        signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, 2)

signal.signal(signal.SIGINT, count)
print(os.getpid(), flush=True)
while True:
    time.sleep(0.05)
"""


def test_an_interruption_reaches_the_bench_once(tmp_path: Path) -> None:
    """As from timeout(1), which signals a process and then its group."""
    process = subprocess.Popen(started(tmp_path, WAITS), stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline()
    process.send_signal(signal.SIGINT)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130


@pytest.mark.skipif(sys.platform != "linux", reason="the signal of a parent's death is Linux's")
def test_the_bench_ends_with_the_process_that_waits_for_it(tmp_path: Path) -> None:
    process = subprocess.Popen(started(tmp_path, WAITS), stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.wait(timeout=60)
    status, deadline = Path(f"/proc/{child}/stat"), time.monotonic() + 60
    while status.exists() and ") Z " not in status.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not status.exists() or ") Z " in status.read_text()


def test_a_journal_is_the_sum_of_its_lines(tmp_path: Path) -> None:
    first = renewal.Journal(tmp_path / "journal")
    first.note(run="r1")
    first.begin(*A)
    first.note(failures=2)
    first.note(complete="norm")
    assert renewal.Journal(tmp_path / "journal").died("SIGSEGV")
    second = renewal.Journal(tmp_path / "journal")
    assert (
        second.renewed
        and second.at is None
        and (second.runs, second.complete, second.failures)
        == (
            {"r1"},
            {"norm"},
            2,
        )
    )
    assert second.knows("norm", "small", "bwd") and not second.knows("norm", "small", "fwd")
    with pytest.raises(renewal.Crashed, match=r"the process crashed \(SIGSEGV\); not tried again"):
        second.begin(*A)
    second.begin(*B)
    assert second.died("SIGABRT") and not second.died("SIGABRT")


def test_a_bench_that_nobody_waits_for_keeps_no_journal() -> None:
    journal = renewal.journal()
    journal.begin(*A)
    journal.lost("the context is gone")  # goes on: no process would follow
    assert not journal.renewed


def test_what_a_process_died_of_has_a_row_beside_the_others(tmp_path: Path) -> None:
    spec = registry.load("rmsnorm")
    case, names = spec.cases[0], ("triton", "eager")
    journal = renewal.Journal(tmp_path / "journal")
    journal.begin("rmsnorm", case.name, "fwd", "eager")
    journal.died("SIGABRT")
    group = Group(SimpleNamespace(journal=journal), options.Selection(spec, (case,), ("fwd",), names), case, "fwd")
    tried = []
    for name in names:
        with group._guarded(name):
            group._begin(name)
            tried.append(name)
    assert tried == ["triton"] and list(group.done) == ["eager"]
    assert group.done["eager"]["status"] == "crashed" and "SIGABRT" in group.done["eager"]["reason"]


def test_a_group_is_given_up_where_nobody_knows_which_one_it_was(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    spec = registry.load("rmsnorm")
    case, names = spec.cases[0], ("triton", "eager")
    journal = renewal.Journal(tmp_path / "journal")
    journal.begin("rmsnorm", case.name, "fwd", None)
    journal.died("SIGABRT")
    session = SimpleNamespace(journal=journal, device=None, turns=Turns(None, torch.device("cpu")))
    rows = Group(session, options.Selection(spec, (case,), ("fwd",), names), case, "fwd").rows()
    assert [r["status"] for r in rows] == ["crashed"] * 2


def test_a_bench_that_goes_on_knows_its_own_runs_alone(tmp_path: Path) -> None:
    """Another, which was interrupted before, is not resumed; changes that are not committed are its own."""
    path = tmp_path / "norm.jsonl"
    lines = []
    for name, group in (("before", "a"), ("own", "b")):
        started = {"type": "start", "run": name, "kernel": "norm", "mode": "fwd"}
        lines += [run_line("norm", run=name, environment={"dirty": True}), {**started, "case": group}]
        lines += [row("norm", group, "fwd", "triton", [1.0] * 5, run=name), {**started, "case": "c"}]
    write(path, lines)
    asked = dict(run_line("norm")["options"])
    known = {"options": asked, "commit": run_line("norm")["environment"]["commit"], "gpu": "NVIDIA H200"}
    found = record.finished(path, **known, dirty=True, among={"own"})
    assert found == record.Finished(done=frozenset({("b", "fwd")}), died=frozenset({("c", "fwd")}))
    with pytest.raises(ValueError, match="uncommitted"):
        record.finished(path, **known, dirty=True)


BENCH = """
from argparse import Namespace
from pathlib import Path
import torch
from harness import options, registry
from harness.commands import bench
from harness.measure.turns import Turns
from tests.fake_records import run_line

def measure(group):
    group._begin(None)
    for name in group.selection.implementations:
        with group._guarded(name):
            group._begin(name)
            print(group.mode, name, flush=True)
            if (group.mode, name) == ("bwd", "eager"):
                os.abort()
            if (group.mode, name) == ("bwd", "compile"):
                raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
            group.done[name] = group._row(name, "skipped", "it ran")

bench.Group._measure = measure
torch.cuda.get_device_capability = lambda device: (9, 0)
line = run_line("rmsnorm", environment={"dirty": True})
bench.Session.__post_init__ = lambda session: vars(session).update(
    environment=line["environment"], recorded_ceilings=line["ceilings"], ceilings=None,
    turns=Turns(None, torch.device("cpu")),
)
names = "gpu quick timer case mode impl host host_compiled resume"
arguments = Namespace(**{**dict.fromkeys(names.split()), "host": "no"})
spec = registry.load("rmsnorm")
selection = options.Selection(spec, spec.cases[:1], ("fwd", "bwd"), ("triton", "eager", "compile", "compile-max"))
session = bench.Session(torch.device("cuda", 0), arguments, journal)
session.bench(selection, Path(sys.argv[0]).with_name("rmsnorm.jsonl"))
return journal.failures
"""


def test_the_other_rows_of_a_group_are_measured_after_all(tmp_path: Path) -> None:
    done = run(tmp_path, BENCH)
    assert done.returncode == 0, done.stderr
    records = record.load(tmp_path / "rmsnorm.jsonl")
    reasons = {(r.mode, r.implementation): (r.status, r["reason"]) for r in records.rows}
    ran = ("skipped", "it ran")
    assert reasons.pop(("bwd", "eager")) == ("crashed", "the process crashed (SIGABRT); not tried again")
    lost = "CUDA error: an illegal memory access was encountered; not tried again"
    assert reasons.pop(("bwd", "compile")) == ("crashed", lost)
    assert set(reasons.values()) == {ran} and len(reasons) == 6
    tried = [line for line in done.stdout.splitlines() if line.startswith(("fwd ", "bwd "))]
    assert len([line for line in tried if line.startswith("fwd")]) == 4  # once
    assert tried[4:] == [
        *("bwd triton", "bwd eager"),
        *("bwd triton", "bwd compile"),
        *("bwd triton", "bwd compile-max"),
    ]
    assert [run.stop for run in records.runs.values()][-1] == "complete"

"""The record: what is written comes back, what is torn is survived, what is superseded does not count."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harness import record
from harness.reporting.findings import findings
from tests.fake_records import bench, row, run_line, samples, world, write

KERNEL = "rmsnorm"


def start(case: str, run: str = "20260101T000000Z-0000", mode: str = "fwd") -> dict[str, object]:
    return {"type": "start", "run": run, "kernel": KERNEL, "case": case, "mode": mode}


def stop(reason: str, run: str = "20260101T000000Z-0000") -> dict[str, object]:
    return {"type": "stop", "run": run, "kernel": KERNEL, "reason": reason}


def measured(
    case: str, run: str = "20260101T000000Z-0000", name: str = "triton", us: float = 10.0
) -> dict[str, object]:
    return row(KERNEL, case, "fwd", name, samples(us, n=8), run=run)


EMPTIED = {"columns": {"cold": {"median_us": 1.0, "samples_us": [1.0, math.nan]}}}


def progress(path: Path, **changes: object) -> record.Finished:
    line = run_line(KERNEL)
    asked = {"options": line["options"], "commit": line["environment"]["commit"], "dirty": False, "gpu": "NVIDIA H200"}
    return record.finished(path, **{**asked, **changes})


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    lines = bench(KERNEL, {("a", "fwd"): [measured("a"), measured("a", name="eager", us=20)]})
    records = record.load(write(tmp_path / "records" / "rmsnorm.jsonl", lines))
    assert [r.key for r in records.rows] == [(KERNEL, "a", "fwd", "triton"), (KERNEL, "a", "fwd", "eager")]
    ours, eager = records.rows
    assert ours.ours and not eager.ours and ours.ok
    assert ours.data == lines[2]
    assert ours.run.environment["triton"] == "3.6.0" and ours.run.gpu_folder == "h200"
    assert ours.seconds() == pytest.approx(10e-6, rel=0.01)
    assert ours["ratios"]["eager"]["median"] == pytest.approx(2, rel=0.01)
    assert records.used_runs()[0].stop == "complete"


def test_run_ids_sort_by_time_and_do_not_collide() -> None:
    ids = {record.new_run_id() for _ in range(50)}
    assert len(ids) > 45
    assert all(len(i) == len("20261121T083106Z-3f2a") for i in ids)


def test_figures_that_are_not_finite_become_null_and_numpy_becomes_plain() -> None:
    line = record.dumps({"a": math.nan, "b": [math.inf, 1.5], "c": {"d": np.float32(0.5), "e": np.int64(3)}, "f": True})
    assert json.loads(line) == {"a": None, "b": [None, 1.5], "c": {"d": 0.5, "e": 3}, "f": True}
    with pytest.raises(TypeError, match="set"):
        record.dumps({"a": {1, 2}})


def test_nan_in_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(
        '{"type": "run", "run": "r", "schema": 1, "kernel": NaN}\n' + record.dumps(stop("complete", "r")) + "\n"
    )
    with pytest.raises(record.RecordError, match=r"x\.jsonl:1"):
        record.load(path)


def test_each_line_is_on_disk_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "records" / "x.jsonl"
    with record.Writer(path) as writer:
        writer.write(run_line(KERNEL))
        writer.write(measured("a"))
        assert len(record.load(path).rows) == 1


def test_a_killed_writer_leaves_what_it_finished(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    code = (
        "import os; from pathlib import Path; from harness.record import Writer; from tests.fake_records import *\n"
        f"w = Writer(Path({str(path)!r})); w.write(run_line('rmsnorm'))\n"
        "w.write(row('rmsnorm', 'a', 'fwd', 'triton', samples(9, n=8)))\n"
        "os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    died = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert died.returncode == -9
    assert [r.case for r in record.load(path).rows] == ["a"]


@pytest.mark.parametrize("keep", [1, 20, -2])
def test_a_torn_last_line_is_passed_over_and_mended(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path / "x.jsonl", [run_line(KERNEL), measured("a")])
    with path.open("a") as file:
        file.write(record.dumps(measured("b"))[:keep])
    assert [r.case for r in record.load(path).rows] == ["a"]
    with record.Writer(path) as writer:
        writer.write(measured("c"))
    assert [r.case for r in record.load(path).rows] == ["a", "c"]


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", [run_line(KERNEL), measured("a")])
    path.write_text(path.read_text().rstrip("\n"))
    write(path, [measured("b")])
    assert [r.case for r in record.load(path).rows] == ["a", "b"]


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(record.dumps(run_line(KERNEL)) + '\n{"type": "ro\n' + record.dumps(measured("a")) + "\n")
    with pytest.raises(record.RecordError, match=r"x\.jsonl:2"):
        record.load(path)


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", [{**run_line(KERNEL), "schema": 3}, measured("a")])
    with pytest.raises(record.RecordError, match=r"x\.jsonl:1: schema 3, this version reads schema 1 and 2"):
        record.load(path)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([measured("a")], "no run line"),
        ([run_line(KERNEL), {"type": "note", "run": "20260101T000000Z-0000"}], "unknown type 'note'"),
        ([run_line(KERNEL), {**measured("a"), "case": None, "status": 1}], r":2: a row needs 'case', 'status'"),
        ([run_line(KERNEL), {**start("a"), "mode": None}], r":2: a start needs 'mode'"),
        ([run_line(KERNEL), {**measured("a"), "columns": {"cold": {"median_us": 1.0}}}], "needs the samples"),
        ([run_line(KERNEL), row(KERNEL, "a", "fwd", "triton", [1, 2]) | EMPTIED], "needs the samples"),
    ],
)
def test_lines_that_cannot_be_joined_are_errors(tmp_path: Path, lines: list[dict[str, object]], message: str) -> None:
    with pytest.raises(record.RecordError, match=message):
        record.load(write(tmp_path / "x.jsonl", lines))


def test_a_later_row_supersedes_but_not_across_gpus_or_files_by_name(tmp_path: Path) -> None:
    old = bench(KERNEL, {("a", "fwd"): [measured("a", us=10)], ("b", "fwd"): [measured("b")]}, run="old")
    new = bench(
        KERNEL, {("a", "fwd"): [measured("a", us=5)]}, run="new", environment={"time": "2026-02-01T00:00:00+00:00"}
    )
    other = bench(KERNEL, {("a", "fwd"): [measured("a", us=7)]}, run="t4", gpu={"key": "t4", "name": "Tesla T4"})
    write(tmp_path / "z.jsonl", old)
    write(tmp_path / "a.jsonl", new)  # first by name, last by time
    write(tmp_path / "other.jsonl", other)
    records = record.load(tmp_path)
    found = {(r.run.gpu_folder, r.case): round(r.seconds() * 1e6) for r in records.rows}
    assert found == {("h200", "a"): 5, ("h200", "b"): 10, ("t4", "a"): 7}
    assert [r.run.id for r in records.superseded] == ["old"]
    assert {r.implementation for r in records.siblings(records.superseded[0])} == {"triton"}


def test_of_two_files_that_overlap_in_time_the_later_run_supersedes(tmp_path: Path) -> None:
    def of(month: int, us: float) -> list[dict[str, object]]:
        time = {"time": f"2026-{month:02}-01T00:00:00+00:00"}
        return bench(KERNEL, {("a", "fwd"): [measured("a", us=us)]}, run=f"month {month}", environment=time)

    write(tmp_path / "a.jsonl", [*of(1, 10), *of(3, 30)])
    write(tmp_path / "b.jsonl", of(2, 20))
    records = record.load(tmp_path)
    assert [round(r.seconds() * 1e6) for r in records.rows] == [30]
    assert sorted(r.run.id for r in records.superseded) == ["month 1", "month 2"]
    write(tmp_path / "b.jsonl", [*of(5, 50), *of(4, 40)])  # in one file the order of the lines decides
    assert [round(r.seconds() * 1e6) for r in record.load(tmp_path).rows] == [40]


def test_load_finds_records_below_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "h200" / "records" / "rmsnorm.jsonl", bench(KERNEL, {("a", "fwd"): [measured("a")]}))
    assert len(record.load(tmp_path).rows) == len(record.load(tmp_path / "h200").rows) == 1
    with pytest.raises(FileNotFoundError, match="nowhere"):
        record.load(tmp_path / "nowhere")


def test_a_card_that_is_not_in_the_table_gets_a_folder_of_its_name() -> None:
    line = run_line(KERNEL, gpu={"key": None, "name": "NVIDIA RTX 6000 Ada Generation"})
    assert record.Run(line).gpu_folder == "nvidia-rtx-6000-ada-generation"


def test_resume_skips_what_is_done_and_names_what_died(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.jsonl", [run_line(KERNEL), start("a"), measured("a"), start("b"), measured("b"), start("c")]
    )
    assert progress(path) == record.Finished(
        done=frozenset({("a", "fwd"), ("b", "fwd")}), died=frozenset({("c", "fwd")})
    )


def test_resume_measures_the_interrupted_group_again(tmp_path: Path) -> None:
    lines = [run_line(KERNEL), start("a"), measured("a"), start("b"), stop("interrupted")]
    assert progress(write(tmp_path / "x.jsonl", lines)) == record.Finished(done=frozenset({("a", "fwd")}))
    torn = [run_line(KERNEL), start("a"), measured("a"), start("b"), measured("b")]
    assert progress(write(tmp_path / "y.jsonl", torn)) == record.Finished(done=frozenset({("a", "fwd")}))


def test_resume_does_not_try_again_what_a_rank_died_of(tmp_path: Path) -> None:
    lines = [run_line(KERNEL), start("a"), measured("a"), start("b"), stop("failed: rank 1 was killed by SIGKILL")]
    found = progress(write(tmp_path / "x.jsonl", lines))
    assert found == record.Finished(done=frozenset({("a", "fwd")}), died=frozenset({("b", "fwd")}))


def test_resume_knows_the_parts_of_a_bench_whose_ranks_started_twice(tmp_path: Path) -> None:
    lines = [run_line(KERNEL), start("a"), measured("a"), stop("part"), run_line(KERNEL, run="second")]
    lines += [start("b", "second"), measured("b", "second"), start("c", "second")]
    found = progress(write(tmp_path / "x.jsonl", lines))
    assert found.done == {("a", "fwd"), ("b", "fwd")} and found.died == {("c", "fwd")}


def test_resume_goes_back_through_earlier_resumptions(tmp_path: Path) -> None:
    again = run_line(KERNEL, run="second", options={"resume": True})
    crashed = row(KERNEL, "b", "fwd", "triton", run="second", status="crashed")
    lines = [run_line(KERNEL), start("a"), measured("a"), start("b")]
    lines += [again, crashed, start("c", "second"), measured("c", "second"), start("d", "second")]
    found = progress(write(tmp_path / "x.jsonl", lines))
    assert found.done == {("a", "fwd"), ("b", "fwd"), ("c", "fwd")}
    assert found.died == {("d", "fwd")}


@pytest.mark.parametrize(
    "changes",
    [{"gpu": "NVIDIA H100 PCIe"}, {"options": {"gpu": "auto", "quick": True, "timer": "auto"}}],
)
def test_resume_starts_afresh_on_another_gpu_or_with_other_options(tmp_path: Path, changes: dict[str, object]) -> None:
    path = write(tmp_path / "x.jsonl", [run_line(KERNEL), start("a"), measured("a"), start("b")])
    assert progress(path, **changes) == record.Finished()


def test_resume_after_a_complete_run_has_nothing_left_and_does_not_look_behind_it(tmp_path: Path) -> None:
    done = bench(KERNEL, {("a", "fwd"): [measured("a")]}, run="first")
    path = write(tmp_path / "x.jsonl", done)
    assert progress(path).done == {("a", "fwd")}
    write(path, [run_line(KERNEL, run="second"), start("b", "second"), measured("b", "second"), start("c", "second")])
    assert progress(path).done == {("b", "fwd")}
    assert progress(tmp_path / "absent.jsonl") == record.Finished()


def assert_same(before: record.Records, after: record.Records) -> None:
    """What a verdict rests on to the last bit, statistics to nine digits, and the rest; but no samples of "warm"."""
    assert [row.key for row in after.rows] == [row.key for row in before.rows]
    for old, new in zip(before.rows, after.rows, strict=True):
        rounded = ("columns", "error", "sustained", *(() if old.ours else ("ratios",)))
        assert old.ours or not new.get("ratios")
        assert {**old.data, **dict.fromkeys(rounded)} == {**new.data, **dict.fromkeys(rounded)}
        for name, column in (old.get("columns") or {}).items():
            kept = {figure: value for figure, value in column.items() if (name, figure) != ("warm", "samples_us")}
            assert kept.get("samples_us") == new["columns"][name].get("samples_us")
            assert new["columns"][name].keys() == kept.keys()
            for figure, value in kept.items():
                same = value if isinstance(value, str) else pytest.approx(value, rel=1e-8)
                assert new["columns"][name][figure] == same
        if old.ok:
            assert new.get("error", {}) == pytest.approx(old.get("error", {}), rel=1e-8)
    verdicts = [[(f.speedups, f.verdict, f.column) for f in findings(records)] for records in (before, after)]
    assert verdicts[0] == verdicts[1]


def test_compact_loses_nothing_that_a_verdict_rests_on(tmp_path: Path) -> None:
    world(tmp_path)
    before = record.load(tmp_path)
    size = sum(path.stat().st_size for path in record.files(tmp_path))
    for path in record.files(tmp_path):
        assert record.compact(path) == 0
    assert_same(before, record.load(tmp_path))
    assert sum(path.stat().st_size for path in record.files(tmp_path)) < 0.8 * size


def test_a_compact_file_says_a_thing_once(tmp_path: Path) -> None:
    yardstick = row(KERNEL, "a", "fwd", "copy", samples(5, n=8), kind="yardstick", cost={"flops": 0, "bytes": 1})
    skipped = row(KERNEL, "a", "fwd", "quack")
    group = {("a", "fwd"): [measured("a"), measured("a", name="eager", us=20), yardstick, skipped]}
    path = write(tmp_path / "x.jsonl", bench(KERNEL, group))
    record.compact(path)
    run, first, ours, eager, copy, _absent, _ = map(json.loads, path.read_text().splitlines())
    assert run["schema"] == record.SCHEMA
    assert first["shared"]["dims"] == {"rows": 8192, "dim": 4096} and first["measured"]["headline"] == "cold"
    assert not {"dims", "cost", "headline", "clocks"} & (ours.keys() | eager.keys())
    assert ours["ratios"] == {"eager": None, "copy": None}
    assert copy["cost"] == {"flops": 0, "bytes": 1}  # its own, not the group's
    loaded = {r.implementation: r for r in record.load(path).rows}
    assert loaded["copy"]["cost"]["bytes"] == 1 and loaded["triton"]["cost"]["bytes"] > 1
    assert "clocks" not in loaded["quack"].data and loaded["triton"]["clocks"]["samples"] == 8


def test_a_ratio_over_a_row_that_was_measured_again_is_kept(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.jsonl", bench(KERNEL, {("a", "fwd"): [measured("a"), measured("a", name="eager", us=20)]})
    )
    record.compact(path)
    ratio = record.load(path).rows[0]["ratios"]["eager"]
    write(path, bench(KERNEL, {("a", "fwd"): [measured("a", name="eager", us=50)]}, run="later"))
    for _ in range(2):
        record.compact(path)
        (ours,) = [r for r in record.load(path).rows if r.ours]
        assert ours["ratios"]["eager"] == ratio


def test_a_ratio_whose_samples_are_gone_is_an_error(tmp_path: Path) -> None:
    lines = bench(KERNEL, {("a", "fwd"): [measured("a")]})
    lines[2]["ratios"] = {"eager": None}
    with pytest.raises(record.RecordError, match=r"x\.jsonl: .*a/fwd/triton: its ratio over 'eager'"):
        record.load(write(tmp_path / "x.jsonl", lines))


def test_compact_drops_superseded_rows_and_empty_runs_and_nothing_else(tmp_path: Path) -> None:
    first = bench(KERNEL, {("a", "fwd"): [measured("a", us=10)], ("b", "fwd"): [measured("b")]}, run="first")
    empty = [run_line(KERNEL, run="empty"), start("a", "empty"), stop("interrupted", "empty")]
    second = bench(KERNEL, {("a", "fwd"): [measured("a", us=5)]}, run="second")
    path = write(tmp_path / "x.jsonl", [*first, *empty, *second])
    with path.open("a") as file:
        file.write('{"type": "row", "ru')
    before = record.load(path)
    assert record.compact(path) == 5  # the row of a and its start, and the three lines of the empty run
    after = record.load(path)
    assert_same(before, after)
    assert not after.superseded and list(after.runs) == ["first", "second"]
    assert record.compact(path) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["x.jsonl"]


def test_an_interrupted_compaction_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = bench(KERNEL, {("a", "fwd"): [measured("a", us=10)]}, run="first")
    path = write(tmp_path / "x.jsonl", [*first, *bench(KERNEL, {("a", "fwd"): [measured("a", us=5)]}, run="second")])
    content = path.read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        record.compact(path)
    assert path.read_bytes() == content


def test_records_of_several_gpus_have_a_folder_of_their_own() -> None:
    one, two = ({"environment": {"gpu": {"key": "h200"}}, "world_size": n} for n in (1, 2))
    assert (record.Run(one).gpu_folder, record.Run(two).gpu_folder) == ("h200", "h200-x2")


@pytest.mark.parametrize(
    ("begun", "now", "reason"),
    [
        ({}, {"commit": "f" * 40}, "was begun at commit 0123456789abcdef"),
        ({}, {"dirty": True}, "this checkout has uncommitted changes"),
        ({"dirty": True}, {}, "was begun with uncommitted changes"),
    ],
)
def test_another_commit_or_one_with_changes_is_not_resumed(tmp_path: Path, begun, now, reason) -> None:
    path = write(tmp_path / "rmsnorm.jsonl", [run_line(KERNEL, environment=begun), start("a"), stop("interrupted")])
    with pytest.raises(ValueError, match=reason):
        progress(path, **now)
    write(path, [run_line(KERNEL, environment=begun), start("a"), measured("a"), stop("complete")])
    progress(path, **now)  # there is nothing to resume


def test_what_colours_a_terminal_is_not_recorded() -> None:
    text = "\x1b[31merror\x1b[0m: \x1b]8;;http://a\x07link\x1b]8;;\x07\ta\x1b(B\x00b"
    assert json.loads(record.dumps({"reason": text})) == {"reason": "error: link\tab"}

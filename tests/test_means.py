"""Means of a report: over which cases they are, what stays out of them and is named, and what is beside what."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from harness import record, registry
from harness.commands import report
from harness.reporting import aggregates, charts, declared, host
from harness.reporting.aggregates import Group, Mean
from harness.reporting.findings import findings
from harness.reporting.roofline_charts import overview
from harness.spec import Yardstick
from tests.fake_records import bench, column, row, with_ratios, write

KERNEL = "rmsnorm"
COST = {"flops": {"fp32": 1_000_000}, "bytes": 340_000_000}  # 80 µs at the measured 4.25 TB/s
Rows = list[dict[str, Any]]


def exact(us: float) -> list[float]:
    return [us] * 10


def case(name: str, times: Mapping[str, float], failed: Mapping[str, str] | None = None, **changes: Any) -> Rows:
    """One case: what each implementation took in µs, and the status of those that have no time."""
    fields = {"cost": COST, **changes}
    rows = [row(KERNEL, name, "fwd", i, exact(us), **fields) for i, us in times.items()]
    for implementation, status in (failed or {}).items():
        rows.append(row(KERNEL, name, "fwd", implementation, status=status, reason=f"it was {status}", **fields))
    return rows


def folder(tmp_path: Path, *cases: Rows) -> Path:
    groups = {(rows[0]["case"], "fwd"): rows for rows in cases}
    write(tmp_path / "h200" / "records" / f"{KERNEL}.jsonl", bench(KERNEL, groups))
    return tmp_path / "h200"


def groups(tmp_path: Path, *cases: Rows) -> list[Group]:
    return aggregates.groups(findings(record.load(folder(tmp_path, *cases))))


def mean(tmp_path: Path, *cases: Rows) -> Mean:
    (group,) = groups(tmp_path, *cases)
    return group.over_best_peer()


PLAIN = {"triton": 100, "eager": 900, "compile": 200, "quack": 120}


@pytest.mark.parametrize("status", ["error", "oom", "crashed", "over-roofline", "wrong"])
def test_a_peer_that_failed_takes_its_row_out_of_the_mean(tmp_path: Path, status: str) -> None:
    without = case("lost", {"triton": 100, "eager": 900, "compile": 2000}, {"quack": status})
    found = mean(tmp_path, case("plain", PLAIN), without)
    assert found.values == pytest.approx([1.2]) and found.counted() == "1 of 2"
    assert found.left_out == {"lost": ("the peer quack failed",)}


@pytest.mark.parametrize(
    ("throttled", "doubt", "counted"),
    [
        ([8, 9], None, "2 of 2"),  # by the other eight
        ([8, 9], "unsteady", "1 of 2"),
        ([8, 9], "a warning", "1 of 2"),
        (list(range(5, 10)), None, "1 of 2"),  # five rounds give no interval
        (list(range(10)), None, "1 of 2"),
    ],
)
def test_a_case_counts_by_its_unthrottled_rounds(
    tmp_path: Path, throttled: list[int], doubt: str | None, counted: str
) -> None:
    found = case("hot", PLAIN, clocks={"rounds": {"cold": {"sm_mhz": [1500] * 10, "throttled": throttled}}})
    for each, us in zip(found, (100, 900, 200, 130), strict=True):
        samples = [us * (1.015 if index in throttled and us != 100 else 1) for index in range(10)]
        if doubt == "unsteady" and us == 130:
            samples = [us * (1 + 0.03 * index) for index in range(10)]
        each["columns"]["cold"] = column(samples)
    if doubt == "a warning":
        found[0]["warnings"] = ["something synchronises"]
    where = folder(tmp_path, case("plain", PLAIN), found)
    (group,) = aggregates.groups(findings(record.load(where)))
    mean = group.over_best_peer()
    assert mean.counted() == counted
    report.write(where, with_charts=False)
    index = (where / "README.md").read_text()
    said = "In the means with the speed-up over their unthrottled rounds only: 1 of rmsnorm fwd." in index
    assert said == (counted == "2 of 2")
    if said:
        assert mean.values == pytest.approx([1.2, 1.3]) and mean.unthrottled == ("hot",) and not mean.left_out


def test_the_fastest_peer_of_the_unthrottled_rounds_counts(tmp_path: Path) -> None:
    """quack is the fastest over all rounds, since it is faster while the GPU throttles; compile is over the others."""
    rounds = {"rounds": {"cold": {"sm_mhz": [1500] * 11, "throttled": list(range(6, 11))}}}
    rows = case("hot", {"triton": 100, "quack": 130, "compile": 130}, clocks=rounds)
    samples = ([100] * 11, [130, 130, 130.2, 130.4, 130.6, 130.6, *[129] * 5], [130.2] * 6 + [131] * 5)
    for each, us in zip(rows, samples, strict=True):
        each["columns"]["cold"] = column(us)
    (group,) = groups(tmp_path, rows)
    best = group.found[0].over_best_peer
    assert best is not None and best.peer == "quack" and best.unthrottled is not None
    assert best.unthrottled["median"] == pytest.approx(1.303)
    mean = group.over_best_peer()
    assert mean.values == pytest.approx([1.302]) and mean.unthrottled == ("hot",)


def test_a_failed_peer_marks_its_row_everywhere_and_leaves_no_verdict(tmp_path: Path) -> None:
    lost = case("lost", {"triton": 100, "compile": 2000, "liger": 2100}, {"quack": "error"})
    where = folder(tmp_path, case("plain", PLAIN), lost)
    report.write(where, with_charts=False)
    index = (where / "README.md").read_text()
    (summary,) = [x for x in index.splitlines() if x.startswith("| lost | fwd |")]
    assert (
        "20.00× [20.00, 20.00] compile ¶" in summary and summary.endswith("| – |") and "¶ A peer that supports" in index
    )
    assert "| rmsnorm | fwd | the peer quack failed | 1 | lost |" in index
    assert "20.00× compile ¶" in report.kernel_block(where, KERNEL)
    assert "- quack: **error**, it was error" in (where / f"{KERNEL}-fwd.md").read_text()


def test_a_peer_without_the_reported_timing_may_be_the_fastest(tmp_path: Path) -> None:
    """One that no CUDA graph can capture, beside times in a graph: its cold time may be shorter than that of the peer
    which is the fastest in a graph."""
    rows = case("lost", {"triton": 100, "eager": 900, "compile": 140, "liger": 130}, headline="graph")
    for name in ("eager", "liger"):
        (found,) = [r for r in rows if r["implementation"] == name]
        del found["columns"]["graph"]
    path = tmp_path / "h200" / "records" / f"{KERNEL}.jsonl"
    timed = [r for r in rows if "graph" in r["columns"]]
    with_ratios(timed)
    lines = bench(KERNEL, {("lost", "fwd"): timed})
    lines[-1:-1] = [r for r in rows if r not in timed]
    write(path, lines)
    (finding,) = found = findings(record.load(path))
    (group,) = aggregates.groups(found)
    assert [row.implementation for row in finding.untimed] == ["liger"]  # the reference is no peer
    assert finding.verdict is None
    assert group.over_best_peer().left_out == {"lost": ("the peer liger has no graph timing",)}
    report.write(tmp_path / "h200", with_charts=False)
    index = (tmp_path / "h200" / "README.md").read_text()
    assert "| fwd | 1 | 0 | 0 | 0 | 1 |" in index and "1.40× [1.40, 1.40] compile ¶" in index


def test_pytorch_without_the_reported_timing_is_in_no_mean_over_pytorch(tmp_path: Path) -> None:
    rows = case("lost", {"triton": 100, "quack": 120}, headline="graph")
    path = tmp_path / "h200" / "records" / f"{KERNEL}.jsonl"
    lines = bench(KERNEL, {("lost", "fwd"): rows})
    for name in ("a", "b"):
        lines.insert(-1, row(KERNEL, "lost", "fwd", name, exact(130), cost=COST, pytorch=name == "b"))
    write(path, lines)
    (group,) = aggregates.groups(findings(record.load(path)))
    assert group.over_pytorch().left_out == {"lost": ("the peer b has no graph timing",)}


def test_neither_the_reference_nor_an_absent_or_unfit_peer_takes_a_row_out(tmp_path: Path) -> None:
    rows = case("plain", {"triton": 100, "quack": 120}, {"eager": "oom", "liger": "skipped"})
    assert mean(tmp_path, rows).values == pytest.approx([1.2])


def test_a_case_that_no_library_takes_is_not_averaged_with_those_that_one_does(tmp_path: Path) -> None:
    alone = case("alone", {"triton": 100, "eager": 900, "compile": 500}, {"quack": "skipped"})
    found = mean(tmp_path, case("plain", PLAIN), alone)
    assert found.values == pytest.approx([1.2]) and found.left_out == {"alone": ("no library supports it",)}


def test_a_kernel_without_any_library_says_so(tmp_path: Path) -> None:
    where = folder(tmp_path, case("plain", {"triton": 100, "eager": 900, "compile": 150, "compile-max": 130}))
    assert (
        "| 0 of 1 | **1.30×** (1.30× to 1.30×), only over torch.compile, 1 of 1 | 0 of 1 | – |"
        in report.readme_block(where)
    )


@pytest.mark.usefixtures("undeclared")
def test_the_reference_is_no_peer_and_is_named(tmp_path: Path) -> None:
    where = folder(tmp_path, case("plain", {"triton": 100, "eager": 900}))
    report.write(where, with_charts=False)
    index, block = (where / "README.md").read_text(), report.readme_block(where)
    (cells,) = [x.split(" | ") for x in index.splitlines() if x.startswith("| plain | fwd |")]
    assert cells[4:7] == ["–", "–", "9.00× [9.00, 9.00]"] and cells[-1] == "– |"
    assert "| eager (the reference) | 900 µs |" in (where / f"{KERNEL}-fwd.md").read_text()
    assert "over the reference" in index and "reference" not in block and "9.00" not in block and "eager" not in block


def test_over_pytorch_is_over_the_fastest_that_a_user_would_write(tmp_path: Path) -> None:
    rows = case("plain", PLAIN)
    rows += [row(KERNEL, "plain", "fwd", n, exact(us), cost=COST, pytorch=True) for n, us in (("a", 300), ("b", 250))]
    (group,) = groups(tmp_path, rows)
    assert group.over_pytorch().values == pytest.approx([2.5])
    assert group.over_best_peer().values == pytest.approx([1.2])


def test_the_reference_may_be_what_a_user_would_write(tmp_path: Path) -> None:
    rows = case("plain", {"triton": 100, "compile": 200})
    rows.append(row(KERNEL, "plain", "fwd", "eager", exact(130), cost=COST, pytorch=True))
    (group,) = groups(tmp_path, rows)
    assert group.over_pytorch().values == group.over_best_peer().values == pytest.approx([1.3])
    assert group.over_best_peer().library and group.found[0].over_reference is None


def test_pytorch_failing_takes_the_row_out_of_its_mean_and_another_peer_does_not(tmp_path: Path) -> None:
    lost = case("lost", {"triton": 100, "quack": 120}, {"torch": "oom"})
    kept = case("kept", {"triton": 100, "torch": 150}, {"quack": "error"})
    (group,) = groups(tmp_path, lost, kept)
    assert group.over_pytorch().values == pytest.approx([1.5])
    assert group.over_pytorch().left_out == {"lost": ("the peer torch failed",)}


def throttled(rows: Rows) -> Rows:
    rows[0]["clocks"] |= {"throttled_samples": 2}
    return rows


def wide(rows: Rows) -> Rows:
    rows[0]["columns"]["cold"]["ci95_us"] = [98, 101]
    return rows


def warned(rows: Rows) -> Rows:
    rows[0]["warnings"] = ["something is wrong"]
    return rows


def unqueued(rows: Rows) -> Rows:
    (quack,) = [r for r in rows if r["implementation"] == "quack"]
    quack["warnings"] = ["cannot be queued ahead of the GPU: its times may include host time"]
    return rows


def few(rows: Rows) -> Rows:
    rows[0]["columns"]["cold"]["n"] = 5
    return rows


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (throttled, "the GPU throttled"),
        (few, "fewer than 6 samples"),
        (wide, "a confidence interval wider than 2 %"),
        (warned, "a warning by the harness"),
        (unqueued, "a warning by the harness"),
    ],
)
def test_rows_that_the_harness_flags_stay_out(tmp_path: Path, spoil: Any, reason: str) -> None:
    flagged = spoil(case("flagged", PLAIN))
    found = mean(tmp_path, case("plain", PLAIN), flagged)
    assert found.values == pytest.approx([1.2]) and found.left_out == {"flagged": (reason,)}


def test_a_cuda_graph_includes_no_host_time(tmp_path: Path) -> None:
    assert mean(tmp_path, unqueued(case("plain", PLAIN, headline="graph"))).values == pytest.approx([1.2])


def test_a_peer_that_is_newer_than_the_record_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared, "peers", lambda kernel: ("torch", "quack", "later"))
    lacking = case("lacking", {"triton": 100, "torch": 150})
    block = report.readme_block(folder(tmp_path, case("plain", {"triton": 100, "torch": 150, "quack": 120}), lacking))
    assert "Peers missing from the run of these cases" in block and "to fewer peers:\n\n" in block
    assert "- later, in 2 of rmsnorm fwd.\n- quack, in 1 of rmsnorm fwd.\n" in block and "- torch" not in block
    monkeypatch.setattr(aggregates, "MANY_GROUPS", 0)
    found = findings(record.load(tmp_path))
    assert aggregates.newer(found)[0] == "- later, in 2 cases of rmsnorm."


@pytest.mark.parametrize("chosen", [None, ["triton", "compile", "quack"]])
def test_a_peer_that_was_left_out_of_the_run_may_be_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: list[str] | None
) -> None:
    """An older run is marked; one of chosen implementations is in no mean either. A peer that does not take the case
    is not missed."""
    monkeypatch.setattr(declared, "peers", lambda kernel: ("quack", "liger", "narrow"))
    rows = case("plain", PLAIN, {"narrow": "skipped"})
    path = tmp_path / "h200" / "records" / f"{KERNEL}.jsonl"
    write(path, bench(KERNEL, {("plain", "fwd"): rows}, options={"impl": chosen}))
    report.write(tmp_path / "h200", with_charts=False)
    page = (tmp_path / "h200" / f"{KERNEL}.md").read_text()
    (finding,) = found = findings(record.load(path))
    (group,) = aggregates.groups(found)
    assert finding.absent == ("liger",) and "1.20× [1.20, 1.20] quack ◊" in page
    assert "◊ The run that measured this case lacked" in page
    if chosen:
        assert finding.verdict is None and group.over_best_peer().counted() == "0 of 1"
        assert group.over_best_peer().left_out == {"plain": ("the peer liger was left out of the run",)}
    else:
        assert finding.verdict == "good" and group.over_best_peer().counted() == "1 of 1"


def test_torch_compile_is_no_library_beside_others(tmp_path: Path) -> None:
    """Where other cases have another library's kernel, one in which torch.compile beats PyTorch's is apart."""
    alone = case("alone", {"triton": 100, "torch": 2000, "compile": 1000})
    found = mean(tmp_path, case("plain", {**PLAIN, "torch": 300}), alone)
    assert found.values == pytest.approx([1.2]) and found.left_out == {"alone": (aggregates.OVER_COMPILE,)}


@pytest.mark.parametrize("kernel", ["rmsnorm", "attention", "linear_cross_entropy", "llama_layer"])
def test_the_peers_of_a_bench_py_are_read_without_running_it(kernel: str) -> None:
    baselines = registry.load(kernel).baselines
    named = {b.name for b in baselines if b.name != "eager" and not isinstance(b, Yardstick)}
    assert set(declared.peers(kernel)) == named
    assert declared.peers("no-such-kernel") == ()


@pytest.mark.parametrize(("column", "counts"), [("warm", True), ("cold", False)])
def test_a_throttled_round_counts_in_the_column_that_is_compared(tmp_path: Path, column: str, counts: bool) -> None:
    rows = throttled(case("hot", PLAIN))
    clocks = {"sm_mhz": [1980] * 10, "throttled": []}
    rows[0]["clocks"]["rounds"] = {"cold": clocks, "warm": clocks} | {column: {**clocks, "throttled": [3, 4]}}
    found = mean(tmp_path, rows)
    assert not found.left_out and found.unthrottled == (() if counts else ("hot",))


def test_a_row_above_the_roofline_stays_out(tmp_path: Path) -> None:
    fast = case("fast", {"triton": 79, "quack": 400})
    found = mean(tmp_path, case("plain", PLAIN), fast)
    assert found.left_out == {"fast": ("above 100 % of the measured roofline",)}


def test_a_wide_ratio_stays_out_and_a_less_accurate_peer_does_not(tmp_path: Path) -> None:
    noisy = case("noisy", PLAIN)
    noisy[-1]["columns"]["cold"]["samples_us"] = [110, 130] * 5
    rough = case("rough", PLAIN)
    rough[-1]["warnings"] = ["less accurate than the rule for our own kernels allows: by far"]
    found = mean(tmp_path, noisy, rough)
    assert list(found.left_out) == ["noisy"] and len(found.values) == 1


def test_fp8_is_not_averaged_with_the_rest(tmp_path: Path) -> None:
    eight = case("eight", {"triton": 100, "quack": 300}, cost={"flops": {"fp8": 10e9}, "bytes": 1000})
    plain, fp8 = groups(tmp_path, case("plain", PLAIN), eight)
    assert plain.over_best_peer().values == pytest.approx([1.2])
    assert fp8.over_best_peer().values == pytest.approx([3.0]) and fp8.name == "rmsnorm fwd in fp8"
    block = report.readme_block(tmp_path / "h200")
    assert "(reports/h200/rmsnorm-fwd.md), fp8 | 1 |" in block and "A row marked fp8" in block


def test_the_caption_counts_what_is_left_out_by_reason(tmp_path: Path) -> None:
    lost = case("lost", {"triton": 100, "compile": 2000}, {"quack": "oom"})
    block = report.readme_block(folder(tmp_path, case("plain", PLAIN), lost, throttled(case("hot", PLAIN))))
    assert "| 3 | memory | 80 to 80 % | 1 of 3 | **1.20×** (1.20× to 1.20×) | 0 of 3 | – |" in block
    assert "- The peer quack failed: 1 of rmsnorm fwd.\n- The GPU throttled: 1 of rmsnorm fwd.\n" in block
    plain = report.readme_block(folder(tmp_path / "plain", case("plain", PLAIN)))
    assert "1 of 1" in plain and "Left out" not in plain


def test_the_overview_shows_no_best_peer_and_no_mean_where_one_failed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plain, lost = case("plain", PLAIN), case("lost", {"triton": 100, "compile": 400}, {"quack": "error"})
    for name, rows, points in (("plain", plain, 1), ("lost", lost, 0)):
        figure = overview(findings(record.load(folder(tmp_path / name, rows))), "one NVIDIA H200")
        theirs, ours = figure.axes[0].lines[:2]
        assert len(ours.get_xdata()) == 1 and len(theirs.get_xdata()) == points
        assert [t.get_text() for t in figure.axes[0].texts] == (["1.20×"] if points else [])


def test_each_implementation_of_a_chart_looks_different(tmp_path: Path) -> None:
    """A workload has a dozen versions of its own, and ring attention a dozen peers."""
    times = {f"{kind}-{index}": 100 + index for kind in ("triton", "peer") for index in range(20)}
    found = findings(record.load(folder(tmp_path, case("plain", times))))
    looks = charts.looks(found)
    assert len(looks) == len(times) == len({(look.colour, look.mark) for look in looks.values()})


@pytest.mark.parametrize(
    ("pytorch", "shown"), [(True, "eager 90.0 | 0.11"), (False, "eager (the reference) 90.0 | 0.11")]
)
def test_host_time_over_the_reference_is_not_called_pytorch(tmp_path: Path, pytorch: bool, shown: str) -> None:
    """Where what a PyTorch user would write was not timed, the reference takes its place."""
    rows = [row(KERNEL, "small", "host-fwd", "triton", exact(10), cost=COST)]
    rows.append(row(KERNEL, "small", "host-fwd", "eager", exact(90), cost=COST, pytorch=pytorch))
    path = write(tmp_path / "host.jsonl", bench(KERNEL, {("small", "host-fwd"): rows}))
    assert f"| {shown} |" in "\n".join(host.overview(record.load(path)))


def test_the_caption_names_peers_that_were_not_there(tmp_path: Path) -> None:
    rows = [*case("plain", PLAIN), row(KERNEL, "plain", "fwd", "fa3", reason="fa3 is not installed (no such module)")]
    block = report.readme_block(folder(tmp_path, rows, case("other", PLAIN)))
    assert "were not installed:\n\n- fa3, in 1 of rmsnorm fwd.\n" in block and "2 of 2" in block


def test_a_smaller_configuration_of_a_peer_is_named_with_what_failed(tmp_path: Path) -> None:
    rows = case("plain", PLAIN)
    rows[-1]["configuration"] = {"name": "tiles of 64", "instead_of": "OutOfResources: shared memory"}
    where = folder(tmp_path, rows)
    report.write(where, with_charts=False)
    page = (where / f"{KERNEL}-fwd.md").read_text()
    assert "| quack (tiles of 64) | 120 µs |" in page
    assert "- quack ran with tiles of 64; its default failed: OutOfResources: shared memory" in page
    assert mean(tmp_path / "again", rows).values == pytest.approx([1.2])


@pytest.mark.parametrize("compacted", [False, True])
def test_a_peer_that_was_measured_again_has_no_speed_up_beside_its_new_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compacted: bool
) -> None:
    """The speed-up of this kernel is over the peer of its own run, which had that peer."""
    monkeypatch.setattr(declared, "peers", lambda kernel: ("quack", "compile"))
    path = tmp_path / "h200" / "records" / f"{KERNEL}.jsonl"
    old = bench(KERNEL, {("plain", "fwd"): case("plain", PLAIN)}, run="20250101T000000Z-0000")
    new = bench(KERNEL, {("plain", "fwd"): case("plain", {"quack": 240})}, options={"impl": ["quack"]})
    write(path, [*old, *new])
    if compacted:
        record.compact(path)
    report.write(tmp_path / "h200", with_charts=False)
    (row,) = [x for x in (tmp_path / "h200" / f"{KERNEL}-fwd.md").read_text().splitlines() if x.startswith("| quack ◦")]
    assert row.split(" | ")[1:4] == ["240 µs", "[240, 240] µs", "–"]
    (finding,) = findings(record.load(path))
    assert finding.absent == () and finding.over_best_peer is not None and finding.over_best_peer.median == 1.2
    assert finding.peer() is None  # so that no chart shows the new time as that of the fastest peer in the run


def test_a_row_of_another_run_is_marked(tmp_path: Path) -> None:
    """A peer that was measured before, and not in the run of this kernel, has no ratio and a sign."""
    path = tmp_path / "h200" / "records" / f"{KERNEL}.jsonl"
    old = bench(KERNEL, {("plain", "fwd"): case("plain", PLAIN)}, run="20250101T000000Z-0000")
    new = bench(KERNEL, {("plain", "fwd"): case("plain", {"triton": 90, "compile": 200})})
    write(path, [*old, *new])
    report.write(tmp_path / "h200", with_charts=False)
    page = (tmp_path / "h200" / f"{KERNEL}-fwd.md").read_text()
    assert "| quack ◦ |" in page and "◦ Measured in a different run than this kernel" in page and "| compile |" in page

"""The report: every figure on a page is the record's, and the same records give the same bytes."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest

from harness import cli, record, roofline
from harness.commands import report
from harness.registry import ROOT
from harness.reporting import against_peers, charts, svg, training
from harness.reporting.findings import Finding, findings, verdict
from tests.fake_records import DATASHEET, MEASURED, bench, column, row, samples, with_ratios, world, write

KERNEL = "rmsnorm"
COST = {"flops": 1_000_000, "bytes": 340_000_000, "pipe": "fp32"}  # 80 µs at the measured 4.25 TB/s


def exact(us: float) -> list[float]:
    """Samples without noise, so that a page can be checked by hand."""
    return [us] * 10


def one(tmp_path: Path, rows: list[dict[str, Any]], **run: Any) -> Path:
    write(tmp_path / "records" / "rmsnorm.jsonl", bench(KERNEL, {("wide", "fwd"): rows}, **run))
    return tmp_path


def only(folder: Path) -> Finding:
    (found,) = findings(record.load(folder))
    return found


def line(text: str, *parts: str) -> str:
    (found,) = [x for x in text.splitlines() if all(part in x for part in parts)]
    return found


@pytest.fixture(scope="module")
def h200(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = world(tmp_path_factory.mktemp("reports") / "h200")
    report.write(folder)
    return folder


@pytest.mark.usefixtures("undeclared")
def test_the_summary_is_what_a_reader_would_compute(tmp_path: Path) -> None:
    rows = [
        row(KERNEL, "wide", "fwd", "triton", exact(100), cost=COST, items=32768),
        row(KERNEL, "wide", "fwd", "triton-portable", exact(125), cost=COST),
        row(KERNEL, "wide", "fwd", "eager", exact(260), cost=COST),
        row(KERNEL, "wide", "fwd", "torch", exact(170), cost=COST, pytorch=True),
        row(KERNEL, "wide", "fwd", "quack", exact(130), cost=COST),
    ]
    report.write(one(tmp_path, rows), with_charts=False)
    cells = [c.strip() for c in line((tmp_path / "README.md").read_text(), "| wide |").strip("|").split("|")]
    assert cells == [
        "wide", "fwd", "**triton**", "**100 µs**", "1.30× [1.30, 1.30] quack", "1.70× [1.70, 1.70]",
        "2.60× [2.60, 2.60]", "3400 GB/s", "80.0 %", "70.8 %", "328 M rows/s", "64.0 MiB", "good",
    ]  # fmt: skip


def test_the_report_begins_with_who_is_faster(tmp_path: Path) -> None:
    """By the interval of the speed-up over the fastest peer of each case; none where a peer failed or none ran."""

    def case(**peers: float) -> list[dict[str, Any]]:
        times = {"triton": 100, "eager": 300, **peers}
        return [row(KERNEL, "wide", "fwd", name, exact(us)) for name, us in times.items()]

    failed = {**row(KERNEL, "wide", "fwd", "quack", exact(10)), "status": "error", "reason": "no such symbol"}
    cases = {
        "ahead": case(liger=120, compile=150),
        "far": case(liger=150),
        "level": case(liger=100),
        "behind": case(compile=80, liger=90),
        "alone": case(),
        "unknown": [*case(liger=110), failed],
    }
    rows = {(name, "fwd"): [{**r, "case": name} for r in rows] for name, rows in cases.items()}
    write(tmp_path / "records" / "rmsnorm.jsonl", bench(KERNEL, rows))
    report.write(tmp_path, with_charts=False)
    text = (tmp_path / "README.md").read_text()
    assert text.index(against_peers.TITLE) < text.index("| ahead |")
    cells = [c.strip() for c in line(text, "[rmsnorm](rmsnorm.md) | fwd |", "liger in").strip("|").split("|")]
    assert cells == [
        "[rmsnorm](rmsnorm.md)", "fwd", "6", "2", "1", "1", "2",
        "liger in 3: 1.000× to 1.50×; compile in 1: 0.80×",
    ]  # fmt: skip


def test_a_compute_bound_case_is_in_flops(tmp_path: Path) -> None:
    cost = {"flops": int(78e9), "bytes": 1_000_000, "pipe": "bf16"}  # 100 µs at the measured 780 TFLOP/s
    found = only(one(tmp_path, [row(KERNEL, "wide", "fwd", "triton", exact(125), cost=cost)]))
    assert found.best is not None and found.limit == "bf16"
    assert found.rate(found.best) == pytest.approx(624e12)
    assert found.percent(found.best, found.measured) == pytest.approx(80)
    report.write(tmp_path, with_charts=False)
    assert "| 624 TFLOP/s | 80.0 % | 63.1 % |" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("speedup", "expected"),
    [(1.51, "excellent"), (1.5, "good"), (1.2, "good"), (1.19, "measured"), (1.0, "measured"), (0.999, "investigate")],
)
def test_verdicts(speedup: float, expected: str) -> None:
    assert verdict(speedup) == expected


def test_the_verdict_is_by_the_best_peer_of_the_same_run(tmp_path: Path) -> None:
    rows = [row(KERNEL, "wide", "fwd", n, exact(us)) for n, us in (("triton", 100), ("eager", 300), ("liger", 95))]
    found = only(one(tmp_path, rows))
    assert found.over_best_peer is not None and found.over_best_peer.peer == "liger"
    assert found.verdict == "investigate"


def test_a_wrong_peer_and_our_other_implementation_are_no_peers(tmp_path: Path) -> None:
    rows = with_ratios([row(KERNEL, "wide", "fwd", n, exact(us)) for n, us in (("triton", 100), ("compile", 300))])
    fast_but_wrong = {**row(KERNEL, "wide", "fwd", "liger", exact(10)), "status": "wrong", "reason": "off by one"}
    rows = [*rows, fast_but_wrong, row(KERNEL, "wide", "fwd", "triton-portable", exact(101))]
    found = only(one(tmp_path, rows))
    assert [s.peer for s in found.speedups] == ["compile"]
    report.write(tmp_path, with_charts=False)
    assert "| rmsnorm | liger | wrong | off by one | wide fwd |" in (tmp_path / "README.md").read_text()
    assert "- liger: **wrong**, off by one" in (tmp_path / "rmsnorm-fwd.md").read_text()


def test_a_yardstick_shows_our_share_and_is_no_peer(tmp_path: Path) -> None:
    """Half the bytes in 40 of our 100 µs: its rate is 1.25 times ours."""
    half = {**COST, "bytes": COST["bytes"] // 2}
    rows = [
        row(KERNEL, "wide", "fwd", "triton", exact(100), cost=COST),
        row(KERNEL, "wide", "fwd", "compile", exact(260), cost=COST),
        row(KERNEL, "wide", "fwd", "copy", exact(40), cost=half, kind="yardstick"),
    ]
    found = only(one(tmp_path, rows))
    assert [s.peer for s in found.speedups] == ["compile"] and found.verdict == "excellent"
    report.write(tmp_path, with_charts=False)
    page = (tmp_path / "rmsnorm-fwd.md").read_text()
    assert "This kernel reaches 80.0 % of the rate of **copy** in the same rounds." in page
    assert "4250 GB/s" in line(page, "| copy |", "40.0 µs")


def test_peers_of_a_superseded_row_still_count_for_the_run_they_were_in(tmp_path: Path) -> None:
    folder = one(tmp_path, [row(KERNEL, "wide", "fwd", n, exact(us)) for n, us in (("triton", 100), ("eager", 200))])
    alone = bench(KERNEL, {("wide", "fwd"): [row(KERNEL, "wide", "fwd", "eager", exact(50))]}, run="later")
    write(folder / "records" / "rmsnorm.jsonl", alone)
    found = only(folder)
    assert found.over_reference is not None and found.over_reference.median == pytest.approx(2)  # not 0.5: another run
    record.compact(folder / "records" / "rmsnorm.jsonl")
    assert only(folder).over_reference == found.over_reference


def test_throttled_and_warned_rows_are_marked(tmp_path: Path) -> None:
    partly = row(KERNEL, "wide", "fwd", "triton", exact(100))
    partly["clocks"] |= {"throttled_samples": 3, "throttle": ["sw_power_cap"]}
    partly["warnings"] = ["something synchronises"]
    report.write(one(tmp_path, [partly]), with_charts=False)
    index, page = (tmp_path / "README.md").read_text(), (tmp_path / "rmsnorm-fwd.md").read_text()
    assert "**triton** ‡ §" in index and "‡ The GPU throttled" in index
    assert "3 of 10 samples (sw_power_cap)" in page and "- triton: something synchronises" in page
    partly["clocks"]["throttled_samples"] = 10
    again = tmp_path / "again"
    report.write(one(again, [partly]), with_charts=False)
    assert (
        "**triton** ‡‡" in (again / "README.md").read_text() and "No valid sample" in (again / "README.md").read_text()
    )
    partly["clocks"]["rounds"] = {
        "cold": {"sm_mhz": [1980] * 10, "throttled": []},
        "warm": {"sm_mhz": [1500] * 10, "throttled": list(range(10))},
    }
    report.write(one(tmp_path / "warm alone", [partly]), with_charts=False)
    assert "‡" not in (tmp_path / "warm alone" / "README.md").read_text(), "the cold column is the headline"


@pytest.mark.parametrize(
    ("headline", "cost", "mark", "reason"),
    [
        ("graph", COST, "†", "L2 can serve part"),
        ("cold", {"flops": 80e-6 * 780e12, "bytes": 4, "pipe": "bf16"}, "††", "a higher clock"),
        ("cold", COST, "†††", "within its noise"),
    ],
)
def test_more_than_the_roofline_is_marked_and_explained(tmp_path: Path, headline, cost, mark, reason) -> None:
    over = row(KERNEL, "wide", "fwd", "triton", exact(70), cost=cost, headline=headline)
    report.write(one(tmp_path, [over]), with_charts=False)
    text = (tmp_path / "README.md").read_text()
    assert f"| 114.3 % {mark} |" in text and f"{mark} Above 100 %" in text and reason in text


def test_the_best_of_three_bandwidths_is_the_ceiling() -> None:
    measured = {"bandwidth": 4.0e12, "bandwidth_read": 4.2e12, "bandwidth_2r1w": 4.1e12, "flops": {}}
    for without, best in (((), 4.2e12), (("bandwidth_read",), 4.1e12), (("bandwidth_read", "bandwidth_2r1w"), 4.0e12)):
        known = {name: value for name, value in measured.items() if name not in without}
        found = roofline.Ceilings.from_record(known, "measured")
        assert found is not None and found.bandwidth == best


def test_a_case_where_ours_failed_is_a_row_with_the_reason(tmp_path: Path) -> None:
    rows = [row(KERNEL, "wide", "fwd", "triton", status="oom", reason="needs 3 TB", kind="ours")]
    report.write(one(tmp_path, [*rows, row(KERNEL, "wide", "fwd", "eager", exact(9))]))
    assert "not measured (triton: oom, needs 3 TB)" in (tmp_path / "README.md").read_text()
    assert (tmp_path / "rmsnorm-roofline.svg").is_file()


def test_a_card_outside_the_table_has_no_datasheet_figures(tmp_path: Path) -> None:
    run = {"gpu": {"key": None, "name": "NVIDIA X1"}, "ceilings": {"measured": MEASURED, "datasheet": None}}
    folder = one(tmp_path, [row(KERNEL, "wide", "fwd", "triton", exact(100), cost=COST)], **run)
    report.write(folder)
    text = (folder / "README.md").read_text()
    assert text.startswith("# One NVIDIA X1") and "there are no datasheet figures" in text
    assert "| 80.0 % | – |" in text


def test_different_cards_in_one_folder_are_refused(tmp_path: Path) -> None:
    one(tmp_path, [row(KERNEL, "wide", "fwd", "triton", exact(100))])
    t4 = bench(
        KERNEL, {("wide", "fwd"): [row(KERNEL, "wide", "fwd", "triton", exact(9))]}, run="b", gpu={"name": "Tesla T4"}
    )
    write(tmp_path / "records" / "other.jsonl", [{**entry, "kernel": "other"} for entry in t4])
    with pytest.raises(ValueError, match="different GPUs: one Tesla T4, one NVIDIA H200"):
        report.write(tmp_path, with_charts=False)


def two_gpus(folder: Path, us: float = 800) -> Path:
    """A case of two GPUs, bound by the links between them: 0.27 GB a GPU and direction, 600 µs by the datasheet."""
    cost = {"flops": {"bf16": 100_000_000_000, "fp32": 1_000_000}, "bytes": 400_000_000, "link_bytes": 270_000_000}
    rows = [row("ring", "long", "fwd", name, exact(t), cost=cost) for name, t in (("triton", us), ("eager", 2 * us))]
    ceilings = {"measured": MEASURED, "datasheet": {**DATASHEET, "link": 450e9, "host": 64e9}}
    lines = bench("ring", {("long", "fwd"): rows}, run="two", world_size=2, ceilings=ceilings)
    write(folder / "records" / "ring.jsonl", lines)
    return folder


def test_a_report_of_several_gpus_says_so_and_takes_their_links_into_the_floor(tmp_path: Path) -> None:
    folder = two_gpus(tmp_path / "h200-x2")
    report.write(folder)
    found = only(folder)
    assert (found.limit, found.run.gpu_folder) == ("link", "h200-x2")
    assert found.best and found.percent(found.best, found.measured) == pytest.approx(75)
    index, page = (folder / "README.md").read_text(), (folder / "ring-fwd.md").read_text()
    assert index.startswith("# 2 NVIDIA H200\n")
    assert [c.strip() for c in line(index, "| long |", "GB/s").split("|")][7:10] == [
        "2.00× [2.00, 2.00]",
        "338 GB/s",
        "75.0 %",
    ]
    assert line(index, "| NVLink, per direction |").endswith("| – | 450 GB/s |")
    assert page.startswith("# ring fwd on 2 NVIDIA H200\n")
    assert "257 MiB over the links between GPUs, 100 GFLOP (bf16) and 1.00 MFLOP (fp32)" in page
    assert "bound by link; floor 600 µs" in page
    assert "roofline of 2 NVIDIA H200" in (folder / "overview.svg").read_text()
    readme = report.update_readme("<!-- report:begin h200-x2 -->\n<!-- report:end -->\n", tmp_path)
    assert "2 NVIDIA H200, PyTorch" in readme and "| 1 | link | 75 to 75 % |" in readme


def test_a_kernel_of_several_gpus_has_efficiency_transfers_and_memory(tmp_path: Path) -> None:
    cost = {"flops": {"bf16": 400e9}, "bytes": 4_000_000, "link_bytes": 2_000_000}

    def of(length: int, name: str, us: float, efficiency: float | None) -> dict[str, Any]:
        spread = efficiency and {"median": efficiency, "ci95": [efficiency - 0.01, efficiency + 0.01]}
        several = {
            "backend": "nccl",
            "rank_median_us": [us * 0.9, us],
            "axis": ["causal", length],
            "outside_bytes": [2**20, 2**21],
            "efficiency": spread,
            "alone": spread and {"implementation": "attention", **column(exact(2 * us))},
            "exposed_us": {"median": us / 20, "ci95": [0, us]} if name == "triton" else None,
        }
        if name == "triton" and spread:
            several["model"] = {"us": 0.96 * us, "exposed_us": 0.0, "efficiency": 0.9999}
        several |= {} if spread else {"alone_reason": "too long for one GPU"}
        if length == 16384 and name == "triton":
            several |= {"local_median_us": 50.0, "plain": {"implementation": "torch-cp", "link_bytes": 12_000_000}}
        return row("ring", f"s{length}", "fwd", name, exact(us), cost=cost, several=several)

    groups = {
        (f"s{length}", "fwd"): [of(length, "triton", 1000, of_ours), of(length, "torch-cp", 2000, of_ours and 0.4)]
        for length, of_ours in ((16384, 0.9), (65536, 0.97), (1048576, None))
    }
    write(tmp_path / "records" / "ring.jsonl", bench("ring", groups, run="two", world_size=2))
    report.write(tmp_path)
    page = (tmp_path / "ring.md").read_text()
    cells = [c.strip() for c in line(page, "| s65536 | fwd | **triton** | 1000 µs | 400").split("|")][4:-1]
    assert cells == ["1000 µs", "400 TFLOP/s", "2000 µs", "97.0 % [96.0, 98.0]", "50.0 µs, 5.0 %", "64.0 MiB",
                     "2.00 MiB", "900 µs to 1000 µs"]  # fmt: skip
    assert "| s1048576 | fwd | torch-cp | 2000 µs | 200 TFLOP/s | – | – | – |" in page
    assert page.count("- No efficiency (too long for one GPU): s1048576 fwd.") == 1
    assert page.count("| s16384 | fwd | **triton** | 1.91 MiB | 11.4 MiB | 50.0 µs | 200 GB/s |") == 1
    assert "| s65536 | fwd | triton | 1000 µs | 960 µs | -4.0 % | 104.2 % |" in page  # 2000 µs over 2 · 960 µs
    assert page.count("% | 104.2 % |") == 2
    chart = (tmp_path / "ring-fwd-efficiency.svg").read_text()
    assert "causal" in chart and "torch-cp" in chart and "triton (this kernel)" in chart
    assert "| 200 GB/s | 6 GB/s: pays off | 2.00× [2.00, 2.00] torch-cp |" in page
    again = {("s16384", "fwd"): [of(16384, "torch-cp", 40, None)]}  # its speed is not that of the same rounds
    later = bench("ring", again, run="three", world_size=2, environment={"time": "2026-01-02T00:00:00+00:00"})
    write(tmp_path / "records" / "ring.jsonl", later)
    report.write(tmp_path)
    assert "| 200 GB/s | – | 2.00× [2.00, 2.00] torch-cp |" in (tmp_path / "ring.md").read_text()


def test_a_training_has_a_page_and_a_chart_of_its_own(tmp_path: Path) -> None:
    one(tmp_path, [row(KERNEL, "wide", "fwd", "triton", exact(100), cost=COST)])
    run = {"loss": 2.0, "ms_a_step": 5.0, "curve": [[50, 3.0], [100, 2.5]]}
    runs = {"none": {"0": run, "1": {**run, "loss": 2.2}}, "int4": {"0": {**run, "loss": 2.01}, "1": run}}
    head = {"schema": 1, "device": "NVIDIA H200", "torch": "2.11", "ranks": 2, "steps": 100, "model": {"layers": 4}}
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / f"{KERNEL}.json").write_text(json.dumps({**head, "results": runs}))
    report.write(tmp_path)
    page = (tmp_path / f"{KERNEL}-training.md").read_text()
    assert "| none | 2 | 2.1000 | – | – | – | 5.00 |" in page
    assert "| int4 | 2 | 2.0050 | -0.0950 | -0.2000 | +0.0100 | 5.00 |" in page
    assert "from 2.0000 to 2.2000" in page and "100 steps on 2 ranks" in page
    assert "int4" in (tmp_path / f"{KERNEL}-training.svg").read_text()
    own = (tmp_path / f"{KERNEL}.md").read_text()
    assert f"[training]({KERNEL}-training.md)" in own
    assert f"## Training\n\n![{KERNEL}: loss over steps]({KERNEL}-training.svg)\n" in own
    assert f"](../../reports/{tmp_path.name}/{KERNEL}-training.svg)" in report.kernel_block(tmp_path, KERNEL)


def test_a_training_says_what_its_kinds_are_and_what_bounds_their_loss(tmp_path: Path) -> None:
    run = {"loss": 2.0, "ms_a_step": 5.0, "curve": [[50, 3.0], [100, 2.5]]}
    runs = {"torch": {"0": run}, "ours": {"0": {**run, "loss": 2.01}}, "other": {"0": {**run, "loss": 4.0}}}
    document = {
        "schema": 1,
        "device": "NVIDIA H200",
        "torch": "2.11",
        "steps": 100,
        "model": {"layers": 4},
        "plain": "torch",
        "kinds": {"torch": "as it is", "ours": "with kernels", "not run": "?"},
        "other_models": ["other"],
        "bounds": {"the best guess": 5.0},
        "results": runs,
    }
    text = "\n".join(training.page(KERNEL, "one NVIDIA H200", document))
    assert "100 steps on NVIDIA H200, PyTorch 2.11; layers 4.\n" in text
    assert "- `torch`: as it is\n- `ours`: with kernels\n- the best guess: a loss of 5.0000\n\n*Loss*" in text
    assert "| kind | seeds | loss | minus torch |" in text and "not run" not in text
    assert "| torch | 1 | 2.0000 | – | – | – | 5.00 |" in text and "| other | 1 | 4.0000 | – | – | – | 5.00 |" in text
    assert "| ours | 1 | 2.0100 | +0.0100 | +0.0100 | +0.0100 | 5.00 |" in text
    left, right = training.chart(KERNEL, "one NVIDIA H200", document).axes
    assert (len(left.lines), len(right.lines)) == (4, 2)


def test_a_training_of_fewer_seeds_is_beside_the_plain_one_of_the_same_seeds() -> None:
    """A seed's curve may be far from another's; the difference that a kind makes is far smaller."""
    runs = {str(seed): {"loss": 2.0, "ms_a_step": 5.0, "curve": [[50, 3.0 + seed]]} for seed in range(3)}
    few = {"0": {**runs["0"], "curve": [[50, 3.01]]}}
    head = {"schema": 1, "device": "NVIDIA H200", "torch": "2.11", "steps": 50, "model": {"layers": 4}}
    document = {**head, "results": {"none": runs, "int4": few}}
    _, right = training.chart(KERNEL, "one NVIDIA H200", document).axes
    assert [list(line.get_ydata()) for line in right.lines] == [[0.0], [pytest.approx(0.01)]]


def test_folders_of_one_and_of_several_gpus_stand_beside_each_other(tmp_path: Path) -> None:
    one(tmp_path / "h200", [row(KERNEL, "wide", "fwd", "triton", exact(100), cost=COST)])
    two_gpus(tmp_path / "h200-x2")
    assert report.report_folders(tmp_path) == [tmp_path / "h200", tmp_path / "h200-x2"]
    assert {r.run.gpu_folder for r in record.load(tmp_path).rows} == {"h200", "h200-x2"}
    alone = bench("ring", {("long", "fwd"): [row("ring", "long", "fwd", "triton", exact(9))]}, run="alone")
    write(tmp_path / "h200-x2" / "records" / "alone.jsonl", alone)
    with pytest.raises(ValueError, match="different GPUs: .*one NVIDIA H200.*"):
        report.write(tmp_path / "h200-x2", with_charts=False)


def test_time_by_stage_and_what_each_part_brings(tmp_path: Path) -> None:
    """Tables of what a SPEC declares: the rest is what the call takes beyond its stages, ratios are the rows' own."""
    stages = {"attention": 40.0, "loss": 0.0, "optimizer": 25.0}
    rows = [
        row(KERNEL, "wide", "fwd", "triton", exact(100), headline="graph", ablation="ours", stages_us=stages),
        row(KERNEL, "wide", "fwd", "triton-plain", exact(130), headline="graph", ablation="ours, but a plain norm"),
        row(KERNEL, "wide", "fwd", "quack", exact(150), headline="graph", ablation="all of quack"),
        row(KERNEL, "wide", "fwd", "liger", exact(140), headline="graph"),
    ]
    report.write(one(tmp_path, rows), with_charts=False)
    text = (tmp_path / "rmsnorm.md").read_text()
    staged, brings = (text.split(f"\n## {title}\n")[1] for title in ("Time by stage", "Ablation"))
    assert "| wide | **triton** | 40.0 µs | – | 25.0 µs | 35.0 µs | 100 µs |" in staged.split("\n## ")[0]
    lines = [cells for cells in brings.split("\n## ")[0].splitlines() if cells.startswith("| ")]
    assert lines[1:] == [
        "| all of quack | quack | 152 µs | 150 µs | 1.50× [1.50, 1.50] |",
        "| ours, but a plain norm | **triton-plain** | 132 µs | 130 µs | 1.30× [1.30, 1.30] |",
        "| ours | **triton** | 102 µs | 100 µs | – |",
    ]


def test_twice_is_the_same_bytes(h200: Path, tmp_path: Path) -> None:
    first = {p.name: p.read_bytes() for p in h200.iterdir() if p.is_file()}
    again = tmp_path / "h200"
    (again / "records").mkdir(parents=True)
    for path in (h200 / "records").iterdir():
        (again / "records" / path.name).write_bytes(path.read_bytes())
    written = report.write(again)
    assert {p.name for p in written} == set(first)
    assert {p.name: p.read_bytes() for p in written} == first


def test_links_and_images_lead_somewhere(h200: Path) -> None:
    pages = [p for p in h200.iterdir() if p.suffix == ".md"]
    kernels = ("attention", "gmm_logprob", "rmsnorm")
    assert {p.name for p in pages} == {
        "README.md", *(f"{kernel}{part}.md" for kernel in kernels for part in ("", "-fwd", "-bwd"))
    }  # fmt: skip
    for page in pages:
        targets = re.findall(r"\]\(([^)]+)\)", page.read_text())
        assert targets
        for target in targets:
            assert target.startswith("https://") or (page.parent / target).is_file(), f"{page.name}: {target}"


def test_every_table_has_as_many_cells_as_headings(h200: Path) -> None:
    for page in h200.glob("*.md"):
        width = 0
        for text in page.read_text().splitlines():
            if not text.startswith("|"):
                width = 0
            else:
                cells = len(re.findall(r"(?<!\\)\|", text))
                assert not width or cells == width, f"{page.name}: {text}"
                width = cells


def test_every_row_of_the_records_is_on_its_page(h200: Path) -> None:
    for measured in record.load(h200).rows:
        page = (h200 / f"{measured.kernel}-{measured.mode}.md").read_text()
        section = page.split(f"\n## {measured.case}\n")[1].split("\n## ")[0]
        assert re.search(rf"^[|-] (\*\*)?{re.escape(measured.implementation)}\b", section, re.MULTILINE)
        if measured.ok:
            for name, column in measured["columns"].items():
                assert re.search(
                    rf"\| {measured.implementation} \| (\*\*)?{name}(\*\*)? \|.*\| {column['n']} \|", section
                )


def test_svg_is_short_well_formed_on_white_and_without_dates(h200: Path) -> None:
    drawings = sorted(h200.glob("*.svg"))
    assert len(drawings) == 10  # the overview, and for three kernels the roofline and two modes
    for path in drawings:
        root = xml.etree.ElementTree.parse(path).getroot()
        text = path.read_text()
        assert root.tag.endswith("svg") and "fill:#ffffff" in text
        assert "<dc:date>" not in text and "matplotlib" not in text.lower() and "clip" not in text
        assert not re.search(r"\d\.\d{3}", re.sub(r">[^<]*<", "><", text)), "more digits than can be seen"
        assert len(text) < 20_000


def words(path: Path) -> list[str]:
    """The texts of a drawing."""
    return [e.text or "" for e in xml.etree.ElementTree.parse(path).getroot().iter("{http://www.w3.org/2000/svg}text")]


def test_a_chart_of_peers_has_a_line_a_case_and_a_point_an_implementation(h200: Path) -> None:
    found = [f for f in findings(record.load(h200)) if (f.kernel, f.mode) == ("rmsnorm", "fwd")]
    text = [word.removesuffix(" ◊") for word in words(h200 / "rmsnorm-fwd.svg")]
    for finding in found:
        assert charts.case_label(finding) in text
    # The best peer of all cases is quack.
    assert text.count("triton (this kernel)") == text.count("quack") - len(found) + 1 == 1
    drawing = (h200 / "rmsnorm-fwd.svg").read_text()
    # A <use> each; a legend entry each; liger skips one case.
    assert drawing.count("<use") == sum(len(f.shares()) for f in found) + 5
    height = float(re.search(r'viewBox="0 0 \d+ ([\d.]+)"', drawing)[1])
    assert height < 72 * (2 + charts.LINE * len(found))


def test_points_that_would_hide_each_other_go_to_different_levels() -> None:
    shares = {"ours": 97.0, "quack": 96.5, "liger": 96.8, "compile": 70.0, "eager": 7.0}
    placed = charts.spread(shares, 1.5, list(shares))
    assert {name: share for name, (share, _) in placed.items()} == shares
    assert placed["ours"][1] == placed["compile"][1] == placed["eager"][1] == 0
    assert len({placed[name][1] for name in ("ours", "quack", "liger")}) == 3


def test_an_implementation_looks_the_same_everywhere_and_ours_is_the_strong_one(h200: Path) -> None:
    found = [f for f in findings(record.load(h200)) if f.kernel == "attention"]
    looks = charts.looks(found)
    assert list(looks) == ["gluon", "triton", "eager", "cudnn", "fa4"]
    assert looks["gluon"] == charts.OURS[0] and max(look.size for look in looks.values()) == looks["gluon"].size
    assert len({look.mark for look in looks.values()}) == len({look.colour for look in looks.values()}) == 5


def test_a_shortened_svg_keeps_its_text_and_what_is_referred_to() -> None:
    drawn = """<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">
      <metadata>made today</metadata><defs><clipPath id="c"><rect/></clipPath></defs><!-- a comment -->
      <g id="axes"><g><path id="mark" d="M 1.23456 -0.0001 L 2.0 3"/></g><g id="empty"/></g>
      <g clip-path="url(#c)"><use xlink:href="#mark" x="0.125" style="fill: red"/></g>
      <text style="font: bold 8.5px 'DejaVu Sans'; text-anchor: end" transform="rotate(-0 1 2)">1.0295</text>
    </svg>"""
    short = svg.shortened(drawn)
    assert short.splitlines()[1:] == [
        '<path id="mark" d="M 1.23 0 L 2 3"/>',
        '<use xlink:href="#mark" x="0.12" style="fill:red"/>',
        '<text style="font-weight:bold;font-size:8.5px;text-anchor:end">1.0295</text>',
        "</svg>",
    ]


def test_the_profile_is_shown_beside_the_bench(h200: Path, tmp_path: Path) -> None:
    folder = one(tmp_path, [row(KERNEL, "wide", "fwd", "triton", exact(100), cost=COST)])
    launch = {
        "name": "_rmsnorm_fwd_kernel", "duration_us": 97.5, "dram_bytes": 3.4e8, "dram_pct": 91.0, "l2_pct": 44.0,
        "sm_pct": 22.0, "tensor_pct": 0.0, "occupancy_pct": 61.0, "registers": 40, "shared_bytes": 1024,
        "spill_bytes": 0, "stalls": [["long_scoreboard", 71.0], ["barrier", 8.0]],
    }  # fmt: skip
    shared = {"kernel": KERNEL, "mode": "fwd", "case": "wide", "run": 0}
    unknown = dict.fromkeys(("duration_us", "dram_bytes", "cost_bytes", "bytes_ratio"))
    rows = [
        {**shared, "implementation": "triton", "status": "ok", "reason": None, "launches": [launch],
         "duration_us": 97.5, "dram_bytes": 3.57e8, "cost_bytes": 3.4e8, "bytes_ratio": 1.05},
        {**shared, "implementation": "quack", "status": "skipped", "reason": "quack is not installed", "launches": [],
         **unknown},
    ]  # fmt: skip
    (folder / "profile").mkdir()
    (folder / "profile" / "rmsnorm.json").write_text(
        json.dumps({"schema": 2, "kernel": KERNEL, "gpu": "h200", "environments": [{}], "rows": rows})
    )
    written = report.write(folder, with_charts=False)
    assert folder / "profile" / "README.md" in written
    assert "| wide | fwd | triton | 1 | 97.5 µs | 100 µs | 0.975 |" in (folder / "profile" / "README.md").read_text()
    text = (folder / "rmsnorm.md").read_text()
    assert "| wide | fwd | triton | 340 MiB | 324 MiB | 1.05× | 97.5 µs | 100 µs | 0.97× | ok |" in text
    assert "long_scoreboard 71 %, barrier 8 %" in text and "skipped: quack is not installed" in text
    (folder / "profile" / "rmsnorm.json").write_text('{"schema": 9}')
    with pytest.raises(ValueError, match="schema 9"):
        report.write(folder, with_charts=False)


def test_what_was_tuned_is_shown_beside_the_bench(h200: Path, tmp_path: Path) -> None:
    folder = one(tmp_path, [row(KERNEL, "wide", "fwd", "triton", exact(100), cost=COST)])
    split, whole = {"config": ["split", 8], "median_us": 12.5}, {"config": ["whole", 1], "median_us": 10.0}
    shared = {"kernel": KERNEL, "mode": "fwd", "function": "pick_version"}
    rows = [
        {**shared, "implementation": "cuda", "case": "long", "picked": ["split", 8], "picked_us": 12.5,
         "candidates": [split, whole]},
        {**shared, "case": "short", "picked": {"warps": 4}, "picked_us": 3.0, "candidates": [
            {"config": {"warps": 4}, "median_us": 3.0}, {"config": {"warps": 8}, "median_us": None}]},
    ]  # fmt: skip
    (folder / "tune").mkdir()
    (folder / "tune" / "rmsnorm.json").write_text(json.dumps({"schema": 2, "rows": rows}))
    report.write(folder, with_charts=False)
    text = (folder / "rmsnorm.md").read_text()
    assert "## Configurations" in text and "### pick_version, in cuda" in text
    assert "| fwd | long | 2 | 12.5 µs | 10.0 µs | 25.0 % | split 8 | whole 1 |" in text
    assert "| fwd | short | 1 | 3.00 µs | 3.00 µs | 0.0 % | warps=4 | warps=4 |" in text


README = "# Top\n\n<!-- report:begin h200 -->\nold figures\n<!-- report:end -->\n\nEnd.\n"


def test_the_readme_block_is_made_from_the_records(h200: Path) -> None:
    text = report.update_readme(README, h200.parent)
    assert text.startswith("# Top\n\n<!-- report:begin h200 -->\n") and text.endswith("<!-- report:end -->\n\nEnd.\n")
    assert "old figures" not in text and "(reports/h200/overview.svg)" in text
    assert "[rmsnorm](reports/h200/rmsnorm.md) | [bwd](reports/h200/rmsnorm-bwd.md) | 5 | memory |" in text
    assert report.update_readme(text, h200.parent) == text
    assert report.update_readme("no markers\n", h200.parent) == "no markers\n"


def test_the_readme_block_of_a_folder_without_records_is_empty(tmp_path: Path) -> None:
    assert "old figures" not in report.update_readme(README, tmp_path)
    assert report.update_readme(report.update_readme(README, tmp_path), tmp_path) == report.update_readme(
        README, tmp_path
    )


def test_a_kernels_block_holds_its_own_rows_alone(h200: Path) -> None:
    text = report.update_readme(README, h200.parent, KERNEL)
    assert f"(../../reports/h200/{KERNEL}-fwd.svg)" in text and f"(../../reports/h200/{KERNEL}-bwd.svg)" in text
    assert text.count("| llama-7b |") == 2 and "| attention" not in text
    assert report.update_readme(text, h200.parent, KERNEL) == text
    assert "../../reports" not in report.update_readme(README, h200.parent, "no_such_kernel")


@pytest.mark.parametrize("readme", report.readmes(ROOT), ids=lambda path: path.parent.name)
def test_the_readmes_show_what_the_records_say(readme: Path) -> None:
    """Figures in a README are never typed: the block must be what `report --readme` would write."""
    kernel = report.kernel_of(readme, ROOT)
    for block in report.BLOCK.finditer(readme.read_text(encoding="utf-8")):
        updated = report.update_readme(block[0], ROOT / "reports", kernel)
        assert updated == block[0], "run: python -m harness report --readme"


def test_the_top_readme_has_a_block() -> None:
    assert ROOT / "README.md" in report.readmes(ROOT)


def test_the_command_writes_and_complains_clearly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = one(tmp_path / "h200", [row(KERNEL, "wide", "fwd", "triton", samples(100))])
    assert cli.main(["report", "--out", str(folder)]) == 0
    assert str(folder / "rmsnorm-fwd.svg") in capsys.readouterr().out
    assert cli.main(["report", "--out", str(tmp_path / "empty")]) == 2
    assert "no record" in capsys.readouterr().err
    monkeypatch.setattr(charts, "available", lambda: False)
    assert cli.main(["report", "--out", str(folder)]) == 2
    assert "--no-charts" in capsys.readouterr().err
    assert cli.main(["report", "--out", str(folder), "--no-charts"]) == 0
    assert "overview.svg" not in (folder / "README.md").read_text()


def test_report_without_records_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(report, "ROOT", tmp_path)
    assert cli.main(["report"]) == 2


def test_compacted_records_give_the_same_pages(tmp_path: Path) -> None:
    folder = world(tmp_path / "h200")
    report.write(folder)
    first = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    size = sum(path.stat().st_size for path in record.files(folder))
    assert cli.main(["report", "--out", str(folder), "--compact"]) == 0
    assert sum(path.stat().st_size for path in record.files(folder)) < 0.8 * size
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == first


def committed() -> list[Path]:
    return sorted(path for path in (ROOT / "reports").iterdir() if path.is_dir())


@pytest.mark.parametrize("folder", committed(), ids=lambda folder: folder.name)
def test_a_committed_report_is_small(folder: Path) -> None:
    """Of each kernel 120 KB of what the compiler says, and 60 KB of mutants; of each card 0.5 MB, and 2.5 KB for each
    implementation of a case in a mode: its samples, its line in a table of each column, and its point in a chart."""
    of_each = {"build": 1.2e5, "mutants": 6e4}.get(folder.name)
    if of_each is not None:
        limit = of_each * len(list(folder.glob("*.json*")))
    else:
        limit = 5e5 + 2.5e3 * len(record.load(folder / "records").rows)
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= limit


@pytest.mark.parametrize("folder", [f for f in committed() if f.name != "build"], ids=lambda folder: folder.name)
def test_every_page_and_chart_of_a_committed_report_is_linked(folder: Path) -> None:
    """What a report no longer writes is deleted by hand."""
    linked = {name for page in folder.glob("*.md") for name in re.findall(r"\]\(([^)#]+)", page.read_text("utf-8"))}
    assert {path.name for path in folder.iterdir() if path.suffix in (".md", ".svg")} - linked == set()


@pytest.mark.parametrize(
    "page", sorted(ROOT.glob("kernels/*/*.md")), ids=lambda page: f"{page.parent.name}/{page.name}"
)
def test_links_into_the_reports_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]*reports/[^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"

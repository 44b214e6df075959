"""The page over the number of GPUs: what is on it, and when there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.commands import report
from harness.registry import ROOT
from harness.reporting import over_gpus

from .fake_records import bench, column, row, write

README = "# Reports\n\n<!-- report:begin gpus -->\n<!-- report:end -->\n"
COST = {"flops": {"bf16": 400e9}, "bytes": 4_000_000, "link_bytes": 2_000_000}


def records(reports: Path, world: int, efficiencies: dict[int, float | None], **changes: Any) -> None:
    """A ring on so many GPUs: by the length its efficiency, a model that is 2 % too fast, and a T1 of one sample."""
    groups = {}
    for length, median in efficiencies.items():
        several: dict[str, Any] = {"backend": "nccl", "rank_median_us": [1.0] * world, "axis": ["causal", length]}
        if median:
            several["efficiency"] = {"median": median, "ci95": [median, median]}
            several["alone"] = {"implementation": "attention", **column([1000 * world * median])}
            several["model"] = {"us": 980.0, "exposed_us": 0.0, "efficiency": 0.9999}  # by a T1 and a launch
            several["exposed_us"] = {"median": 10.0, "ci95": [9.0, 11.0]}
        groups[f"s{length}", "fwd"] = [
            row("ring", f"s{length}", "fwd", "triton", [1000.0] * 9, cost=COST, several=several)
        ]
    lines = bench("ring", groups, run=f"of{world}", world_size=world, **changes)
    write(reports / f"h200-x{world}" / "records" / "ring.jsonl", lines)


def cells(page: str, *parts: str) -> list[str]:
    (found,) = [x for x in page.splitlines() if x.startswith("|") and all(part in x for part in parts)]
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_each_length_has_a_line_over_the_number_of_gpus(tmp_path: Path) -> None:
    records(tmp_path, 2, {65536: 0.98, 262144: 0.99})
    records(tmp_path, 4, {65536: 0.9, 262144: 0.97, 1048576: None})
    (tmp_path / "README.md").write_text(README)
    written = report.write_over_gpus(tmp_path, with_charts=True)
    assert [path.name for path in written] == ["gpus.md", "README.md", "ring-fwd-gpus.svg"]
    page = (tmp_path / "gpus.md").read_text()
    assert "[2](h200-x2/ring.md), [4](h200-x4/ring.md)" in page and "](ring-fwd-gpus.svg)" in page
    assert cells(page, "65\u202f536 | 4 |")[3:] == ["1000 µs", "3600 µs, once", "90.0 %", "91.8 %", "-2.0 %", "1.0 %"]
    assert cells(page, "1\u202f048\u202f576 | 4 |")[4:] == ["–"] * 5
    chart = (tmp_path / "ring-fwd-gpus.svg").read_text()
    assert "efficiency over GPUs" in chart and "262\u202f144" in chart and "1\u202f048\u202f576" not in chart
    assert "[gpus.md](gpus.md) shows how the efficiency" in (tmp_path / "README.md").read_text()
    assert report.write_over_gpus(tmp_path, with_charts=False) == [tmp_path / "gpus.md"]
    assert "svg" not in (tmp_path / "gpus.md").read_text()


def test_one_number_of_gpus_has_no_page(tmp_path: Path) -> None:
    records(tmp_path, 2, {65536: 0.98})
    records(tmp_path, 4, {65536: 0.98}, gpu={"name": "NVIDIA X1"})  # another kind of GPU is not beside it
    assert report.over_gpus_panels(tmp_path) == [] == report.write_over_gpus(tmp_path, with_charts=True)


def test_the_committed_page_says_what_the_records_say() -> None:
    found, path = report.over_gpus_panels(ROOT / "reports"), ROOT / "reports" / f"{over_gpus.STEM}.md"
    assert path.is_file() == bool(found), "run: python -m harness report"
    if found:
        assert path.read_text(encoding="utf-8") == "\n".join(over_gpus.page(found, True)).rstrip() + "\n"
    text = (ROOT / "reports" / "README.md").read_text(encoding="utf-8")
    assert report.with_link(text, over_gpus.STEM, over_gpus.LINK_TEXT, bool(found)) == text


@pytest.mark.parametrize("number", [2, 4])
def test_the_order_of_numbers_is_theirs(tmp_path: Path, number: int) -> None:
    for world in (number, 16, 8):
        records(tmp_path, world, {65536: 0.9})
    (panel,) = report.over_gpus_panels(tmp_path)
    page = "\n".join(over_gpus.page([panel], charts=False))
    assert [line.split("|")[3].strip() for line in page.splitlines() if line.startswith("| causal")] == [
        str(number), "8", "16",
    ]  # fmt: skip


def test_two_cases_are_no_one_point(tmp_path: Path) -> None:
    path = tmp_path / "h200-x2" / "records" / "ring.jsonl"
    several = {"backend": "nccl", "rank_median_us": [1.0, 1.0], "axis": ["causal", 65536]}
    groups = {
        (c, "fwd"): [row("ring", c, "fwd", "triton", [1000.0] * 9, cost=COST, several=several)] for c in ("a", "b")
    }
    write(path, bench("ring", groups, run="of2", world_size=2))
    with pytest.raises(ValueError, match="a and b are one point of 'causal': SPEC's axis must tell them apart"):
        report.write_over_gpus(tmp_path, with_charts=False)

"""The page that sets cards side by side: what is on it, what is left out, and when there is one."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness import cli, options
from harness.commands import bench as bench_command
from harness.commands import report
from harness.registry import ROOT
from harness.reporting import cards
from tests.fake_records import MEASURED, bench, row, world, write

KERNEL = "rmsnorm"
COST = {"flops": 1_000_000, "bytes": 340_000_000, "pipe": "fp32"}  # 80 µs at the H200's measured 4.25 TB/s
H100 = {
    "key": "h100",
    "name": "NVIDIA H100 80GB HBM3",
    "uuid": "GPU-11111111-0000-0000-0000-000000000000",
    "memory_bytes": 85_017_493_504,
    "power_limit_w": 699,
}
H100_CEILINGS = {"measured": {**MEASURED, "bandwidth": 3.0e12}, "datasheet": None}
README = "# Reports\n\n<!-- report:begin cards -->\n<!-- report:end -->\n"


def rows(us: float, peer: float, case: str = "wide", **changes: Any) -> list[dict[str, Any]]:
    """Ours and one peer, without noise: a page can be checked by hand."""
    made = [row(KERNEL, case, "fwd", n, [t] * 10, cost=COST, **changes) for n, t in (("triton", us), ("quack", peer))]
    return [{**r, "noise": None} for r in made]


def reports(tmp_path: Path, h100: dict[tuple[str, str], list], h200: dict[tuple[str, str], list]) -> str:
    """The page of the two cards."""
    write(tmp_path / "h200" / "records" / f"{KERNEL}.jsonl", bench(KERNEL, h200))
    lines = bench(KERNEL, h100, run="h100", gpu=H100, ceilings=H100_CEILINGS)
    write(tmp_path / "h100" / "records" / f"{KERNEL}.jsonl", lines)
    (tmp_path / "README.md").write_text(README)
    written = report.write_cards(tmp_path)
    assert written == [tmp_path / "cards.md", tmp_path / "README.md"]
    return (tmp_path / "cards.md").read_text()


def cells(page: str, *parts: str) -> list[str]:
    (found,) = [x for x in page.splitlines() if x.startswith("|") and all(part in x for part in parts)]
    return [cell.strip() for cell in found.strip("|").split("|")]


@pytest.mark.usefixtures("undeclared")
def test_a_case_on_both_is_what_a_reader_would_compute(tmp_path: Path) -> None:
    """340 MB at 3.0 and at 4.25 TB/s are 113.3 and 80 µs."""
    page = reports(tmp_path, {("wide", "fwd"): rows(125, 150)}, {("wide", "fwd"): rows(100, 110)})
    assert "## One NVIDIA H100 80GB HBM3 and one NVIDIA H200" in page
    assert cells(page, "| case |") == [
        "case", "mode", "time, h100", "time, h200", "h100 / h200",
        "% of roofline, h100", "% of roofline, h200",
        "speed-up over the fastest peer, h100", "speed-up over the fastest peer, h200",
    ]  # fmt: skip
    assert cells(page, "| wide |") == [
        "wide", "fwd", "125 µs triton", "100 µs triton", "**1.25×**",
        "90.7 %", "80.0 %", "1.20× [1.20, 1.20] quack", "1.10× [1.10, 1.10] quack",
    ]  # fmt: skip
    assert cells(page, "| rmsnorm fwd |") == ["rmsnorm fwd", "1 of 1", "**1.25×** (1.25× to 1.25×)", "–"]
    assert cells(page, "| power limit |") == ["power limit", "699 W", "700 W"]
    assert cells(page, "| copy, measured |") == ["copy, measured", "3000 GB/s", "4250 GB/s"]
    assert "### Excluded" not in page


def test_a_case_that_one_card_lacks_is_in_no_figure(tmp_path: Path) -> None:
    failed = [row(KERNEL, "long", "fwd", "triton", status="oom", reason="out of memory", cost=COST)]
    here = {("wide", "fwd"): rows(100, 110), ("long", "fwd"): rows(10, 11, "long"), ("more", "fwd"): rows(1, 2, "more")}
    page = reports(tmp_path, {("wide", "fwd"): rows(200, 300), ("long", "fwd"): failed}, here)
    assert cells(page, "| rmsnorm fwd |")[1:3] == ["1 of 1", "**2.00×** (2.00× to 2.00×)"]
    assert cells(page, "not measured on h100") == ["rmsnorm", "fwd", "not measured on h100", "2", "long, more"]
    assert "| long |" not in page and "| more |" not in page


def test_a_case_that_became_another_one_is_not_compared(tmp_path: Path) -> None:
    other = [{**r, "cost": {**COST, "bytes": 2 * COST["bytes"]}} for r in rows(200, 300)]
    page = reports(tmp_path, {("wide", "fwd"): other}, {("wide", "fwd"): rows(100, 110)})
    assert "No case was measured on both." in page
    assert cells(page, "different definitions |") == ["rmsnorm", "fwd", "different definitions", "1", "wide"]


@pytest.mark.usefixtures("undeclared")
def test_what_is_doubted_on_either_card_is_marked_and_in_no_mean(tmp_path: Path) -> None:
    doubted = rows(300, 310)
    doubted[0]["clocks"] |= {"throttled_samples": 3, "throttle": ["sw_power_cap"]}
    failing = [*rows(125, 150, "long"), row(KERNEL, "long", "fwd", "liger", status="error", reason="boom", cost=COST)]
    here = {("wide", "fwd"): rows(100, 110), ("long", "fwd"): rows(100, 110, "long")}
    page = reports(tmp_path, {("wide", "fwd"): doubted, ("long", "fwd"): failing}, here)
    assert cells(page, "| wide |")[2:5] == ["300 µs triton ‡", "100 µs triton", "**3.00×**"]
    assert cells(page, "| long |")[7] == "1.20× [1.20, 1.20] quack ¶"
    assert "‡ The GPU throttled" in page and "¶ A peer" in page
    assert cells(page, "| rmsnorm fwd |") == [
        "rmsnorm fwd", "1 of 2", "**1.25×** (1.25× to 1.25×)", "the GPU throttled: 1"
    ]  # fmt: skip


@pytest.mark.usefixtures("undeclared")
def test_a_peer_that_was_not_captured_is_compared_by_its_cold_time(tmp_path: Path) -> None:
    """A peer without a time in a graph has one in the column of the page."""
    here = rows(47.5, 60, headline="graph")
    lost = row(KERNEL, "wide", "fwd", "liger", [55.0] * 10, cost=COST)
    lines = bench(KERNEL, {("wide", "fwd"): here})
    write(tmp_path / "h200" / "records" / f"{KERNEL}.jsonl", [*lines[:-1], {**lost, "run": lines[0]["run"]}, lines[-1]])
    other = bench(KERNEL, {("wide", "fwd"): rows(55, 60)}, run="h100", gpu=H100, ceilings=H100_CEILINGS)
    write(tmp_path / "h100" / "records" / f"{KERNEL}.jsonl", other)
    report.write_cards(tmp_path)
    assert cells((tmp_path / "cards.md").read_text(), "| wide |")[8] == "1.10× [1.10, 1.10] liger"


@pytest.mark.usefixtures("undeclared")
def test_times_of_different_columns_are_both_cold(tmp_path: Path) -> None:
    """The headline of a short call is that of its graph, whose cold time is 2.5 µs more."""
    here = {("wide", "fwd"): rows(47.5, 60, headline="graph")}
    page = reports(tmp_path, {("wide", "fwd"): rows(55, 60)}, here)
    assert cells(page, "| wide |")[2:5] == ["55.0 µs triton", "50.0 µs triton", "**1.10×**"]
    # The peers' cold times are 60 and 62.5 µs; in a graph the speed-up on the H200 would be 1.26×.
    assert cells(page, "| wide |")[7:] == ["1.09× [1.09, 1.09] quack", "1.25× [1.25, 1.25] quack"]
    both = {("wide", "fwd"): rows(25, 60, headline="graph")}
    assert cells(reports(tmp_path / "b", both, here), "| wide |")[2:5] == [
        "25.0 µs (graph) triton", "47.5 µs (graph) triton", "**0.53×**"
    ]  # fmt: skip


def test_one_card_has_no_page_and_no_link(tmp_path: Path) -> None:
    write(tmp_path / "h200" / "records" / "a.jsonl", bench(KERNEL, {("wide", "fwd"): rows(1, 2)}))
    two = bench(KERNEL, {("wide", "fwd"): rows(1, 2)}, run="two", world_size=2)
    write(tmp_path / "h200-x2" / "records" / "a.jsonl", two)
    on_cpu = bench(KERNEL, {("wide", "fwd"): rows(1, 2)}, run="cpu")
    on_cpu[0]["environment"]["gpu"] = {"key": None, "name": "CPU"}
    write(tmp_path / "cpu" / "records" / "a.jsonl", on_cpu)
    linked = report.with_link(README, cards.STEM, cards.LINK_TEXT, True)
    assert "\n[cards.md](cards.md) compares" in linked
    assert report.with_link(linked, cards.STEM, cards.LINK_TEXT, True) == linked
    (tmp_path / "README.md").write_text(linked)
    assert report.write_cards(tmp_path) == [tmp_path / "README.md"] and not (tmp_path / "cards.md").exists()
    assert (tmp_path / "README.md").read_text() == README
    assert report.write_cards(tmp_path) == []


def test_the_command_writes_it_and_every_table_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world(tmp_path / "reports" / "h200")
    world(tmp_path / "reports" / "h100", gpu=H100, run="h100", ceilings=H100_CEILINGS)
    (tmp_path / "reports" / "README.md").write_text(README)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    assert cli.main(["report", "--no-charts"]) == 0
    text = (tmp_path / "reports" / "cards.md").read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (tmp_path / "reports" / target).is_file(), target
    width = 0
    for line in text.splitlines():
        found = line.count("|") if line.startswith("|") else 0
        assert not found or not width or found == width, line
        width = found
    assert cli.main(["report", "--no-charts"]) == 0 and (tmp_path / "reports" / "cards.md").read_text() == text
    assert "(cards.md)" in (tmp_path / "reports" / "README.md").read_text()


def test_the_committed_page_says_what_the_records_say() -> None:
    lines, path = report.cards_page(ROOT / "reports"), ROOT / "reports" / f"{cards.STEM}.md"
    assert path.is_file() == bool(lines), "run: python -m harness report"
    assert not lines or path.read_text(encoding="utf-8") == "\n".join(lines).rstrip() + "\n"
    text = (ROOT / "reports" / "README.md").read_text(encoding="utf-8")
    assert report.with_link(text, cards.STEM, cards.LINK_TEXT, bool(lines)) == text
    assert f"report:begin {cards.STEM}" in text


@pytest.mark.parametrize(("asked", "found"), [("h100", "h100"), ("auto", "h100"), ("h200", None)])
def test_a_bench_on_an_h100_writes_into_its_own_folder(
    asked: str, found: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As typed: `nox -s bench -- --gpu h100`."""
    properties = SimpleNamespace(name=H100["name"], total_memory=H100["memory_bytes"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    seen = []

    class Nothing:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

        def bench(self) -> None: ...

        turns = SimpleNamespace(give=lambda: None)

    monkeypatch.setattr(torch.cuda, "device", Nothing)
    monkeypatch.setattr(bench_command, "Session", Nothing)
    one = SimpleNamespace(spec=SimpleNamespace(name="gelu"), groups=lambda: ["a group"])
    monkeypatch.setattr(options, "select", lambda arguments: [one])
    monkeypatch.setattr(bench_command, "_benched", lambda bench, selections, out, suite: seen.append(out) or 0)
    code = cli.main(["bench", "--gpu", asked])
    assert seen == ([ROOT / "reports" / found] if found else []) and code == (0 if found else 2)
    if not found:
        assert "the GPU found is 'NVIDIA H100 80GB HBM3' (h100)" in capsys.readouterr().err

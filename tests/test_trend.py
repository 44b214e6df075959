"""`trend`: what the versions of a record in git's history say of a case's time."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import pytest

from harness.commands import trend
from tests.fake_records import bench, row, samples, with_ratios, write

KERNEL = "rmsnorm"


def version(run: str, us: float, **environment: object) -> list[dict]:
    rows = [row(KERNEL, "wide", "fwd", "triton", samples(us), run=run)]
    rows.append(row(KERNEL, "wide", "fwd", "liger", samples(200), run=run))
    lines = bench(KERNEL, {("wide", "fwd"): with_ratios(rows)}, run=run)
    lines[0]["environment"] |= environment
    return lines


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Three versions of a record: two measurements of one case, and a commit that changes nothing in it."""
    path = tmp_path / "reports" / "h200" / "records" / f"{KERNEL}.jsonl"

    def commit(lines: list[dict]) -> None:
        write(path, lines)
        for words in ("add .", "-c user.name=a -c user.email=a@b commit -q --allow-empty -m x"):
            subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)

    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    first = version("20260101T000000Z-0000", 100, commit="a" * 40, time="2026-01-01T10:00:00+00:00")
    second = version("20260201T000000Z-0000", 80, commit="b" * 40, time="2026-02-01T10:00:00+00:00", dirty=True)
    for lines in (first, second, second):
        commit(lines)
    return tmp_path


def test_each_measurement_once_and_judged_against_the_one_before(checkout: Path) -> None:
    path = checkout / "reports" / "h200" / "records" / f"{KERNEL}.jsonl"
    found = trend.points(trend.versions(checkout, path))
    assert [point.row.run.id[:8] for point in found] == ["20260101", "20260201"]
    assert found[0].change is None
    assert found[1].change is not None and found[1].change.verdict == "FASTER"


def test_the_page(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trend.main(argparse.Namespace(kernel=None, out=None), checkout) == 0
    page = checkout / "reports" / "h200" / f"{KERNEL}-trend.md"
    assert str(page) in capsys.readouterr().out
    lines = [line for line in page.read_text().splitlines() if line.startswith("| wide")]
    assert "2026-01-01 10:00 | `aaaaaaaaa` |" in lines[0] and "| – | – | 2.0" in lines[0]
    assert "`bbbbbbbbb` with uncommitted changes" in lines[1] and "-20." in lines[1] and "| FASTER | 2.5" in lines[1]


def test_what_cannot_be_said(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(ValueError, match="no records of nonesuch"):
        trend.main(argparse.Namespace(kernel=["nonesuch"], out=None), checkout)
    (elsewhere := tmp_path_factory.mktemp("plain") / "reports").mkdir()
    (checkout / "reports" / "h200").rename(elsewhere / "h200")
    with pytest.raises(ValueError, match="not a git checkout"):
        trend.main(argparse.Namespace(kernel=None, out=None), elsewhere.parent)

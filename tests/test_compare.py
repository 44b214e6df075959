"""The verdict rule on synthetic samples, and the command end to end."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import cli, record
from harness.commands import compare
from harness.reporting.verdicts import (
    FASTER,
    SAME,
    SLOWER,
    UNSURE,
    Ratio,
    against,
    classify,
    noise_floor,
    ratio_of_medians,
)
from tests.fake_records import bench, row, run_line, samples, write

KERNEL = "rmsnorm"


def noisy(median: float, seed: int, n: int = 60, noise: float = 0.01, ties: float = 0.0) -> list[float]:
    """Log-normal samples; with `ties` each carries part of its predecessor's deviation, as a drifting clock does."""
    draw = np.random.default_rng(seed)
    deviation, values = 0.0, []
    for shock in draw.normal(0, noise, n):
        deviation = ties * deviation + float(shock) * (1 - ties**2) ** 0.5
        values.append(median * float(np.exp(deviation)))
    return values


def verdict(baseline: list[float], current: list[float], noise: float = 0.0) -> str:
    ratio = ratio_of_medians(baseline, current, noise)
    return UNSURE if ratio is None else classify(ratio)


def test_ten_percent_slower_is_slower_and_faster_is_faster() -> None:
    assert Counter(verdict(noisy(100, s), noisy(110, s + 1000)) for s in range(50)) == {SLOWER: 50}
    assert Counter(verdict(noisy(110, s), noisy(100, s + 1000)) for s in range(50)) == {FASTER: 50}


@pytest.mark.parametrize("ties", [0.0, 0.7])
@pytest.mark.parametrize("n", [7, 20, 100])
def test_the_same_distribution_is_never_slower_or_faster(n: int, ties: float) -> None:
    found = Counter(verdict(noisy(100, s, n, ties=ties), noisy(100, s + 5000, n, ties=ties)) for s in range(100))
    assert not found[SLOWER] and not found[FASTER]
    assert found[SAME] > (93 if n > 7 else 70)


def test_even_noise_of_five_percent_does_not_make_the_same_thing_slower() -> None:
    found = Counter(verdict(noisy(100, s, 40, 0.05), noisy(100, s + 5000, 40, 0.05)) for s in range(100))
    assert not found[SLOWER] and not found[FASTER]


def test_wide_noise_is_unsure() -> None:
    found = Counter(verdict(noisy(100, s, 12, 0.15), noisy(104, s + 1000, 12, 0.15)) for s in range(50))
    assert found[UNSURE] >= 46


def test_a_certain_change_below_the_threshold_is_the_same() -> None:
    assert verdict(noisy(100, 1, 300, 0.002), noisy(102, 2, 300, 0.002)) == SAME

    at_the_border = Counter(verdict(noisy(100, s, 60, 0.01), noisy(103, s + 1000, 60, 0.01)) for s in range(60))
    assert at_the_border[UNSURE] >= 50 and at_the_border[SLOWER] <= 5


@pytest.mark.parametrize("n", [6, 7, 10, 20, 50])
def test_the_interval_covers_the_truth_as_often_as_it_says(n: int) -> None:
    """With the bootstrap alone it was 88 % with 6 samples, and 92 % with 7 to 10."""
    hits = 0
    for seed in range(300):
        ratio = ratio_of_medians(noisy(100, seed, n, 0.02), noisy(105, seed + 9000, n, 0.02))
        assert ratio is not None
        hits += ratio.low <= 1.05 <= ratio.high
    assert hits >= 0.95 * 300


def test_fewer_than_six_samples_say_nothing() -> None:
    assert verdict([1.0] * 5, [2.0] * 100) == UNSURE
    assert verdict([1.0] * 6, [2.0] * 6) == SLOWER


def test_the_seed_is_fixed() -> None:
    assert ratio_of_medians(noisy(100, 1), noisy(101, 2)) == ratio_of_medians(noisy(100, 1), noisy(101, 2))


def test_a_shift_that_the_harness_sees_in_itself_is_no_change() -> None:
    baseline, current = noisy(100, 1, noise=0.001), noisy(105, 2, noise=0.001)
    assert verdict(baseline, current) == SLOWER
    floor = noise_floor({"median": 1.0, "ci95": [0.95, 1.01]}, None)
    assert floor == pytest.approx(0.0513, rel=0.01)
    assert verdict(baseline, current, floor) == UNSURE
    assert noise_floor(None, {}) == 0


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.031, 1.2, SLOWER),
        (1.029, 1.2, UNSURE),
        (0.98, 1.029, SAME),
        (0.96, 1.0, UNSURE),
        (0.8, 0.97, FASTER),
        (0.8, 0.98, UNSURE),
        (0.9, 1.1, UNSURE),
    ],
)
def test_the_rule_at_its_borders(low: float, high: float, expected: str) -> None:
    assert classify(Ratio((low + high) / 2, low, high), 0.03) == expected


def test_relative_change_divides_the_machine_out() -> None:
    found = against({"median": 2.0, "ci95": [1.98, 2.02]}, {"median": 2.0, "ci95": [1.98, 2.02]})
    assert found is not None and found.value == 1 and found.low < 1 < found.high
    slower = against({"median": 2.0, "ci95": [1.98, 2.02]}, {"median": 1.8, "ci95": [1.79, 1.81]})
    assert slower is not None and slower.value == pytest.approx(2 / 1.8) and slower.low > 1.03


def records(path: Path, us: dict[str, float], factor: float = 1.0, seed: int = 0, **run: Any) -> Path:
    """One kernel with a case per name, ours at us[name], eager at twice that; all times `factor`."""
    groups = {
        (case, "fwd"): [
            row(KERNEL, case, "fwd", "triton", samples(median * factor, noise=0.003, seed=seed)),
            row(KERNEL, case, "fwd", "eager", samples(200 * factor, noise=0.003, seed=seed + 1)),
        ]
        for case, median in us.items()
    }
    return write(path, bench(KERNEL, groups, **run))


def command(*arguments: object) -> int:
    return cli.main(["compare", *map(str, arguments)])


def test_a_kernel_slowed_by_a_tenth_fails_the_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = records(tmp_path / "a.jsonl", {"wide": 100, "long": 1000})
    after = records(tmp_path / "b.jsonl", {"wide": 110, "long": 1000}, seed=7)
    out = tmp_path / "deep" / "out.md"
    assert command("--baseline", before, "--current", after, "--out", out) == 1
    text = capsys.readouterr().out
    assert out.read_text() == text
    assert "**1 SLOWER**, **1 SAME**" in text
    line = next(line for line in text.splitlines() if "**SLOWER**" in line)
    assert "| wide |" in line and "+10" in line and "eager did not change alike: the kernel" in line
    assert "Same GPU, driver" in text
    assert command("--baseline", after, "--current", before) == 0
    assert "FASTER" in capsys.readouterr().out


def test_threshold_is_an_option(tmp_path: Path) -> None:
    before = records(tmp_path / "a.jsonl", {"wide": 100})
    after = records(tmp_path / "b.jsonl", {"wide": 110}, seed=7)
    assert command("--baseline", before, "--current", after, "--threshold", 15) == 0
    assert command("--baseline", before, "--current", after, "--threshold", 0) == 2


def test_a_slower_machine_is_named_before_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = records(tmp_path / "a.jsonl", {"wide": 100})
    gpu = {"power_limit_w": 500, "driver": "590.00"}
    after = records(tmp_path / "b.jsonl", {"wide": 100}, 1.08, seed=7, gpu=gpu, environment={"triton": "3.7.0"})
    assert command("--baseline", before, "--current", after) == 1
    text = capsys.readouterr().out
    head, table = text.split("| verdict |")
    assert "| power limit (W) | 700 | 500 |" in head
    assert "| driver | 580.00 | 590.00 |" in head and "| Triton | 3.6.0 | 3.7.0 |" in head
    assert "*eager*, which is not this repository's code, changed by +8" in head
    assert "eager changed alike: probably the machine, not the kernel" in table


def test_two_different_cards_can_be_compared_and_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = records(tmp_path / "a.jsonl", {"wide": 100})
    after = records(tmp_path / "b.jsonl", {"wide": 130}, seed=7, gpu={"key": "h100", "name": "NVIDIA H100 80GB HBM3"})
    assert command("--baseline", before, "--current", after) == 1
    assert "| GPU | NVIDIA H200 | NVIDIA H100 80GB HBM3 |" in capsys.readouterr().out


def test_one_gpu_and_two_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = records(tmp_path / "h200" / "records" / "r.jsonl", {"wide": 100})
    two = records(tmp_path / "h200-x2" / "records" / "r.jsonl", {"wide": 60}, seed=7, run="two", world_size=2)
    assert command("--baseline", one, "--current", two) == 0
    assert "| GPUs | 1 | 2 |" in capsys.readouterr().out
    assert command("--baseline", tmp_path, "--current", tmp_path) == 0  # each folder with itself
    assert "**2 SAME**" in capsys.readouterr().out


def test_with_several_cards_each_is_compared_with_itself(tmp_path: Path) -> None:
    for side, us in (("a", 100), ("b", 101)):
        records(tmp_path / side / "h200" / "records" / "rmsnorm.jsonl", {"wide": us}, run="one")
        t4 = {"key": "t4", "name": "Tesla T4"}
        records(tmp_path / side / "t4" / "records" / "rmsnorm.jsonl", {"wide": 10 * us}, run="two", gpu=t4)
    found = compare.compare(record.load(tmp_path / "a"), record.load(tmp_path / "b"))
    assert [pair.verdict for pair in found.pairs] == [SAME, SAME]
    assert {pair.current.run.gpu_folder for pair in found.pairs} == {"h200", "t4"}


def test_rows_of_one_side_are_listed_and_peers_only_on_demand(tmp_path: Path) -> None:
    before = record.load(records(tmp_path / "a.jsonl", {"wide": 100, "gone": 50}))
    after = record.load(records(tmp_path / "b.jsonl", {"wide": 100, "new": 70}, seed=7))
    found = compare.compare(before, after)
    assert [pair.current.implementation for pair in found.pairs] == ["triton"]
    assert [(m.side, m.row.case) for m in found.missing] == [("baseline", "gone"), ("current", "new")]
    assert "not in the records of the other side" in "\n".join(found.markdown())
    everything = compare.compare(before, after, everything=True)
    assert sorted(pair.current.implementation for pair in everything.pairs) == ["eager", "triton"]
    assert len(everything.missing) == 4


@pytest.mark.parametrize("status", ["wrong", "oom", "crashed", "error", "over-roofline"])
def test_a_row_that_ran_and_now_fails_is_no_success(tmp_path: Path, status: str) -> None:
    before = records(tmp_path / "a.jsonl", {"wide": 100, "long": 10})
    broken = row(KERNEL, "wide", "fwd", "triton", status=status, reason="because", kind="ours")
    after = records(tmp_path / "b.jsonl", {"long": 10})
    write(after, [broken])
    assert command("--baseline", before, "--current", after) == 1
    found = compare.compare(record.load(before), record.load(after))
    assert found.pairs[0].verdict == "FAILED" and status in found.pairs[0].note


def test_a_skipped_row_is_listed_with_its_reason(tmp_path: Path) -> None:
    before = records(tmp_path / "a.jsonl", {"wide": 100, "long": 10})
    after = records(tmp_path / "b.jsonl", {"long": 10})
    write(after, [row(KERNEL, "wide", "fwd", "triton", reason="needs 200 GB")])
    found = compare.compare(record.load(before), record.load(after))
    assert not compare.FAIL_ON["slower"](found) and compare.FAIL_ON["missing"](found)
    assert [(m.row.case, m.why) for m in found.missing] == [("wide", "skipped on the other side: needs 200 GB")]


def test_nothing_in_common_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = records(tmp_path / "a.jsonl", {"wide": 100})
    after = records(tmp_path / "b.jsonl", {"long": 100})
    assert command("--baseline", before, "--current", after) == 2
    assert "nothing was measured on both sides" in capsys.readouterr().err


def test_columns_are_matched_when_the_headline_changed(tmp_path: Path) -> None:
    cold = write(tmp_path / "a.jsonl", [run_line(KERNEL), row(KERNEL, "a", "fwd", "triton", samples(12))])
    graph = [run_line(KERNEL), row(KERNEL, "a", "fwd", "triton", samples(9.5, seed=3), headline="graph")]
    found = compare.compare(record.load(cold), record.load(write(tmp_path / "b.jsonl", graph)))
    assert found.pairs[0].column == "cold" and found.pairs[0].verdict == SAME


def test_a_baseline_can_be_a_git_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "empty")
    path = tmp_path / "reports" / "h200" / "records" / "rmsnorm.jsonl"
    records(path, {"wide": 100})
    (tmp_path / "reports" / "h200" / "README.md").write_text("not a record")
    git("add", "-A")
    git("commit", "-q", "-m", "measured")
    path.unlink()
    records(path, {"wide": 112}, seed=7)
    found = compare.compare(compare.read("HEAD", tmp_path), record.load(tmp_path / "reports"))
    assert [pair.verdict for pair in found.pairs] == [SLOWER]
    with pytest.raises(ValueError, match="no records under reports/ at that revision"):
        compare.read("HEAD~1", tmp_path)
    with pytest.raises(ValueError, match="neither a file, nor a folder, nor a git revision"):
        compare.read("no-such-thing", tmp_path)


def test_what_fails_is_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = records(tmp_path / "a.jsonl", {"wide": 100, "gone": 50})
    slower = records(tmp_path / "b.jsonl", {"wide": 110}, seed=7)
    both = ("--baseline", before, "--current", slower)
    assert [command(*both, "--fail-on", what) for what in ("slower", "missing", "unsure", "memory", "host")] == [
        1,
        1,
        0,
        0,
        0,
    ]
    assert command(*both, "--fail-on", "unsure,missing") == 1
    with pytest.raises(SystemExit) as stopped:
        command(*both, "--fail-on", "slower,late")
    assert stopped.value.code == 2 and "'late': known are slower, unsure, missing" in capsys.readouterr().err


def test_relative_to_a_peer_a_slower_machine_is_not_a_slower_kernel(tmp_path: Path) -> None:
    before = records(tmp_path / "a.jsonl", {"wide": 100})
    machine = records(tmp_path / "b.jsonl", {"wide": 100}, 1.2, seed=7)
    kernel = records(tmp_path / "c.jsonl", {"wide": 115}, 1.2, seed=7)
    assert command("--baseline", before, "--current", machine) == 1
    assert command("--baseline", before, "--current", machine, "--relative", "eager") == 0
    assert command("--baseline", before, "--current", kernel, "--relative", "eager") == 1
    assert command("--baseline", before, "--current", kernel, "--relative", "liger") == 2
    alone = write(tmp_path / "d.jsonl", [run_line(KERNEL), row(KERNEL, "wide", "fwd", "triton", samples(100))])
    write(alone, [row(KERNEL, "other", "fwd", "eager", samples(100))])
    found = compare.compare(record.load(before), record.load(alone), relative="eager")
    assert [(pair.verdict, pair.note) for pair in found.pairs] == [
        (UNSURE, "eager was not measured in the same run on both sides")
    ]


def test_memory_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def side(name: str, **bytes_: int) -> Path:
        return write(tmp_path / name, [run_line(KERNEL), row(KERNEL, "wide", "bwd", "triton", samples(9), **bytes_)])

    mib = 1 << 20
    before = side("a.jsonl", peak_memory_bytes=100 * mib, saved_bytes=10 * mib)
    for changed, code in (
        (dict(peak_memory_bytes=100 * mib + 1000, saved_bytes=10 * mib), 0),
        (dict(peak_memory_bytes=102 * mib, saved_bytes=10 * mib), 0),
        (dict(peak_memory_bytes=110 * mib, saved_bytes=10 * mib), 1),
        (dict(peak_memory_bytes=100 * mib, saved_bytes=12 * mib), 1),
        (dict(peak_memory_bytes=50 * mib, saved_bytes=5 * mib), 0),
        (dict(peak_memory_bytes=100 * mib), 0),
    ):
        after = side(f"{changed}.jsonl", **changed)
        assert command("--baseline", before, "--current", after, "--fail-on", "memory") == code, changed
        assert command("--baseline", before, "--current", after) == 0
    text = capsys.readouterr().out
    assert "| **MORE** |" in text and "saved for the backward" in text and "+20.0 %" in text


def test_a_record_that_cannot_be_read_is_told_from_misuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = records(tmp_path / "a.jsonl", {"wide": 100})
    broken = tmp_path / "b.jsonl"
    broken.write_text(before.read_text() + "{nonsense\n{}\n")
    assert command("--baseline", before, "--current", broken) == 3
    assert "b.jsonl" in capsys.readouterr().err
    broken.write_bytes(before.read_bytes() + b"{\xff}\n")
    assert command("--baseline", before, "--current", broken) == 3
    lines = len(before.read_text().splitlines())
    assert f"b.jsonl:{lines + 1}: not UTF-8" in capsys.readouterr().err
    assert command("--baseline", before, "--current", tmp_path / "absent") == 2
    assert "--current" in capsys.readouterr().err
    broken.write_text(before.read_text().replace('"case"', '"Case"'))
    assert command("--baseline", before, "--current", broken) == 3
    assert "a start needs 'case'" in capsys.readouterr().err


def test_verdicts_for_other_programs(tmp_path: Path) -> None:
    before = records(tmp_path / "a.jsonl", {"wide": 100, "gone": 50})
    after = records(tmp_path / "b.jsonl", {"wide": 110}, seed=7)
    out = tmp_path / "deep" / "out.json"
    assert command("--baseline", before, "--current", after, "--json", out) == 1
    found = json.loads(out.read_text())
    assert found["failed"] == ["slower"] and found["counts"] == {"SLOWER": 1}
    (entry,) = found["rows"]
    assert (entry["case"], entry["verdict"], entry["relative_to"]) == ("wide", "SLOWER", "eager")
    assert entry["ratio"]["low"] < entry["ratio"]["value"] < entry["ratio"]["high"]
    assert [(m["side"], m["case"]) for m in found["missing"]] == [("baseline", "gone")]


@pytest.mark.parametrize("place", ["under-a-file/x.md", "folder"])
def test_a_place_that_cannot_be_written_is_misuse_and_not_slower(tmp_path: Path, place: str, capsys) -> None:
    before = records(tmp_path / "a.jsonl", {"wide": 100})
    (tmp_path / "folder").mkdir()
    (tmp_path / "under-a-file").write_text("")
    for option in ("--out", "--json"):
        assert command("--baseline", before, "--current", before, option, tmp_path / place) == 2
        assert place.split("/")[0] in capsys.readouterr().err


def test_relative_to_a_peer_with_an_impossible_time_nothing_is_judged(tmp_path: Path) -> None:
    before = records(tmp_path / "a.jsonl", {"wide": 100})
    after = tmp_path / "b.jsonl"
    ours, eager = row(KERNEL, "wide", "fwd", "triton", samples(100)), row(KERNEL, "wide", "fwd", "eager", samples(80))
    write(after, bench(KERNEL, {("wide", "fwd"): [ours, eager | {"status": "over-roofline", "reason": "too fast"}]}))
    out = tmp_path / "out.json"
    relative = ("--baseline", before, "--current", after, "--relative", "eager", "--json", out)
    assert command(*relative) == 0 and command(*relative, "--fail-on", "unsure") == 1
    (found,) = json.loads(out.read_text())["rows"]
    assert (found["verdict"], found["relative"]) == (UNSURE, None)


def test_relative_to_a_peer_too_few_samples_are_still_the_reason(tmp_path: Path) -> None:
    few = [row(KERNEL, "wide", "fwd", name, samples(100, n=5)) for name in ("triton", "eager")]
    path, out = write(tmp_path / "a.jsonl", bench(KERNEL, {("wide", "fwd"): few})), tmp_path / "out.json"
    assert command("--baseline", path, "--current", path, "--relative", "eager", "--json", out) == 0
    assert json.loads(out.read_text())["rows"][0]["note"] == "fewer than six samples on a side"


def test_the_noise_of_a_run_is_that_of_all_its_implementations(tmp_path: Path) -> None:
    """Only the first of ours is measured against itself."""

    def of(name: str, us: float) -> Path:
        noise = {"median": 1.0, "ci95": [0.9, 1.11]}
        first = row(KERNEL, "wide", "fwd", "triton", samples(us)) | {"noise": noise}
        second = row(KERNEL, "wide", "fwd", "triton2", samples(us)) | {"noise": None}
        return write(tmp_path / name, bench(KERNEL, {("wide", "fwd"): [first, second]}))

    before, after, out = of("a.jsonl", 100), of("b.jsonl", 108), tmp_path / "out.json"
    assert command("--baseline", before, "--current", after, "--json", out) == 0
    assert [found["verdict"] for found in json.loads(out.read_text())["rows"]] == [UNSURE, UNSURE]

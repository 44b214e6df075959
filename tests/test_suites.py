"""Suites: what they name exists, they can come from a bench.py, and the summary says what the rows say."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness import cli, record, registry, suites
from harness.commands import check
from harness.reporting import console, kernel_page, memory_table, suite_summary
from harness.reporting.findings import findings
from harness.suites import Part, Suite

from . import fake_records as fake

SUITE = Suite("own", "two cases", (Part("rmsnorm", ("second", "first", "third"), ("torch", "eager"), ("fwd",)),))


def asked(**given) -> argparse.Namespace:
    return argparse.Namespace(**{**dict.fromkeys(("kernel", "case", "mode", "impl")), **given})


@pytest.mark.parametrize("suite", suites.SUITES, ids=lambda suite: suite.name)
def test_what_a_suite_names_can_be_run(suite: Suite) -> None:
    for selection, part in zip(suites.select(suite, asked()), suite.parts, strict=True):
        assert [case.name for case in selection.cases] == list(part.cases)
        spec = selection.spec
        baselines = {b.name: b for b in spec.baselines}
        for case, mode in selection.groups():
            assert baselines[part.baselines[0]].supports(case, mode) is None
            assert spec.cost(case, mode).bytes > 0 and spec.items(case) > 0
            assert spec.skip_reason(selection.implementations[0], case, mode) is None


def test_train_scale_has_what_its_name_promises() -> None:
    found = {
        s.spec.name: {tuple(c.dims.values()) for c in s.cases}
        for s in suites.select(suites.find("trainscale"), asked())
    }
    assert found["rmsnorm"] == {(b * s, d) for b in (4, 32) for s in (2048, 4096) for d in (4096, 8192)}
    assert found["gelu"] == found["fp8"] == {(4096, 4096), (16384, 4096)}
    assert found["cross_entropy"] == {(4096, 32000), (16384, 32000)}


def test_small_attention_is_in_both_dtypes_against_pytorch_as_it_is_called(tmp_path: Path) -> None:
    (selection,) = suites.select(suites.find("attention-small"), asked())
    sizes = {(c.dims["batch"], c.dims["kv_heads"], c.dims["queries"], c.dtype) for c in selection.cases}
    dtypes = (torch.float16, torch.bfloat16)
    assert sizes == {(b, h, s, d) for b, h, s in (*((1, 1, 2**n) for n in range(5, 10)), (2, 4, 128)) for d in dtypes}
    assert selection.spec.items(selection.cases[-1]) == 2 * 128
    (part,) = suites.find("attention-small").parts
    (suite,) = (Suite("small", "small", (dataclasses.replace(part, kernel="rmsnorm", cases=("first",)),)),)
    (line,) = suite_summary.summary(suite, measured(tmp_path / "rmsnorm.jsonl"))["rows"]
    assert line["unit"] == "tokens" and any(cell.endswith("tokens/s") for cell in suite_summary.cells(line))


@pytest.mark.parametrize("name", ["rmsnorm", "attention", "fp8"])
def test_the_cases_of_suites_are_neither_tested_nor_benched_with_the_others(name: str) -> None:
    spec = registry.load(name)
    own = {case.name for case in spec.suite_cases}
    assert own and not own & {case.name for case in spec.cases}
    assert not own & {item.case.name for item in check.plan(spec, "cpu")}
    assert spec.case(next(iter(own))) in spec.suite_cases


def test_a_suite_narrows_and_says_when_nothing_is_left() -> None:
    suite = suites.find("trainscale")
    (selection,) = suites.select(suite, asked(kernel=["gelu"], mode=["fwd"], impl=["triton"]))
    assert (selection.modes, selection.implementations) == (("fwd",), ("triton",))
    with pytest.raises(ValueError, match="suite trainscale: .* select none of its cases"):
        suites.select(suite, asked(mode=["step"]))
    known = "4096x4096-bf16-exact"
    with pytest.raises(ValueError, match="unknown case of suite trainscale 'nonesuch'; known: .*" + known):
        suites.select(suite, asked(case=[known, "nonesuch"]))
    with pytest.raises(ValueError, match="unknown kernel of suite trainscale 'nonesuch'; known: attention"):
        suites.select(suite, asked(kernel=["gelu", "nonesuch"]))
    with pytest.raises(ValueError, match="has no implementation nonesuch"):
        suites.select(Suite("a", "b", (Part("gelu", (), ("nonesuch",)),)), asked())
    with pytest.raises(ValueError, match="gelu has no case 'nonesuch'"):
        suites.select(Suite("a", "b", (Part("gelu", ("nonesuch",), ("eager",)),)), asked())


def test_a_bench_py_may_declare_suites_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(registry, "names", lambda: ["model"])
    monkeypatch.setattr(registry, "module", lambda name: SimpleNamespace(SUITES=(SUITE,)))
    assert suites.find("own") is SUITE
    assert cli.main(["bench", "--suite", "llm"]) == 2
    assert "unknown suite 'llm'; known: attention-small, own, trainscale" in capsys.readouterr().err
    monkeypatch.setattr(registry, "module", lambda name: SimpleNamespace(SUITES=(SUITE, SUITE)))
    with pytest.raises(ValueError, match="must be unique"):
        suites.every()


def measured(path: Path) -> list:
    """A suite of three cases: one twice as fast as torch, one as fast, one whose baseline failed."""

    def group(case: str, ours: float, torchs: float | None) -> list:
        where = ("rmsnorm", case, "fwd")
        rows = [
            fake.row(*where, "triton", fake.samples(ours), saved_bytes=4096, growth_bytes=0, peak_memory_bytes=2**20)
        ]
        if torchs is None:
            return [*rows, fake.row(*where, "torch", status="error", reason="it broke")]
        return [*rows, fake.row(*where, "torch", fake.samples(torchs), growth_bytes=512, peak_memory_bytes=3 * 2**20)]

    groups = {("first", "fwd"): group("first", 100, 200), ("second", "fwd"): group("second", 100, 100)}
    groups[("third", "fwd")] = group("third", 100, None)
    return record.load(fake.write(path, fake.bench("rmsnorm", groups))).rows


def test_the_summary_leaves_out_what_was_not_measured_and_says_so(tmp_path: Path, capsys) -> None:
    found = suite_summary.summary(SUITE, measured(tmp_path / "rmsnorm.jsonl"))
    assert [line["case"] for line in found["rows"]] == ["second", "first", "third"]
    assert (found["speedup"]["count"], found["speedup"]["of"]) == (2, 3)
    assert found["speedup"]["arithmetic_mean"] == pytest.approx(1.5, rel=0.02)
    assert found["speedup"]["mean"] == pytest.approx(2**0.5, rel=0.02)
    assert (found["speedup"]["min"], found["speedup"]["max"]) == (
        pytest.approx(1, rel=0.02),
        pytest.approx(2, rel=0.02),
    )
    assert [line["memory_reduction"] for line in found["rows"]] == [3, 3, None]
    first = found["rows"][1]
    assert first["items_per_second"] == pytest.approx(8192 / (first["latency_us"] * 1e-6))
    assert first["bytes_per_second"] == pytest.approx(4 * 8192 * 4096 / (first["latency_us"] * 1e-6))
    assert {"mean_us", "std_us", "min_us", "max_us", "median_us", "p95_us", "p99_us"} <= found["statistics"][0].keys()
    assert json.loads(suite_summary.dumps(found)) == found
    suite_summary.show(found)
    shown = capsys.readouterr().out
    assert (
        "2 of 3 lines: mean 1.41" in shown
        and "arithmetic 1.50" in shown
        and "torch error" in shown
        and "3.00×" in shown
    )


def test_the_tables_of_memory_are_of_new_records_alone(tmp_path: Path) -> None:
    rows = [row.data for row in measured(tmp_path / "rmsnorm.jsonl")]
    assert memory_table.cells(rows[:2]) == [
        ["triton", "1.00 MiB", "1.00×", "4.00 KiB", "1.00×", "0 B"],
        ["torch", "3.00 MiB", "3.00×", "–", "–", "+512 B"],
    ]
    assert memory_table.section([fake.row("a", "b", "fwd", "triton", fake.samples(9))]) == []
    loaded = record.load(tmp_path / "rmsnorm.jsonl")
    page = "\n".join(line for f in findings(loaded) for line in kernel_page.case(f))
    assert "saved for the backward" in page and "+512 B" in page
    table = "\n".join(console.lines("rmsnorm", rows, "torch"))
    assert "rmsnorm: device time, µs" in table and "over torch" in table and "error: it broke" in table


def test_a_baseline_without_the_reported_timing_is_named(tmp_path: Path) -> None:
    """A baseline that no CUDA graph can capture, beside a short call, which is timed in one."""
    groups = {("first", "fwd"): [fake.row("rmsnorm", "first", "fwd", "triton", fake.samples(20), headline="graph")]}
    lines = fake.bench("rmsnorm", groups)
    lines.insert(-1, fake.row("rmsnorm", "first", "fwd", "torch", fake.samples(40)))
    (line,) = suite_summary.summary(SUITE, record.load(fake.write(tmp_path / "a.jsonl", lines)).rows)["rows"]
    assert (line["latency_us"] is None, line["speedup"]) == (False, None)
    assert suite_summary.cells(line)[-1] == "torch has no graph timing"


def test_a_baseline_of_another_run_is_not_beside_ours(tmp_path: Path) -> None:
    """A suite that was narrowed to one of them, after the whole."""

    def run(name: str, us: dict[str, float]) -> list:
        rows = [fake.row("rmsnorm", "first", "fwd", of, fake.samples(time)) for of, time in us.items()]
        return fake.bench("rmsnorm", {("first", "fwd"): rows}, run=name)

    for again in ({"torch": 400}, {"triton": 50}):
        path = tmp_path / f"{next(iter(again))}.jsonl"
        whole = run("whole", {"triton": 100, "torch": 200})
        found = suite_summary.summary(SUITE, record.load(fake.write(path, [*whole, *run("again", again)])).rows)
        (line,) = found["rows"]
        assert (line["baseline_latency_us"], line["speedup"], line["memory_reduction"]) == (None, None, None)
        assert suite_summary.cells(line)[-1] == "torch was measured in another run"
        assert (found["speedup"]["count"], found["speedup"]["of"]) == (0, 1)

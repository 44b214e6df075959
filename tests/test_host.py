"""The host column: how it is measured, what it becomes in a record, what a page and a comparison say of it."""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness import host, options, record, registry
from harness.commands import compare
from harness.measure import host as clock
from harness.reporting import host as page
from harness.reporting.findings import findings
from harness.spec import EAGER, Case, Cost, KernelSpec, Peer


def busy(microseconds: float):
    def call() -> None:
        end = time.perf_counter_ns() + 1000 * microseconds
        while time.perf_counter_ns() < end:
            pass

    return call


def test_the_time_of_a_call_is_its_own() -> None:
    slow, quick = clock.Contender("slow", busy(400)), clock.Contender("quick", busy(50))
    clock.measure([slow, quick], lambda: None, rounds=5, calls=10, seed=0)
    assert len(slow.samples_us) == len(quick.samples_us) == 5
    assert min(slow.samples_us) >= 400 and min(quick.samples_us) >= 50
    assert min(slow.samples_us) > 2 * min(quick.samples_us)  # a busy machine may lengthen any sample, not all
    assert not slow.device_bound


def test_implementations_take_turns_in_a_fresh_order() -> None:
    called: list[str] = []
    names = "abcd"
    contenders = [clock.Contender(n, lambda n=n: called.append(n)) for n in names]
    clock.measure(contenders, lambda: called.append("|"), rounds=6, calls=3, seed=1)
    loops = "".join(called[clock.WARM_UP * len(names) :]).split("|")[1::2]  # what was timed
    rounds = [tuple(loop[0] for loop in loops[i : i + 4]) for i in range(0, len(loops), 4)]
    assert len(rounds) == 6 and all(sorted(r) == list(names) for r in rounds)
    assert all(loop == loop[0] * 3 for loop in loops)
    assert len(set(rounds)) > 1


def test_a_device_that_is_slower_than_the_host_is_told() -> None:
    contender = clock.Contender("a", busy(20))
    clock.measure([contender], lambda: time.sleep(0.002), rounds=5, calls=10, seed=0)
    assert contender.device_bound


CASE = Case("8x16-host", {"rows": 8, "dim": 16}, torch.float32)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def broken(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("it takes no tensor of this sort\nat line 3")


def absent():
    raise ImportError("no module named that")


SPEC = KernelSpec(
    name="double",
    implementations={"triton": double},
    reference=double,
    make_inputs=lambda case, device, generator: {
        "x": torch.randn(tuple(case.dims.values()), device=device, generator=generator)
    },
    cost=lambda case, mode: Cost(0, 0),
    cases=(Case("8x16", {"rows": 8, "dim": 16}, torch.float32, bench=True),),
    grads=("x",),
    unit="rows",
    items=lambda case: 8,
    fuzz={},
    baselines=(
        EAGER,
        Peer("quack", load=lambda: broken),
        Peer("liger", load=absent),
        Peer("torch", load=lambda: double),
    ),
    host_cases=(CASE,),
)


@pytest.fixture(scope="module")
def measured() -> list[tuple[Case, str, host.Rows]]:
    selection = options.Selection(SPEC, SPEC.cases, SPEC.modes, tuple(options.implementations(SPEC)))
    return list(host.rows(selection, torch.device("cpu"), compiled=False, quick=True))


def test_each_way_has_a_row_for_each_implementation(measured) -> None:
    assert [way for _, way, _ in measured] == ["host-nograd", "host-fwd", "host-fwd+bwd"]
    for _, way, rows in measured:
        status = {row["implementation"]: (row["status"], row["reason"]) for row in rows}
        assert status["triton"] == status["eager"] == status["torch"] == ("ok", None)
        assert status["quack"] == ("error", "ValueError: it takes no tensor of this sort")
        assert status["liger"][0] == "skipped" and "not installed" in status["liger"][1]
        ours = next(row for row in rows if row["implementation"] == "triton")
        assert ours["mode"] == way and ours["kind"] == "ours" and set(ours["ratios"]) == {"eager", "torch"}
        assert ours["noise"] and len(ours["columns"]["host"]["samples_us"]) == 5


def test_a_peer_that_fails_in_a_later_call_loses_its_own_row_only() -> None:
    calls = itertools.count()

    def fails_later(x: torch.Tensor) -> torch.Tensor:
        if next(calls) > 20:
            raise RuntimeError("no more")
        return x * 2

    spec = replace(SPEC, baselines=(Peer("later", load=lambda: fails_later), Peer("torch", load=lambda: double)))
    selection = options.Selection(spec, spec.cases, spec.modes, tuple(options.implementations(spec)))
    _, _, rows = next(host.rows(selection, torch.device("cpu"), compiled=False, quick=True))
    status = {row["implementation"]: (row["status"], row["reason"]) for row in rows}
    assert status == {"triton": ("ok", None), "later": ("error", "RuntimeError: no more"), "torch": ("ok", None)}
    assert rows[0]["columns"]["host"]["n"] == 5 and rows[0]["noise"] and set(rows[0]["ratios"]) == {"torch"}


def test_a_peer_that_compiles_has_static_shapes_in_every_case() -> None:
    sizes = []

    def backend(graph, arguments):
        sizes.append([argument for argument in arguments if not isinstance(argument, torch.Tensor)])
        return graph.forward

    compiled = torch.compile(double, backend=backend)
    cases = (CASE, replace(CASE, name="9x16-host", dims={"rows": 9, "dim": 16}))
    spec = replace(SPEC, baselines=(Peer("compiled", load=lambda: compiled),), host_cases=cases, modes=("fwd",))
    selection = options.Selection(spec, spec.cases, spec.modes, ("triton", "compiled"))
    assert len(list(host.rows(selection, torch.device("cpu"), compiled=False, quick=True))) == 2
    assert len(sizes) >= 2 and not any(sizes), "a size that is an argument of the graph is dynamic"


def test_only_what_was_selected_is_measured() -> None:
    spec = replace(SPEC, host_ops={"triton": double, "torch": double})
    selection = options.Selection(spec, spec.cases, spec.modes, ("eager", "torch"))
    for _, _, rows in host.rows(selection, torch.device("cpu"), compiled=False, quick=True):
        assert [row["implementation"] for row in rows] == ["torch"]


def lines(measured, run: str, factor: float = 1.0) -> str:
    environment = {"gpu": {"key": "h200", "name": "NVIDIA H200"}, "time": f"2026-11-{run}"}
    entries = [{"type": "run", "schema": record.SCHEMA, "run": run, "kernel": "double", "environment": environment}]
    for case, way, rows in measured:
        entries.append({"type": "start", "run": run, "kernel": "double", "case": case.name, "mode": way})
        for row in rows:
            row = json.loads(record.dumps(row))
            if row["status"] == "ok" and row["kind"] == "ours":
                column = row["columns"]["host"]
                column["samples_us"] = [factor * s for s in column["samples_us"]]
                column["median_us"] *= factor
            entries.append({"type": "row", "run": run, "kernel": "double", **row})
    entries.append({"type": "stop", "run": run, "kernel": "double", "reason": "complete"})
    return "".join(record.dumps(entry) + "\n" for entry in entries)


def test_a_record_keeps_them_apart_from_device_time(measured, tmp_path: Path) -> None:
    path = tmp_path / "double.jsonl"
    path.write_text(lines(measured, "01") + lines(measured, "02", 2.0))
    record.compact(path)
    records = record.load(path)
    assert len(records.rows) == sum(len(rows) for _, _, rows in measured) and all(r.host for r in records.rows)
    assert findings(records) == []


def test_pages_say_what_a_call_costs(measured) -> None:
    records = record.parse([("a", lines(measured, "01"))])
    section = "\n".join(page.section(records, "double"))
    assert "forward without gradients" in section and ">**triton**" not in section and "**triton**" in section
    assert "quack, forward and backward: **error**, ValueError" in section
    overview = "\n".join(page.overview(records))
    assert overview.count("double |") == 3 and "torch " in overview
    assert "median of 5 rounds of 40 calls" in overview.replace("\n", " ")  # a quick bench has fewer
    assert page.section(records, "other") == [] and page.overview(record.parse([])) == []


def test_a_slower_host_fails_a_comparison(measured) -> None:
    def sides(factor: float):
        steady = [(c, w, [_steady(row) for row in rows]) for c, w, rows in measured]
        return [record.parse([("a", lines(steady, "01"))]), record.parse([("b", lines(steady, "02", factor))])]

    slower = compare.FAIL_ON["host"]
    assert slower(compare.compare(*sides(1.5)))
    assert not slower(compare.compare(*sides(1.05))), "under a tenth is within what a busy processor does"


def _steady(row: dict) -> dict:
    if row["status"] != "ok":
        return row
    column = {**row["columns"]["host"], "samples_us": [10.0, 10.01, 9.99] * 4, "median_us": 10.0}
    return {**row, "columns": {"host": column}, "noise": None}


@pytest.mark.parametrize("kernel_name", registry.names())
def test_every_kernel_has_a_host_case(kernel_name: str) -> None:
    spec = registry.load(kernel_name)
    assert spec.host_cases, "a case so small that the device never limits"
    assert not {case.name for case in spec.host_cases} & {case.name for case in spec.cases}
    for case in spec.host_cases:
        inputs = spec.make_inputs(case, "meta", None)
        assert host.ways(spec, case)
        assert sum(t.numel() for t in inputs.values() if isinstance(t, torch.Tensor)) < 1 << 21


def test_the_command_line_takes_it() -> None:
    from harness.commands import bench

    parser = argparse.ArgumentParser()
    bench.configure(parser)
    assert parser.parse_args([]).host == "yes"
    assert parser.parse_args(["--host", "only", "--host-compiled"]).host_compiled

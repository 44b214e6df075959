"""The battery must reject every broken kernel, for the right reason, and accept every right one."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness import registry, sampling
from harness.commands import check
from harness.correctness import accuracy, oracle
from harness.correctness.accuracy import Verdict
from harness.spec import KernelSpec

KERNELS = tuple(name for name in registry.names() if Path(__file__).parent.joinpath("wrong", f"{name}.py").is_file())
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUMERICAL = ("accuracy", "replay", "repeat", "strides", "leading", "partial", "interleave", "alias", "values")
ZOO = {kernel: importlib.import_module(f"tests.wrong.{kernel}") for kernel in KERNELS}


def entries(attribute: str) -> list:
    return [
        pytest.param(kernel, wrong, id=f"{kernel}-{wrong.name.replace(' ', '-')}")
        for kernel in KERNELS
        for wrong in getattr(ZOO[kernel], attribute, ())
    ]


def every(kernel: str) -> tuple:
    zoo = ZOO[kernel]
    return (*on_cpu(kernel), *zoo.ON_A_GPU)


def on_cpu(kernel: str) -> tuple:
    """Those that every machine can try."""
    zoo = ZOO[kernel]
    return (*zoo.WRONG, *getattr(zoo, "CHEATS", ()), *getattr(zoo, "EDGES", ()))


def spec_with(kernel: str, name: str, fn) -> KernelSpec:
    """The real declaration with another implementation and cases small enough for the interpreter."""
    spec = registry.load(kernel)
    cases = (*ZOO[kernel].CASES, *ZOO[kernel].LONG_CASES, next(case for case in spec.cases if case.bench))
    return dataclasses.replace(
        spec,
        implementations={name: fn},
        min_capability={},
        alias_reason=lambda *_: None,
        cases=cases,
        fuzz=ZOO[kernel].FUZZ,
        limits=ZOO[kernel].LIMITS,
        sampled=getattr(ZOO[kernel], "sampled", lambda case: None),
        sharding=spec.sharding and dataclasses.replace(spec.sharding, local={}),  # of the implementations replaced
    )


def first_failure(spec: KernelSpec, case: str, only: str | None = None) -> check.Outcome | None:
    for item in check.plan(spec, DEVICE, [spec.case(case)]):
        if only not in (None, item.check):
            continue
        outcome = check.run(item, DEVICE)
        if outcome.status == "fail":
            return outcome
    return None


#: Prints what rejects a fault, and ends without the destructors, which CUDA may keep waiting after a fault.
APART = """
import json, os
from tests import test_wrong
print(json.dumps(test_wrong.failure_here(*{arguments})), flush=True)
os._exit(0)
"""


def failure_on_a_gpu(kernel: str, name: str) -> list[str] | None:
    """The check that rejects a fault of ON_A_GPU, the cause and the row that is printed. Only the check that it names
    is made."""
    if not next(wrong for wrong in ZOO[kernel].ON_A_GPU if wrong.name == name).fatal:
        return failure_here(kernel, name)
    program = APART.format(arguments=(kernel, name))
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=registry.ROOT, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def failure_here(kernel: str, name: str) -> list[str] | None:
    """The same, found in this process."""
    wrong = next(wrong for wrong in ZOO[kernel].ON_A_GPU if wrong.name == name)
    outcome = first_failure(spec_with(kernel, "wrong", wrong.fn), wrong.case, only=wrong.check)
    return outcome and [outcome.item.check, outcome.cause, check.row(outcome)]


@pytest.mark.parametrize(("kernel_name", "wrong"), [*entries("WRONG"), *entries("CHEATS"), *entries("EDGES")])
def test_wrong_is_rejected(kernel_name, wrong):
    outcome = first_failure(spec_with(kernel_name, "wrong", wrong.fn), wrong.case)
    assert outcome is not None, f"{wrong.name} was accepted"
    expected = [(wrong.check, wrong.cause)]
    if wrong.on_gpu and DEVICE == "cuda":
        expected.append(wrong.on_gpu)
    assert (outcome.item.check, outcome.cause) in expected, check.row(outcome)


@pytest.mark.parametrize(("kernel_name", "wrong"), entries("CHEATS"))
def test_a_cheat_is_rejected_by_one_check_alone(kernel_name, wrong):
    """All numerical checks but that one, and but its cause where that can be told from wrong numbers."""
    spec = spec_with(kernel_name, "wrong", wrong.fn)
    items = [item for item in check.plan(spec, DEVICE, [spec.case(wrong.case)]) if item.check in NUMERICAL]
    outcomes = [check.run(item, DEVICE) for item in items if item.check != wrong.check or wrong.cause != "error"]
    failures = [o for o in outcomes if o.status == "fail" and (wrong.cause == "error" or o.cause != wrong.cause)]
    assert not [check.row(o) for o in failures if o.item.check != wrong.check]


@pytest.mark.parametrize(("kernel_name", "wrong"), entries("EDGES"))
def test_what_is_wrong_at_an_edge_is_right_elsewhere(kernel_name, wrong):
    """So no other case of the zoo would show it."""
    spec = spec_with(kernel_name, "right but there", wrong.fn)
    for case in ZOO[kernel_name].CASES:
        if case.name != wrong.case:
            outcome = first_failure(spec, case.name, only="accuracy")
            assert outcome is None, check.row(outcome)


# What is found by one rule alone: with the others and without it the same kernel is accepted by these checks.
ALONE = {
    ("swiglu", "small values flushed"): ([(accuracy, "_wrong_bin", lambda *_: "")], NUMERICAL),
    ("fp8", "last column two steps off"): ([(accuracy, "_beyond_a_step", lambda *_: "")], NUMERICAL),
    # The row is not among those that a run of the number 0 draws.
    ("attention", "nan in a row that may not be sampled"): (
        [(oracle, "_finite", lambda *_: Verdict(True)), (sampling, "RUN", 0)],
        ("accuracy", "replay", "repeat", "strides"),
    ),
    ("attention", "right in a known sample"): ([(sampling, "RUN", 0)], ("accuracy", "replay", "repeat", "strides")),
}


@pytest.mark.parametrize(("kernel_name", "name"), ALONE)
def test_one_rule_alone_rejects(kernel_name, name, monkeypatch):
    wrong = next(wrong for wrong in on_cpu(kernel_name) if wrong.name == name)
    patches, checks = ALONE[kernel_name, name]
    for patch in patches:
        monkeypatch.setattr(*patch)
    spec = spec_with(kernel_name, "wrong", wrong.fn)
    for item in check.plan(spec, DEVICE, [spec.case(wrong.case)]):
        if item.check in checks:
            outcome = check.run(item, DEVICE)
            assert outcome.status != "fail", check.row(outcome)


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel_name", "wrong"), entries("ON_A_GPU"))
def test_wrong_on_a_gpu_is_rejected(kernel_name, wrong):
    if torch.cuda.device_count() < wrong.gpus:
        pytest.skip(f"needs {wrong.gpus} GPUs")
    found = failure_on_a_gpu(kernel_name, wrong.name)
    assert found is not None, f"{wrong.name} was accepted"
    assert found[1] in wrong.cause.split(" or "), found[2]


def controls() -> Iterator[object]:
    """Right versions: the first on the first of its cases, all on all where there is time."""
    for kernel in KERNELS:
        first = next(iter(ZOO[kernel].CONTROLS)), ZOO[kernel].CASES[0]
        for name in ZOO[kernel].CONTROLS:
            for case in ZOO[kernel].CASES:
                slow = () if (name, case) == first else (pytest.mark.slow,)
                yield pytest.param(kernel, name, case, id=f"{kernel}-{name.replace(' ', '-')}-{case.name}", marks=slow)


@pytest.mark.parametrize(("kernel_name", "control", "case"), [*controls()])
def test_right_is_accepted(kernel_name, control, case):
    """The kernel itself goes through the same checks in tests/test_specs.py."""
    spec = spec_with(kernel_name, control, ZOO[kernel_name].CONTROLS[control])
    outcomes = [check.run(item, DEVICE) for item in check.plan(spec, DEVICE, [case])]
    assert not [check.row(o) for o in outcomes if o.status == "fail"]
    assert {o.item.check for o in outcomes if o.status == "pass"} >= {"accuracy", "replay", "strides", "sizes"}


@pytest.mark.parametrize("kernel_name", KERNELS)
def test_every_zoo_has_broken_versions_and_controls(kernel_name):
    assert len(ZOO[kernel_name].WRONG) >= 4
    assert ZOO[kernel_name].CONTROLS


def test_every_check_rejects_something():
    rejecting = {wrong.check for kernel in KERNELS for wrong in every(kernel)}
    assert rejecting >= set(check.CHECKS)

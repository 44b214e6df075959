"""Large problems are held against the reference on some of their rows."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from harness import execute, registry, sampling
from harness.commands.check import Item, run
from harness.correctness.verify import verify
from harness.spec import Case, Cost, KernelSpec, Rows

ROWS = 5000


def scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.to(torch.promote_types(x.dtype, torch.float32)) * weight).to(x.dtype)


def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    assert x.shape[0] < ROWS, "the reference was asked for all rows"
    return scaled(x, weight)


def make_inputs(case, device, generator):
    shapes = {"x": (case.dims["rows"], 8), "weight": (8,)}
    return {n: torch.randn(s, dtype=case.dtype, device=device, generator=generator) for n, s in shapes.items()}


SPEC = KernelSpec(
    name="toy",
    implementations={"toy": scaled},
    reference=reference,
    make_inputs=make_inputs,
    cost=lambda case, mode: Cost(1, 1),
    cases=(Case("large", dict(rows=ROWS), torch.float32, bench=True),),
    grads=("x", "weight"),
    unit="rows",
    items=lambda case: case.dims["rows"],
    fuzz={},
    sampled=lambda case: Rows(100, {"x": 0}, 0) if case.dims["rows"] == ROWS else None,
)
CASE = SPEC.cases[0]


def verified(fn, mode):
    inputs = SPEC.make_inputs(CASE, "cpu", torch.Generator().manual_seed(0))
    grads = execute.out_grads(SPEC, CASE, SPEC.reference, inputs, mode, torch.Generator().manual_seed(1))
    return verify(SPEC, CASE, mode, inputs, execute.bind(SPEC, fn, inputs, mode, grads), grads), grads


def scaled_but(row: int):
    """Right but for a fifth of the rows, from `row` on: a sample misses them once in 10^9 processes."""
    end = row + ROWS // 5

    def wrong(x, weight):
        return torch.cat([scaled(x[:row], weight), scaled(x[row:end], weight + 0.5), scaled(x[end:], weight)])

    return wrong


class _SumsHalf(torch.autograd.Function):
    """The gradient of the weight lacks the rows of the second half."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        half = x.shape[0] // 2
        return grad * weight, (grad * x)[:half].sum(0)


@pytest.mark.parametrize("mode", ["fwd", "bwd", "fwd+bwd"])
def test_right_is_accepted_and_gradients_are_whole_again(mode):
    verdict, grads = verified(scaled, mode)
    assert verdict.ok, verdict.reason
    if mode != "fwd":
        assert grads[0].shape == (ROWS, 8)
        assert (grads[0] != 0).any(1).all()


@pytest.mark.parametrize("row", [0, 2000, ROWS - 100])
def test_wrong_rows_are_found(row):
    assert verified(scaled_but(row), "fwd")[0].cause == "error"
    assert verified(scaled_but(row), "bwd")[0].cause == "error"


def test_a_sum_over_part_of_the_rows_is_found():
    assert verified(lambda x, weight: _SumsHalf.apply(x, weight), "bwd")[0].cause == "error"


@pytest.mark.parametrize("check", ["accuracy", "replay", "repeat"])
@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_checks_take_samples(check, mode):
    outcome = run(Item(SPEC, "toy", CASE, mode, check), "cpu")
    assert outcome.status == "pass", outcome.reason
    wrong = dataclasses.replace(SPEC, implementations={"toy": scaled_but(2000)})
    if check != "repeat":
        assert run(Item(wrong, "toy", CASE, mode, check), "cpu").status == "fail"


def test_the_ends_are_in_every_sample():
    inputs = SPEC.make_inputs(CASE, "cpu", None)
    for seed in range(3):
        index = sampling.draw(SPEC, CASE, inputs, seed).index
        assert index[0] == 0 and index[-1] == ROWS - 1 and 100 <= len(index) <= 102


def test_attention_samples_its_longest_case_alone():
    spec = registry.load("attention")
    assert [case.name for case in spec.cases if spec.sampled(case)] == ["b1-h8-q205000-k200000-d64-bf16"]


def test_attention_on_a_sample_of_its_queries():
    spec = registry.load("attention")
    spec = dataclasses.replace(spec, sampled=lambda case: Rows(9, {"q": 2}, 2))
    case = spec.case("b2-h1-q41-k29-d24-fp32-context")
    for mode in ("fwd", "bwd"):
        outcome = run(Item(spec, "auto", case, mode, "accuracy"), "cpu")
        assert outcome.status == "pass", outcome.reason

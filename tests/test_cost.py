"""The bytes of `cost` against the tensors of each bench case: a count that is double fails."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

from harness import record, registry
from harness.execute import leaves, outputs
from harness.roofline import Cost
from harness.spec import Case, KernelSpec
from kernels.attention import reference

LEAST = 64  # bytes: a scalar more or less is no matter
SHARE = 1e-5

CASES = [
    pytest.param(name, case, id=f"{name}-{case.name}")
    for name in registry.names()
    for case in (*(c for c in registry.load(name).cases if c.bench), *registry.load(name).suite_cases)
]


def nbytes(tensors) -> int:
    """Of all tensors in there, each counted once."""
    distinct = {id(t): t for t in tree_leaves(tensors) if isinstance(t, torch.Tensor)}
    return sum(t.numel() * t.element_size() for t in distinct.values())


def fp8_products(offsets, out_dtype, formats, **inputs):
    """Of the forward or, from transposed operands, of the weights' gradient."""
    if "dy_t" in inputs:
        return (offsets[:, None, None] * inputs["dy_t"][:, :1] * inputs["x_t"][:, 0]).to(out_dtype)
    return (inputs["x"][:, :1] * inputs["weights"][:1, :, 0]).to(out_dtype)


# Of ops whose reference reads values on its way, which a tensor without any does not have: what has the result's shape.
SHAPED = {
    "grouped_gemm": lambda weights, x=None, constant=None, **_: (
        (constant if x is None else x)[:, :1] * weights[:1, :, 0]
    ),
    "grouped_gemm_fp8": fp8_products,
}
# Each rank has a part of the whole problem's tensors: the dimension that is cut. Else it has tensors of their size.
CUT = {"ring_attention": 2}


def expected(spec: KernelSpec, case: Case, mode: str) -> int:
    inputs = spec.make_inputs(case, "meta", None)
    if spec.name in CUT:
        at, ranks = CUT[spec.name], case.world_size
        tensors = {name: t for name, t in inputs.items() if isinstance(t, torch.Tensor)}
        inputs |= {name: t.narrow(at, 0, t.shape[at] // ranks) for name, t in tensors.items()}
    differentiable = {name: tensor.requires_grad_() for name, tensor in leaves(spec, inputs).items()}
    autograd = mode in ("bwd", "fwd+bwd")
    with torch.set_grad_enabled(autograd):
        found = outputs(SHAPED.get(spec.name, spec.reference)(**inputs))
    total = nbytes(inputs) + sum(spec.extra_bytes(case, mode).values())
    if mode != "bwd":
        total += nbytes(found)
    if autograd:
        total += nbytes([t for t in found if t.requires_grad]) + nbytes(differentiable)
    return total


@pytest.fixture(autouse=True)
def _in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without values take no memory, for which the reference of attention works on a piece at a time."""
    monkeypatch.setattr(reference, "MOST_SCORES", 1 << 62)


@pytest.mark.parametrize(("kernel_name", "case"), CASES)
def test_the_bytes_are_those_of_the_tensors(kernel_name, case):
    spec = registry.load(kernel_name)
    for mode in spec.modes_of(case):
        counted, wanted = spec.cost(case, mode).bytes, expected(spec, case, mode)
        assert abs(counted - wanted) <= max(LEAST, SHARE * wanted), (mode, counted, wanted, counted / wanted)


def test_a_count_that_is_double_fails():
    spec = registry.load("rmsnorm")
    case = next(c for c in spec.cases if c.bench)
    assert 2 * spec.cost(case, "fwd").bytes - expected(spec, case, "fwd") > SHARE * expected(spec, case, "fwd")


@pytest.mark.parametrize(
    "path", sorted(registry.ROOT.glob("reports/*/records/*.jsonl")), ids=lambda p: f"{p.parts[-3]}-{p.stem}"
)
def test_the_records_count_as_today(path):
    """Where SPEC has learnt to count better, a share of the roofline from an older record is no longer its share."""
    spec = registry.load(path.stem)
    cases = {case.name: case for case in spec.cases}
    for row in (row for row in record.load(path).rows if row.ours and not row.host and row.case in cases):
        assert Cost.from_record(row["cost"]) == spec.cost(cases[row.case], row.mode), (row.case, row.mode)

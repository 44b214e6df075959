"""Checks huge, tiny, infinite and NaN values in one input at a time, and large values in two inputs that may meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import torch

from .. import execute
from ..spec import Inputs
from .accuracy import bits
from .battery import Rejected, Subject, contiguous, guarded_call, prepared
from .oracle import Expected, OutGrads, expected

Plant = Callable[[torch.Tensor], object]


def _row(tensor: torch.Tensor) -> torch.Tensor:
    """The middle row (the last dimension) as a view."""
    rows = tensor.view(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.view(1, -1)
    return rows[rows.shape[0] // 2]


def _element(tensor: torch.Tensor) -> torch.Tensor:
    row = _row(tensor)
    return row[row.shape[0] // 2]


def _subnormal(tensor: torch.Tensor) -> None:
    _row(tensor).sign_().mul_(torch.finfo(tensor.dtype).smallest_normal / 4)


PLANTS: dict[str, Plant] = {
    "one nan": lambda t: _element(t).fill_(torch.nan),
    "one +inf": lambda t: _element(t).fill_(torch.inf),
    "one -inf": lambda t: _element(t).fill_(-torch.inf),
    "a row of -inf": lambda t: _row(t).fill_(-torch.inf),  # a fully masked row
    "a row of zeros": lambda t: _row(t).zero_(),
    "a row of subnormal numbers": _subnormal,
    "a row times 1e-4": lambda t: _row(t).mul_(1e-4),
    "a row times 100": lambda t: _row(t).mul_(100),
    "one 1e4": lambda t: _element(t).fill_(1e4),
    "one -1e4": lambda t: _element(t).fill_(-1e4),
}


def _together(tensor: torch.Tensor) -> None:
    """Fills a row with a value whose square overflows in fp16 (and in no other dtype), so that the product of two such
    rows does. All have one sign, so that a dot product neither cancels nor becomes a -inf that a softmax would hide."""
    _row(tensor).fill_(300)


NOT_FINITE = frozenset({"one nan", "one +inf", "one -inf", "a row of -inf"})


def special_values(s: Subject, mode: str) -> None:
    """Checks every kind of special value in every floating-point input, within SPEC.limits; nan everywhere, unless the
    case is finite_only."""
    inputs, out_grads = prepared(s, s.inputs(), mode)
    clean = expected(s.spec, inputs, out_grads)
    names = [n for n, t in inputs.items() if isinstance(t, torch.Tensor) and t.is_floating_point() and t.numel()]
    for name in names:
        for what, plant in PLANTS.items():
            if what in NOT_FINITE and s.spec.finite_only(s.case):
                continue
            _examine(s, _planted(s, inputs, name, plant), [name], out_grads, clean, f"{what} in {name}")
    if half := _in_half(s, mode):
        _products(half, mode)


def _in_half(s: Subject, mode: str) -> Subject | None:
    """The subject in which products may overflow: that of an fp16 case or, on a CPU, where one dtype represents all,
    the same case in fp16, if SPEC has any of that dtype."""
    if s.case.dtype == torch.float16:
        return s
    of_all = s.device == "cpu" and s.case.dtype == torch.float32
    if not of_all or all(case.dtype != torch.float16 for case in s.spec.cases):
        return None
    case = replace(s.case, name=f"{s.case.name}-in-fp16", dtype=torch.float16)
    return None if s.spec.skip_reason(s.name, case, mode) or execute.uninterpretable(case) else replace(s, case=case)


def _products(s: Subject, mode: str) -> None:
    """Checks large values in each pair of floating-point inputs at once. Where PyTorch itself overflows, the result
    depends on which intermediate results are rounded to 16 bits: a kernel that keeps some in fp32 may differ."""
    inputs, out_grads = prepared(s, s.inputs(), mode)
    clean = expected(s.spec, inputs, out_grads)
    names = [n for n, t in inputs.items() if isinstance(t, torch.Tensor) and t.is_floating_point() and t.numel()]
    for one, two in itertools.combinations(names, 2):
        changed = _planted(s, _planted(s, inputs, one, _together), two, _together)
        _examine(s, changed, [one, two], out_grads, clean, f"rows of 300 in {one} and {two}, in fp16", True)


def _planted(s: Subject, inputs: Inputs, name: str, plant: Plant) -> Inputs:
    changed = contiguous(name, inputs[name])
    plant(changed.view(-1) if changed.dim() < 1 else changed)
    if name in s.spec.limits:
        changed.clamp_(-s.spec.limits[name], s.spec.limits[name])
    return {**inputs, name: changed}


def _examine(
    s: Subject,
    inputs: Inputs,
    names: list[str],
    out_grads: OutGrads | None,
    clean: Expected,
    where: str,
    where_eager_is_finite: bool = False,
) -> None:
    truth = expected(s.spec, inputs, out_grads)
    results = guarded_call(s, inputs, out_grads, where=where).copies
    for part, text in _parts(truth, clean, {n: inputs[n] for n in names}):
        if where_eager_is_finite:
            part = [mask & eager.isfinite() for mask, eager in zip(part, truth.eager, strict=True)]
        verdict = truth.verdict(results, s.case, s.spec, part, clean.oracle)
        if not verdict.ok:
            raise Rejected(verdict, f"{where}, {text}")


def _parts(truth: Expected, clean: Expected, planted: dict[str, torch.Tensor]) -> list[tuple[list[torch.Tensor], str]]:
    """The elements that the special values affect, and the others. Each part is compared with eager's error on that
    part alone: otherwise eager's error on a huge value would allow any error elsewhere. The scale is at least that of
    the results without special values: where these make all results zero, an epsilon of the usual values is no error.

    The derivative at +inf is left out, because it depends on how a formula is written. That at -inf, which masks, is
    checked.
    """
    reached = [bits(a) != bits(b) for a, b in zip(truth.oracle, clean.oracle, strict=True)]
    others = [~mask for mask in reached]
    for index, output in enumerate(truth.names):
        if (name := output.removeprefix("gradient of ")) in planted and name != output:
            reached[index] = reached[index] & ~planted[name].isposinf()
            others[index] = others[index] & ~planted[name].isposinf()
    return [(reached, "where it reaches"), (others, "where it does not reach")]

"""What is wrong with each broken gelu, and the controls."""

from __future__ import annotations

from functools import partial

import torch

from harness.spec import Case
from kernels.gelu.reference import gelu_reference

from . import Wrong, wrappers
from .plain_gelu import check, gelu

EXACT, TANH, HALF = "9x37-fp32-exact", "9x37-fp32-tanh", "9x33-fp16-exact"
CASES = (
    Case(EXACT, dict(rows=9, dim=37), torch.float32, dict(approximate="none")),
    Case(TANH, dict(rows=9, dim=37), torch.float32, dict(approximate="tanh")),
    Case(HALF, dict(rows=9, dim=33), torch.float16, dict(approximate="none")),
)
LONG_CASES: tuple[Case, ...] = ()
FUZZ = {"rows": (0, 9), "dim": (1, 40)}
LIMITS: dict[str, float] = {}


def _fault(name: str, case: str, check: str, cause: str, on_gpu: tuple[str, str] | None = None) -> Wrong:
    return Wrong(name, partial(gelu, fault=name), case, check, cause, on_gpu)


WRONG = (
    # In the formula.
    _fault("exact form for tanh", TANH, "accuracy", "error"),
    _fault("constant of four digits", TANH, "accuracy", "error"),
    _fault("cubic term dropped", TANH, "accuracy", "error"),
    _fault("erf of five digits", EXACT, "accuracy", "error"),
    _fault("cumulative in half precision", EXACT, "accuracy", "error"),
    _fault("tanh that overflows", TANH, "values", "nonfinite"),
    _fault("nan taken for zero", EXACT, "values", "nonfinite"),
    _fault("zero at -inf", EXACT, "values", "nonfinite"),
    # In the derivative.
    _fault("derivative of the exact form", TANH, "accuracy", "error"),
    _fault("derivative of the inner term dropped", TANH, "accuracy", "error"),
    _fault("density dropped", EXACT, "accuracy", "error"),
    _fault("incoming gradient taken for ones", EXACT, "accuracy", "error"),
    # In what is read and written.
    _fault("last full block alone", HALF, "accuracy", "nonfinite"),
    _fault("writes past the end", EXACT, "accuracy", "bounds"),
    _fault("row stride ignored", EXACT, "strides", "nonfinite"),
    _fault("gradient read with the strides of x", EXACT, "strides", "nonfinite"),
    # Around the kernel.
    Wrong("in place", wrappers.mutating(gelu), EXACT, "accuracy", "inputs"),
    Wrong("copy of the input", wrappers.input_copy(gelu), EXACT, "accuracy", "error"),
    Wrong("cached by address", wrappers.cached(gelu), EXACT, "replay", "replay", on_gpu=("accuracy", "error")),
    Wrong("fp32 out of fp16", wrappers.single_precision(gelu), HALF, "accuracy", "dtype"),
    _fault("no checks", EXACT, "refusal", "accepted"),
    Wrong("nameless refusal", wrappers.nameless(gelu), EXACT, "refusal", "message"),
    _fault("shape of the fake result", EXACT, "opcheck", "opcheck"),
)
ON_A_GPU: tuple[Wrong, ...] = ()


def reference(x, approximate="none"):
    """The reference itself, behind the checks of a public function."""
    check(x, approximate)
    return gelu_reference(x, approximate)


def doubled(x, approximate="none"):
    """In fp64, rounded once."""
    check(x, approximate)
    return gelu_reference(x.double(), approximate).to(x.dtype)


CONTROLS = {"plain": gelu, "reference": reference, "doubled": doubled}

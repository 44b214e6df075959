"""What is wrong with each broken norm_linear, and the controls."""

from __future__ import annotations

from functools import partial

import torch

from harness.spec import Case
from kernels.norm_linear.reference import norm_linear_reference

from . import Wrong, wrappers
from .plain_norm_linear import check, norm_linear

PLAIN, HALF, RESIDUAL, SILU = "9x21x13-fp32", "9x21x13-fp16", "9x21x13-fp32-residual", "9x21x13-fp32-silu"
DIMS = dict(rows=9, dim=21, cols=13)
CASES = (
    Case(PLAIN, DIMS, torch.float32),
    Case(HALF, DIMS, torch.float16),
    Case(RESIDUAL, DIMS, torch.float32, dict(residual=True)),
    Case(SILU, DIMS, torch.float32, dict(activation="silu")),
)
LONG_CASES: tuple[Case, ...] = ()
FUZZ = {"rows": (0, 9), "dim": (1, 40), "cols": (1, 20)}
LIMITS: dict[str, float] = {"norm_weight": 10.0}


def _fault(name: str, case: str, check: str, cause: str, on_gpu: tuple[str, str] | None = None) -> Wrong:
    return Wrong(name, partial(norm_linear, fault=name), case, check, cause, on_gpu)


WRONG = (
    # In the forward.
    _fault("last column not written", PLAIN, "accuracy", "nonfinite"),
    _fault("mean over the padding", PLAIN, "accuracy", "error"),
    _fault("gain dropped", PLAIN, "accuracy", "error"),
    _fault("scaled twice", PLAIN, "accuracy", "error"),
    _fault("row stride ignored", PLAIN, "strides", "nonfinite"),
    _fault("stride of the weight ignored", PLAIN, "strides", "nonfinite"),
    _fault("residual read with the strides of x", RESIDUAL, "strides", "nonfinite"),
    _fault("residual not added", RESIDUAL, "accuracy", "error"),
    _fault("residual returned unsummed", RESIDUAL, "accuracy", "error"),
    _fault("activation dropped", SILU, "accuracy", "error"),
    # In the backward.
    _fault("mean over the columns of y", PLAIN, "accuracy", "error"),
    _fault("mean from the rounded result", HALF, "sizes", "error"),
    _fault("gradient that ignores the statistics", PLAIN, "accuracy", "error"),
    _fault("gradient of h dropped", RESIDUAL, "accuracy", "error"),
    _fault("dgain of rows that are not normalised", PLAIN, "accuracy", "error"),
    _fault("dW of rows without the gain", PLAIN, "accuracy", "error"),
    _fault("incoming gradient taken for ones", PLAIN, "accuracy", "error"),
    # Around the kernel.
    Wrong("mutated input", wrappers.mutating(norm_linear), PLAIN, "accuracy", "inputs"),
    Wrong("cached by address", wrappers.cached(norm_linear), PLAIN, "replay", "replay", on_gpu=("accuracy", "error")),
    Wrong("fp32 out of fp16", wrappers.single_precision(norm_linear), HALF, "accuracy", "dtype"),
    _fault("no checks", PLAIN, "refusal", "accepted", on_gpu=("refusal", "launched")),
    Wrong("nameless refusal", wrappers.nameless(norm_linear), PLAIN, "refusal", "message"),
    _fault("shape of the fake result", PLAIN, "opcheck", "opcheck"),
)
ON_A_GPU: tuple[Wrong, ...] = ()


def reference(x, norm_weight, weight, residual=None, *, eps=1e-6, activation=None):
    """The reference itself, behind the checks of a public function."""
    check(x, norm_weight, weight, residual, activation)
    return norm_linear_reference(x, norm_weight, weight, residual, eps=eps, activation=activation)


def doubled(x, norm_weight, weight, residual=None, *, eps=1e-6, activation=None):
    """In fp64, rounded once; but h as it is stored."""
    check(x, norm_weight, weight, residual, activation)
    h = x if residual is None else x + residual
    given = (t.double() for t in (h, norm_weight, weight))
    y = norm_linear_reference(*given, eps=eps, activation=activation).to(x.dtype)
    return y if residual is None else (y, h)


CONTROLS = {"plain": norm_linear, "reference": reference, "doubled": doubled}

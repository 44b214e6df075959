"""What is wrong with each broken gradient compression, and the controls."""

from __future__ import annotations

from functools import partial

import torch

from harness.spec import Case
from kernels.gradient_compression import gradient_compression as ours

from . import Wrong, wrappers
from .plain_gradient_compression import check, gradient_compression

PLAIN, KEPT, HALF = "700-fp32-int8", "700-fp32-int4-residual", "300-fp16-int8"


def _case(name: str, dtype: torch.dtype, kind: str, **params) -> Case:
    mutates = ("tensor", "residual") if params else ("tensor",)
    numel = int(name.split("-")[0])
    return Case(name, dict(numel=numel), dtype, dict(kind=kind, **params), mutates=mutates)


CASES = (
    _case(PLAIN, torch.float32, "int8"),
    _case(KEPT, torch.float32, "int4", feedback="fp32"),
    _case(HALF, torch.float16, "int8"),
)
LONG_CASES: tuple[Case, ...] = ()
FUZZ = {"numel": (0, 600)}
LIMITS: dict[str, float] = {}


def _fault(name: str, case: str, check: str, cause: str, on_gpu: tuple[str, str] | None = None) -> Wrong:
    return Wrong(name, partial(gradient_compression, fault=name), case, check, cause, on_gpu)


WRONG = (
    # In the codes and scales.
    _fault("one scale for all", PLAIN, "accuracy", "error"),
    _fault("a code too many", PLAIN, "accuracy", "error"),
    _fault("scale in half precision", PLAIN, "accuracy", "error"),
    _fault("rounded towards zero", KEPT, "accuracy", "error"),
    _fault("last full block alone", PLAIN, "accuracy", "error"),
    # In the residual.
    _fault("residual dropped", KEPT, "accuracy", "error"),
    _fault("residual as it was", KEPT, "accuracy", "error"),
    _fault("residual of the wrong sign", KEPT, "accuracy", "error"),
    _fault("nan kept in the residual", KEPT, "values", "nonfinite"),
    # In what is not finite.
    _fault("nan taken for zero", PLAIN, "values", "nonfinite"),
    _fault("infinities saturate", PLAIN, "values", "nonfinite"),
    _fault("nan spoils its block", PLAIN, "values", "nonfinite"),
    # In where it is written.
    _fault("not in place", PLAIN, "accuracy", "inputs"),
    _fault("strides ignored", PLAIN, "strides", "bounds"),
    # Around it.
    _fault("no checks", PLAIN, "refusal", "accepted"),
    Wrong("cached by address", wrappers.cached(gradient_compression), PLAIN, "accuracy", "inputs"),
)
ON_A_GPU: tuple[Wrong, ...] = ()


def public(tensor, residual=None, **options):
    """The kernels themselves, behind other checks."""
    check(tensor, residual)
    ours(tensor, residual, **options)
    return tensor if residual is None else (tensor, residual)


CONTROLS = {"plain": gradient_compression, "public": public}

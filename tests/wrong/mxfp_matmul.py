"""What is wrong with each broken mxfp_matmul, and the controls."""

from __future__ import annotations

from functools import partial

import torch

from harness.spec import Case
from kernels.mxfp_matmul.reference import mxfp_matmul_reference

from . import Wrong, wrappers
from .plain_mxfp_matmul import check, mxfp_matmul

SINGLE, HALF = "5x20x200-fp32-mxfp4", "5x20x200-fp16-mxfp4"
CASES = (
    Case(SINGLE, dict(rows=5, columns=20, depth=200), torch.float32, dict(format="mxfp4")),
    Case(HALF, dict(rows=5, columns=20, depth=200), torch.float16, dict(format="mxfp4")),
)
LONG_CASES: tuple[Case, ...] = ()
FUZZ = {"rows": (0, 5), "columns": (0, 20), "depth": (1, 200)}
LIMITS: dict[str, float] = {}


def _fault(name: str, case: str, check: str, cause: str, on_gpu: tuple[str, str] | None = None) -> Wrong:
    return Wrong(name, partial(mxfp_matmul, fault=name), case, check, cause, on_gpu)


def checks_last(x, w, scales, format="mxfp4"):
    result = mxfp_matmul(x, w, scales, format, fault="no checks")
    check(x, w, scales)
    return result


WRONG = (
    _fault("subnormal weight lost", SINGLE, "accuracy", "error"),
    _fault("sign ignored", SINGLE, "accuracy", "error"),
    _fault("halves swapped", SINGLE, "accuracy", "error"),
    _fault("scales of the lower half", SINGLE, "accuracy", "error"),
    _fault("scale of the next row", SINGLE, "accuracy", "error"),
    _fault("scale dropped", SINGLE, "accuracy", "error"),
    _fault("last chunk forgotten", SINGLE, "accuracy", "error"),
    _fault("one column too many", SINGLE, "accuracy", "nonfinite"),
    _fault("row stride ignored", SINGLE, "strides", "nonfinite"),
    _fault("writes past the end", SINGLE, "accuracy", "bounds"),
    # Around the kernel.
    Wrong("cached by address", wrappers.cached(mxfp_matmul), SINGLE, "replay", "replay", on_gpu=("accuracy", "error")),
    Wrong("mutated input", wrappers.mutating(mxfp_matmul), SINGLE, "accuracy", "inputs"),
    Wrong("lazy output", wrappers.lazy(mxfp_matmul), HALF, "accuracy", "lazy"),
    Wrong("fp32 out of fp16", wrappers.single_precision(mxfp_matmul), HALF, "accuracy", "dtype"),
    Wrong("checks after the launch", checks_last, SINGLE, "refusal", "launched"),
    _fault("shape of the fake result", SINGLE, "opcheck", "opcheck"),
    Wrong("looks at values", wrappers.looking_at_values(mxfp_matmul), SINGLE, "compile", "compile"),
)

# Tried by the check that it names alone: what other checks see of an unjoined stream is a matter of luck.
ON_A_GPU = (Wrong("side stream", wrappers.on_a_side_stream(wait=True)(mxfp_matmul), SINGLE, "stream", "late"),)


def reference(x, w, scales, format="mxfp4"):
    """The reference itself, behind the checks of a public function."""
    check(x, w, scales)
    return mxfp_matmul_reference(x, w, scales, format)


CONTROLS = {"plain": mxfp_matmul, "reference": reference}

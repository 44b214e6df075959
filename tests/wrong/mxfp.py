"""What is wrong with each broken mxfp, and the controls."""

from __future__ import annotations

from functools import partial

import torch

from harness.spec import Case
from kernels.mxfp.reference import mxfp_reference

from . import Wrong, wrappers
from .plain_mxfp import check, mxfp

EIGHT, FOUR = "9x300-fp32-mxfp8_e4m3", "9x300-fp16-mxfp4"
CASES = (
    Case(EIGHT, dict(rows=9, dim=300), torch.float32, dict(format="mxfp8_e4m3")),
    Case(FOUR, dict(rows=9, dim=300), torch.float16, dict(format="mxfp4")),
)
LONG_CASES: tuple[Case, ...] = ()
FUZZ = {"rows": (0, 9), "dim": (1, 300)}
LIMITS: dict[str, float] = {}


def _fault(name: str, case: str, check: str, cause: str, on_gpu: tuple[str, str] | None = None) -> Wrong:
    return Wrong(name, partial(mxfp, fault=name), case, check, cause, on_gpu)


def checks_last(x, format="mxfp8_e4m3"):
    result = mxfp(x, format, fault="no checks")
    check(x)
    return result


WRONG = (
    # The scale.
    _fault("scale rounded up", EIGHT, "accuracy", "error"),
    _fault("exponent of the other format", EIGHT, "accuracy", "error"),
    _fault("scale of the block before", EIGHT, "accuracy", "error"),
    _fault("smallest of the block", EIGHT, "accuracy", "error"),
    _fault("padding counted", EIGHT, "accuracy", "error"),
    _fault("smallest scale is 2^-126", EIGHT, "values", "error"),
    _fault("nan forgotten", EIGHT, "values", "error"),
    _fault("inf saturates", EIGHT, "values", "error"),
    # The elements.
    _fault("not divided by the scale", EIGHT, "accuracy", "error"),
    _fault("ties away from zero", FOUR, "accuracy", "error"),
    _fault("rounded towards zero", EIGHT, "accuracy", "error"),
    _fault("subnormals flushed", FOUR, "accuracy", "error"),
    _fault("does not saturate", EIGHT, "accuracy", "error"),
    _fault("zero without a sign", FOUR, "accuracy", "error"),
    _fault("halves of a byte swapped", FOUR, "accuracy", "error"),
    _fault("last block not written", EIGHT, "accuracy", "error"),
    _fault("writes past the end", EIGHT, "accuracy", "bounds"),
    _fault("row stride ignored", EIGHT, "strides", "error"),
    # Around the kernel.
    Wrong("cached by address", wrappers.cached(mxfp), EIGHT, "replay", "replay", on_gpu=("accuracy", "error")),
    Wrong("mutated input", wrappers.mutating(mxfp), EIGHT, "accuracy", "inputs"),
    Wrong("lazy output", wrappers.lazy(mxfp), FOUR, "accuracy", "lazy"),
    Wrong("fp32 out of mxfp", wrappers.single_precision(mxfp), FOUR, "accuracy", "dtype"),
    _fault("no checks", EIGHT, "refusal", "accepted"),
    Wrong("checks after the launch", checks_last, EIGHT, "refusal", "launched"),
    _fault("shape of the fake result", EIGHT, "opcheck", "opcheck"),
    Wrong("looks at values", wrappers.looking_at_values(mxfp), EIGHT, "compile", "compile"),
)

# Tried by the check that it names alone: what other checks see of an unjoined stream is a matter of luck.
ON_A_GPU = (Wrong("side stream", wrappers.on_a_side_stream(wait=True)(mxfp), EIGHT, "stream", "late"),)


def reference(x, format="mxfp8_e4m3"):
    """The reference itself, behind the checks of a public function."""
    check(x)
    return mxfp_reference(x, format)


CONTROLS = {"plain": mxfp, "reference": reference}

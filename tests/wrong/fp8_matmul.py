"""What is wrong with each broken fp8_matmul, and the controls."""

from __future__ import annotations

from functools import partial

import torch

from harness.spec import Case
from kernels.fp8_matmul.reference import fp8_matmul_reference

from . import Wrong, wrappers
from .plain_fp8_matmul import check, fp8_matmul

ROW, SQUARE, LINE = "5x144x32-fp16-row", "5x272x144-fp16-128x128", "5x272x32-fp16-1x128-bias"


def _case(name: str, k: int, n: int, scaling: str, formats: str = "e4m3", **params) -> Case:
    dims = dict(m=5, k16=k // 16, n16=n // 16)
    return Case(name, dims, torch.float16, dict(scaling=scaling, formats=formats, **params))


CASES = (
    _case(ROW, 144, 32, "row", "e5m2"),
    _case(SQUARE, 272, 144, "128x128"),
    _case(LINE, 272, 32, "1x128", "e4m3.e5m2", bias=True),
)
LONG_CASES: tuple[Case, ...] = ()
FUZZ = {"m": (0, 5), "k16": (0, 17), "n16": (0, 9)}
LIMITS: dict[str, float] = {}


def _fault(name: str, case: str, check: str, cause: str, on_gpu: tuple[str, str] | None = None) -> Wrong:
    return Wrong(name, partial(fp8_matmul, fault=name), case, check, cause, on_gpu)


def checks_last(scale_a, scale_b, a, b, formats, bias=None, **options):
    result = fp8_matmul(scale_a, scale_b, a, b, formats, bias, **options, fault="no checks")
    check(scale_a, scale_b, a, b, bias)
    return result


WRONG = (
    # What the codes stand for.
    _fault("e5m2 read as e4m3", ROW, "accuracy", "error", on_gpu=("accuracy", "nonfinite")),
    _fault("sign ignored", ROW, "accuracy", "error"),
    _fault("small codes flushed", SQUARE, "accuracy", "error"),
    # The scales.
    _fault("scale of the row before", ROW, "accuracy", "error"),
    _fault("scale of b dropped", ROW, "accuracy", "error"),
    _fault("scale of the block before", SQUARE, "accuracy", "error"),
    _fault("scale of the first block", LINE, "accuracy", "error"),
    _fault("blocks of 64 rows", SQUARE, "accuracy", "error"),
    _fault("strides of scales ignored", LINE, "strides", "error", on_gpu=("strides", "nonfinite")),
    # The sum and what is written.
    _fault("tail of k dropped", SQUARE, "accuracy", "error"),
    _fault("bias dropped", LINE, "accuracy", "error"),
    _fault("order of the blocks by chance", SQUARE, "repeat", "repeat"),
    _fault("last row not written", ROW, "accuracy", "nonfinite"),
    _fault("strides ignored", ROW, "strides", "nonfinite"),
    # Around the kernel.
    Wrong("zeros", wrappers.constant(0.0)(fp8_matmul), ROW, "accuracy", "error"),
    Wrong("cached by address", wrappers.cached(fp8_matmul), ROW, "replay", "replay", on_gpu=("accuracy", "error")),
    Wrong("mutated input", wrappers.mutating(fp8_matmul), ROW, "accuracy", "inputs"),
    Wrong("lazy output", wrappers.lazy(fp8_matmul), ROW, "accuracy", "lazy"),
    Wrong("fp32 out of fp16", wrappers.single_precision(fp8_matmul), ROW, "accuracy", "dtype"),
    _fault("no checks", ROW, "refusal", "accepted"),
    _fault("dtype of the fake result", ROW, "opcheck", "opcheck"),
    Wrong("looks at values", wrappers.looking_at_values(fp8_matmul), ROW, "compile", "compile"),
)

# Tried by the check that it names alone: what other checks see of an unjoined stream is a matter of luck.
ON_A_GPU = (Wrong("side stream", wrappers.on_a_side_stream(wait=True)(fp8_matmul), ROW, "stream", "late"),)


def reference(scale_a, scale_b, a, b, formats, bias=None, out_dtype=torch.float16):
    """The reference itself, behind the checks of a public function."""
    check(scale_a, scale_b, a, b, bias)
    return fp8_matmul_reference(a.view(formats[0]), b.view(formats[1]), scale_a, scale_b, bias, out_dtype)


CONTROLS = {"plain": fp8_matmul, "reference": reference}

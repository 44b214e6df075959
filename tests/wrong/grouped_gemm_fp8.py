"""What is wrong with each broken grouped_gemm_fp8, and the controls."""

from __future__ import annotations

from functools import partial

import torch

from harness.spec import Case
from kernels.grouped_gemm_fp8.reference import grouped_gemm_fp8_reference, grouped_gemm_fp8_wgrad_reference

from . import Wrong, wrappers
from .plain_grouped_gemm_fp8 import check, grouped_gemm_fp8

ROWS, WIDE, WGRAD, EMPTY = "g3-23-fp16", "g2-19-wide-fp16", "g3-272-wgrad-fp16", "g3-256-wgrad-onehot-fp16"


def _case(name: str, groups: int, n: int, k: int, formats: str = "e4m3", split: str = "random", **rows: int) -> Case:
    dims = dict(groups=groups, n16=n // 16, k16=k // 16, **rows)
    params = dict(split=split, formats=formats, wgrad="rows16" in rows)
    return Case(name, dims, torch.float16, params)


CASES = (
    _case(ROWS, 3, 32, 144, "e5m2", rows=23),
    _case(WIDE, 2, 144, 272, "e4m3.e5m2", rows=19),
    _case(WGRAD, 3, 32, 16, "e5m2.e4m3", rows16=17),
    _case(EMPTY, 3, 16, 32, split="onehot", rows16=16),
)
LONG_CASES: tuple[Case, ...] = ()
FUZZ = {"groups": (1, 3), "rows": (0, 12), "rows16": (0, 9), "n16": (0, 3), "k16": (0, 9)}
LIMITS: dict[str, float] = {}


def _fault(name: str, case: str, check: str, cause: str, on_gpu: tuple[str, str] | None = None) -> Wrong:
    return Wrong(name, partial(grouped_gemm_fp8, fault=name), case, check, cause, on_gpu)


WRONG = (
    # The forward.
    _fault("e5m2 read as e4m3", ROWS, "accuracy", "error", on_gpu=("accuracy", "nonfinite")),
    _fault("offsets taken for the last row", ROWS, "accuracy", "error"),
    _fault("weight of the group before", ROWS, "accuracy", "error"),
    _fault("rows behind the last offset multiplied", ROWS, "accuracy", "error"),
    _fault("scale of the row before", ROWS, "accuracy", "error"),
    _fault("scale of the first block", ROWS, "accuracy", "error"),
    _fault("scale of weights of the first group", ROWS, "accuracy", "error"),
    _fault("scale of weights of the first columns", WIDE, "accuracy", "error"),
    _fault("tail of k dropped", WIDE, "accuracy", "error"),
    _fault("order of the blocks by chance", WIDE, "repeat", "repeat"),
    _fault("last row not written", ROWS, "accuracy", "nonfinite"),
    _fault("strides ignored", ROWS, "strides", "nonfinite"),
    _fault("strides of scales ignored", WIDE, "strides", "error", on_gpu=("strides", "nonfinite")),
    _fault("stride of offsets ignored", ROWS, "strides", "error"),
    # The weights' gradient.
    Wrong(
        "gradient: offsets taken for the last row",
        partial(grouped_gemm_fp8, fault="offsets taken for the last row"),
        WGRAD,
        "accuracy",
        "error",
    ),
    Wrong(
        "gradient: scale of the first block",
        partial(grouped_gemm_fp8, fault="scale of the first block"),
        WGRAD,
        "accuracy",
        "error",
    ),
    _fault("a group's rows in whole blocks", WGRAD, "accuracy", "error"),
    _fault("scales of blocks without rows", WGRAD, "values", "nonfinite"),
    _fault("gradient of an empty group left as it was", EMPTY, "accuracy", "nonfinite"),
    # Around the kernel.
    Wrong("zeros", wrappers.constant(0.0)(grouped_gemm_fp8), ROWS, "accuracy", "error"),
    Wrong(
        "cached by address", wrappers.cached(grouped_gemm_fp8), ROWS, "replay", "replay", on_gpu=("accuracy", "error")
    ),
    Wrong("mutated input", wrappers.mutating(grouped_gemm_fp8), ROWS, "accuracy", "inputs"),
    Wrong("lazy output", wrappers.lazy(grouped_gemm_fp8), ROWS, "accuracy", "lazy"),
    _fault("no checks", ROWS, "refusal", "accepted", on_gpu=("refusal", "message")),
    _fault("dtype of the fake result", ROWS, "opcheck", "opcheck"),
    Wrong("looks at values", wrappers.looking_at_values(grouped_gemm_fp8), ROWS, "compile", "compile"),
)

# Tried by the check that it names alone: what other checks see of an unjoined stream is a matter of luck.
ON_A_GPU = (Wrong("side stream", wrappers.on_a_side_stream(wait=True)(grouped_gemm_fp8), ROWS, "stream", "late"),)


def reference(offsets, formats, out_dtype=torch.float16, **inputs):
    """The references themselves, behind the checks of a public function."""
    check(offsets, **inputs)
    names = ("dy_t", "x_t", "scale_dy", "scale_x") if "dy_t" in inputs else ("x", "weights", "scale_x", "scale_w")
    a, b, *scales = (inputs[name] for name in names)
    op = grouped_gemm_fp8_wgrad_reference if "dy_t" in inputs else grouped_gemm_fp8_reference
    return op(a.view(formats[0]), b.view(formats[1]), *scales, offsets, out_dtype=out_dtype)


CONTROLS = {"plain": grouped_gemm_fp8, "reference": reference}

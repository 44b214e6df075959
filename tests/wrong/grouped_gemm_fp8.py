"""What is wrong with each broken grouped_gemm_fp8, and the controls."""

from __future__ import annotations

from functools import partial

import torch

from harness.spec import Case

from . import Wrong, wrappers
from .plain_grouped_gemm_fp8 import BLOCK, check, grouped_gemm_fp8

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


def _in_blocks(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers in fp64, the last dimension cut into blocks of 128, of which the last is filled up with zeros."""
    numbers = codes.contiguous().view(dtype).double()
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[-1] % BLOCK))
    return numbers.unflatten(-1, (-1, BLOCK))


def all_blocks_at_once(offsets, formats, out_dtype=torch.float16, **inputs):
    """The sums of all blocks in one product, in fp64, which are scaled and added afterwards."""
    check(offsets, **inputs)
    rows = inputs["dy_t"].shape[1] if "dy_t" in inputs else inputs["x"].shape[0]
    ends = offsets.clamp(0, rows).cummax(0).values
    row = torch.arange(rows, device=offsets.device)
    group = (row[:, None] >= ends).sum(1)  # one more than the last for rows behind it
    if "dy_t" in inputs:
        dy, x = _in_blocks(inputs["dy_t"], formats[0]), _in_blocks(inputs["x_t"], formats[1])
        own = group == torch.arange(len(ends), device=group.device)[:, None]
        own = torch.nn.functional.pad(own, (0, -rows % BLOCK)).unflatten(-1, (-1, BLOCK))  # [G, B, 128]
        own_dy = torch.where(own[:, None], dy, 0.0)
        sums = torch.einsum("gnbr,gkbr->gbnk", own_dy, torch.where(own[:, None], x, 0.0))
        scales = inputs["scale_dy"].t()[:, :, None].double() * inputs["scale_x"].t()[:, None, :]
        return torch.where(own.any(-1)[:, :, None, None], sums * scales, 0.0).sum(1).to(out_dtype)
    x, weights = _in_blocks(inputs["x"], formats[0]), _in_blocks(inputs["weights"], formats[1])
    known = group.clamp(max=len(ends) - 1)
    sums = torch.einsum("tbk,tnbk->tnb", x, weights[known])
    of_columns = inputs["scale_w"].double().repeat_interleave(BLOCK, 1)[:, : weights.shape[1]]
    y = (sums * (inputs["scale_x"][:, None, :] * of_columns[known])).sum(-1)
    return torch.where((group < len(ends))[:, None], y, 0.0).to(out_dtype)


CONTROLS = {"plain": grouped_gemm_fp8, "all blocks at once": all_blocks_at_once}

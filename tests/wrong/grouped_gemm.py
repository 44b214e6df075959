"""What is wrong with each broken grouped_gemm, and the controls."""

from __future__ import annotations

from functools import partial

import torch

from harness.spec import Case

from . import Wrong, wrappers
from .plain_grouped_gemm import check, grouped_gemm

PLAIN, BIAS, EMPTY = "g3-23x8x7-fp32", "g3-22x8x7-fp32-bias", "g3-21x8x7-onehot-fp32"
CASES = (
    Case(PLAIN, dict(groups=3, rows=23, n=8, k=7), torch.float32),
    Case(BIAS, dict(groups=3, rows=22, n=8, k=7), torch.float32, dict(bias=True)),
    Case(EMPTY, dict(groups=3, rows=21, n=8, k=7), torch.float32, dict(split="onehot")),
)
LONG_CASES: tuple[Case, ...] = ()
FUZZ = {"groups": (1, 4), "rows": (0, 12), "n": (1, 9), "k": (1, 9)}
LIMITS: dict[str, float] = {}


def _fault(name: str, case: str, check: str, cause: str, on_gpu: tuple[str, str] | None = None) -> Wrong:
    return Wrong(name, partial(grouped_gemm, fault=name), case, check, cause, on_gpu)


WRONG = (
    # In the forward.
    _fault("tail of a group dropped", PLAIN, "accuracy", "error"),
    _fault("offsets taken for the last row", PLAIN, "accuracy", "error"),
    _fault("weight of the group before", PLAIN, "accuracy", "error"),
    _fault("rows behind the last offset multiplied", PLAIN, "accuracy", "error"),
    _fault("last block of k dropped", PLAIN, "accuracy", "error"),
    _fault("sum rounded at each block of k", PLAIN, "accuracy", "error"),
    _fault("bias dropped", BIAS, "accuracy", "error"),
    _fault("strides ignored", PLAIN, "strides", "error"),
    _fault("stride of offsets ignored", PLAIN, "strides", "error"),
    # In the backward.
    _fault("tail of the sum not masked", PLAIN, "accuracy", "error"),
    _fault("gradient of an empty group left as it was", EMPTY, "accuracy", "nonfinite"),
    _fault("gradient of rows behind the last offset", PLAIN, "accuracy", "error"),
    _fault("gradient of weights rounded at each block of rows", PLAIN, "accuracy", "error"),
    _fault("gradient of bias over all rows", BIAS, "accuracy", "error"),
    _fault("incoming gradient taken for one", PLAIN, "accuracy", "error"),
    _fault("rows in the order of arrival", EMPTY, "repeat", "repeat"),
    # Around the kernel.
    Wrong("zeros", wrappers.constant(0.0)(grouped_gemm), PLAIN, "accuracy", "error"),
    Wrong("nan", wrappers.constant(float("nan"))(grouped_gemm), PLAIN, "accuracy", "nonfinite"),
    Wrong("cached by address", wrappers.cached(grouped_gemm), PLAIN, "replay", "replay", on_gpu=("accuracy", "error")),
    Wrong("mutated input", wrappers.mutating(grouped_gemm), PLAIN, "accuracy", "inputs"),
    Wrong("lazy output", wrappers.lazy(grouped_gemm), PLAIN, "accuracy", "lazy"),
    _fault("no checks", PLAIN, "refusal", "accepted", on_gpu=("refusal", "message")),
    _fault("dtype of the fake result", PLAIN, "opcheck", "opcheck"),
    Wrong("looks at values", wrappers.looking_at_values(grouped_gemm), PLAIN, "compile", "compile"),
)

# Each tried by the check that it names alone: what other checks see of an unjoined stream is a matter of luck.
ON_A_GPU = (
    Wrong("side stream", wrappers.on_a_side_stream(wait=True)(grouped_gemm), PLAIN, "stream", "late"),
    Wrong(
        "side stream that is not joined", wrappers.on_a_side_stream(wait=True)(grouped_gemm), PLAIN, "graph", "graph"
    ),
)


def by_masks(x, weights, offsets, *, bias=None):
    """All rows times all weights, of which a mask keeps those of a row's group."""
    check(x, weights, offsets, bias)
    ends = offsets.clamp(0, x.shape[0]).cummax(0).values
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    row = torch.arange(x.shape[0], device=x.device)
    y = x.new_zeros(x.shape[0], weights.shape[1])
    for group in range(weights.shape[0]):
        mine = ((row >= starts[group]) & (row < ends[group]))[:, None]
        product = torch.where(mine, x, 0) @ weights[group].T
        y = torch.where(mine, product if bias is None else product + bias[group], y)
    return y


CONTROLS = {"plain": grouped_gemm, "by masks": by_masks}

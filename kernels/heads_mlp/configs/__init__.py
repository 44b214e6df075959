"""Launch configurations of heads_mlp: every choice is a pure function of the problem and the GPU. heads_backward.py has
those of the backward, heads_forward.py those of the forward in CUDA C++. EXPERIMENTS.md lists the alternatives that
were tried."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from .heads_backward import fit
from .heads_forward import pick_backend as pick_backend


@dataclass(frozen=True)
class FwdConfig:
    """A CTA computes `block_m` rows and `heads` heads, in blocks of `block_h` hidden columns, with K-blocks of
    `block_k`. `resident`: x is loaded once for all blocks."""

    block_m: int
    block_h: int
    block_k: int
    heads: int
    resident: bool
    stages: int
    num_warps: int


def pick_fwd_config(
    rows: int,
    dim: int,
    heads: int,
    hidden: int,
    aligned: bool,
    dtype: torch.dtype,
    capability: tuple[int, int],
    sms: int,
) -> FwdConfig:
    """Configuration of the forward. Pure. x is resident if D <= 64. On Hopper, measured on one H200: 128 rows by 256
    columns with half the heads per CTA are 12 % faster than 128 by 128 for 205 000 rows; 64 by 128 with one head per
    CTA 15 % faster for 5000. Reading x again from L2 is faster than keeping it. On other GPUs, not measured: as many
    heads per CTA as still give two CTAs per SM."""
    if dim <= 64:
        block_m, block_h = fit(rows, 32), fit(hidden, 32)
        return FwdConfig(block_m, block_h, fit(dim, 64), heads, resident=True, stages=1, num_warps=4)
    if not aligned or dtype == torch.float32:
        block_m = fit(rows, 64)
        return FwdConfig(block_m, fit(hidden, 32), 32, _heads(rows, block_m, heads, sms), False, 2, 8)
    if capability >= (9, 0):
        if rows >= 32_768:
            half = triton.cdiv(max(1, heads), 2)
            return FwdConfig(128, fit(hidden, 256), 64, half, resident=False, stages=3, num_warps=8)
        return FwdConfig(fit(rows, 64), fit(hidden, 128), 64, 1, resident=False, stages=4, num_warps=4)
    block_m = 128 if triton.cdiv(rows, 128) * heads >= sms else fit(rows, 64)
    block_k, stages = 32, 4
    warps = 8 if block_m == 128 else 4
    return FwdConfig(block_m, fit(hidden, 128), block_k, _heads(rows, block_m, heads, sms), False, stages, warps)


def _heads(rows: int, block_m: int, heads: int, sms: int) -> int:
    """Heads per CTA that give two CTAs per SM, if possible."""
    groups = triton.cdiv(2 * sms, max(1, triton.cdiv(rows, block_m)))
    return triton.cdiv(max(1, heads), min(max(1, heads), groups))

"""Launch configurations of heads_gmm: every choice is a pure function of the problem and the GPU. heads_backward.py has
those of the backward's GEMMs, heads_forward.py those of the forward in CUDA C++. EXPERIMENTS.md lists the alternatives
that were tried."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from .heads_backward import fit
from .heads_forward import pick_backend as pick_backend

PARAMETER_BYTES = 12  # of a row and head, in fp32
LOSS_BLOCK = 256  # rows of a CTA that combines statistics, if there are several CTAs
MAX_LOSS_BLOCK = 1024  # the most rows that a single CTA combines


@dataclass(frozen=True)
class FwdConfig:
    """A CTA computes `block_m` rows and `heads` heads, in blocks of `block_h` hidden columns, with K-blocks of
    `block_k`."""

    block_m: int
    block_h: int
    block_k: int
    heads: int
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
    """Configuration of the forward. Pure. On Hopper, measured on one H200: 128 rows by 256 columns and two heads per
    CTA for many rows, 7.70 ms for 205 000 (five heads 7.94, ten 8.36; 64 by 128 8.8); 64 by 128 and one head per CTA
    for few, 212 us for 5000 (two heads 282). On other GPUs, not measured: as many heads per CTA as still give two CTAs
    per SM. fp32 keeps all operands of a K-block in registers, and spills with 4 warps."""
    if not aligned or dtype == torch.float32 or dim <= 64:
        block_m, warps = fit(rows, 32 if dim <= 64 else 64), 8 if dtype == torch.float32 else 4
        return FwdConfig(block_m, fit(hidden, 32), fit(dim, 32), _heads(rows, block_m, heads, sms), 2, warps)
    if capability >= (9, 0):
        if rows >= 32_768:
            return FwdConfig(128, fit(hidden, 256), 64, min(heads, 2), stages=3, num_warps=8)
        return FwdConfig(fit(rows, 64), fit(hidden, 128), 64, 1, stages=4, num_warps=4)
    block_m = 128 if triton.cdiv(rows, 128) * heads >= sms else fit(rows, 64)
    return FwdConfig(
        block_m, fit(hidden, 128), 32, _heads(rows, block_m, heads, sms), 4, num_warps=8 if block_m == 128 else 4
    )


def _heads(rows: int, block_m: int, heads: int, sms: int) -> int:
    """Heads per CTA that give two CTAs per SM, if possible."""
    groups = triton.cdiv(2 * sms, max(1, triton.cdiv(rows, block_m)))
    return triton.cdiv(heads, min(heads, groups))


def pick_loss_block(rows: int) -> int:
    """Rows of a CTA that combines statistics. Pure. One CTA for few rows, so that no second kernel has to sum the
    losses: a launch takes longer. Estimated, not measured."""
    return fit(rows, MAX_LOSS_BLOCK) if rows <= MAX_LOSS_BLOCK else LOSS_BLOCK


def pick_save(save: str, heads: int, dim: int, dtype: torch.dtype) -> bool:
    """Whether the parameters of the mixture are saved for the backward. Pure. "auto" saves them if they need at most an
    eighth of the bytes of x, which is saved in any case: for ten heads of 512 columns in 16 bits, 120 bytes a row and
    1024 of x. Without them the backward recomputes the forward's GEMM: by the records of one H200 it then takes 1.3 to
    1.4 times as long from 5000 rows on."""
    small = 8 * PARAMETER_BYTES * heads <= dim * dtype.itemsize
    return save == "parameters" or (save == "auto" and small)


def pick_incoming_rows(heads: int) -> int:
    """Rows of a CTA that computes the gradients of the parameters: some 1024 components, four for each thread of 8
    warps; with eight it spills. Pure."""
    return max(1, 1024 // triton.next_power_of_2(heads))

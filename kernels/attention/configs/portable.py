"""Tiles of the Triton kernels. Pure functions of the head dimension D, the mask, the dtype and the compute capability.

`banded`: there is a causal mask or a window. block_d: D padded to a power of two. Each tile is the largest tile without
a register spill under Triton 3.6 and 3.7 (EXPERIMENTS.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True)
class Config:
    """A CTA of `num_warps` warps loops over tiles of block_m queries by block_n keys, in `num_stages` pipeline stages.
    block_d is the head dimension padded to a power of two."""

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int


def pick_fwd_config(dim: int, banded: bool, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    """128 queries by 64 keys up to D = 128 (128 keys up to D = 32), 64 by 64 beyond."""
    block_d = padded(dim)
    if dtype == torch.float32:
        return _fp32(block_d, capability)
    if block_d <= 128:
        return Config(128, 128 if block_d <= 32 else 64, block_d, 8, 3)
    return Config(64, 64, block_d, 8, 2)


def pick_split_config(rows: int, dim: int, banded: bool, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    """`rows`: queries of all query heads of a KV head. The tile has as many, rounded up to 16, 32, 64 or 128.

    16 rows are bound by memory: they take 128 keys a tile up to D = 64 on sm_90; sm_80 lacks the shared memory.
    Record: "Split" in EXPERIMENTS.md (H200)."""
    block_m, block_d = block_of_rows(rows), padded(dim)
    if block_m == 128 or dtype == torch.float32:
        return pick_fwd_config(dim, banded, dtype, capability)
    if block_m == 16 and block_d <= 64 and capability >= (9, 0):
        return Config(block_m, 128, block_d, 4, 3)
    return Config(block_m, 64 if block_d <= 128 else 32, block_d, 4, 3 if block_d <= 128 else 2)


def pick_dkdv_config(dim: int, banded: bool, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    """The tile of the kernel for dK and dV, which accumulates block_n keys and loops over tiles of block_m queries."""
    block_d = padded(dim)
    if dtype == torch.float32:
        return _fp32(block_d, capability)
    if block_d == 256:
        return Config(32, 32, block_d, 8, 2)
    if block_d == 128:
        # A mask takes registers: 32 by 128 would spill.
        return Config(64, 64, block_d, 8, 2) if banded or capability < (9, 0) else Config(32, 128, block_d, 8, 2)
    return Config(64 if capability >= (9, 0) else 32, 128, block_d, 8, 2)


def pick_dq_config(dim: int, banded: bool, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    """The tile of the kernel for dQ, which accumulates block_m queries and loops over tiles of block_n keys."""
    block_d = padded(dim)
    if dtype == torch.float32:
        return _fp32(block_d, capability)
    if block_d == 256:
        return Config(64, 32, block_d, 8, 2)
    if capability < (9, 0) and block_d != 64:
        return Config(64, 64 if block_d == 128 else 32, block_d, 4, 2)
    return Config(128, 64, block_d, 8, 2)


def pick_fused_config(dim: int, banded: bool, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    """The tile of the fused kernel: many keys, as dQ is read and written once for each tile of keys."""
    block_d = padded(dim)
    if dtype == torch.float32:
        return _fp32(block_d, capability)
    if block_d == 256:
        return Config(16, 32, block_d, 8, 2) if capability >= (9, 0) else Config(16, 16, block_d, 8, 2)
    if capability >= (9, 0):
        return Config(64, 128, block_d, 8, 2) if block_d <= 64 else Config(16, 64, block_d, 8, 2)
    # 32 rows at D = 16 spill 12 bytes under Triton 3.7.
    return Config(32 if block_d in (32, 64) else 16, 64, block_d, 8, 2)


def pick_fused_splits(kv_heads: int, tiles: int, sms: int) -> int:
    """CTAs that split the tiles of keys of a KV head: as many as run at a time, at most 16, as each needs an fp32 dQ of
    its own in device memory."""
    return max(1, min(sms // kv_heads, tiles, 16))


def _fp32(block_d: int, capability: tuple[int, int]) -> Config:
    """On the FMA units, without tensor cores. A thread holds entire rows of both operands in registers, so wider tiles
    spill. All kernels have the same tile, so that the backward rounds scores as the forward did."""
    if capability < (8, 0):
        return Config(32, 32, block_d, 4, 1)  # the interpreter: fewer tiles take less time, and nothing spills
    return Config(16, 16, block_d, 4 if block_d <= 32 else 8, 1)


def precision(dtype: torch.dtype) -> str:
    """`input_precision` of tl.dot: "ieee" for fp32, which TF32 would round."""
    return "ieee" if dtype == torch.float32 else "tf32"


def padded(dim: int) -> int:
    """block_d: the width of a tile for head dimension `dim`."""
    return max(16, triton.next_power_of_2(dim))


def block_of_rows(rows: int) -> int:
    """Rows of a tile of the split forward: 16, 32, 64 or 128."""
    return max(16, min(128, 1 << (rows - 1).bit_length()))

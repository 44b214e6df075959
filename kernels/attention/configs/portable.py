"""Tiles of the Triton kernels. Pure functions of the head's width, mask, dtype and compute capability.

Each is the largest tile without a register spill under Triton 3.6 and 3.7 (EXPERIMENTS.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True)
class Config:
    """A CTA of `num_warps` warps goes over tiles of block_m queries by block_n keys, `num_stages` of them in flight.
    block_d is the head's width padded to a power of two."""

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int


def pick_fwd_config(dim: int, banded: bool, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    block_d = padded(dim)
    if dtype == torch.float32:
        return _fp32(block_d, capability)
    if block_d <= 128:
        return Config(128, 128 if block_d <= 32 else 64, block_d, 8, 3)
    return Config(64, 64, block_d, 8, 2)


def pick_split_config(rows: int, dim: int, banded: bool, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    """Few rows are bound by memory: 128 keys a tile up to D = 64 on sm_90, for which sm_80 has no room. Record: "Split"
    in EXPERIMENTS.md (H200)."""
    block_m, block_d = block_of_rows(rows), padded(dim)
    if block_m == 128 or dtype == torch.float32:
        return pick_fwd_config(dim, banded, dtype, capability)
    if block_m == 16 and block_d <= 64 and capability >= (9, 0):
        return Config(block_m, 128, block_d, 4, 3)
    return Config(block_m, 64 if block_d <= 128 else 32, block_d, 4, 3 if block_d <= 128 else 2)


def pick_dkdv_config(dim: int, banded: bool, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
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
    block_d = padded(dim)
    if dtype == torch.float32:
        return _fp32(block_d, capability)
    if block_d == 256:
        return Config(64, 32, block_d, 8, 2)
    if capability < (9, 0) and block_d != 64:
        return Config(64, 64 if block_d == 128 else 32, block_d, 4, 2)
    return Config(128, 64, block_d, 8, 2)


def pick_fused_config(dim: int, banded: bool, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    """Many keys, because dQ is read and written once for each tile of them."""
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
    """Into how many CTAs the tiles of keys of each key head are shared out: as many as there is room for at a time, for
    each costs a dQ in fp32, and never more than 16."""
    return max(1, min(sms // kv_heads, tiles, 16))


def _fp32(block_d: int, capability: tuple[int, int]) -> Config:
    """Without tensor cores. Each thread has whole rows of both factors in registers, so wider tiles spill. The same
    tile everywhere, so that the backward rounds scores as the forward did."""
    if capability < (8, 0):
        return Config(32, 32, block_d, 4, 1)  # the interpreter, where tiles cost time and registers nothing
    return Config(16, 16, block_d, 4 if block_d <= 32 else 8, 1)


def precision(dtype: torch.dtype) -> str:
    """Of matrix products: that of fp32 for fp32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def padded(dim: int) -> int:
    """The width of a tile for heads of that width."""
    return max(16, triton.next_power_of_2(dim))


def block_of_rows(rows: int) -> int:
    """Rows of a tile of the split forward: 16, 32, 64 or 128."""
    return max(16, min(128, 1 << (rows - 1).bit_length()))

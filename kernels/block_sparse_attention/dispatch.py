"""With which tiles the kernels run. Pure functions of sizes, dtype and GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True)
class Config:
    """A CTA of `num_warps` warps goes over tiles of block_m queries by block_n keys, `num_stages` of them in flight.
    Both divide the size of the mask's blocks. block_d is the head's width padded to a power of two."""

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int


# The largest tiles without a register spill under Triton 3.6 and 3.7, but for a few bytes of which the README
# speaks (what was tried). On Hopper eight warps have at least 128 rows, four at least 64: with fewer, groups of
# four warps compute the same scores twice. Causal kernels have a second loop, so that they may want tiles of their own.


def pick_fwd_config(dim: int, block: int, causal: bool, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    block_d, hopper = padded(dim), capability >= (9, 0)
    if dtype == torch.float32:
        return _fp32(block_d, block, capability)
    if block_d == 256:
        return Config(128, 32, block_d, 8, 3) if hopper and block == 128 else Config(64, 64, block_d, 8, 2)
    if block == 64:
        return Config(64, 64, block_d, 4, 3 if hopper or block_d < 128 else 2)
    if block_d == 128:
        return Config(128, 64 if hopper else 32, block_d, 8, 3)
    return Config(128, 128 if block_d <= 32 else 64, block_d, 8, 3)


def pick_dkdv_config(dim: int, block: int, causal: bool, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    block_d, hopper = padded(dim), capability >= (9, 0)
    if dtype == torch.float32:
        return _fp32(block_d, block, capability)
    if block_d == 256:
        return Config(32, 32, block_d, 8, 2)
    if block_d == 128:
        if not hopper:
            return Config(64, 64, block_d, 8, 2)
        return Config(32, 128, block_d, 8, 2) if block == 128 else Config(32, 64, block_d, 4, 2)
    block_m = 64 if hopper else 32
    return Config(block_m, 128, block_d, 8, 2) if block == 128 else Config(block_m, 64, block_d, 4, 2)


def pick_dq_config(dim: int, block: int, causal: bool, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    block_d, hopper = padded(dim), capability >= (9, 0)
    if dtype == torch.float32:
        return _fp32(block_d, block, capability)
    if not hopper:
        if block_d >= 128:
            return Config(64, 64 if block_d == 128 else 32, block_d, 8, 2)
        if block_d <= 32:
            return Config(64, 32, block_d, 4, 2)
    block_n = 32 if block_d == 256 else 64
    return Config(128, block_n, block_d, 8, 2) if block == 128 else Config(64, block_n, block_d, 4, 2)


def _fp32(block_d: int, block: int, capability: tuple[int, int]) -> Config:
    """Without tensor cores. Each thread has whole rows of both factors in registers, so wider tiles spill. The same
    tile everywhere, so that the backward rounds scores as the forward did."""
    if capability < (8, 0):
        return Config(block, block, block_d, 4, 1)  # the interpreter, where tiles cost time and registers nothing
    return Config(16, 16, block_d, 4 if block_d <= 32 else 8, 1)


def precision(dtype: torch.dtype) -> str:
    """Of matrix products: that of fp32 for fp32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def padded(dim: int) -> int:
    """The width of a tile for heads of that width."""
    return max(16, triton.next_power_of_2(dim))

"""How gelu's kernels are launched: a pure function of the problem and the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

EVICT_LAST_BYTES = 20e6  # a tensor


@dataclass(frozen=True)
class Config:
    """Each CTA has a tile of `block_m` rows by `block_n` columns. `eviction` is the L2 policy of the loads."""

    block_m: int
    block_n: int
    num_warps: int
    eviction: str


def pick_config(
    rows: int, cols: int, dtype: torch.dtype, reads: int, transposed: bool, capability: tuple[int, int]
) -> Config:
    """Configuration of both kernels; `reads` is how many tensors are read. Pure.

    Tiles of 2048 elements, of at most 512 columns where there are rows, with 4 warps where one tensor of a 16-bit dtype
    is read and 8 otherwise. Transposed tensors: a square tile, because it crosses shared memory. Tensors of more than
    EVICT_LAST_BYTES are loaded with evict_last: what leaves L2 in their place is the output, early and in order.
    Record: EXPERIMENTS.md, "Tiles"; no other tile that was tried is more than 0.6 % faster.
    """
    if transposed:
        return Config(64, 64, 8, "")
    block_n = 2048 if rows == 1 else min(triton.next_power_of_2(cols), 512)
    num_warps = 4 if reads == 1 and dtype.itemsize == 2 else 8
    eviction = "evict_last" if rows * cols * dtype.itemsize > EVICT_LAST_BYTES else ""
    return Config(2048 // block_n, block_n, num_warps, eviction)

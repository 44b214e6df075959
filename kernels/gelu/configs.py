"""How gelu's kernels are launched: a pure function of the problem and the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

EVICT_LAST_BYTES = 20e6  # per tensor


@dataclass(frozen=True)
class Config:
    """One CTA per tile of `block_m` rows by `block_n` columns. `eviction` is the L2 policy of the loads."""

    block_m: int
    block_n: int
    num_warps: int
    eviction: str


def pick_config(
    rows: int, cols: int, dtype: torch.dtype, reads: int, transposed: bool, capability: tuple[int, int]
) -> Config:
    """Configuration of the forward kernel (`reads` = 1 tensor) or of the backward kernel (`reads` = 2), on rows x cols
    as `coalesce` in layout.py returns them. Pure.

    A tile has 2048 elements of a single row, or of several rows with up to 512 columns each. A CTA has 4 warps in the
    forward of 16-bit dtypes and 8 otherwise. Transposed tensors have a square tile, because Triton converts its layout
    through shared memory. Tensors of more than EVICT_LAST_BYTES are loaded with evict_last: L2 then evicts lines of the
    output first, so that these are written back early and in order. Record: EXPERIMENTS.md, "Tiles"; no other tile that
    was tried is more than 0.6 % faster.
    """
    if transposed:
        return Config(64, 64, 8, "")
    block_n = 2048 if rows == 1 else min(triton.next_power_of_2(cols), 512)
    num_warps = 4 if reads == 1 and dtype.itemsize == 2 else 8
    eviction = "evict_last" if rows * cols * dtype.itemsize > EVICT_LAST_BYTES else ""
    return Config(2048 // block_n, block_n, num_warps, eviction)

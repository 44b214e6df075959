"""How swiglu's kernels are launched: every choice is a pure function of the problem and the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

EVICT_LAST_BYTES = 20e6  # a tensor
VECTOR = 8  # elements of 16 bits in 16 bytes
WARP = 32  # lanes
MIN_LANES_BUSY = 0.7


@dataclass(frozen=True)
class Config:
    """Each CTA has a tile of `block_m` rows by `block_n` columns. `eviction` is the L2 policy of the loads."""

    block_m: int
    block_n: int
    num_warps: int
    eviction: str


@dataclass(frozen=True)
class UnalignedConfig:
    """A CTA of `threads`; a lane has `slots` vectors of 16 bytes of each tensor. Registers are limited so that
    `resident` CTAs fit on an SM. `eviction` is the L2 policy of the loads."""

    threads: int
    slots: int
    resident: int
    eviction: str


def pick_config(
    rows: int, cols: int, dtype: torch.dtype, aligned: bool, transposed: bool, capability: tuple[int, int]
) -> Config:
    """Configuration of both Triton kernels. Pure.

    A single row: 2048 elements a CTA. Rows: 4096, in up to 1024 columns. Rows that are not aligned: 2048 in up to 512
    columns, because every element is an access of its own and padding costs more. Transposed tensors: a square tile,
    because it crosses shared memory. Tensors of more than EVICT_LAST_BYTES that are aligned are loaded with evict_last:
    what leaves L2 in their place is the output, early and in order. Record: EXPERIMENTS.md, "Tiles".
    """
    if transposed:
        return Config(64, 64, 8, "")
    if not aligned:
        block_n = min(triton.next_power_of_2(cols), 512)
        return Config(2048 // block_n, block_n, 4, "")
    eviction = "evict_last" if rows * cols * dtype.itemsize > EVICT_LAST_BYTES else ""
    if rows == 1:
        return Config(1, 2048, 8, eviction)
    block_n = min(triton.next_power_of_2(cols), 1024)
    return Config(4096 // block_n, block_n, 8, eviction)


def pick_unaligned_config(
    rows: int, cols: int, dtype: torch.dtype, gradients: int, capability: tuple[int, int]
) -> UnalignedConfig:
    """Configuration of unaligned.cu, of the forward or with 1 or 2 gradients. Pure.

    Small CTAs, since one that ends makes room for the next sooner, and as many as 32 registers forward and 48 backward
    allow: 64 and 40 warps, 64 and 60 KB in flight on an SM. Record: EXPERIMENTS.md, "Rows on any boundary".
    """
    eviction = "evict_last" if rows * cols * dtype.itemsize > EVICT_LAST_BYTES else ""
    return UnalignedConfig(128, 1, 10 if gradients else 16, eviction)


def fills_warps(cols: int, gradients: int) -> bool:
    """Whether unaligned.cu is faster than Triton on rows of `cols` elements that are not aligned. Pure.

    A warp has vectors of one row alone. With fewer than MIN_LANES_BUSY of its lanes at work its instructions take
    longer than its bytes: from 538 columns on they always suffice, and at some narrower widths.
    """
    return cols >= MIN_LANES_BUSY * pieces(cols, 1, gradients == 2) * WARP * VECTOR


def pieces(cols: int, slots: int, both: bool) -> int:
    """Warps to a row of `cols` elements, a lane of which has `slots` vectors. `both` gradients begin on boundaries of
    their own: there may be a vector before the row, and the last lane of a warp writes nothing."""
    vectors = -(-(cols + VECTOR - 1) // VECTOR) + both  # at worst the first holds one element of the row
    return -(-vectors // ((WARP - both) * slots))

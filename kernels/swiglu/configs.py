"""How swiglu's kernels are launched: every choice is a pure function of the problem and the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

EVICT_LAST_BYTES = 20e6  # per tensor
VECTOR = 8  # elements of 16 bits in 16 bytes
WARP = 32  # lanes
MAX_ROW = 32768  # columns that one CTA keeps in registers
MIN_LANES_BUSY = 0.7


@dataclass(frozen=True)
class Config:
    """One CTA per tile of `block_m` rows by `block_n` columns. `eviction` is the L2 policy of the loads."""

    block_m: int
    block_n: int
    num_warps: int
    eviction: str


@dataclass(frozen=True)
class RowsConfig:
    """One CTA per `block_m` whole rows of up to block_n + tail columns, kept in registers until their largest magnitude
    is known."""

    block_m: int
    block_n: int
    tail: int
    num_warps: int


@dataclass(frozen=True)
class UnalignedConfig:
    """CTAs of `threads` threads, where a thread computes `slots` vectors of 16 bytes of the output. Registers are
    limited so that `resident` CTAs fit on an SM. `eviction` is the L2 policy of the loads."""

    threads: int
    slots: int
    resident: int
    eviction: str


def pick_rows_config(cols: int) -> RowsConfig:
    """Configuration of swiglu_fp8 with granularity "row". Pure.

    A tile has 2048 elements for up to 2048 columns. Above that it is one row, in two parts where that masks fewer
    lanes: 11008 columns are 8192 and 4096. A thread has 16 to 32 elements and 32 to 51 registers, so that an SM has two
    or three CTAs (one with 32768 columns), of which one loads while another stores. From the ahead-of-time build
    (EXPERIMENTS.md); not measured yet.
    """
    block_n = triton.next_power_of_2(cols)
    if block_n <= 2048:
        return RowsConfig(2048 // block_n, block_n, 0, 4)
    tail = max(4, triton.next_power_of_2(cols - block_n // 2))  # encode converts four elements at a time
    if tail <= block_n // 4:
        return RowsConfig(1, block_n // 2, tail, min(32, block_n // 1024))
    return RowsConfig(1, block_n, 0, min(32, block_n // 512))


def pick_config(
    rows: int, cols: int, dtype: torch.dtype, aligned: bool, transposed: bool, capability: tuple[int, int]
) -> Config:
    """Configuration of both Triton kernels, on rows x cols as `coalesce` in layout.py returns them. Pure.

    A tile has 2048 elements of a single row, or 4096 of aligned rows with up to 1024 columns. For unaligned rows it has
    2048 with up to 512 columns: these are accessed element by element, so that masked lanes cost more. Transposed
    tensors have a square tile, because Triton converts its layout through shared memory. Aligned tensors of more than
    EVICT_LAST_BYTES are loaded with evict_last: L2 then evicts lines of the output first, so that these are written
    back early and in order. Record: EXPERIMENTS.md, "Tiles".
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
    """Configuration of unaligned.cu for the forward (`gradients` 0) or a backward with 1 or 2 gradients. Pure.

    CTAs are small, so that the next one starts sooner after one exits. As many are resident as 32 registers per thread
    allow in the forward and 48 in the backward: 64 and 40 warps, 64 and 60 KB in flight on an SM. Record:
    EXPERIMENTS.md, "Rows on any boundary".
    """
    eviction = "evict_last" if rows * cols * dtype.itemsize > EVICT_LAST_BYTES else ""
    return UnalignedConfig(128, 1, 10 if gradients else 16, eviction)


def fills_warps(cols: int, gradients: int) -> bool:
    """Whether unaligned.cu is faster than Triton on unaligned rows of `cols` elements. Pure.

    A warp computes vectors of a single row. Where the share of active lanes is below MIN_LANES_BUSY the kernel is bound
    by instruction issue and not by memory. The share is sufficient from 538 columns on, and at some narrower widths.
    """
    return cols >= MIN_LANES_BUSY * warps_per_row(cols, 1, gradients == 2) * WARP * VECTOR


def warps_per_row(cols: int, slots: int, both: bool) -> int:
    """Warps per row of `cols` elements, with `slots` vectors per lane. With `both` gradients, whose alignments differ,
    one more vector may be needed before the row, and the last lane of a warp writes nothing."""
    vectors = -(-(cols + VECTOR - 1) // VECTOR) + both  # worst case: the first vector holds one element of the row
    return -(-vectors // ((WARP - both) * slots))

"""How each kernel of fp8 is launched: every choice is a pure function of the problem and the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

BLOCK = 128  # the side of a block that has a scale of its own
MAX_ROW = 32768  # the widest row that is kept in the registers of one CTA
VECTOR = 16  # elements of a store of data
ODD_ROW = 1024  # the least tile of a row that begins on no boundary and has a CTA of its own
FLAT = 4096  # the tile of a tensor whose rows do not matter
EVICT_LAST_BYTES = 100e6  # twice the L2 of an H100 or H200


@dataclass(frozen=True)
class Config:
    """A CTA for each tile of block_m by block_n elements; where the largest of a row is sought, a tile is block_m whole
    rows, or one row in chunks if block_n < dim. `eviction` is the L2 policy of the loads of x."""

    block_m: int
    block_n: int
    num_warps: int
    eviction: str


@dataclass(frozen=True)
class DequantizeConfig:
    """A CTA for each tile."""

    block_m: int
    block_n: int
    num_warps: int


def pick_config(
    granularity: str,
    transpose: bool,
    source: str,
    rows: int,
    dim: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
) -> Config:
    """The configuration of one call, the same for both passes where there are two. Pure.

    source  of the scales: "tile", what a CTA reads itself; "amax", a pass before; "given", by the caller
    """
    eviction = "evict_last" if rows * dim * dtype.itemsize > EVICT_LAST_BYTES else ""
    if source == "tile" and granularity == "row":
        return _row_config(dim, eviction)
    # The predicates of a ragged tile need registers: with 64 elements a thread it would spill hundreds of bytes.
    ragged = rows % BLOCK or dim % BLOCK
    if transpose and "128" in granularity:
        return Config(BLOCK, BLOCK, 16 if ragged else 8, eviction)
    if granularity == "128x128":
        return Config(BLOCK, BLOCK, 32 if ragged else 8, eviction)
    if granularity == "column" and not (transpose or ragged):
        return Config(BLOCK, BLOCK // 2, 4, eviction)
    if transpose or granularity == "column":
        return Config(64 if ragged else BLOCK, BLOCK, 16 if ragged else 8, eviction)
    if granularity == "1x128":
        return Config(32, BLOCK, 8, eviction)
    block_n = max(BLOCK, min(triton.next_power_of_2(dim), FLAT))
    return Config(FLAT // block_n, block_n, 8, eviction)


def _row_config(dim: int, eviction: str) -> Config:
    """Sixteen elements a thread, and thirty-two where a row is so wide that there are no more threads. Rows that are
    not whole vectors begin each on another boundary: a CTA for each, but where they are so short that it would idle.
    """
    block_n = max(32, triton.next_power_of_2(dim))
    if block_n > MAX_ROW:
        return Config(1, 16384, 32, "evict_last")
    if dim % VECTOR and block_n >= ODD_ROW:
        return Config(1, block_n, max(2, min(32, block_n // 512)), eviction)
    block_m = max(1, 2048 // block_n)
    return Config(block_m, block_n, max(4, min(32, block_m * block_n // 512)), eviction)


def pick_dequantize_config(
    granularity: str, rows: int, dim: int, dtype: torch.dtype, capability: tuple[int, int]
) -> DequantizeConfig:
    """The configuration of dequantize. Pure. `dtype` is that of the result."""
    block_n = BLOCK if "128" in granularity else max(BLOCK, min(triton.next_power_of_2(dim), 1024))
    return DequantizeConfig(max(1, FLAT // block_n), block_n, 8)

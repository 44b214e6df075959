"""How each kernel of fp8 is launched: every choice is a pure function of the problem and the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

BLOCK = 128  # side of a block with its own scale
MAX_ROW = 32768  # elements of the widest row that stays in the registers of a CTA
VECTOR = 16  # elements of a vector store of data
ODD_ROW = 1024  # unaligned rows have one CTA each if a tile has at least this many elements
FLAT = 4096  # elements of a tile where the result does not depend on rows
EVICT_LAST_BYTES = 100e6  # a larger x is loaded with evict_last; twice the L2 of an H100 or H200


@dataclass(frozen=True)
class Config:
    """One CTA per tile of block_m by block_n elements. With granularity "row" a tile is block_m entire rows, or one row
    in chunks of block_n if block_n < dim. `eviction` is the L2 policy of the loads of x."""

    block_m: int
    block_n: int
    num_warps: int
    eviction: str


@dataclass(frozen=True)
class DequantizeConfig:
    """One CTA per tile."""

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

    source  of the scales: "tile", computed by the CTA that uses them; "amax", by an earlier pass; "given" by the caller

    - "row": entire rows, 16 elements per thread (`_row_config`).
    - Blocks of 128 and transposed copies: tiles of 128 by 128 or, if partial and without blocks, 64 by 128. With
      partial tiles at least twice the warps, because predicates need registers.
    - "column": 128 by 64 with 4 warps. "1x128": 32 by 128. "tensor": 4096 elements.
    - eviction: evict_last above 100 MB.

    Record: `reports/h200` (bench and tune of fp8); the comparisons are in EXPERIMENTS.md.
    """
    eviction = "evict_last" if rows * dim * dtype.itemsize > EVICT_LAST_BYTES else ""
    if source == "tile" and granularity == "row":
        return _row_config(dim, eviction)
    # Predicates of a partial tile need registers: with 64 elements a thread they would spill hundreds of bytes.
    partial = rows % BLOCK or dim % BLOCK
    if transpose and "128" in granularity:
        return Config(BLOCK, BLOCK, 16 if partial else 8, eviction)
    if granularity == "128x128":
        return Config(BLOCK, BLOCK, 32 if partial else 8, eviction)
    if granularity == "column" and not (transpose or partial):
        return Config(BLOCK, BLOCK // 2, 4, eviction)
    if transpose or granularity == "column":
        return Config(64 if partial else BLOCK, BLOCK, 16 if partial else 8, eviction)
    if granularity == "1x128":
        return Config(32, BLOCK, 8, eviction)
    block_n = max(BLOCK, min(triton.next_power_of_2(dim), FLAT))
    return Config(FLAT // block_n, block_n, 8, eviction)


def _row_config(dim: int, eviction: str) -> Config:
    """16 elements per thread; 32 where a row would need more than 1024 threads. Rows whose width is not a multiple of
    VECTOR are unaligned and have one CTA each, unless the row is too short for a CTA."""
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
    """The configuration of dequantisation: tiles of 4096 elements, with 128 columns for blocks of 128, otherwise up to
    1024. Pure. `dtype` is that of the result. Not tuned: no case of dequantize is benched."""
    block_n = BLOCK if "128" in granularity else max(BLOCK, min(triton.next_power_of_2(dim), 1024))
    return DequantizeConfig(max(1, FLAT // block_n), block_n, 8)

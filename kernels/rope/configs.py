"""How the kernel of rope is launched: a pure function of the problem and the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

EVICT_LAST_BYTES = 100e6  # twice the L2 of an H100 or H200


@dataclass(frozen=True)
class Config:
    """A CTA for each tile of `rows` rows (a row is one head of one token): of q, `q_heads` heads of rows / q_heads
    tokens; of k, `k_heads` of rows / k_heads. `eviction` is the L2 policy of the loads of q and k."""

    rows: int
    q_heads: int
    k_heads: int
    num_warps: int
    eviction: str


def pick_config(
    batch: int,
    seq: int,
    heads: tuple[int, int],
    heads_outer: tuple[bool, bool],
    dims: tuple[int, int],
    dtype: torch.dtype,
    capability: tuple[int, int],
) -> Config:
    """Configuration for heads of q and of k (0: no k), which are `heads_outer` if their stride is larger than that of
    the tokens. `dims` are the columns of a head that are rotated and those that are copied. Pure.

    - rows: as many as give a thread 16 elements of both halves of a row, a copied column counting half; at most 128.
    - heads of a tile: as many as leave at most an eighth of the rows as padding; at most 4 where heads are outer.
    - eviction: evict_last from 100 MB on.

    Record: `reports/h200` (bench and tune of rope); the comparisons behind each rule are in EXPERIMENTS.md.
    """
    width = triton.next_power_of_2(dims[0]) + (triton.next_power_of_2(dims[1]) // 2 if dims[1] else 0)
    rows = min(128, 1 << ((4096 // width).bit_length() - 1))
    # A tile has no more tokens than there are, or else most CTAs of the other tensor would have no token.
    most, least = (4 if outer else rows for outer in heads_outer), rows // min(rows, triton.next_power_of_2(seq))
    q_heads, k_heads = (max(least, min(tile_heads(n, rows), m)) for n, m in zip(heads, most, strict=True))
    eviction = "evict_last" if batch * seq * sum(heads) * sum(dims) * dtype.itemsize > EVICT_LAST_BYTES else ""
    return Config(rows, q_heads, k_heads, 8, eviction)


def tile_heads(heads: int, rows: int) -> int:
    """The most heads, a power of two, in tiles of which at most an eighth of the rows is padding."""
    blocks = (1 << n for n in range(rows.bit_length() - 1, 0, -1))
    return next((block for block in blocks if 8 * (-heads % block) <= heads), 1)

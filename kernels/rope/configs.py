"""How the kernel of rope is launched: a pure function of the problem and the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

EVICT_LAST_BYTES = 100e6  # twice the L2 of an H100 or H200


@dataclass(frozen=True)
class Config:
    """One CTA per tile of `rows` rows, where a row is one head of one token. A tile of q is rows / q_heads tokens by
    `q_heads` heads; a tile of k is rows / k_heads tokens by `k_heads` heads. `eviction` is the L2 policy of the loads
    of q and k."""

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
    """Configuration of the kernel. `heads` are the numbers of heads of q and of k (0: no k). heads_outer: the stride of
    heads is larger than that of tokens, as in [B, heads, S, D]. `dims` are the numbers of columns of a head that are
    rotated and that are copied. Pure.

    - warps: 8, always.
    - rows: such that a thread has 16 rotated elements, where a copied column counts half; at most 128.
    - heads of a tile: the largest power of two with at most an eighth of padding; at most 4 if heads_outer, so that the
      other rows are consecutive tokens; at least so many that a tile has no more tokens than the sequence.
    - eviction: evict_last above 100 MB of q and k.

    Record: `reports/h200` (bench and tune of rope); the comparisons behind each rule are in EXPERIMENTS.md.
    """
    width = triton.next_power_of_2(dims[0]) + (triton.next_power_of_2(dims[1]) // 2 if dims[1] else 0)
    rows = min(128, 1 << ((4096 // width).bit_length() - 1))
    # Tiles of q and k are launched in groups, with the tokens of the tile that has more of them (plans.py). With more
    # tokens than the sequence has, most CTAs of the other tensor would have no work.
    max_heads, min_heads = (
        (4 if outer else rows for outer in heads_outer),
        rows // min(rows, triton.next_power_of_2(seq)),
    )
    q_heads, k_heads = (
        max(min_heads, min(tile_heads(n, rows), most)) for n, most in zip(heads, max_heads, strict=True)
    )
    eviction = "evict_last" if batch * seq * sum(heads) * sum(dims) * dtype.itemsize > EVICT_LAST_BYTES else ""
    return Config(rows, q_heads, k_heads, 8, eviction)


def tile_heads(heads: int, rows: int) -> int:
    """The largest power of two, at most `rows`, that pads `heads` by at most an eighth."""
    blocks = (1 << n for n in range(rows.bit_length() - 1, 0, -1))
    return next((block for block in blocks if 8 * (-heads % block) <= heads), 1)

"""Which tensors move between ranks, by their bytes, and on how many streams a rank computes."""

from __future__ import annotations

from collections.abc import Sequence

#: Most bytes of keys and values of a head in one call, half of an H200's L2.
SEGMENT_BYTES = 32 << 20
#: Tiles of 128 queries below which two chains would leave SMs without work: three waves of an H200's 132 SMs each.
CHAIN_TILES = 2 * 3 * 132


def pick_chains(queries: int, heads: int, independent: int) -> int:
    """Returns the number of chains of a rank's calls (`chains.py`). `heads` of all batches; `independent`: the most
    parts possible. Causal 16 384, 32 heads: forward 1.512 ms with two and 1.610 with one, backward 4.91 and 5.03; no
    difference at 65 536 (EXPERIMENTS.md). The limit follows from the number of tiles, and was not measured."""
    return 2 if independent > 1 and queries * heads >= 128 * CHAIN_TILES else 1


def pick_segment(dim: int, size: int) -> int:
    """Returns the most keys of one call of `attention_partial`. All tiles of a wave read the keys of a few heads. If
    these fit L2, they are read from memory once per call, which leaves more power for the GEMMs. 32 768 queries of 32
    heads on 524 288 keys of 8, D 128 in bf16, take 393 ms in segments of 65 536 keys and 425 ms in one call (one of two
    H200, EXPERIMENTS.md)."""
    return max(1, SEGMENT_BYTES // (2 * dim * size))


def pick_rotation(
    q_lengths: Sequence[int], k_lengths: Sequence[int], heads: int, kv_heads: int, dim: int, size: int
) -> str:
    """Returns "keys" or "queries", whichever moves fewer bytes in the forward.

    For each key and head, 2·D elements are moved: the key and the value. For each query and head, the query is sent,
    and a partial output and its lse are sent back: D elements, and D + 1 in fp32. The choice depends on total lengths,
    so all ranks make the same one. If bytes are equal it is "keys", which needs no pass that merges outputs.
    """
    keys = sum(k_lengths) * kv_heads * 2 * dim * size
    queries = sum(q_lengths) * heads * (dim * size + 4 * (dim + 1))
    return "queries" if queries < keys else "keys"

"""What moves between the ranks, by the bytes of it, and on how many streams a rank computes."""

from __future__ import annotations

from collections.abc import Sequence

#: Bytes of keys and values of a head that one call goes over, half of an H200's L2.
SEGMENT_BYTES = 32 << 20
#: Tiles of 128 queries below which two chains would leave SMs without work: three waves of an H200's 132 SMs each.
CHAIN_TILES = 2 * 3 * 132


def pick_chains(queries: int, heads: int, independent: int) -> int:
    """Into how many chains a rank's calls are cut (`chains.py`). `heads` of all batches; `independent`: how many parts
    there could be. Causal 16 384, 32 heads, takes 1.512 ms forward in two and 1.610 in one, and 4.91 and 5.03 backward;
    65 536 are alike (EXPERIMENTS.md). The limit is by the number of tiles, not measured."""
    return 2 if independent > 1 and queries * heads >= 128 * CHAIN_TILES else 1


def pick_segment(dim: int, size: int) -> int:
    """How many keys one call of `attention_partial` goes over. All tiles of a wave read the keys of a few heads: where
    these fit into L2 they are read from memory once a call, and power goes to products. 32 768 queries of 32 heads on
    524 288 keys of 8, D 128 in bf16, take 393 ms in segments of 65 536 keys and 425 ms in one call (one of two H200,
    EXPERIMENTS.md)."""
    return max(1, SEGMENT_BYTES // (2 * dim * size))


def pick_rotation(
    q_lengths: Sequence[int], k_lengths: Sequence[int], heads: int, kv_heads: int, dim: int, size: int
) -> str:
    """ "keys" or "queries": which of the two has fewer bytes to be moved in the forward.

    Of a key and head its own row and that of its value are moved, 2·D numbers. Of a query and head its row goes to the
    other ranks and an output and its log-sum-exp in fp32 come back, D numbers and D + 1 in fp32. The rule goes by the
    whole lengths, so that all ranks come to the same choice; where the two are equal it is "keys", which needs no pass
    that merges outputs.
    """
    keys = sum(k_lengths) * kv_heads * 2 * dim * size
    queries = sum(q_lengths) * heads * (dim * size + 4 * (dim + 1))
    return "queries" if queries < keys else "keys"

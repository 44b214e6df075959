"""What moves between the ranks, by the bytes of it, and on how many streams a rank computes."""

from __future__ import annotations

from collections.abc import Sequence

#: Tiles of 128 queries below which two chains would leave SMs without work: three waves of an H200's 132 SMs each.
CHAIN_TILES = 2 * 3 * 132


def pick_chains(queries: int, heads: int, independent: int) -> int:
    """Into how many chains a rank's calls are cut (`chains.py`). `heads` of all batches; `independent`: how many parts
    there could be. A rule from the number of tiles, not from a record."""
    return 2 if independent > 1 and queries * heads >= 128 * CHAIN_TILES else 1


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

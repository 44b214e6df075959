"""What moves between the ranks, by the bytes of it."""

from __future__ import annotations

from collections.abc import Sequence


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

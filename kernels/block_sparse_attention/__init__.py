"""Attention over the blocks of scores that a mask keeps, forward and backward; `masks` and `gate` make such masks."""

from .op import BlockIndex, block_index, block_sparse_attention

__all__ = ["BlockIndex", "block_index", "block_sparse_attention"]

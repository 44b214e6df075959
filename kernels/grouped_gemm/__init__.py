"""Matrix products of ragged groups of rows, each with a weight of its own, forward and backward."""

from .op import grouped_gemm

__all__ = ["grouped_gemm"]

"""Grouped GEMM of ragged groups of rows, each with its own weight: forward and backward."""

from .op import grouped_gemm

__all__ = ["grouped_gemm"]

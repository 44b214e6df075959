"""GEMMs of fp8 matrices with scales of tensors, rows and blocks."""

from .op import fp8_matmul

__all__ = ["fp8_matmul"]

"""Quantisation to 8-bit floating point by tensor, row, column or block, and the way back."""

from .op import fp8, fp8_dequantize, fp8_scale

__all__ = ["fp8", "fp8_dequantize", "fp8_scale"]

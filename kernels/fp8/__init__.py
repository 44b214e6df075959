"""Quantisation to 8-bit floating point per tensor, row, column or block, and dequantisation."""

from .op import fp8, fp8_dequantize, fp8_scale

__all__ = ["fp8", "fp8_dequantize", "fp8_scale"]

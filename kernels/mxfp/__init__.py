"""Microscaling formats: MXFP8, MXFP6, MXFP4 and NVFP4, quantisation and dequantisation."""

from .op import mxfp, mxfp_dequantize

__all__ = ["mxfp", "mxfp_dequantize"]

"""GEMM with 4-bit weights, MXFP4 and NVFP4, and their packing."""

from .op import mxfp_matmul, mxfp_pack

__all__ = ["mxfp_matmul", "mxfp_pack"]

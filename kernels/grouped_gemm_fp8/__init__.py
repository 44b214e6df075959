"""Products of ragged groups of rows in 8-bit floating point, with scales of blocks: forward and weights' gradient."""

from .op import grouped_gemm_fp8
from .op_wgrad import grouped_gemm_fp8_wgrad

__all__ = ["grouped_gemm_fp8", "grouped_gemm_fp8_wgrad"]

"""Grouped GEMMs of ragged groups of rows in fp8 with block scales: the forward and the weights' gradient."""

from .op import grouped_gemm_fp8
from .op_wgrad import grouped_gemm_fp8_wgrad

__all__ = ["grouped_gemm_fp8", "grouped_gemm_fp8_wgrad"]

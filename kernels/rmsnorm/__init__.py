"""RMSNorm, forward and backward, with the residual addition fused; and its forward with an fp8 output."""

from .op import rmsnorm
from .op_fp8 import rmsnorm_fp8

__all__ = ["rmsnorm", "rmsnorm_fp8"]

"""RMSNorm, forward and backward, with the residual addition fused; and its forward with an fp8 output."""

from .op import rmsnorm
from .op_backward import rmsnorm_backward, rmsnorm_forward
from .op_fp8 import rmsnorm_fp8

__all__ = ["rmsnorm", "rmsnorm_backward", "rmsnorm_forward", "rmsnorm_fp8"]

"""RMSNorm, forward and backward, with the residual addition fused."""

from .op import rmsnorm

__all__ = ["rmsnorm"]

"""y = act(rmsnorm(x + residual) · Wᵀ) in one kernel, and its gradient, for few rows."""

from .op import norm_linear
from .op_backward import norm_linear_backward, norm_linear_forward

__all__ = ["norm_linear", "norm_linear_backward", "norm_linear_forward"]

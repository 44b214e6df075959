"""The Gaussian error linear unit, exact and in its tanh form, forward and backward; the forward with an fp8 output."""

from .op import gelu
from .op_fp8 import gelu_fp8

__all__ = ["gelu", "gelu_fp8"]

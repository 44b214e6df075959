"""SwiGLU and the other gated linear units: act(gate) · up, forward and backward; and the forward with an fp8 output."""

from .op import swiglu
from .op_fp8 import swiglu_fp8

__all__ = ["swiglu", "swiglu_fp8"]

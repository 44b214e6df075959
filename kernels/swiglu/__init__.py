"""SwiGLU and the other gated linear units: act(gate) · up, forward and backward."""

from .op import swiglu

__all__ = ["swiglu"]

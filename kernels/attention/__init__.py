"""Attention without its matrix: forward and backward, rectangular, grouped, causal, in a window, by blocks of keys."""

from .op import attention
from .op_partial import attention_delta, attention_partial, attention_partial_backward

__all__ = ["attention", "attention_delta", "attention_partial", "attention_partial_backward"]

"""Attention that does not store its scores: forward, backward, rectangular, grouped, causal, windowed, in blocks."""

from .op import attention
from .op_backward import attention_backward
from .op_partial import attention_delta, attention_partial, attention_partial_backward
from .op_sdpa import register as _register

__all__ = ["attention", "attention_backward", "attention_delta", "attention_partial", "attention_partial_backward"]

_register()

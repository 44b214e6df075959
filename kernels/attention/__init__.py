"""Attention without its matrix: forward and backward, rectangular, grouped, causal or in a window."""

from .op import attention

__all__ = ["attention"]

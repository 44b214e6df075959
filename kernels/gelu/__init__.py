"""The Gaussian error linear unit, exact and in its tanh form, forward and backward."""

from .op import gelu

__all__ = ["gelu"]

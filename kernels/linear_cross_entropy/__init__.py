"""The cross entropy of a linear layer's output, forward and backward, without the logits in memory."""

from .op import linear_cross_entropy

__all__ = ["linear_cross_entropy"]

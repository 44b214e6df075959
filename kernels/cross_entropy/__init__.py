"""Cross entropy over a vocabulary, forward and backward, or both in one pass."""

from .op import cross_entropy, cross_entropy_and_grad

__all__ = ["cross_entropy", "cross_entropy_and_grad"]

"""Mixture-density heads: K feed-forward layers of one input, and the Gaussian mixture that they parametrise."""

from .op import heads_gmm

__all__ = ["heads_gmm"]

"""Log-density of a Gaussian mixture per row, forward and backward, reduction included."""

from .op import gmm_logprob

__all__ = ["gmm_logprob"]

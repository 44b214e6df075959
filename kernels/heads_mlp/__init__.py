"""Heads that share their input: K feed-forward layers of one x, forward and backward."""

from .op import heads_mlp

__all__ = ["heads_mlp"]

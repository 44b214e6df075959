"""Rotary position embedding, forward and backward, of q and k in one launch."""

from .op import rope

__all__ = ["rope"]

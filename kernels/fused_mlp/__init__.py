"""The feed-forward layer of a transformer, forward and backward: two linear layers with an activation or a gate."""

from .op import fused_mlp

__all__ = ["fused_mlp"]

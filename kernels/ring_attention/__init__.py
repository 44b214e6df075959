"""Attention over sequences that are cut up over several GPUs, forward and backward."""

from .op import positions, release, ring_attention, shard, simulate, unshard

__all__ = ["positions", "release", "ring_attention", "shard", "simulate", "unshard"]

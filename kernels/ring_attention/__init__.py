"""Attention over sequences that are cut up over several GPUs, forward and backward."""

from .op import Rates, positions, release, ring_attention, shard, simulate, unshard

__all__ = ["Rates", "positions", "release", "ring_attention", "shard", "simulate", "unshard"]

"""Attention over sequences that are cut up over several GPUs, forward and backward."""

from .op import positions, release, ring_attention, shard, simulate, unshard
from .op_context_parallel import context_parallel

__all__ = ["context_parallel", "positions", "release", "ring_attention", "shard", "simulate", "unshard"]

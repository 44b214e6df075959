"""Attention over sequences that are sharded over several GPUs, forward and backward."""

from .op import Rates, positions, release, ring_attention, shard, simulate, unshard
from .op_context_parallel import context_parallel

__all__ = ["Rates", "context_parallel", "positions", "release", "ring_attention", "shard", "simulate", "unshard"]

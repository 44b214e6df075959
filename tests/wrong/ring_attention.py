"""What is wrong with each broken ring attention, and the controls. Their ranks are simulated in one process; that real
ones agree with each other is tested in kernels/ring_attention."""

from __future__ import annotations

from functools import partial

import torch

from harness.spec import Case
from kernels.ring_attention import ring_attention as ours

from . import Wrong, wrappers
from .plain_ring_attention import check, ring_attention

CAUSAL, FULL, STRIPED = "h2-1-q13-k13-d5-causal-fp32", "h2-q9-k17-d5-fp32-lse", "h2-q12-k12-d5-causal-fp32-striped"


def _case(name: str, kv_heads: int, queries: int, keys: int, **params) -> Case:
    dims = dict(batch=1, kv_heads=kv_heads, group=2 // kv_heads, queries=queries, keys=keys, dim=5)
    return Case(name, dims, torch.float32, params)


CASES = (
    _case(CAUSAL, 1, 13, 13, causal=True),
    _case(FULL, 2, 9, 17, return_lse=True),
    _case(STRIPED, 2, 12, 12, causal=True, layout="striped"),
)
LONG_CASES: tuple[Case, ...] = ()
FUZZ = {"queries": (0, 9), "keys": (5, 14)}
LIMITS: dict[str, float] = {}


def _fault(name: str, case: str, check: str = "accuracy", cause: str = "error") -> Wrong:
    return Wrong(name, partial(ring_attention, fault=name), case, check, cause)


WRONG = (
    # In the schedule.
    _fault("last block skipped", CAUSAL),
    _fault("second half of the keys dropped", CAUSAL),
    _fault("block of the wrong owner", FULL),
    _fault("offset of the keys off by one", STRIPED),
    _fault("mask by local positions", CAUSAL),
    _fault("no mask", CAUSAL),
    # In the merge.
    _fault("output not rescaled", CAUSAL),
    _fault("output rounded to fp16 at each step", FULL),
    _fault("lse of the larger block", FULL),
    _fault("ranks one behind the other", CAUSAL),
    # In the backward.
    _fault("gradients of another rank's block dropped", CAUSAL),
    _fault("gradients handed to the wrong owner", CAUSAL),
    _fault("gradients rounded to fp16 at each step", CAUSAL),
    _fault("gradients of the first rank twice", CAUSAL),
    _fault("lse of one block in the backward", CAUSAL),
    _fault("gradient of lse dropped", FULL),
    # Around it.
    _fault("no checks", CAUSAL, "refusal", "accepted"),
    Wrong("cached by address", wrappers.cached(ring_attention), CAUSAL, "replay", "replay"),
    Wrong("mutated input", wrappers.mutating(ring_attention), CAUSAL, "accuracy", "inputs"),
)
ON_A_GPU: tuple[Wrong, ...] = ()


def one_rank(q, k, v, **options):
    """The public op, in a world of one rank, behind other checks."""
    check(q, k, v)
    return ours(q, k, v, **options)


CONTROLS = {"plain": ring_attention, "one rank": one_rank}

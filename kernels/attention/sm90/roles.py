"""The argument of a launch of backward.cu whose CTAs have three roles (backward_roles.cuh)."""

from __future__ import annotations

import ctypes
import functools

import torch

from ..configs.backward import CUDA_BWD_SPANS
from ..configs.roles import LAG, RolesPlan
from .cuda_driver import pointer


class Round(ctypes.Structure):
    """As in backward_roles.cuh."""

    _fields_ = [
        (name, ctypes.c_int)
        for name in ("start", "preprocesses", "others", "stride", "multiplies_from", "preprocessed", "multiplied")
    ]


class Roles(ctypes.Structure):
    """As in backward_roles.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("lse", "dlse", "ready", "done", "drawn")),
        *((name, ctypes.c_int) for name in ("span", "spans", "chunk", "chunks", "end_chunk", "end_chunks")),
        ("round", Round * (CUDA_BWD_SPANS + LAG)),
    ]


def roles_argument(plan: RolesPlan, lse: torch.Tensor, dlse: torch.Tensor | None, counters: torch.Tensor) -> Roles:
    """counters: 2 · spans + 1 zeros of 32 bits, for `ready`, `done` and `drawn`."""
    sizes = (plan.span, plan.spans, plan.chunk, plan.chunks, plan.end_chunk, plan.end_chunks)
    counts = (pointer(counters[at:]) for at in (0, plan.spans, 2 * plan.spans))
    return Roles(pointer(lse), pointer(dlse), *counts, *sizes, _table(plan.rounds))


@functools.lru_cache(maxsize=256)
def _table(rounds: tuple[tuple[int, ...], ...]) -> ctypes.Array:
    return (Round * (CUDA_BWD_SPANS + LAG))(*(Round(*x) for x in rounds))

"""A compressed all-reduce or reduce-scatter of a flat tensor: its chunks, its transport, and the cache of plans."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.distributed as dist

from .chunks import Chunks
from .launch import Plans, lean, signature
from .plans import Alone, Stages
from .transport import Collectives, peers, reachable

_PLANS = Plans()


def group_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group, by default the world. None if there is only one process."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    return dist.group.WORLD if group is None else group


def all_reduce(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    group: dist.ProcessGroup | None,
    kind: str,
    average: bool,
    transport: str = "auto",
) -> None:
    """Compressed all-reduce of x in place, on the current stream. x and residual are checked, flat and contiguous."""
    if x.numel() == 0:
        return
    if group is not None and group.size() == 1:
        group = None
    if group is None and transport != "collectives":
        _plan(lambda: Alone(x.numel(), kind, x.device), ("alone", kind), x, residual)(x, residual)
        return
    rank, world, in_place = 0, 1, False
    if group is not None:
        rank, world = group.rank(), group.size()
        in_place = transport == "peers" or (transport == "auto" and reachable(group, x.device))

    def make() -> Stages:
        chunks = Chunks.whole_blocks(x.numel(), world, kind)
        return Stages(chunks, rank, x.device, average, peers=in_place)

    stages = _plan(make, ("all_reduce", rank, world, kind, average, in_place), x, residual)
    if in_place and group is not None:
        peers(group, x.device, world * stages.chunks.bytes).exchange(stages, x, residual)
    else:
        Collectives(group).exchange(stages, x, residual)


def reduce_scatter(
    out: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    group: dist.ProcessGroup,
    kind: str,
    average: bool,
) -> None:
    """Compressed reduce-scatter: reduces this rank's chunk, one of N equal chunks of x, into `out`, on the current
    stream. The elements are quantised once."""
    if x.numel() == 0:
        return
    rank, world = group.rank(), group.size()

    def make() -> Stages:
        return Stages(Chunks.even(x.numel(), world, kind), rank, x.device, average, scatter=True)

    stages = _plan(make, ("reduce_scatter", rank, world, kind, average), x, residual, out)
    received = Collectives(group if world > 1 else None).scatter(stages, x, residual)
    stages.reduce(received, None, out)


def _plan(make: Callable[[], Any], options: tuple[Hashable, ...], x: torch.Tensor, *others: torch.Tensor | None) -> Any:
    """The plan for these tensors and options, cached if the tensors are plain."""
    if not lean(x, *others):
        return make()
    key = (*options, signature(x), *map(signature, others))
    found = _PLANS.find(key)
    return _PLANS.keep(key, make()) if found is None else found

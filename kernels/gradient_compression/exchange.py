"""A compressed all-reduce or reduce-scatter of a flat tensor: which chunks, which transport, and the plans kept."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .chunks import Chunks
from .launch import Plans, signature
from .plans import Stages
from .transport import Collectives, peers, reachable

_STAGES = Plans()


def group_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group, by default the world; None where there is one process."""
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
    """Compressed all-reduce of x in place, on the current stream. x and residual are flat and contiguous; checked."""
    if x.numel() == 0:
        return
    rank, world = (0, 1) if group is None else (group.rank(), group.size())
    in_place = world > 1 and (transport == "peers" or (transport == "auto" and reachable(group, x.device)))
    key = ("all_reduce", signature(x), signature(residual), rank, world, kind, average, in_place)
    stages = _STAGES.find(key)
    if stages is None:
        chunks = Chunks.whole_blocks(x.numel(), world, kind)
        stages = _STAGES.keep(key, Stages(chunks, rank, x.device, average, peers=in_place))
    if in_place:
        peers(group, x.device, world * stages.chunks.bytes).exchange(stages, x, residual)
    else:
        Collectives(group if world > 1 else None).exchange(stages, x, residual)


def reduce_scatter(
    out: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    group: dist.ProcessGroup,
    kind: str,
    average: bool,
) -> None:
    """This rank's one of N equal chunks of x, reduced into `out`: quantised once, on the current stream."""
    if x.numel() == 0:
        return
    rank, world = group.rank(), group.size()
    key = ("reduce_scatter", signature(out), signature(x), signature(residual), rank, world, kind, average)
    stages = _STAGES.find(key)
    if stages is None:
        chunks = Chunks.even(x.numel(), world, kind)
        stages = _STAGES.keep(key, Stages(chunks, rank, x.device, average, scatter=True))
    received = Collectives(group if world > 1 else None).scatter(stages, x, residual)
    stages.reduce(received, None, None, out)

"""Which rows of a sequence each rank holds: sharding a sequence, gathering it, positions of a rank's rows.

    contiguous  rank r has the r-th of N pieces
    striped     rank r has rows r, r + N, r + 2N, … (Brandon et al. 2023, arXiv:2311.09431)
    zigzag      of 2N chunks, rank r has the r-th from the start and the r-th from the end, so that each rank has the
                same share of a causal mask

A layout depends only on the lengths of the ranks, so it is defined for unequal lengths too. In zigzag the first chunk
of a rank is half of its rows, rounded up. In striped a round of stripes skips the ranks that have no row left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
import torch.distributed as dist

LAYOUTS = ("zigzag", "striped", "contiguous")


@dataclass(frozen=True)
class Run:
    """`rows` rows of a rank, from its local row `row` on, which have consecutive positions from `position` on."""

    position: int
    row: int
    rows: int


def even_lengths(length: int, world: int, layout: str) -> tuple[int, ...]:
    """Returns how many rows of a sequence `shard` gives to each rank. If the length is not divisible, the first pieces
    (zigzag: chunks; striped: ranks) have one row more."""
    check_layout(layout)
    pieces = 2 * world if layout == "zigzag" else world
    each, more = divmod(length, pieces)
    sizes = [each + (piece < more) for piece in range(pieces)]
    if layout == "zigzag":
        return tuple(sizes[r] + sizes[-1 - r] for r in range(world))
    return tuple(sizes)


@lru_cache(maxsize=4096)
def runs(lengths: tuple[int, ...], rank: int, layout: str) -> tuple[Run, ...]:
    """Returns the runs of a rank in a contiguous or zigzag layout, in the order of its rows; none is empty."""
    if layout == "contiguous":
        found = [Run(sum(lengths[:rank]), 0, lengths[rank])]
    else:
        front = [(length + 1) // 2 for length in lengths]
        back = [length // 2 for length in lengths]
        last = sum(front) + sum(back[rank + 1 :])
        found = [Run(sum(front[:rank]), 0, front[rank]), Run(last, front[rank], back[rank])]
    return tuple(run for run in found if run.rows)


def positions(
    length: int,
    rank: int,
    world: int,
    layout: str = "zigzag",
    lengths: Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Returns the positions in the whole sequence of the rows that a rank holds, int64 [length], for example for RoPE.

    length         number of rows of this rank
    rank, world    this rank, and the number of ranks
    layout         as in `ring_attention`
    lengths        numbers of rows of all ranks; by default all have `length`
    device         of the result

    Raises ValueError for an unknown layout, a rank outside the world or lengths that do not match.
    """
    check_layout(layout)
    lengths = (length,) * world if lengths is None else tuple(lengths)
    if not 0 <= rank < world:
        raise ValueError(f"positions: rank must be from 0 to {world - 1}, got {rank}")
    if len(lengths) != world or lengths[rank] != length or min(lengths) < 0:
        raise ValueError(f"positions: lengths must be {world}, with {length} for rank {rank}, got {list(lengths)}")
    if layout == "striped":
        row = torch.arange(length, device=device)
        # Row i of this rank comes after rows 0 … i of lower ranks, and after rows 0 … i − 1 of the others.
        return sum((torch.clamp(row + (other < rank), max=n) for other, n in enumerate(lengths)), torch.zeros_like(row))
    parts = [torch.arange(run.position, run.position + run.rows, device=device) for run in runs(lengths, rank, layout)]
    return torch.cat(parts) if parts else torch.arange(0, device=device)


def shard(x: torch.Tensor, dim: int, group: dist.ProcessGroup | None = None, layout: str = "zigzag") -> torch.Tensor:
    """Returns this rank's rows along `dim` of a sequence that every rank has whole; differentiable, contiguous.

    If the length is not divisible, the first chunks, pieces or stripes have one row more (`even_lengths`). Nothing is
    sent. Without a process group the world is one rank; layout is as in `ring_attention`.

    Raises ValueError for an unknown layout, or a group of which this rank is not a member.
    """
    return cut(x, dim, *place(group), layout)


def cut(x: torch.Tensor, dim: int, rank: int, world: int, layout: str) -> torch.Tensor:
    """Returns the rows that `shard` gives to `rank` of `world` ranks."""
    lengths = even_lengths(x.shape[dim], world, layout)
    if layout == "striped":
        return x[_at(x, dim, slice(rank, None, world))].contiguous()
    parts = [x.narrow(dim, run.position, run.rows) for run in runs(lengths, rank, layout)]
    # Of tensors in a channels-last format torch.cat makes another one.
    return torch.cat(parts, dim).contiguous() if parts else x.narrow(dim, 0, 0).contiguous()


def unshard(
    x: torch.Tensor,
    dim: int,
    group: dist.ProcessGroup | None = None,
    layout: str = "zigzag",
    lengths: Sequence[int] | None = None,
) -> torch.Tensor:
    """Inverts `shard`: gathers the whole sequence on every rank, and returns it. Not differentiable.

    x        this rank's rows along `dim`; group and layout as in `shard`
    lengths  numbers of rows of all ranks, which may differ from those of `shard`; by default they are gathered first

    Raises ValueError for an unknown layout, lengths that do not match, or a group of which this rank is not a member.
    """
    check_layout(layout)
    rank, world = place(group)
    if world == 1:
        return x.detach().clone()
    if lengths is None:
        found: list[int] = [0] * world
        dist.all_gather_object(found, x.shape[dim], group=group)
        lengths = found
    if len(lengths) != world or lengths[rank] != x.shape[dim]:
        raise ValueError(f"unshard: lengths must be {world}, with {x.shape[dim]} for rank {rank}, got {list(lengths)}")
    # Padded to one size, because not every backend gathers tensors of different sizes.
    longest = max(lengths)
    mine = x.detach().movedim(dim, 0)
    padded = mine.new_zeros(longest, *mine.shape[1:])
    padded[: mine.shape[0]] = mine
    blocks = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(blocks, padded, group=group)
    return assemble([block[:n] for block, n in zip(blocks, lengths, strict=True)], 0, layout).movedim(0, dim)


def assemble(blocks: Sequence[torch.Tensor], dim: int, layout: str) -> torch.Tensor:
    """Returns the whole sequence, assembled from the blocks of all ranks in rank order."""
    lengths = [block.shape[dim] for block in blocks]
    places = [positions(n, rank, len(lengths), layout, lengths, blocks[0].device) for rank, n in enumerate(lengths)]
    order = torch.empty(sum(lengths), dtype=torch.int64, device=blocks[0].device)
    order[torch.cat(places)] = torch.arange(sum(lengths), device=blocks[0].device)
    return torch.cat(list(blocks), dim).index_select(dim, order)


def starts(lengths: Sequence[int]) -> list[int]:
    """Returns where each rank's rows begin if all are concatenated."""
    return [0, *accumulate(lengths)][:-1]


def place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Returns (rank, world size) in a group; (0, 1) without a process group. ValueError if this rank is not in it."""
    if not dist.is_available() or not dist.is_initialized():
        if group is not None:
            raise ValueError("group must be None where torch.distributed has not been initialised")
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group must be one that this process is part of")
    return rank, dist.get_world_size(group)


def check_layout(layout: str) -> None:
    """Raises ValueError for an unknown layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")


def _at(x: torch.Tensor, dim: int, index: slice) -> tuple[slice, ...]:
    return (*[slice(None)] * (dim % x.dim()), index)

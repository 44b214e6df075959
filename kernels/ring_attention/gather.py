"""All-gather of keys and values, and reduce-scatter of their gradients."""

from __future__ import annotations

import torch

from .blocks import GIVEN, Handed, Ring, fp32, like
from .layout import Run
from .schedule import Step, gathered_places
from .transport import BLOCKS, Transport


def gather(
    ring: Ring, k: torch.Tensor, v: torch.Tensor, gradients: bool = False
) -> tuple[torch.Tensor, torch.Tensor, Transport]:
    """Returns k and v of all ranks, rows in the order of `gathered_places`, and the transport. They are in its room,
    and valid until it is closed. With `gradients`, it can `scatter` gradients of k and v."""
    problem, rank, world = ring.problem, ring.rank, ring.problem.world
    blocks = like((k, v), sum(problem.k_lengths))
    given = fp32(_shapes(k, max(problem.k_lengths))) if gradients else []
    transport = ring.transport(k.device, given, blocks, rooms=1)
    everything = transport.room(GIVEN + 1, blocks)
    sendable = [transport.sendable(t) for t in (k, v)]
    pending = []
    for s in range(1, world):
        partner, to = (rank - s) % world, (rank + s) % world
        into = _rows(everything, [(run.position, run.rows) for run in gathered_places(problem, partner)])
        runs = gathered_places(problem, rank)
        sent = _rows(sendable, [(run.row, run.rows) for run in runs])
        places = _rows(transport.room(GIVEN + 1, blocks, to), [(run.position, run.rows) for run in runs])
        pending.append(transport.exchange(BLOCKS, sent, to, places, into, partner))
    for run in gathered_places(problem, rank):
        for mine, whole in zip((k, v), everything, strict=True):
            whole[:, :, run.position : run.position + run.rows] = mine[:, :, run.row : run.row + run.rows]
    for one in pending:
        one.wait()
    return everything[0], everything[1], transport


def scatter(ring: Ring, transport: Transport, *gradients: torch.Tensor) -> list[torch.Tensor]:
    """Returns this rank's rows of fp32 gradients, summed over all ranks, from gradients in the order of `gather`."""
    problem, rank, world = ring.problem, ring.rank, ring.problem.world
    steps = []
    for s in range(world):
        partner, to = (rank - s) % world, (rank + s) % world
        steps.append(Step(partner, (0, problem.k_lengths[partner]), (), to, (0, problem.k_lengths[rank])))

    own = [gradients[0].new_empty(shape) for shape in _shapes(gradients[0], problem.k_lengths[rank])]
    _take(own, gradients, gathered_places(problem, rank))
    handed = Handed(transport, steps, lambda rows: _shapes(gradients[0], rows), gradients[0].device)
    for s in range(1, world):
        given = handed.staging(s)
        _take(given, gradients, gathered_places(problem, steps[s].partner))
        _add(own, handed)
        handed.hand(s, given)
    _add(own, handed)
    return own


def _shapes(k: torch.Tensor, rows: int) -> list[tuple[int, ...]]:
    return [(*k.shape[:2], rows, k.shape[3])] * 2


def _rows(tensors: list[torch.Tensor], places: list[tuple[int, int]]) -> list[torch.Tensor]:
    return [t[:, :, first : first + rows] for t in tensors for first, rows in places]


def _take(into: list[torch.Tensor], gradients: tuple[torch.Tensor, ...], places: tuple[Run, ...]) -> None:
    for mine, whole in zip(into, gradients, strict=True):
        for run in places:
            mine[:, :, run.row : run.row + run.rows] = whole[:, :, run.position : run.position + run.rows]


def _add(own: list[torch.Tensor], handed: Handed) -> None:
    if found := handed.collect():
        for mine, more in zip(own, found[1], strict=True):
            mine.add_(more)

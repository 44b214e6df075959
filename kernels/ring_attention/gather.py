"""All keys and values on every rank, and the gradients of them back to their owners."""

from __future__ import annotations

import torch

from .blocks import Handed, Ring
from .compute import rows_first
from .layout import Run
from .schedule import Step, gathered_places
from .transport import Piece, Transport


def gather(ring: Ring, *tensors: torch.Tensor, transport: Transport | None = None) -> list[torch.Tensor]:
    """Of each tensor [B, H, S, …] the rows of all ranks, rows first, where `gathered_places` has them."""
    problem, rank, world = ring.problem, ring.rank, ring.problem.world
    own = [rows_first(t) for t in tensors]
    everything = [t.new_empty(sum(problem.k_lengths), *t.shape[1:]) for t in own]
    used = transport or ring.transport(problem.k_lengths, own)
    used.publish(own)
    pending = []
    for s in range(1, world):
        partner = (rank - s) % world
        pieces = [
            (Piece(i, run.row, run.row + run.rows), whole[run.position : run.position + run.rows])
            for i, whole in enumerate(everything)
            for run in gathered_places(problem, partner)
        ]
        sends = [
            Piece(i, run.row, run.row + run.rows) for i in range(len(own)) for run in gathered_places(problem, rank)
        ]
        pending.append(used.fetch(partner, pieces, (rank + s) % world, sends))
    for run in gathered_places(problem, rank):
        for mine, whole in zip(own, everything, strict=True):
            whole[run.position : run.position + run.rows] = mine[run.row : run.row + run.rows]
    for one in pending:
        one.wait()
    if transport is None:
        used.close()
    return everything


def scatter(ring: Ring, transport: Transport, *gradients: torch.Tensor) -> list[torch.Tensor]:
    """The sums over all ranks of this rank's rows of fp32 gradients in the order of `gather`, rows first."""
    problem, rank, world = ring.problem, ring.rank, ring.problem.world
    steps = []
    for s in range(world):
        partner, to = (rank - s) % world, (rank + s) % world
        steps.append(Step(partner, (0, problem.k_lengths[partner]), (), to, (0, problem.k_lengths[rank])))

    def shapes(rows: int) -> list[tuple[int, ...]]:
        return [(rows, *gradient.shape[1:]) for gradient in gradients]

    own = [
        gradient.new_empty(shape) for gradient, shape in zip(gradients, shapes(problem.k_lengths[rank]), strict=True)
    ]
    _take(own, gradients, gathered_places(problem, rank))
    handed = Handed(transport, steps, shapes, gradients[0].device)
    for s in range(1, world):
        given = handed.staging(s)
        _take(given, gradients, gathered_places(problem, steps[s].partner))
        _add(own, handed)
        handed.hand(s, given)
    _add(own, handed)
    return own


def _take(into: list[torch.Tensor], gradients: tuple[torch.Tensor, ...], places: tuple[Run, ...]) -> None:
    for mine, whole in zip(into, gradients, strict=True):
        for run in places:
            mine[run.row : run.row + run.rows] = whole[run.position : run.position + run.rows]


def _add(own: list[torch.Tensor], handed: Handed) -> None:
    if found := handed.collect():
        for mine, more in zip(own, found[1], strict=True):
            mine.add_(more)

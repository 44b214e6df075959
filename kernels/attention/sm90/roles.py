"""The kernel parameter of backward.cu from which CTAs derive their roles: struct Roles of backward_roles.cuh."""

from __future__ import annotations

from ..configs.backward import CUDA_BWD_SPANS
from ..configs.roles import LAG, RolesPlan

_ROUND = 7  # integers of a Round of the software pipeline over spans of heads
_ROUNDS = CUDA_BWD_SPANS + LAG
# lse, dlse, ready, done, drawn; span, spans, chunk, chunks, end_chunk, end_chunks; the rounds.
LAYOUT = f"(PPPPP{'i' * (6 + _ROUND * _ROUNDS)})"


def numbers(plan: RolesPlan) -> tuple[int, ...]:
    """Returns the integers of the parameter, which are the same in each call."""
    rounds = [number for one in plan.rounds for number in one]
    sizes = (plan.span, plan.spans, plan.chunk, plan.chunks, plan.end_chunk, plan.end_chunks)
    return (*sizes, *rounds, *(0,) * (_ROUND * _ROUNDS - len(rounds)))


def pointers(plan: RolesPlan, lse: int, dlse: int, counters: int) -> tuple[int, ...]:
    """Returns the addresses of the parameter. counters: 2 · spans + 1 zeros of 32 bits, for `ready` and `done` of each
    span, and for `drawn`, from which each CTA takes its logical index when it starts."""
    return lse, dlse, *(counters + 4 * at for at in (0, plan.spans, 2 * plan.spans))

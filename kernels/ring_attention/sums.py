"""Which calls write fp32 sums (beta = 0) and which add to them (beta = 1), as data. Rows that a call can write are not
zeroed first.

The fp32 gradients of a rank are sums over several calls, each of which covers some of the rows. A call writes its rows
if none of them has been written before. If some have been, the others are zeroed, and the call adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from .schedule import Call, Problem, gathered_calls, halves, intersect, schedule, shifted, subtract

Rows = tuple[int, int]


@dataclass(frozen=True)
class Share:
    """How a call updates the sums of its rows: it zeros some rows and then adds to all, or it writes all. `final`: no
    later call has any of its rows."""

    zeros: tuple[Rows, ...]
    add: bool
    final: bool


Stage = tuple[tuple[Call, Share, Share], ...]  # calls, each with its Share of dq, and that of dk and dv


@dataclass(frozen=True)
class Sums:
    """The calls of a backward, grouped in stages.

    gaps    for each stage, rows that are zeroed after it, before a sum is sent, or before contributions of other ranks
            are added to it
    rest    rows of dq that no final call writes
    unseen  rows that are zeroed at the end, of dq, or of dk and dv where queries move
    """

    stages: tuple[Stage, ...]
    gaps: tuple[tuple[Rows, ...], ...]
    rest: tuple[Rows, ...]
    unseen: tuple[Rows, ...]


def shares(ranges: Sequence[Rows | None], rows: int) -> list[Share]:
    """Returns the Share of each call, for consecutive calls with these rows of uninitialised sums. None is a point
    where all `rows` must be initialised; its `zeros` are the rows that are not yet."""
    fresh: list[Rows] = [(0, rows)] if rows else []
    found = []
    for place, own in enumerate(ranges):
        whole = (0, rows) if own is None else own
        zeros = tuple(intersect(fresh, whole))
        fresh = subtract(fresh, [whole])
        writes = own is not None and zeros == (own,)
        final = not any(later and intersect([later], whole) for later in ranges[place + 1 :])
        found.append(Share(() if writes else zeros, not writes, final))
    return found


@lru_cache(maxsize=256)
def of_keys(problem: Problem, rank: int) -> Sums:
    """The Sums where keys move. Stages are the first half of the own block, the partners' blocks, whose gradients are
    separate sums, and the second half of the own block. Contributions of others arrive after the first stage."""
    steps = schedule(problem, rank, "keys")
    first, last = halves(steps[0].calls)
    others = [[shifted(call, k=step.rows[0]) for call in step.calls] for step in steps[1:]]
    own = shares([*(call.k for call in first), None, *(call.k for call in last)], problem.k_lengths[rank])
    of_k = [own[: len(first) + 1]]
    for step, found in zip(steps[1:], others, strict=True):
        of_k.append(shares([*(call.k for call in found), None], step.rows[1] - step.rows[0]))
    return _sums(problem, rank, [first, *others, last], [*of_k, own[len(first) + 1 :]])


@lru_cache(maxsize=256)
def of_all(problem: Problem, rank: int) -> Sums:
    """The Sums where all keys are gathered: one stage."""
    calls = [call for call in gathered_calls(problem, rank) if call.k[0] < call.k[1]]
    return _sums(problem, rank, [calls], [shares([*(call.k for call in calls), None], sum(problem.k_lengths))])


@lru_cache(maxsize=256)
def of_queries(problem: Problem, rank: int) -> Sums:
    """The Sums where queries move: a stage for the queries of each rank, the own ones first. Contributions of others to
    dq arrive after the first stage. `gaps` are rows of dq here, and dk and dv are sums over all stages."""
    steps = schedule(problem, rank, "queries")
    calls = [[shifted(call, q=step.rows[0] if s else 0) for call in step.calls] for s, step in enumerate(steps)]
    of_k = iter(shares([*(call.k for found in calls for call in found), None], problem.k_lengths[rank]))
    stages, gaps = [], []
    for s, (step, found) in enumerate(zip(steps, calls, strict=True)):
        rows = step.rows[1] - step.rows[0] if s else problem.q_lengths[rank]
        *of_q, behind = shares([*(call.q for call in found), None], rows)
        stages.append(tuple((call, mine, next(of_k)) for call, mine in zip(found, of_q, strict=True)))
        gaps.append(behind.zeros)
    return Sums(tuple(stages), tuple(gaps), (), next(of_k).zeros)


def _sums(problem: Problem, rank: int, calls: Sequence[Sequence[Call]], of_k: Sequence[Sequence[Share]]) -> Sums:
    """Returns the Sums. `of_k`: for each stage the Share of each call, and one for the end of the stage if needed."""
    queries = problem.q_lengths[rank]
    of_q = iter(shares([*(call.q for found in calls for call in found), None], queries))
    stages: list[Stage] = []
    rest: list[Rows] = [(0, queries)] if queries else []
    for found, theirs in zip(calls, of_k, strict=True):
        stages.append(tuple((call, next(of_q), share) for call, share in zip(found, theirs, strict=False)))
        rest = subtract(rest, [call.q for call, share, _ in stages[-1] if share.final])
    gaps = tuple(
        theirs[-1].zeros if len(theirs) > len(found) else () for found, theirs in zip(calls, of_k, strict=True)
    )
    return Sums(tuple(stages), gaps, tuple(rest), next(of_q).zeros)

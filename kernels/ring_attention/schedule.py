"""The schedule, as data: what each rank fetches and computes at each step. Pure functions: they send nothing and touch
no tensor.

At step s rank r processes the block of rank (r − s) mod N, its own at step 0, and rank (r + s) mod N processes r's
block. A block is fetched from its owner, so no step waits for a rank to forward it. The block is keys and values for
the rank's own queries ("keys"), or queries for its own keys ("queries"). A `Call` is one call of `attention_partial`.

With a causal mask, query i of all Sq is aligned with key i + Sk − Sq: the last query sees all keys. In a zigzag layout
with as many queries as keys, each step after the first is one call without a mask, of the same size for all ranks. Of
the keys of a lower rank, all queries see the first half. The second half of the queries sees all keys of a higher rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from .layout import Run, even_lengths, runs, starts

ROTATIONS = ("keys", "queries", "gather")


@dataclass(frozen=True)
class Call:
    """Queries q[0]:q[1] and keys k[0]:k[1], as rows of their blocks. Query q[0] has position `q_offset`, key k[0] has
    `k_offset`, and with `causal` queries see keys at their position or before. `final`: no later call of this rank has
    these queries. A call without keys is final; its queries see no key."""

    q: tuple[int, int]
    k: tuple[int, int]
    q_offset: int = 0
    k_offset: int = 0
    causal: bool = False
    final: bool = False

    @property
    def pairs(self) -> int:
        """Number of visible pairs of a query and a key."""
        queries, keys = self.q[1] - self.q[0], self.k[1] - self.k[0]
        if not self.causal:
            return queries * keys
        first = self.q_offset - self.k_offset + 1  # keys that the first query sees, before clamping
        return _sum_to(first + queries - 1, keys) - _sum_to(first - 1, keys)


@dataclass(frozen=True)
class Step:
    """The block of rank `partner`, of which `rows` are fetched, and the calls with it. Meanwhile rank `to` fetches
    `to_rows` of this rank's block. Nothing is fetched at step 0, nor if the rows are none."""

    partner: int
    rows: tuple[int, int]
    calls: tuple[Call, ...]
    to: int
    to_rows: tuple[int, int]


@dataclass(frozen=True)
class Problem:
    """The problem on which a schedule depends. Lengths are those of all ranks."""

    layout: str
    causal: bool
    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]

    @property
    def world(self) -> int:
        return len(self.q_lengths)

    @property
    def shift(self) -> int:
        """Query i of the whole sequence is aligned with key i + shift."""
        return sum(self.k_lengths) - sum(self.q_lengths)

    def unsupported_reason(self) -> str | None:
        """Why there is no schedule, or None: stripes of queries and of keys with unequal lengths have no common
        stride."""
        if self.layout != "striped" or not self.causal or self.q_lengths == self.k_lengths:
            return None
        even = [n == even_lengths(sum(n), self.world, "striped") for n in (self.q_lengths, self.k_lengths)]
        return None if all(even) else "causal stripes of queries and keys that differ must be cut as `shard` cuts them"


@lru_cache(maxsize=256)
def schedule(problem: Problem, rank: int, rotate: str, results: bool = False) -> tuple[Step, ...]:
    """Returns the steps of a rank. `rotate` is "keys" or "queries"; for "gather" see `gathered_calls`. With `results`
    each query has one final call, and calls that are final for only some of their queries are split."""
    world = problem.world
    steps = []
    for s in range(world):
        partner, to = (rank - s) % world, (rank + s) % world
        found = tuple(block_calls(problem, *_pair(rank, partner, rotate)))
        theirs = tuple(block_calls(problem, *_pair(to, rank, rotate)))
        axis = "k" if rotate == "keys" else "q"
        steps.append(Step(partner, _hull(found, axis), found, to, _hull(theirs, axis)))
    if results:
        finished = _finish([step.calls for step in steps], problem.q_lengths[rank])
        steps = [replace(step, calls=calls) for step, calls in zip(steps, finished, strict=True)]
    return tuple(steps)


def _pair(worker: int, partner: int, rotate: str) -> tuple[int, int]:
    """Returns (rank of the queries, rank of the keys)."""
    return (worker, partner) if rotate == "keys" else (partner, worker)


def block_calls(problem: Problem, query_rank: int, key_rank: int) -> list[Call]:
    """Returns the calls for one rank's queries and one rank's keys; none if no query sees a key."""
    queries, keys = problem.q_lengths[query_rank], problem.k_lengths[key_rank]
    if not queries or not keys:
        return []
    if not problem.causal:
        return [Call((0, queries), (0, keys))]
    if problem.layout == "striped":
        # With as many queries as keys, query i of rank a sees key j of rank b if (j, b) <= (i, a), so offsets are in
        # units of rounds. Otherwise positions are i·N + a and j·N + b.
        if problem.q_lengths == problem.k_lengths:
            distance = 0 if key_rank <= query_rank else -1
        else:
            distance = (query_rank - key_rank + problem.shift) // problem.world
        return list(_rectangle(Run(distance, 0, queries), Run(0, 0, keys), trim=False))
    q_runs = runs(problem.q_lengths, query_rank, problem.layout)
    return _calls(q_runs, runs(problem.k_lengths, key_rank, problem.layout), problem.shift)


@lru_cache(maxsize=256)
def gathered_calls(problem: Problem, rank: int) -> tuple[Call, ...]:
    """Returns the calls of a rank that has all keys, in the order of `gathered_places`: one for each run of queries."""
    everything = sum(problem.k_lengths)
    queries = problem.q_lengths[rank]
    if problem.causal and problem.layout == "striped":
        found = []
        for owner, start in enumerate(starts(problem.k_lengths)):
            for call in block_calls(problem, rank, owner):
                found.append(replace(call, k=(call.k[0] + start, call.k[1] + start)))
    elif problem.causal:
        q_runs = runs(problem.q_lengths, rank, problem.layout)
        found = _calls(q_runs, (Run(0, 0, everything),), problem.shift) if everything else []
    else:
        found = [Call((0, queries), (0, everything))] if queries and everything else []
    return _finish([tuple(found)], queries)[0]


def gathered_places(problem: Problem, owner: int) -> tuple[Run, ...]:
    """Returns where the rows of an owner's keys are placed in the gathered keys, as `Run.position`. They are sorted by
    position; stripes, and keys without a mask, are in rank order."""
    if problem.causal and problem.layout != "striped":
        return runs(problem.k_lengths, owner, problem.layout)
    rows = problem.k_lengths[owner]
    return (Run(starts(problem.k_lengths)[owner], 0, rows),) if rows else ()


def shifted(call: Call, q: int = 0, k: int = 0) -> Call:
    """Returns the call with rows counted from row q of the queries' block and row k of the keys' block."""
    moved = (call.q[0] - q, call.q[1] - q), (call.k[0] - k, call.k[1] - k)
    return replace(call, q=moved[0], k=moved[1])


def halves(calls: Sequence[Call]) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
    """Splits the calls on a rank's own block into halves by queries. The first block of another rank arrives during the
    first half, and the last gradients for another rank leave during the second."""
    first, second = [], []
    for call in calls:
        start, stop = call.q
        middle = start + -(-(stop - start) // 256) * 128  # half, rounded to tiles of 128 queries
        if middle < stop:
            first.append(_rows_of(call, (start, middle), call.final))
            second.append(_rows_of(call, (middle, stop), call.final))
        else:
            first.append(call)
    return tuple(first), tuple(second)


def _calls(q_runs: Sequence[Run], k_runs: Sequence[Run], shift: int) -> list[Call]:
    """Returns the fewest possible calls for runs of queries and of keys, by position."""
    found: list[Call] = []
    for q_run in q_runs:
        row: list[Call] = []
        for k_run in k_runs:
            for call in _rectangle(replace(q_run, position=q_run.position + shift), k_run, trim=True):
                merged = _beside(row[-1], call) if row else None
                row[-1:] = [merged] if merged else [*row[-1:], call]
        if len(found) == len(row) == 1 and (merged := _below(found[0], row[0])):
            found = [merged]
        else:
            found += row
    return found


def _rectangle(q: Run, k: Run, trim: bool) -> Iterator[Call]:
    """Yields at most one call, without keys that no query sees and, with `trim`, without queries that see no key."""
    last = q.position + q.rows
    keys = min(k.rows, last - k.position)
    if keys <= 0:
        return
    skipped = max(0, k.position - q.position) if trim else 0
    first = q.position + skipped
    masked = k.position + keys - 1 > first
    offsets = (first, k.position, True) if masked else (0, 0, False)
    yield Call((q.row + skipped, q.row + q.rows), (k.row, k.row + keys), *offsets)


def _beside(left: Call, right: Call) -> Call | None:
    """Merges two calls with the same queries and adjacent keys, of which the left one has no mask, or returns None."""
    if left.causal or left.q != right.q or left.k[1] != right.k[0]:
        return None
    keys = (left.k[0], right.k[1])
    if not right.causal:
        return replace(left, k=keys)
    before = left.k[1] - left.k[0]
    shifted = replace(right, k=keys, k_offset=right.k_offset - before)
    # The mask then also covers the left keys, so the first query must see all of these.
    return shifted if right.q_offset >= right.k_offset - 1 else None


def _below(upper: Call, lower: Call) -> Call | None:
    """Merges two calls with adjacent queries and the same first key, or returns None."""
    if upper.q[1] != lower.q[0] or upper.k[0] != lower.k[0]:
        return None
    if not upper.causal and not lower.causal:
        return replace(upper, q=(upper.q[0], lower.q[1])) if upper.k == lower.k else None
    if not upper.causal or not lower.causal:
        return None
    distance, rows = upper.q_offset - upper.k_offset, upper.q[1] - upper.q[0]
    if lower.q_offset - lower.k_offset != distance + rows or upper.k[1] - upper.k[0] < distance + rows:
        return None
    return replace(upper, q=(upper.q[0], lower.q[1]), k=lower.k)  # later queries see no fewer keys


def _finish(steps: list[tuple[Call, ...]], queries: int) -> list[tuple[Call, ...]]:
    """Sets `final`, and splits calls where it differs between their queries. Queries without a call get one without
    keys, at the first step."""
    open_rows = [(0, queries)] if queries else []
    done: list[tuple[Call, ...]] = []
    for calls in reversed(steps):
        found: list[Call] = []
        for call in reversed(calls):
            inside, outside = intersect(open_rows, call.q), subtract([call.q], open_rows)
            open_rows = subtract(open_rows, [call.q])
            pieces = [(rows, True) for rows in inside] + [(rows, False) for rows in outside]
            found += [_rows_of(call, rows, final) for rows, final in sorted(pieces, reverse=True)]
        done.append(tuple(reversed(found)))
    done.reverse()
    done[0] = (*done[0], *(Call(rows, (0, 0), final=True) for rows in open_rows))
    return done


def _rows_of(call: Call, rows: tuple[int, int], final: bool) -> Call:
    """Returns the call for some of its queries, without the keys that these do not see, but with at least one key."""
    q_offset = call.q_offset + (rows[0] - call.q[0] if call.causal else 0)
    keys = call.k[1] - call.k[0]
    if call.causal:
        keys = max(1, min(keys, q_offset + rows[1] - rows[0] - call.k_offset))
    return Call(rows, (call.k[0], call.k[0] + keys), q_offset, call.k_offset, call.causal, final)


def intersect(intervals: Sequence[tuple[int, int]], with_: tuple[int, int]) -> list[tuple[int, int]]:
    found = [(max(a, with_[0]), min(b, with_[1])) for a, b in intervals]
    return [(a, b) for a, b in found if a < b]


def subtract(intervals: Sequence[tuple[int, int]], without: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    left = list(intervals)
    for c, d in without:
        left = [piece for a, b in left for piece in ((a, min(b, c)), (max(a, d), b)) if piece[0] < piece[1]]
    return left


def _hull(calls: Sequence[Call], axis: str) -> tuple[int, int]:
    """Returns the range from the first to the last row of the block that the calls use."""
    ranges = [getattr(call, axis) for call in calls]
    return (min(a for a, _ in ranges), max(b for _, b in ranges)) if ranges else (0, 0)


def _sum_to(count: int, most: int) -> int:
    """Returns Σ min(i, most) over i = 1 … count."""
    count = max(count, 0)
    return count * (count + 1) // 2 if count <= most else most * (most + 1) // 2 + (count - most) * most

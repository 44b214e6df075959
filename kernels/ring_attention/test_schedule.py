"""Schedules as data: consistent transfers, each visible pair computed once, balanced work, the fewest bytes."""

from __future__ import annotations

import random

import pytest
import torch

from . import configs
from .layout import LAYOUTS, even_lengths, positions
from .schedule import (
    ROTATIONS,
    Call,
    Problem,
    block_calls,
    gathered_calls,
    gathered_places,
    schedule,
)


def drawn(random_: random.Random) -> Problem:
    """Returns a problem that has a schedule: equal lengths or not, square or not, also ranks without rows."""
    world, layout = random_.randint(1, 5), random_.choice(LAYOUTS)

    def lengths() -> tuple[int, ...]:
        if random_.random() < 0.5:
            return even_lengths(random_.randint(0, 30), world, layout)
        return tuple(random_.choice((0, 1, random_.randint(2, 9))) for _ in range(world))

    queries = lengths()
    problem = Problem(layout, random_.random() < 0.8, queries, queries if random_.random() < 0.4 else lengths())
    return drawn(random_) if problem.unsupported_reason() else problem


def visible(problem: Problem) -> list[list[torch.Tensor]]:
    """Returns the visible pairs of the queries of each rank and the keys of each rank."""
    queries, keys = (
        [positions(n, rank, problem.world, problem.layout, lengths) for rank, n in enumerate(lengths)]
        for lengths in (problem.q_lengths, problem.k_lengths)
    )
    shift = sum(problem.k_lengths) - sum(problem.q_lengths)
    hidden = [[k[None] > q[:, None] + shift for k in keys] for q in queries]
    return [[~pair if problem.causal else torch.ones_like(pair) for pair in row] for row in hidden]


def add(seen: torch.Tensor, call: Call) -> None:
    (a, b), (c, d) = call.q, call.k
    pairs = torch.ones(b - a, d - c, dtype=torch.int64)
    if call.causal:
        pairs = (torch.arange(d - c) + call.k_offset <= torch.arange(b - a)[:, None] + call.q_offset).long()
    assert pairs.sum() == call.pairs
    seen[a:b, c:d] += pairs


def check(problem: Problem) -> None:
    """Every visible pair is computed exactly once, and no other pair."""
    want, world = visible(problem), problem.world
    for rotate in ("keys", "queries"):
        every = [schedule(problem, rank, rotate, results=rotate == "keys") for rank in range(world)]
        for rank, steps in enumerate(every):
            assert sorted(step.partner for step in steps) == list(range(world)) and steps[0].partner == rank
            for s, step in enumerate(steps):
                assert every[step.to][s].partner == rank and every[step.to][s].rows == step.to_rows
                queries, keys = (rank, step.partner) if rotate == "keys" else (step.partner, rank)
                seen = torch.zeros(problem.q_lengths[queries], problem.k_lengths[keys], dtype=torch.int64)
                for call in step.calls:
                    assert call.q[0] < call.q[1]
                    add(seen, call)
                    used = call.k if rotate == "keys" else call.q
                    assert used[0] == used[1] or (step.rows[0] <= used[0] and used[1] <= step.rows[1])
                assert torch.equal(seen, want[queries][keys].long()), (problem, rank, s)
            if rotate == "keys":
                final_once([call for step in steps for call in step.calls], problem.q_lengths[rank])


def final_once(calls: list[Call], queries: int) -> None:
    """Each query has one final call, which is its last."""
    last = [[call.final for call in calls if call.q[0] <= row < call.q[1]] for row in range(queries)]
    assert all(flags and flags[-1] and not any(flags[:-1]) for flags in last)


def check_gathered(problem: Problem) -> None:
    """Every visible pair is computed once by a rank that has all keys, in gathered order."""
    want = visible(problem)
    for rank in range(problem.world):
        place = torch.full((sum(problem.k_lengths),), -1)
        row = 0
        for owner, keys in enumerate(problem.k_lengths):
            for run in gathered_places(problem, owner):
                rows = torch.arange(run.rows)
                place[run.position + rows] = row + run.row + rows
            row += keys
        seen = torch.zeros(problem.q_lengths[rank], sum(problem.k_lengths), dtype=torch.int64)
        calls = gathered_calls(problem, rank)
        for call in calls:
            assert call.q[0] < call.q[1]
            add(seen, call)
        assert torch.equal(seen, torch.cat(want[rank], 1).long()[:, place]), (problem, rank)
        final_once(list(calls), problem.q_lengths[rank])


@pytest.mark.parametrize("count", [400, pytest.param(20_000, marks=pytest.mark.slow)])
def test_fuzzed_schedules_compute_each_visible_pair_once(count: int) -> None:
    random_ = random.Random(count)
    for _ in range(count):
        problem = drawn(random_)
        check(problem)
        check_gathered(problem)


@pytest.mark.parametrize("world", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("length", [16384, 65536, 100_003])
def test_zigzag_shares_a_causal_mask_out_evenly(world: int, length: int) -> None:
    lengths = even_lengths(length, world, "zigzag")
    problem = Problem("zigzag", True, lengths, lengths)
    steps = [[sum(call.pairs for call in step.calls) for step in schedule(problem, r, "keys")] for r in range(world)]
    work = [sum(rank) for rank in steps]
    assert sum(work) == length * (length + 1) // 2
    assert max(work) <= 1.02 * sum(work) / world
    for step in zip(*steps, strict=True):  # each step is balanced too, so that no rank waits for another
        assert max(step) <= 1.02 * sum(step) / world


def test_zigzag_steps_are_one_product_without_a_mask() -> None:
    problem = Problem("zigzag", True, (8,) * 4, (8,) * 4)
    own, *others = schedule(problem, 1, "keys")
    assert own.calls == (Call((0, 8), (0, 8), 4, 4, causal=True),)
    assert [(step.partner, step.rows) for step in others] == [(0, (0, 4)), (3, (0, 8)), (2, (0, 8))]
    assert [step.calls for step in others] == [(Call((0, 8), (0, 4)),), *[(Call((4, 8), (0, 8)),)] * 2]
    assert [(step.to, step.to_rows) for step in others] == [(2, (0, 4)), (3, (0, 4)), (0, (0, 8))]


def test_contiguous_fetches_no_keys_that_nobody_sees() -> None:
    problem = Problem("contiguous", True, (8,) * 3, (8,) * 3)
    assert [step.rows for step in schedule(problem, 0, "keys")] == [(0, 8), (0, 0), (0, 0)]
    assert block_calls(problem, 0, 1) == []


def test_causal_stripes_of_unlike_cuts_are_refused() -> None:
    reason = Problem("striped", True, (3, 5), (4, 4)).unsupported_reason()
    assert reason and "must be cut as `shard` cuts them" in reason
    assert Problem("striped", True, (3, 5), (3, 5)).unsupported_reason() is None
    assert Problem("striped", False, (3, 5), (4, 4)).unsupported_reason() is None


def test_what_moves_has_fewer_bytes() -> None:
    def rotation(queries: int, keys: int, heads: int = 8, kv_heads: int = 8, dim: int = 64) -> str:
        return configs.pick_rotation((queries,) * 2, (keys,) * 2, heads, kv_heads, dim, 2)

    assert rotation(2500, 500_000) == "queries"
    assert rotation(102_500, 100_000) == rotation(8192, 8192, 32, 8, 128) == "keys"
    assert {rotation(a, b) for a in (0, 9) for b in (0, 9)} <= set(ROTATIONS)
    assert rotation(0, 0) == "keys"

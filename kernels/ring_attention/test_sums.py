"""Which calls write sums and which add, for every layout: each row is written before it is added to."""

from __future__ import annotations

import itertools

import pytest

from .layout import LAYOUTS, even_lengths
from .schedule import Problem
from .sums import Share, of_all, of_keys, of_queries, shares


def test_a_call_writes_what_none_has_written() -> None:
    first, second, behind = shares([(0, 4), (4, 8), None], 8)
    assert first == second == Share((), False, True) and behind == Share((), True, True)
    assert shares([(0, 4), (2, 8), None], 10)[1:] == [Share(((4, 8),), True, True), Share(((8, 10),), True, True)]
    assert shares([(0, 4), (6, 8)], 8) == [Share((), False, True), Share((), False, True)]
    assert shares([None], 0) == [Share((), True, True)]


def _problems():
    for layout, causal, world in itertools.product(LAYOUTS, (False, True), (2, 3, 4)):
        even = even_lengths(1024 * world, world, layout)
        ragged = (900, 0, 400, 700)[:world]
        for lengths in (even, ragged):
            yield Problem(layout, causal, lengths, lengths)
        if layout != "striped" or not causal:
            yield Problem(layout, causal, ragged, (300, 700, 0, 600)[-world:])


@pytest.mark.parametrize("problem", list(_problems()), ids=str)
def test_every_row_is_written_before_it_is_added_to(problem) -> None:
    for rank in range(problem.world):
        for plan in (of_keys(problem, rank), of_all(problem, rank)):
            rows = problem.q_lengths[rank]
            written, finished = set(), set()
            for call, share, _ in (marked for stage in plan.stages for marked in stage):
                own = set(range(*call.q))
                zeros = {row for one in share.zeros for row in range(*one)}
                assert not zeros & written and not own & finished
                assert own <= written | zeros if share.add else not own & written
                written |= own
                finished |= own if share.final else set()
            unseen = {row for one in plan.unseen for row in range(*one)}
            assert written | unseen == set(range(rows)) and not written & unseen
            assert {row for one in plan.rest for row in range(*one)} == set(range(rows)) - finished
        moved = of_queries(problem, rank)
        keys: set[int] = set()
        for call, _, share in (marked for stage in moved.stages for marked in stage):
            own, zeros = set(range(*call.k)), {row for one in share.zeros for row in range(*one)}
            assert own <= keys | zeros if share.add else not own & keys
            keys |= own
        assert keys | {row for one in moved.unseen for row in range(*one)} == set(range(problem.k_lengths[rank]))

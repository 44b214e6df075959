"""Layouts: sharding, gathering, and the positions of rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from . import positions, shard, unshard
from .layout import LAYOUTS, assemble, cut, even_lengths, runs

WORLDS = st.integers(1, 9)
LAYOUT = st.sampled_from(LAYOUTS)


@given(st.integers(0, 60), WORLDS, LAYOUT)
def test_what_is_cut_up_is_put_together_again(length: int, world: int, layout: str) -> None:
    x = torch.randn(2, length, 3)
    blocks = [cut(x, 1, rank, world, layout) for rank in range(world)]
    lengths = [block.shape[1] for block in blocks]
    assert lengths == list(even_lengths(length, world, layout)) and max(lengths) - min(lengths) <= 2
    assert all(block.is_contiguous() for block in blocks)
    assert torch.equal(assemble(blocks, 1, layout), x)
    last = torch.randn(2, 3, length, 2).to(memory_format=torch.channels_last)
    assert all(cut(last, 2, rank, world, layout).is_contiguous() for rank in range(world))


@given(st.integers(0, 60), WORLDS, LAYOUT)
def test_positions_are_where_the_rows_were(length: int, world: int, layout: str) -> None:
    lengths = even_lengths(length, world, layout)
    for rank in range(world):
        rows = cut(torch.arange(length), 0, rank, world, layout)
        assert torch.equal(positions(lengths[rank], rank, world, layout, lengths), rows)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), LAYOUT)
def test_ragged_lengths_have_every_position_once_and_in_order(lengths: list[int], layout: str) -> None:
    world = len(lengths)
    found = [positions(n, rank, world, layout, lengths) for rank, n in enumerate(lengths)]
    assert sorted(torch.cat(found).tolist()) == list(range(sum(lengths)))
    assert all(torch.equal(rows, rows.sort().values) for rows in found)


def test_zigzag_gives_each_rank_a_chunk_from_either_end() -> None:
    found = [positions(4, rank, 3).tolist() for rank in range(3)]
    assert found == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert [run.position for run in runs((4, 4, 4), 1, "zigzag")] == [2, 8]


def test_stripes_are_dealt_out_in_turn() -> None:
    assert positions(3, 1, 4, "striped").tolist() == [1, 5, 9]
    assert positions(3, 2, 3, "striped", [1, 2, 3]).tolist() == [2, 4, 5]


def test_without_a_process_group_there_is_one_rank() -> None:
    x = torch.randn(2, 7, requires_grad=True)
    for layout in LAYOUTS:
        whole = shard(x, -1, layout=layout)
        assert torch.equal(whole, x) and torch.equal(unshard(whole, -1, layout=layout), x)
    (gradient,) = torch.autograd.grad(shard(x, 1).sum(), x)
    assert torch.equal(gradient, torch.ones(2, 7))


def test_bad_input_is_named() -> None:
    x = torch.zeros(4)
    with pytest.raises(ValueError, match="layout must be one of zigzag, striped, contiguous, got 'round'"):
        shard(x, 0, layout="round")
    with pytest.raises(ValueError, match="layout must be"):
        unshard(x, 0, layout="round")
    with pytest.raises(ValueError, match="rank must be from 0 to 1, got 2"):
        positions(3, 2, 2)
    with pytest.raises(ValueError, match="lengths must be 2, with 3 for rank 1"):
        positions(3, 1, 2, lengths=[3, 4])

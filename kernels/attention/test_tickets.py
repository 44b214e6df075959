"""The backward for Hopper whose CTAs stay and draw blocks of keys: the same as with a CTA for each block."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from . import attention, cuda_backward, cuda_driver, delta, dispatch
from .backward import separate_bwd
from .problem import Problem
from .test_attention import everything, normal
from .test_cuda import attend, on_hopper, writes_all_and_no_more
from .test_dispatch import QUERY_TILES

SHAPES = [(1, 129), (100, 1000), (700, 333), (333, 700), (1500, 2999)]


def test_what_it_is_told(monkeypatch):
    """Launched on nothing: a CTA to a multiprocessor, where tickets begin and end, and rows of a warp to be stored."""
    compiled, launched = [], []
    monkeypatch.setattr(cuda_driver, "kernels", lambda *arguments: compiled.append(arguments) or (None,) * 4)
    monkeypatch.setattr(cuda_backward, "tensor_map", lambda *arguments: arguments)
    monkeypatch.setattr(cuda_backward, "launch", lambda *arguments: launched.append(arguments))
    monkeypatch.setattr(Problem, "multiprocessors", lambda self: 4)
    config = dispatch.CudaBackwardConfig(64, 1, tickets=True)
    monkeypatch.setattr(dispatch, "pick_cuda_bwd_config", lambda *_: config)
    q, k, v = (normal(2, heads, rows, 128, dtype=torch.float16) for heads, rows in ((6, 400), (2, 600), (2, 600)))
    saved = delta.Saved(torch.empty_like(q), torch.empty(2, 6, 400), None, torch.empty_like(q), None)
    cuda_backward.cuda_bwd(Problem(q, k, v, 0.1, -1, 0, 600), saved, *(torch.empty_like(x) for x in (q, k, v)))
    assert {"TICKETS=1", "CHAINED=0", "WHOLE=0", "ROLES=0"} <= set(compiled[0][3])
    prepare, main, _ = launched
    ticket, items = main[4][-2:]
    assert [x.value for x in prepare[4][-2:]] == [ticket.value, main[1]] and ticket.value
    assert (main[1], items.value) == (4, 4 * 5) and [x[1:] for x in main[4][4:6]] == [(600, 16)] * 2
    # With more multiprocessors than blocks there is nobody to draw.
    monkeypatch.setattr(Problem, "multiprocessors", lambda self: 100)
    cuda_backward.cuda_bwd(Problem(q, k, v, 0.1, -1, 0, 600), saved, *(torch.empty_like(x) for x in (q, k, v)))
    assert launched[-2][1] == 2 * 2 * 5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("queries", "keys"), SHAPES)
@pytest.mark.parametrize(("dim", "tile"), QUERY_TILES)
def test_agrees(dim, tile, queries, keys, group, causal, dtype, monkeypatch):
    """With the separate form, on few multiprocessors, so that each has many blocks; of one tile or of many, in sections
    and turns, with shares or without. Memory is NaN before, and stays so beyond the rows."""
    on_hopper(dim, causal, dtype)
    q, k, v = (
        normal(2, rows, heads, dim, dtype=dtype).transpose(1, 2)
        for rows, heads in ((queries, 2 * group), (keys, 2), (keys, 2))
    )
    out, lse = attend([q, k, v], "cuda", causal=causal)
    dout = torch.randn_like(out)
    problem = Problem(q, k, v, dim**-0.5, -1, 0 if causal else -1, keys)
    saved = delta.Saved(out, lse, None, dout, None)
    wanted = [torch.empty_like(x) for x in (q, k, v)]
    separate_bwd(problem, saved, *wanted)
    tiles = -(-queries // tile) * group
    ways = [dict(section=3), dict(section=1, alternate=True)]
    ways = ways if causal else [dict(section=1), dict(section=1, shared=2, splits=min(3, tiles))]
    for multiprocessors, way in itertools.product((1, 3, 7), ways):
        if way.get("splits") == 1:
            continue
        config = dispatch.CudaBackwardConfig(tile, tickets=True, **way)
        monkeypatch.setattr(dispatch, "pick_cuda_bwd_config", lambda *_, config=config: config)
        monkeypatch.setattr(Problem, "multiprocessors", lambda self, count=multiprocessors: count)
        writes_all_and_no_more(problem, saved, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dim", "tile"), QUERY_TILES)
def test_who_draws_a_block_changes_nothing(dim, tile, causal, monkeypatch):
    """dK and dV are those of a CTA for each block bit for bit, and the same in each run."""
    on_hopper(dim, causal, torch.bfloat16)
    leaves = [normal(2, heads, rows, dim, dtype=torch.bfloat16) for heads, rows in ((4, 900), (2, 2999), (2, 2999))]
    attend(leaves, "cuda", causal=causal)
    monkeypatch.setattr(Problem, "multiprocessors", lambda self: 5)
    config = dispatch.CudaBackwardConfig(tile, 2 if causal else 1)
    found = []
    for tickets in (False, True, True, True):
        way = dataclasses.replace(config, tickets=tickets)
        monkeypatch.setattr(dispatch, "pick_cuda_bwd_config", lambda *_, way=way: way)
        found.append(everything(attention, leaves, causal=causal, backward="cuda"))
    for _, _, _, dk, dv in found[1:]:
        assert torch.equal(dk, found[0][3]) and torch.equal(dv, found[0][4])

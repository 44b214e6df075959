"""The backward in CUDA C++ with schedule PERSISTENT: its results are those of CTA_PER_BLOCK."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from . import attention
from .configs import backward as backward_configs
from .configs.backward import Schedule
from .portable.backward import separate_bwd
from .problem import Problem, Saved
from .test_attention import everything, normal
from .test_sm90 import attend, on_hopper, writes_all_and_no_more

TILES = [(64, 128), (128, 64)]
SHAPES = [(1, 129), (1, 20_000), (100, 1000), (564, 20_000), (700, 333), (333, 700), (1500, 2999)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("queries", "keys"), SHAPES)
@pytest.mark.parametrize(("dim", "tile"), TILES)
def test_agrees(dim, tile, queries, keys, group, causal, dtype, monkeypatch):
    """Compares with the separate version, on few SMs, so that a CTA has many blocks; blocks of one tile and of many, in
    alternating sections, split or not. Memory holds NaN before, and still does past the last row."""
    on_hopper(dim, causal, dtype)
    q, k, v = (
        normal(2, rows, heads, dim, dtype=dtype).transpose(1, 2)
        for rows, heads in ((queries, 2 * group), (keys, 2), (keys, 2))
    )
    out, lse = attend([q, k, v], "cuda", causal=causal)
    dout = torch.randn_like(out)
    problem = Problem(q, k, v, dim**-0.5, -1, 0 if causal else -1, keys)
    saved = Saved(out, lse, None, dout, None)
    wanted = [torch.empty_like(x) for x in (q, k, v)]
    separate_bwd(problem, saved, *wanted)
    tiles = -(-queries // tile) * group
    ways = [dict(section=3), dict(section=1, alternate=True)]
    ways = ways if causal else [dict(section=1), dict(section=1, shared=2, splits=min(3, tiles))]
    for sms, way in itertools.product((1, 3, 7), ways):
        if way.get("splits") == 1:
            continue
        config = backward_configs.CudaBackwardConfig(tile, schedule=Schedule.PERSISTENT, **way)
        monkeypatch.setattr(backward_configs, "pick_cuda_bwd_config", lambda *_, config=config: config)
        monkeypatch.setattr(Problem, "sms", lambda self, count=sms: count)
        writes_all_and_no_more(problem, saved, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dim", "tile"), TILES)
def test_who_draws_a_block_changes_nothing(dim, tile, causal, monkeypatch):
    """dK and dV are bitwise equal to those of CTA_PER_BLOCK, and deterministic."""
    on_hopper(dim, causal, torch.bfloat16)
    leaves = [normal(2, heads, rows, dim, dtype=torch.bfloat16) for heads, rows in ((4, 900), (2, 2999), (2, 2999))]
    attend(leaves, "cuda", causal=causal)
    monkeypatch.setattr(Problem, "sms", lambda self: 5)
    shares = {} if causal else dict(shared=3, splits=4)
    config = backward_configs.CudaBackwardConfig(tile, 2 if causal else 1, **shares)
    found = []
    for schedule in (Schedule.CTA_PER_BLOCK, *(Schedule.PERSISTENT,) * 3):
        way = dataclasses.replace(config, schedule=schedule)
        monkeypatch.setattr(backward_configs, "pick_cuda_bwd_config", lambda *_, way=way: way)
        found.append(everything(attention, leaves, causal=causal, backward="cuda"))
    for _, _, _, dk, dv in found[1:]:
        assert torch.equal(dk, found[0][3]) and torch.equal(dv, found[0][4])

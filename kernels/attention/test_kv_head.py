"""The backward in CUDA C++ with schedule CTA_PER_KV_HEAD: when it is picked, its arguments, its results."""

from __future__ import annotations

import math

import pytest
import torch

from . import attention, versions
from .configs import backward as backward_configs
from .configs.backward import Schedule
from .problem import Problem, Saved
from .test_attention import DEVICE, everything, normal
from .test_sm90 import agrees_and_repeats, attend, cuda_bwd, leaves_of, near, on_hopper, recorded

CONFIG = backward_configs.CudaBackwardConfig(64, 1, schedule=Schedule.CTA_PER_KV_HEAD)
SIZES = [(333, 700), (700, 333), (512, 512), (1, 129), (64, 500), (60, 1000), (1000, 257)]


@pytest.mark.parametrize(
    ("queries", "keys", "dim", "kv_heads", "group", "causal", "picked"),
    [
        (512, 512, 128, 128, 1, True, True),
        (512, 512, 128, 128, 1, False, True),
        (512, 512, 128, 118, 1, True, False),  # 14 of 132 SMs without work
        (512, 512, 128, 119, 1, True, True),
        (512, 512, 128, 133, 1, True, False),  # a second wave for one head
        (512, 512, 128, 264, 1, True, True),
        (1024, 1024, 128, 128, 1, True, True),
        (1024, 1024, 128, 128, 1, False, False),  # dQ does not fit L2
        (2048, 2048, 128, 128, 1, True, False),
        (1024, 1024, 128, 128, 8, True, False),
        (512, 128, 128, 128, 1, True, False),  # a single block of keys
        (512, 129, 128, 128, 1, True, True),
        (512, 512, 64, 128, 1, True, False),
        (900, 1900, 128, 128, 1, True, False),  # most blocks of keys are seen by all queries
        (16_384, 1000, 128, 128, 1, True, True),  # most queries see none
    ],
)
def test_which_problems_have_kv_head(queries, keys, dim, kv_heads, group, causal, picked):
    config = backward_configs.pick_cuda_bwd_config(queries, keys, dim, kv_heads, group, causal, 132)
    assert config == CONFIG if picked else config.schedule is not Schedule.CTA_PER_KV_HEAD


def problem_of(queries: int, keys: int, heads: int, kv_heads: int, causal: bool) -> tuple[Problem, Saved]:
    q, k, v = (normal(2, h, n, 128).half() for h, n in ((heads, queries), (kv_heads, keys), (kv_heads, keys)))
    lse = torch.zeros(q.shape[:3], device=DEVICE)
    return Problem(q, k, v, 0.1, -1, 0 if causal else -1, keys), Saved(q, lse, None, torch.ones_like(q), None)


@pytest.fixture
def four_sms(monkeypatch):
    monkeypatch.setattr(Problem, "sms", lambda self: 4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [4, 2])
def test_what_it_is_told(heads, causal, four_sms, monkeypatch):
    """Launches are recorded, not run. With CTA_PER_KV_HEAD: two kernels, one CTA per head, TMA boxes of 16 rows for
    results; otherwise three kernels and boxes of 64 rows."""
    compiled, told = recorded(monkeypatch)
    problem, saved = problem_of(400, 300, 3 * heads, heads, causal)
    dq, dk, dv = (torch.full_like(x, math.nan) for x in (problem.q, problem.k, problem.v))
    per_head = heads == 4  # with 2 batches, twice as many heads as SMs
    if not per_head:
        config = backward_configs.CudaBackwardConfig(64, 1)
        monkeypatch.setattr(backward_configs, "pick_cuda_bwd_config", lambda *_: config)
    cuda_bwd(problem, saved, dq, dk, dv)
    defines = compiled[0][3]
    assert {"QUERIES=64", f"SCHEDULE={2 if per_head else 0}"} <= set(defines)
    assert [x.name for x in told] == ["preprocess", "main", *(() if per_head else ("postprocess",))]
    preprocess, main = told[:2]
    assert preprocess.grid == 2 * 3 * heads * 7
    assert (main.grid, main.threads, main.shared) == (2 * heads * (1 if per_head else 3), 384, 232_448)
    maps, described, third = main.values[:6], main.described(), main.values[-2]
    rows = 16 if per_head else 64
    assert [x[1:] for x in maps] == [(400, 64)] * 2 + [(300, 64)] * 2 + [(300, rows)] * 2
    assert [x[0] for x in maps] == [problem.q, saved.dout, problem.k, problem.v, dk, dv]
    assert (third[0] is dq and third[1:] == (400, 16)) or not per_head
    assert (described.queries, described.keys, described.m_tiles, described.kv_heads, described.group) == (
        400,
        300,
        7,
        heads,
        3,
    )
    # No CTA computes tiles whose queries see no key.
    zeros = 64 if per_head and causal else 0
    assert not dq[:, :, :zeros].any() and dq[:, :, zeros:].isnan().all()


@pytest.mark.parametrize(("kv_heads", "keys", "form"), [(2, 300, "cuda"), (1, 300, "separate"), (1, 128, "cuda")])
def test_it_is_deterministic(kv_heads, keys, form, four_sms, monkeypatch):
    """So is SINGLE_BLOCK. Where neither schedule applies, deterministic mode runs the separate backward."""
    monkeypatch.setattr(versions, "cuda_unsupported_reason", lambda *_: None)
    problem, saved = problem_of(200, keys, 2, kv_heads, causal=True)
    torch.use_deterministic_algorithms(True)
    try:
        picked = versions._form(problem, saved, (problem.q, problem.k, problem.v), "auto")
        monkeypatch.setattr(versions, "cuda_unsupported_reason", lambda *_: "for some reason")
        otherwise = versions._form(problem, saved, (problem.q, problem.k, problem.v), "auto")
    finally:
        torch.use_deterministic_algorithms(False)
    assert (picked, otherwise) == (form, "separate")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(3, 3), (8, 2)])
@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_agrees_with_the_separate_form(queries, keys, heads, causal, dtype, monkeypatch):
    on_hopper(128, causal, dtype)
    monkeypatch.setattr(backward_configs, "pick_cuda_bwd_config", lambda *_: CONFIG)
    leaves = leaves_of(queries, keys, heads, dtype)
    agrees_and_repeats(leaves, causal)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_keys_that_do_not_count(causal, monkeypatch):
    leaves, options = on_hopper(128, causal, torch.bfloat16)
    attend(leaves, "cuda", **options)
    monkeypatch.setattr(backward_configs, "pick_cuda_bwd_config", lambda *_: CONFIG)
    mine = everything(attention, leaves, backward="cuda", **options)
    near(mine, everything(attention, leaves, backward="separate", **options))
    assert not mine[3][:, :, options["num_context"] :].any() and not mine[4][:, :, options["num_context"] :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_it_writes(causal, monkeypatch):
    """All rows are written, including those that see no key, and none past the last, whatever memory held before."""
    (q, k, v), _ = on_hopper(128, causal, torch.bfloat16)
    q, k, v = q[:, :, :711], k[:, :, :300], v[:, :, :300]
    out, lse = attend([q, k, v], "cuda", causal=causal)
    monkeypatch.setattr(backward_configs, "pick_cuda_bwd_config", lambda *_: CONFIG)
    problem = Problem(q, k, v, 128**-0.5, -1, 0 if causal else -1, 300)
    saved = Saved(out, lse, None, torch.ones_like(out), None)
    for _ in range(10):
        poison = [torch.full((3 * 16 * 768 * 128,), math.nan, device="cuda") for _ in range(3)]
        del poison  # the caching allocator reuses this memory
        dq, dk, dv = (torch.full((*x.shape[:2], x.shape[2] + 60, 128), math.nan).to(x) for x in (q, k, v))
        cuda_bwd(problem, saved, dq[:, :, :711], dk[:, :, :300], dv[:, :, :300])
        for x, rows in ((dq, 711), (dk, 300), (dv, 300)):
            assert x[:, :, :rows].isfinite().all() and x[:, :, rows:].isnan().all()
        assert not causal or not dq[:, :, : 711 - 300].any()


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 2])
def test_the_same_fifty_times(group):
    """Results are bitwise equal, with a head for each SM, while concurrent copies of varying size disturb the timing of
    CTAs. Also in deterministic mode, which picks this schedule."""
    on_hopper(128, True, torch.bfloat16)
    heads = torch.cuda.get_device_properties(0).multi_processor_count
    leaves = leaves_of(500, 460, (group * heads, heads), torch.bfloat16, batch=1)
    attend(leaves, "cuda", causal=True)
    noise, stream = normal(1 << 24), torch.cuda.Stream()
    first = everything(attention, leaves, causal=True, backward="cuda")
    for repeat in range(50):
        with torch.cuda.stream(stream):
            noise[: 1 << (repeat % 25)].mul_(1.0)
        again = everything(attention, leaves, causal=True, backward="cuda")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), repeat
    torch.cuda.synchronize()
    torch.use_deterministic_algorithms(True)
    try:
        picked = everything(attention, leaves, causal=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, picked, strict=True))

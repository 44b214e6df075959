"""The backward in CUDA C++ with schedule ROLES: when it is picked, the order of CTAs, its arguments, its results."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from . import attention
from .configs import backward as backward_configs
from .configs import roles as roles_configs
from .configs.backward import CudaBackwardConfig, Schedule
from .configs.roles import RolesPlan, pick_roles_plan
from .problem import Problem, Saved
from .sm90 import backward, cuda_driver
from .test_attention import everything, normal
from .test_sm90 import attend, cuda_bwd, leaves_of, near, on_hopper, recorded

Place = tuple[str, int, int, int]  # role, span, item, awaited


def places(plan: RolesPlan, kv_heads: int, group: int, blocks: int, shared: int = 0, splits: int = 1) -> list[Place]:
    """Returns role and work of the CTA at each logical index, span by span, as backward_roles.cuh derives it."""
    whole = kv_heads * blocks - shared
    owned = [*range(whole), *(whole + i // splits for i in range(shared * splits))]  # block of each CTA that multiplies
    multiplies: list[list[int]] = [[] for _ in range(plan.spans)]
    for i, block in enumerate(owned):
        multiplies[block // blocks // plan.span].append(i)
    heads = [group * min(plan.span, kv_heads - s * plan.span) for s in range(plan.spans)]
    preprocesses = [n * (plan.chunks if s else plan.end_chunks) for s, n in enumerate(heads)]
    postprocesses = [n * (plan.chunks if s < plan.spans - 2 else plan.end_chunks) for s, n in enumerate(heads)]
    result: list[Place] = []

    def interleave(others: list[Place], among: list[Place]) -> None:
        stride = (len(others) + len(among)) // max(len(others), 1)
        for i in itertools.count():
            if not others and not among:
                return
            result.append(others.pop(0) if others and i % stride == 0 else among.pop(0))

    for turn in range(plan.spans + 3):
        first, second, third = turn < plan.spans, 1 <= turn <= plan.spans, turn >= 3
        before = [("preprocess", turn, i, 0) for i in range(preprocesses[turn])] if first else []
        multiply = [("multiply", turn - 1, i, preprocesses[turn - 1]) for i in multiplies[turn - 1]] if second else []
        awaited = roles_configs.WARPS * len(multiplies[turn - 3]) if third else 0
        after = [("postprocess", turn - 3, i, awaited) for i in range(postprocesses[turn - 3])] if third else []
        interleave(before + after, multiply)
    return result


PROBLEMS = [  # span, KV heads, group, tiles of queries of a head, their queries, blocks of keys, shared, splits
    (1, 1, 1, 1, 64, 2, 0, 1),
    (3, 2, 1, 5, 64, 3, 0, 1),
    (2, 7, 1, 9, 80, 3, 0, 1),
    (1, 3, 4, 30, 64, 2, 0, 1),
    (2, 8, 8, 128, 64, 64, 0, 1),
    (8, 128, 1, 32, 64, 16, 0, 1),
    (1, 40, 1, 17, 80, 5, 0, 1),
    (2, 32, 1, 103, 80, 64, 68, 5),
    (1, 3, 2, 5, 80, 3, 8, 3),
]


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("sms", [1, 4, 132])
def test_a_cta_waits_for_lower_places_alone(problem, sms):
    span, kv_heads, group, m_tiles, tile, blocks, shared, splits = problem
    config = CudaBackwardConfig(tile, 1, shared, splits, schedule=Schedule.ROLES, span=span)
    made = pick_roles_plan(config, kv_heads, group, m_tiles, blocks, sms)
    grid = places(made, kv_heads, group, blocks, shared, splits)
    ctas = kv_heads * blocks - shared + shared * splits
    assert len(set(grid)) == len(grid) == made.ctas
    # Those that multiply keep their order.
    assert [item for role, _, item, _ in grid if role == "multiply"] == list(range(ctas))
    # A CTA waits for all CTAs of the previous role, at lower indices. CTAs that multiply count warps, not CTAs.
    before = {"multiply": ("preprocess", 1), "postprocess": ("multiply", roles_configs.WARPS)}
    seen: dict[tuple[str, int], int] = {}
    for role, of_span, _, awaited in grid:
        if role in before:
            other, each = before[role]
            assert seen[other, of_span] * each == awaited > 0
        seen[role, of_span] = seen.get((role, of_span), 0) + 1


@pytest.mark.parametrize("tile", [64, 80])
def test_chunks_cover_all_tiles(tile):
    for m_tiles, heads, group, sms in itertools.product((1, 2, 7, 8, 9, 31, 256), (1, 3, 64), (1, 8), (1, 132)):
        made = pick_roles_plan(
            CudaBackwardConfig(tile, 1, schedule=Schedule.ROLES, span=2), heads, group, m_tiles, 3, sms
        )
        for chunk, chunks in ((made.chunk, made.chunks), (made.end_chunk, made.end_chunks)):
            assert (chunks - 1) * chunk < m_tiles <= chunks * chunk
            assert chunk * tile <= roles_configs.CHUNK_ROWS <= 1152
        assert made.end_chunk <= made.chunk
        assert (made.spans - 1) * made.span < heads <= made.spans * made.span


@pytest.mark.parametrize(
    ("queries", "kv_heads", "group", "causal", "section", "span"),
    [
        (2048, 128, 1, True, 8, 8),
        (4096, 128, 1, True, 4, 4),
        (16_384, 32, 1, True, 1, 1),
        (8192, 32, 1, False, 1, 2),
        (2048, 8, 1, False, 1, 4),  # one wave of CTAs: half of the heads
        (4096, 13, 1, False, 1, 7),  # 3.2
        (8192, 8, 1, False, 1, 2),  # 3.9
        (4096, 10, 1, True, 5, 5),  # 2.4 under a mask: half of the heads
        (8192, 5, 1, True, 5, 5),  # or all, if they are few and odd
        (8192, 9, 1, True, 5, 5),  # 4.4, which two at a time do not divide
        (8192, 8, 1, True, 2, 2),  # 3.9: two at a time are a CTA to an SM, and four sections two pairs
        (8192, 10, 1, True, 5, 5),  # 4.8
        (4096, 21, 1, True, 11, 11),  # 5.1: three heads at a time leave a third of the SMs idle
        (8192, 8, 8, True, 2, 2),
        (2048, 8, 8, True, 8, 8),  # alternating sections stay as they are
        (512, 200, 1, True, 25, 50),  # with sections of 32 the last one would have 8
        (512, 60, 1, True, 30, 30),  # 1.8
        (1024, 48, 1, True, 12, 12),  # 2.9 waves of short CTAs
        (1024, 8, 1, True, 4, 4),
        (512, 128, 1, True, 1, 0),  # one CTA a KV head
        (128, 128, 1, True, 32, 0),  # a single block of keys
    ],
)
def test_how_many_heads_a_span_has(queries, kv_heads, group, causal, section, span):
    config = backward_configs.pick_cuda_bwd_config(queries, queries, 128, kv_heads, group, causal, 132)
    assert config.span == span
    assert span == 0 or config.section == section
    assert backward_configs.pick_cuda_bwd_config(queries, queries, 64, kv_heads, group, causal, 132).span == 0


def test_spans_are_whole_sections():
    sizes = itertools.product(
        (1, 300, 2000), (129, 700, 5000), (1, 3, 8, 32, 100, 1000), (1, 4), (False, True), (4, 132)
    )
    for queries, keys, kv_heads, group, causal, sms in sizes:
        config = backward_configs.pick_cuda_bwd_config(queries, keys, 128, kv_heads, group, causal, sms)
        roles = config.schedule is Schedule.ROLES
        assert roles == (config.span > 0)
        assert config.span % config.section == 0 and config.span <= kv_heads
        assert not roles or -(-kv_heads // config.span) <= backward_configs.CUDA_BWD_SPANS


def problem_of(queries: int, keys: int, heads: int, kv_heads: int, causal: bool) -> tuple[Problem, Saved]:
    """Returns a problem in host memory, where the counters can be read without a kernel."""
    shapes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    q, k, v = (normal(2, h, n, 128).half().cpu() for h, n in shapes)
    lse = torch.zeros(q.shape[:3])
    dlse = torch.ones_like(lse)
    return Problem(q, k, v, 0.1, -1, 0 if causal else -1, keys), Saved(q, lse, None, torch.ones_like(q), dlse)


@pytest.mark.parametrize(("tile", "shared", "splits"), [(64, 0, 1), (80, 5, 3)])
def test_what_it_is_told(tile, shared, splits, monkeypatch):
    """Launches are recorded, not run: one kernel, with zeroed counters, and a second one if blocks are split."""
    compiled, told = recorded(monkeypatch)
    counters, zeros = [], torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *n, **options: counters.append(zeros(*n, **options)) or counters[-1])
    config = CudaBackwardConfig(tile, 1, shared, splits, schedule=Schedule.ROLES, span=3)
    monkeypatch.setattr(Problem, "sms", lambda self: 4)
    monkeypatch.setattr(backward_configs, "pick_cuda_bwd_config", lambda *_: config)
    problem, saved = problem_of(400, 300, 8, 4, causal=not shared)
    dq, dk, dv = (torch.full_like(x, math.nan) for x in (problem.q, problem.k, problem.v))
    counters.clear()
    cuda_bwd(problem, saved, dq, dk, dv)
    assert {"SCHEDULE=4", f"QUERIES={tile}"} <= set(compiled[0][3])
    assert [x.name for x in told] == ["main", *(["sum_shares"] if shared else [])]
    main = told[0]
    made = pick_roles_plan(config, 8, 2, -(-400 // tile), 3, 4)
    (counted,) = counters
    assert made.spans == 3 and counted.tolist() == [0] * 7
    assert (main.grid, main.threads, main.shared) == (len(places(made, 8, 2, 3, shared, splits)), 384, 232_448)
    first = 6 + len(backward.Described._fields)
    maps, described, role = main.values[:6], main.described(), main.values[first + 2 :]
    third, fourth = main.values[first : first + 2]
    assert [x[1:] for x in maps] == [(400, tile)] * 2 + [(300, 64)] * 4
    assert third[0] is dq and fourth[0] is saved.out and third[1:] == fourth[1:] == (400, tile)
    assert (described.section, described.unshared, described.splits) == (1, 24 - shared, splits)
    ready = counted.data_ptr()
    assert role[:5] == (saved.lse.data_ptr(), saved.dlse.data_ptr(), ready, ready + 12, ready + 24)
    assert role[5:11] == (made.span, made.spans, made.chunk, made.chunks, made.end_chunk, made.end_chunks)
    assert [role[at : at + 7] for at in range(11, 53, 7)] == list(made.rounds)
    assert len(role) == sum(letter in "Pi" for letter in backward.roles.LAYOUT)
    assert dq.isnan().all()  # the kernel, not the host, zeros the rows that see no key


CONFIGS = [
    CudaBackwardConfig(64, 1, schedule=Schedule.ROLES, span=1),
    CudaBackwardConfig(80, 1, schedule=Schedule.ROLES, span=1),
    CudaBackwardConfig(64, 2, alternate=True, schedule=Schedule.ROLES, span=2),
    CudaBackwardConfig(80, 2, schedule=Schedule.ROLES, span=4),
]
SIZES = [(333, 700), (700, 333), (512, 512), (1, 129), (64, 500), (1500, 257), (60, 1000)]


def picked(monkeypatch: pytest.MonkeyPatch, config: CudaBackwardConfig) -> None:
    monkeypatch.setattr(backward_configs, "pick_cuda_bwd_config", lambda *_: config)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(3, 3), (8, 2)])
@pytest.mark.parametrize(("queries", "keys"), SIZES)
@pytest.mark.parametrize("config", CONFIGS)
def test_agrees_with_the_separate_form(config, queries, keys, heads, causal, dtype, monkeypatch):
    on_hopper(128, causal, dtype)
    picked(monkeypatch, config)
    leaves = leaves_of(queries, keys, heads, dtype)
    attend(leaves, "cuda", causal=causal)
    mine = everything(attention, leaves, causal=causal, backward="cuda")
    near(mine, everything(attention, leaves, causal=causal, backward="separate"))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [64, 80])
@pytest.mark.parametrize(("shared", "splits"), [(1, 2), (7, 5), (10, 9)])
def test_shared_blocks(tile, shared, splits, monkeypatch):
    on_hopper(128, False, torch.float16)
    leaves = [normal(1, heads, rows, 128, dtype=torch.float16) for heads, rows in ((6, 405), (2, 517), (2, 517))]
    attend(leaves, "cuda")
    other = everything(attention, leaves, backward="separate")
    picked(monkeypatch, CudaBackwardConfig(tile, 1, shared, splits, schedule=Schedule.ROLES, span=1))
    near(everything(attention, leaves, backward="cuda"), other)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_keys_that_do_not_count(causal, monkeypatch):
    leaves, options = on_hopper(128, causal, torch.bfloat16)
    attend(leaves, "cuda", **options)
    picked(monkeypatch, CONFIGS[0])
    mine = everything(attention, leaves, backward="cuda", **options)
    near(mine, everything(attention, leaves, backward="separate", **options))
    assert not mine[3][:, :, options["num_context"] :].any() and not mine[4][:, :, options["num_context"] :].any()


def on_the_gpu(causal: bool, heads: int = 3) -> tuple[Problem, Saved]:
    on_hopper(128, causal, torch.bfloat16)
    q, k, v = leaves_of(711, 300, (heads, heads), torch.bfloat16)
    out, lse = attend([q, k, v], "cuda", causal=causal)
    return Problem(q, k, v, 128**-0.5, -1, 0 if causal else -1, 300), Saved(
        out, lse, None, normal(*q.shape).to(q), None
    )


def gradients(problem: Problem, saved: Saved) -> list[torch.Tensor]:
    grads = [torch.full_like(x, math.nan) for x in (problem.q, problem.k, problem.v)]
    cuda_bwd(problem, saved, *grads)
    return grads


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("sms", [1, 132])
def test_rows_that_it_writes(sms, config, causal, monkeypatch):
    """All rows are written, including those that see no key, and none past the last, whatever memory held before. With
    chunks for one SM, circular buffers in shared memory wrap around."""
    problem, saved = on_the_gpu(causal)
    monkeypatch.setattr(Problem, "sms", lambda self: sms)
    picked(monkeypatch, replace(config, schedule=Schedule.CTA_PER_BLOCK, span=0))
    other = gradients(problem, saved)
    picked(monkeypatch, config)
    for _ in range(20):
        poison = [torch.full((n,), math.nan, device="cuda") for n in (6 * 800 * 128, 6 * 800 * 2, 64)]
        del poison  # the caching allocator reuses this memory
        made = [torch.full((*x.shape[:2], x.shape[2] + 90, 128), math.nan).to(x) for x in other]
        cuda_bwd(problem, saved, *(a[:, :, : b.shape[2]] for a, b in zip(made, other, strict=True)))
        for a, b in zip(made, other, strict=True):
            assert a[:, :, b.shape[2] :].isnan().all()
            torch.testing.assert_close(a[:, :, : b.shape[2]], b, rtol=2e-2, atol=2e-2)
        assert not causal or not made[0][:, :, : 711 - 300].any()


@pytest.mark.gpu
def test_a_graph_counts_from_zero_each_time(monkeypatch):
    problem, saved = on_the_gpu(True)
    picked(monkeypatch, CONFIGS[0])
    expected = gradients(problem, saved)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = gradients(problem, saved)
    for _ in range(5):
        for x in captured:
            x.fill_(math.nan)
        graph.replay()
        for a, b in zip(captured, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_two_streams_at_once(monkeypatch):
    """Each call has counters of its own, and waiting CTAs of two launches occupy SMs."""
    problem, saved = on_the_gpu(True, heads=40)
    picked(monkeypatch, CONFIGS[2])
    expected = gradients(problem, saved)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    made = []
    for repeat in range(20):
        with torch.cuda.stream(streams[repeat % 2]):
            made.append(gradients(problem, saved))
    torch.cuda.synchronize()
    for a, b in ((a, b) for grads in made for a, b in zip(grads, expected, strict=True)):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("config", CONFIGS)
def test_it_ends_whatever_the_order_in_which_ctas_start(config, causal, monkeypatch):
    """CTAs with lower blockIdx are delayed longer, so that they take logical indices in another order. There are more
    CTAs than SMs, and each takes one index."""
    problem, saved = on_the_gpu(causal, heads=40)
    picked(monkeypatch, replace(config, span=max(2, config.span)))  # 80 heads in spans of one are too many spans
    expected = gradients(problem, saved)
    original, counters = cuda_driver.kernels, []

    def delayed(device, source, names, defines, shared):
        return original(device, source, names, (*defines, "START_DELAY=1"), shared)

    def zeros(*size, original=torch.zeros, **options):
        counters.append(original(*size, **options))
        return counters[-1]

    monkeypatch.setattr(cuda_driver, "kernels", delayed)
    monkeypatch.setattr(torch, "zeros", zeros)
    config_of = backward.configuration(problem)
    plan = backward._roles_plan(problem, config_of, backward.Sizes.of(problem, config_of))
    for _ in range(3):
        for a, b in zip(gradients(problem, saved), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    counted = [counter for counter in counters if counter.shape == (2 * plan.spans + 1,)]
    assert len(counted) == 3
    for counter in counted:
        assert counter[-1] == plan.ctas > problem.sms()

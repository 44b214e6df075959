"""The versions for Hopper, in Gluon and CUDA C++: results agree with the portable ones, and arguments are right."""

from __future__ import annotations

import itertools
import math
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from . import attention
from .configs import backward as backward_configs
from .configs.backward import Schedule
from .problem import Problem, Saved
from .reference import attention_reference
from .sm90 import backward, cuda_driver, forward
from .test_attention import DEVICE, everything, hide_a_key, normal
from .test_backward_configs import QUERY_TILES


def on_hopper(dim: int, causal: bool, dtype: torch.dtype) -> tuple[list[torch.Tensor], dict]:
    """Inputs with partial tiles, more tiles than SMs, [B, S, H, D] in memory, grouped heads, num_context below Sk."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0 (Hopper)")
    leaves = [
        normal(3, rows, heads, dim, dtype=dtype).transpose(1, 2) for rows, heads in ((1333, 16), (1717, 8), (1717, 8))
    ]
    return leaves, dict(causal=causal, num_context=1511)


def attend(leaves: list[torch.Tensor], version: str, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out and lse of this version of the forward, if it is available here."""
    try:
        return attention(*leaves, forward=version, return_lse=True, **options)
    except RuntimeError as error:
        if "NVRTC through CuPy" in str(error):
            pytest.skip(str(error))
        raise


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("version", "dim"), [*(("gluon", d) for d in (32, 64, 80, 96, 128, 256)), ("cuda", 64), ("cuda", 128)]
)
def test_versions_of_the_forward_agree(version, dim, causal, dtype):
    leaves, options = on_hopper(dim, causal, dtype)
    out, lse = attend(leaves, version, **options)
    other, other_lse = attend(leaves, "portable", **options)
    assert out.stride() == leaves[0].stride()
    # Both round p to the dtype, but relative to different running maxima.
    torch.testing.assert_close(out, other, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(lse, other_lse, rtol=1e-5, atol=1e-4)
    assert torch.equal(out, attend(leaves, version, **options)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("special", [math.inf, math.nan])
@pytest.mark.parametrize(
    ("version", "dim"),
    [("portable", 64), ("split", 64), *(("gluon", d) for d in (32, 64, 256)), ("cuda", 64), ("cuda", 128)],
)
def test_a_score_of_inf_or_nan_makes_its_row_nan(version, dim, special, causal):
    """out, lse and, for keys that the row sees, all gradients: in every version as in the reference."""
    leaves, _ = on_hopper(dim, False, torch.bfloat16)
    leaves = [x[:1, :2, :rows].clone() for x, rows in zip(leaves, (200, 300, 300), strict=True)]
    leaves[0][0, 1, 199, 5] = special  # of the last query, which sees all keys
    for version_of_backward in ("separate", "cuda") if dim in (64, 128) else ("separate",):
        mine = everything(attention, leaves, causal=causal, forward=version, backward=version_of_backward)
        other = everything(attention_reference, leaves, causal=causal)
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), mine, other, strict=True):
            assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf()), name


VERSIONS = [("portable", 64), ("split", 64), *(("gluon", d) for d in (32, 96, 256)), ("cuda", 64), ("cuda", 128)]


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("score", [1.75 * 2**20, -1.75 * 2**20])
@pytest.mark.parametrize(("version", "dim"), [*VERSIONS, ("fp8", 64), ("fp8", 128)])
def test_a_maximum_that_stays_rescales_nothing(version, dim, score, causal):
    """All scores are equal, so out is the mean of v. Scaled scores are rounded by 0.012: were the factor by which each
    of over 100 blocks of keys rescales the sums 2^0.012 or its inverse, the sum would be off by a third or more."""
    (q, k, v), _ = on_hopper(dim, False, torch.bfloat16)
    q, k, v = q[:1, :2, :128].clone(), k[:1, :1].repeat(1, 1, 10, 1), v[:1, :1].repeat(1, 1, 10, 1)
    q.zero_()[..., 0], k.zero_()[..., 0] = 1, score
    v.zero_()[:, :, : v.shape[2] // 2] = 1
    fp8 = version == "fp8"
    out, lse = attend([q, k, v], "auto" if fp8 else version, causal=causal, scale=0.125, fp8=fp8)
    keys = k.shape[2]
    seen = torch.arange(keys - 127, keys + 1, device=DEVICE) if causal else torch.full((128,), keys, device=DEVICE)
    want = (keys // 2 / seen)[:, None].expand_as(out)
    torch.testing.assert_close(out.float(), want, rtol=1e-2, atol=0)
    torch.testing.assert_close(lse, (score / 8 + seen.log()).expand_as(lse), rtol=0, atol=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize(("version", "dim"), VERSIONS)
def test_scaled_scores_over_the_range_of_fp32_are_nan(version, dim):
    """They must not pass for a row that sees no key, though all its probabilities are 0: in one FMA, s · c − inf is
    −inf. The rows of zeros are not affected."""
    (q, k, v), _ = on_hopper(dim, False, torch.bfloat16)
    q, k, v = (x[:1, :1, :200].clone() for x in (q, k, v))
    q[:, :, :100], k[:] = 1e10, 1e10
    q[:, :, 100:] = 0
    out, lse = attend([q, k, v], version, scale=1e30)
    assert out[:, :, :100].isnan().all() and lse[:, :, :100].isnan().all()
    assert out[:, :, 100:].isfinite().all() and lse[:, :, 100:].isfinite().all()


def near(mine, other) -> None:
    """Asserts closeness. Both rounded p and ds to 16 bits, and small elements may be sums of larger terms."""
    for a, b in zip(mine, other, strict=True):
        scale = b.where(b.isfinite(), 0).float().square().mean().sqrt().item()
        torch.testing.assert_close(a, b, rtol=2e-2, atol=3e-2 * scale)


def writes_all_and_no_more(problem: Problem, saved: Saved, wanted: list[torch.Tensor]) -> None:
    """Asserts that the backward in CUDA C++ computes values near `wanted`, and that memory past the last rows, NaN
    before, is not written."""
    grads = [torch.full((*x.shape[:2], x.shape[2] + 60, x.shape[3]), math.nan).to(x) for x in wanted]
    poison = [torch.full((size,), math.nan, device="cuda") for size in (1 << 20, 1 << 22, 1 << 24)]
    del poison  # the caching allocator reuses this memory
    cuda_bwd(problem, saved, *(x[:, :, :-60] for x in grads))
    near([x[:, :, :-60] for x in grads], wanted)
    assert all(x[:, :, -60:].isnan().all() for x in grads)


def cuda_bwd(problem: Problem, saved: Saved, *gradients: torch.Tensor) -> None:
    """Writes dq, dk and dv by a launch plan made for this call."""
    plan = backward.cuda_bwd_plan(problem, saved, *gradients)
    plan(problem.q, problem.k, problem.v, saved.out, saved.lse, saved.dout, saved.dlse, *gradients)


@dataclass
class Told:
    """A launch that is recorded, not run: kernel name, grid, threads, shared memory and parameter values. A tensor map
    is (tensor, rows, rows of a box)."""

    name: str
    grid: int
    threads: int
    shared: int
    layout: str
    values: tuple = ()

    def described(self) -> backward.Described:
        before = len(self.layout.partition(backward.DESCRIBED)[0].replace("(", "").replace(")", ""))
        return backward.Described(*self.values[before : before + len(backward.Described._fields)])


def recorded(monkeypatch: pytest.MonkeyPatch) -> tuple[list, list[Told]]:
    """Returns lists that record what would be compiled and launched."""
    compiled: list = []
    told: list[Told] = []
    names = ("main", "preprocess", "postprocess", "sum_shares")

    def launch(device, handle, grid, threads, shared, layout):
        return lambda *values: told.append(Told(handle, grid, threads, shared, layout, values))

    monkeypatch.setattr(cuda_driver, "kernels", lambda *arguments: compiled.append(arguments) or names)
    monkeypatch.setattr(cuda_driver, "Launch", launch)
    monkeypatch.setattr(backward, "tensor_map", lambda *arguments: lambda address: arguments)
    return compiled, told


def agrees_and_repeats(leaves: list[torch.Tensor], causal: bool) -> None:
    """Asserts that the backward in CUDA C++ is near the separate one, and bitwise equal in the next run."""
    attend(leaves, "cuda", causal=causal)
    mine = everything(attention, leaves, causal=causal, backward="cuda")
    near(mine, everything(attention, leaves, causal=causal, backward="separate"))
    again = everything(attention, leaves, causal=causal, backward="cuda")
    assert all(torch.equal(a, b) for a, b in zip(mine, again, strict=True))


def leaves_of(queries: int, keys: int, heads: tuple[int, int], dtype: torch.dtype, batch: int = 2):
    """Returns q, k and v for D = 128, [B, S, H, D] in memory."""
    shapes = (heads[0], queries), (heads[1], keys), (heads[1], keys)
    return [normal(batch, n, h, 128, dtype=dtype).transpose(1, 2) for h, n in shapes]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dim", "tile"), QUERY_TILES)
def test_backward_in_cuda_agrees(dim, tile, causal, dtype, monkeypatch):
    leaves, options = on_hopper(dim, causal, dtype)
    attend(leaves, "cuda", **options)
    monkeypatch.setattr(backward_configs, "pick_query_tile", lambda *_: tile)
    monkeypatch.setattr(
        backward_configs, "pick_cuda_bwd_config", backward_configs.pick_cuda_bwd_config.__wrapped__
    )  # not cached
    mine = everything(attention, leaves, backward="cuda", **options)
    near(mine, everything(attention, leaves, backward="separate", **options))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dim", "tile", "keys", "schedule"),
    [
        *((dim, tile, 100, Schedule.SINGLE_BLOCK) for dim, tile in ((64, 128), (128, 64))),
        *((dim, tile, 300, Schedule.PERSISTENT) for dim, tile in ((64, 128), (128, 64))),
        (64, 128, 300, Schedule.CTA_PER_BLOCK),
        (128, 64, 300, Schedule.CTA_PER_KV_HEAD),
        *((128, tile, 300, Schedule.ROLES) for tile in (64, 80)),
    ],
)
def test_a_bias_of_minus_infinity_and_the_backward_in_cuda(dim, tile, keys, schedule, causal, monkeypatch):
    """A key that no query sees has gradients of 0, also where queries pad a tile: 0 · inf would be NaN."""
    on_hopper(dim, causal, torch.bfloat16)
    leaves = [normal(2, 2, rows, dim, dtype=torch.bfloat16) for rows in (70, keys, keys)]
    hide_a_key(*leaves[:2], 7)
    attend(leaves, "cuda", causal=causal)
    config = backward_configs.CudaBackwardConfig(tile, 1, schedule=schedule, span=int(schedule is Schedule.ROLES))
    monkeypatch.setattr(backward_configs, "pick_cuda_bwd_config", lambda *_: config)
    mine = everything(attention, leaves, causal=causal, backward="cuda")
    other = everything(attention_reference, leaves, causal=causal)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), mine, other, strict=True):
        assert torch.equal(a.isnan(), b.isnan()), name
    near([x.nan_to_num() for x in mine], [x.nan_to_num() for x in other])


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(6, 6), (6, 2)])
@pytest.mark.parametrize(("queries", "keys"), [(700, 333), (333, 700), (1, 129), (700, 100)])
@pytest.mark.parametrize(("dim", "tile"), QUERY_TILES)
def test_sections_and_directions_of_the_backward_in_cuda(dim, tile, queries, keys, heads, monkeypatch):
    """Under a causal mask: queries that see no key, a partial last section, and both values of `alternate`."""
    on_hopper(dim, True, torch.bfloat16)
    if tile == 80 and keys <= backward_configs.CUDA_BWD_KEYS:
        pytest.skip("tiles of 80 are not for a single block of keys")
    shapes = ((heads[0], queries), (heads[1], keys), (heads[1], keys))
    leaves = [normal(2, *shape, dim, dtype=torch.bfloat16) for shape in shapes]
    attend(leaves, "cuda", causal=True)
    other = everything(attention, leaves, causal=True, backward="separate")
    schedule = Schedule.SINGLE_BLOCK if keys <= backward_configs.CUDA_BWD_KEYS else Schedule.CTA_PER_BLOCK
    for section, alternate in itertools.product((1, 3, 2 * heads[1]), (False, True)):
        config = backward_configs.CudaBackwardConfig(tile, section, alternate=alternate, schedule=schedule)
        monkeypatch.setattr(backward_configs, "pick_cuda_bwd_config", lambda *_, config=config: config)
        near(everything(attention, leaves, causal=True, backward="cuda"), other)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [6, 2])
@pytest.mark.parametrize(("dim", "tile"), QUERY_TILES)
def test_shared_blocks_of_the_backward_in_cuda(dim, tile, heads, monkeypatch):
    """Split blocks that begin in the middle of a group, more of them than heads, or all blocks; blocks that are not
    split begin at different tiles of queries."""
    on_hopper(dim, False, torch.float16)
    leaves = [normal(1, heads, rows, dim, dtype=torch.float16) for heads, rows in ((heads, 405), (2, 517), (2, 517))]
    attend(leaves, "cuda")
    other = everything(attention, leaves, backward="separate")
    monkeypatch.setattr(Problem, "sms", lambda self: 3)
    shares = ((0, 1), (1, 2), (7, 5), (10, 9))
    schedules = (Schedule.CTA_PER_BLOCK, *((Schedule.PERSISTENT,) if dim == 64 else ()))
    for (shared, splits), schedule in itertools.product(shares, schedules):
        splits = min(splits, heads // 2 * -(-405 // tile))
        config = backward_configs.CudaBackwardConfig(tile, 1, shared, splits, schedule=schedule)
        monkeypatch.setattr(backward_configs, "pick_cuda_bwd_config", lambda *_, config=config: config)
        near(everything(attention, leaves, backward="cuda"), other)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(564, 64), (77, 128), (128, 1), (1, 100)])
@pytest.mark.parametrize("dim", [64, 128])
def test_a_single_block_of_the_backward_in_cuda(dim, queries, keys, causal, dtype):
    """One launch: partial tiles, [B, S, H, D] in memory, shared heads, and, under a causal mask, tiles of queries that
    see no key. One CTA computes each sum, so all gradients are deterministic."""
    on_hopper(dim, causal, dtype)
    leaves = [
        normal(3, rows, heads, dim, dtype=dtype).transpose(1, 2) for rows, heads in ((queries, 6), (keys, 2), (keys, 2))
    ]
    agrees_and_repeats(leaves, causal)


@pytest.mark.gpu
def test_a_thread_without_a_context_launches_in_cuda():
    """Such as a thread of autograd whose allocations all came from the caching allocator."""
    leaves, options = on_hopper(64, False, torch.bfloat16)
    wanted, _ = attend(leaves, "cuda", **options)
    with ThreadPoolExecutor(1) as threads, torch.no_grad():
        found, _ = threads.submit(attend, leaves, "cuda", **options).result()
    assert torch.equal(found, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_rows_that_a_single_block_of_the_backward_in_cuda_writes(dim, causal):
    """All rows are written, including those that see no key, and none past the last: 311 is no multiple of the 16 rows
    of a store."""
    (q, k, v), _ = on_hopper(dim, causal, torch.bfloat16)
    q, k, v = q[:, :, :311], k[:, :, :100], v[:, :, :100]
    out, lse = attend([q, k, v], "cuda", causal=causal)
    dq, dk, dv = (torch.full((*x.shape[:2], x.shape[2] + 60, dim), math.nan).to(x) for x in (q, k, v))
    problem = Problem(q, k, v, dim**-0.5, -1, 0 if causal else -1, 100)
    saved = Saved(out, lse, None, torch.ones_like(out), None)
    cuda_bwd(problem, saved, dq[:, :, :311], dk[:, :, :100], dv[:, :, :100])
    for x, rows in ((dq, 311), (dk, 100), (dv, 100)):
        assert x[:, :, :rows].isfinite().all() and x[:, :, rows:].isnan().all()


@pytest.mark.gpu
def test_the_deterministic_mode_picks_a_repeatable_backward():
    leaves, options = on_hopper(64, False, torch.bfloat16)
    separate = everything(attention, leaves, backward="separate", **options)
    torch.use_deterministic_algorithms(True)
    try:
        picked = everything(attention, leaves, **options)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(picked, separate, strict=True))


def test_any_scale_is_a_parameter_of_the_forward_in_cuda(monkeypatch):
    """The slack is divided by it, and must not exceed fp32's range."""
    _, told = recorded(monkeypatch)
    monkeypatch.setattr(cuda_driver, "kernels", lambda *_: ["forward"])
    monkeypatch.setattr(forward, "tensor_map", lambda *arguments: lambda address: arguments)
    monkeypatch.setattr(Problem, "sms", lambda self: 4)
    q, k, v = (normal(1, 2, rows, 64, dtype=torch.float16) for rows in (70, 90, 90))
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=DEVICE)
    for scale in (1e-40, 1.0):
        forward.cuda_fwd_plan(Problem(q, k, v, scale, -1, -1, 90), out)(q, k, v, out, lse)
        scale_log2, slack = struct.unpack("=ff", struct.pack("=ff", *told[-1].values[9:11]))
        assert scale_log2 == pytest.approx(scale / math.log(2), rel=1e-3) and 0 < slack * scale_log2 <= 8.001


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_the_backward_in_cuda_is_told(persistent, dtype, monkeypatch):
    """With PERSISTENT there is one CTA per SM, and dK and dV are stored from registers."""
    compiled, told = recorded(monkeypatch)
    monkeypatch.setattr(Problem, "sms", lambda self: 4 if persistent else 100)
    q, k, v = (normal(2, heads, rows, 64, dtype=dtype) for heads, rows in ((6, 1000), (2, 600), (2, 600)))
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    saved = Saved(torch.empty_like(q), torch.empty(2, 6, 1000, device=DEVICE), None, torch.empty_like(q), None)
    cuda_bwd(Problem(q, k, v, 0.125, -1, -1, 515), saved, dq, dk, dv)
    ((_, source, names, defines, room),) = compiled
    assert (source, names, room) == ("backward.cu", backward.NAMES, 232_448)
    sizes = ("HEAD_DIM=64", "IS_CAUSAL=0", f"FP16={int(dtype == torch.float16)}", "QUERIES=128")
    assert defines == (*sizes, f"SCHEDULE={3 if persistent else 0}")
    # 20 blocks of 24 tiles: five waves of four, or, with more SMs, splits that fill less than a wave.
    main, described = told[1], told[1].described()
    assert (described.queries, described.keys, described.m_tiles, described.n_blocks) == (1000, 515, 8, 5)
    assert (described.kv_heads, described.group, described.all_kv_heads, described.section) == (2, 3, 4, 1)
    assert (described.unshared, described.splits) == ((20, 1) if persistent else (0, 5))
    assert [x.name for x in told] == ["preprocess", "main", *(() if persistent else ("sum_shares",)), "postprocess"]
    assert (main.grid, main.threads, main.shared) == (4 if persistent else 100, 384, room)
    loaded = [(q, 1000, 128), (saved.dout, 1000, 128), (k, 515, 64), (v, 515, 64)]
    stored = [(dk, 515, 64), (dv, 515, 64)]
    if persistent:
        assert _same(main.values[:4], loaded)
        assert main.values[4:12] == (dk.data_ptr(), *dk.stride()[:3], dv.data_ptr(), *dv.stride()[:3])
        assert main.values[-2:] == (0, 20) and told[0].values[-2:] == (0, 4)  # no counter: the schedule is static
    else:
        assert _same(main.values[:6], [*loaded, *stored]) and _same(main.values[-2:], loaded[:2])


def _same(maps, tensors) -> bool:
    return all(a[0] is b[0] and a[1:] == b[1:] for a, b in zip(maps, tensors, strict=True))

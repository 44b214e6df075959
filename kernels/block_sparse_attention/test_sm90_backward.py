"""The backward in CUDA C++: when it runs and its parameters (on any machine), and its results (on Hopper)."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from . import block_sparse_attention, configs, index
from . import problem as problems
from .configs import CUDA_BWD_CANDIDATES
from .portable import backward as portable_backward
from .problem import Saved
from .reference import block_sparse_attention_reference
from .sm90 import backward, cuda_driver
from .test_block_sparse_attention import DEVICE, SMALL, everything, hide_a_key, normal, random_mask, tensors
from .test_sm90_forward import driver, hopper, members  # noqa: F401 (fixtures)

DIMS, BLOCK = (64, 128), 128


def test_which_version_runs():
    assert configs.pick_backward("auto") == "portable"
    assert configs.pick_backward("auto", "cuda") == "cuda"
    assert configs.pick_backward("auto", "cuda", deterministic=True) == "portable"
    assert configs.pick_backward("portable", "cuda") == "portable"
    assert configs.pick_backward("cuda", "cuda", deterministic=True) == "cuda"


def test_what_cuda_does_not_take_runs_in_the_portable_version(monkeypatch):
    ran, original = [], portable_backward.row_terms
    monkeypatch.setattr(portable_backward, "row_terms", lambda *arguments: ran.append(1) or original(*arguments))
    leaves, mask = tensors(70, 130, dim=24), random_mask(2, 3)
    for version in ("auto", "portable"):
        everything(block_sparse_attention, leaves, mask, backward=version, **SMALL)
    assert len(ran) == 2
    with pytest.raises(RuntimeError, match='backward="cuda" cannot run here: it supports blocks of 128, not 64'):
        everything(block_sparse_attention, leaves, mask, backward="cuda", **SMALL)


def problem_of(q, k, v, mask, block: int = BLOCK, bias: torch.Tensor | None = None) -> problems.Problem:
    table = index.make_table(mask[None], q.shape[2], k.shape[2], block, False)
    return problems.Problem(q, k, v, table, bias, 0.1, block, False)


def test_unsupported_reasons(hopper):  # noqa: F811
    def reason(dim: int = 64, dtype: torch.dtype = torch.float16, block: int = BLOCK, bias: bool = False):
        q, k, v = (t.to(dtype) for t in tensors(200, 300, dim=dim))
        shape = (1, -(-200 // block), -(-300 // block))
        problem = problem_of(q, k, v, random_mask(*shape), block, normal(1, *shape) if bias else None)
        return backward.cuda_bwd_unsupported_reason(problem, *(problems.empty_like(t) for t in (q, q, k, v)))

    for dim, dtype in itertools.product(DIMS, (torch.float16, torch.bfloat16)):
        assert reason(dim, dtype) is None
    assert reason(block=64) == "it supports blocks of 128, not 64"
    assert reason(bias=True) == "it does not support block_bias"
    assert reason(dim=80) == "it supports head dimensions 64 and 128, not 80"
    assert reason(dtype=torch.float32) == "it supports float16 and bfloat16, not torch.float32"


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dim", DIMS)
def test_parameters(dim, shared, driver):  # noqa: F811
    """Recorded, not run: sizes, the lines of the columns, lists that are shared or not."""
    compiled, launched = driver
    q, k, v = (t.half() for t in tensors(397, 600, heads=6, kv_heads=2, dim=dim))
    problem = problem_of(q, k, v, random_mask(1 if shared else 6, 4, 5))
    dq, dk, dv = (problems.empty_like(t) for t in (q, k, v))
    saved = Saved(torch.empty_like(q), torch.empty(1, 6, 397, device=DEVICE), None, torch.empty_like(q), None)
    table, dout = problem.table, saved.dout
    plan = backward.cuda_bwd_plan(problem, saved, dq, dk, dv)
    plan(q, k, v, table, saved.out, saved.lse, dout, None, dq, dk, dv)
    ((_, source, names, defines, room),) = compiled
    assert (source, names, room) == ("backward.cu", backward.NAMES, 232_448)
    assert defines == (f"HEAD_DIM={dim}", "IS_CAUSAL=0", "FP16=1")
    preprocess, main, postprocess = launched
    assert [made[0] for made in launched] == [names[1], names[0], names[2]]
    assert preprocess[1:4] == postprocess[1:4] == (6 * 4 * 2, 256, 0)  # 64 rows a CTA, whole blocks of 128
    assert main[1:4] == (5 * 2, 384, room)
    letters, fields = members("backward.cu")
    assert f"MMMMMM({letters})" == backward._MAIN
    maps, told = main[4][:6], SimpleNamespace(**dict(zip(fields, main[4][6:], strict=True)))
    tile = 128 if dim == 64 else 64
    assert [made[:2] for made in maps] == [(397, tile)] * 2 + [(600, 64)] * 4
    assert [made[2] for made in maps] == [t.data_ptr() for t in (q, dout, k, v, dk, dv)]
    assert told.table == table.data_ptr() + 4 * 4 * (3 + 5)
    assert (told.table_batch, told.table_head) == (0, 0 if shared else table.stride(1))
    assert (told.queries, told.keys, told.rows, told.columns) == (397, 600, 4, 5)
    assert (told.kv_heads, told.group, told.all_kv_heads) == (2, 3, 2)
    assert 1 <= told.section <= 2 and 0 <= told.early <= 5
    # Sums of dQ, then lse2 and delta, each for whole blocks of queries.
    assert (told.lse2 - told.dq_sum, told.delta - told.lse2) == (4 * 6 * 512 * dim, 4 * 6 * 512)
    incoming = (saved.out.data_ptr(), *saved.out.stride()[:3], dout.data_ptr(), *dout.stride()[:3])
    assert preprocess[4] == (*incoming, saved.lse.data_ptr(), 0, told.lse2, told.delta, told.dq_sum, 397, 512, 6)
    assert postprocess[4] == (dq.data_ptr(), *dq.stride()[:3], told.dq_sum, 397, 512, 6, problem.scale)


@pytest.mark.parametrize("dim", DIMS)
def test_sections_fit(dim):
    for queries, heads in itertools.product((1, 700, 8192, 200_000), (1, 5, 32)):
        config = configs.pick_cuda_bwd_config(queries, dim, heads)
        assert 1 <= config.section <= heads and heads % config.section == 0
        assert config.section == 1 or 8 * dim * queries * config.section <= configs.BWD_SECTION_BYTES


def needs_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0 (Hopper)")
    if reason := cuda_driver.no_compiler():
        pytest.skip(reason)


def on_hopper(dim: int, dtype: torch.dtype, batch: int = 3, heads: tuple[int, int] = (16, 8), sizes=(1333, 1717)):
    """Returns tensors and a mask with partial blocks, [B, S, H, D] in memory, grouped heads, and rows and columns that
    keep nothing."""
    needs_hopper()
    shapes = (sizes[0], heads[0]), (sizes[1], heads[1]), (sizes[1], heads[1])
    leaves = [normal(batch, *shape, dim, dtype=dtype).transpose(1, 2) for shape in shapes]
    mask = random_mask(heads[0], -(-sizes[0] // BLOCK), -(-sizes[1] // BLOCK), kept=0.4)
    mask[:, ::4] = False
    mask[:, :, ::5] = False
    return leaves, mask


def near(mine, other) -> None:
    """Asserts closeness. Both rounded p and ds to 16 bits, and small elements may be sums of larger terms. If no block
    is kept, all of lse is -inf."""
    for a, b in zip(mine, other, strict=True):
        scale = b.where(b.isfinite(), 0).float().square().mean().sqrt().item()
        torch.testing.assert_close(a, b, rtol=2e-2, atol=3e-2 * scale)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", DIMS)
def test_agrees_with_the_portable_version(dim, causal, dtype):
    """dk and dv are deterministic, and dq is up to the order of its sums."""
    leaves, mask = on_hopper(dim, dtype)
    mine = everything(block_sparse_attention, leaves, mask, causal=causal, backward="cuda")
    near(mine, everything(block_sparse_attention, leaves, mask, causal=causal, backward="portable"))
    _, _, dq, dk, dv = mine
    assert [g.stride() for g in (dq, dk, dv)] == [t.stride() for t in leaves]
    assert not dq[:, :, :BLOCK].any() and not dk[:, :, :BLOCK].any() and not dv[:, :, :BLOCK].any()
    _, _, _, *again = everything(block_sparse_attention, leaves, mask, causal=causal, backward="cuda")
    assert torch.equal(again[0], dk) and torch.equal(again[1], dv)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (6, 1)])
@pytest.mark.parametrize(("queries", "keys"), [(700, 333), (333, 700), (1, 129), (700, 100), (64, 1)])
@pytest.mark.parametrize("dim", DIMS)
def test_sizes_and_orders(dim, queries, keys, heads, monkeypatch):
    """Under a causal mask, with queries that see no key, and with a partial last section."""
    leaves, mask = on_hopper(dim, torch.bfloat16, 2, heads, (queries, keys))
    mask |= random_mask(*mask.shape)
    other = everything(block_sparse_attention, leaves, mask, causal=True, backward="portable")
    for section, early in itertools.product((1, 3, 100), (0, 1, 100)):
        config = configs.CudaBackwardConfig(section, early)
        monkeypatch.setattr(configs, "pick_cuda_bwd_config", lambda *_, config=config: config)
        near(everything(block_sparse_attention, leaves, mask, causal=True, backward="cuda"), other)


@pytest.mark.gpu
@pytest.mark.parametrize("masks", [(1, 1), (1, 16), (3, 1)])
@pytest.mark.parametrize("dim", DIMS)
def test_shared_masks(dim, masks):
    leaves, _ = on_hopper(dim, torch.float16)
    mask = random_mask(*masks, 11, 14, kept=0.3)
    mine = everything(block_sparse_attention, leaves, mask, backward="cuda")
    near(mine, everything(block_sparse_attention, leaves, mask, backward="portable"))


@pytest.mark.gpu
@pytest.mark.parametrize("kept", [0.0, 1.0])
@pytest.mark.parametrize("dim", DIMS)
def test_nothing_and_everything_kept(dim, kept):
    leaves, mask = on_hopper(dim, torch.bfloat16, 1, (4, 2), (400, 600))
    mask = torch.full_like(mask, kept > 0)
    _, _, *mine = everything(block_sparse_attention, leaves, mask, backward="cuda")
    _, _, *want = everything(block_sparse_attention_reference, [t.double() for t in leaves], mask)
    for a, b in zip(mine, want, strict=True):
        assert (a.double() - b).norm() <= 1e-2 * b.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", DIMS)
def test_keys_that_do_not_exist_count_for_nothing(dim, causal):
    """Scores are so low that the score 0 of a padding key would have an infinite probability."""
    leaves, mask = on_hopper(dim, torch.bfloat16, 1, (4, 2), (300, 333))
    q, k, v = (t.clone() for t in leaves)
    q[..., 0], k[..., 0] = 40, -60
    mine, other = (
        everything(block_sparse_attention, [q, k, v], mask, causal=causal, backward=version)[2:]
        for version in ("cuda", "portable")
    )
    assert all(gradient.isfinite().all() for gradient in mine)
    # dq of the first column is -60 times a sum of ds that would be 0 without rounding.
    near(*([gradient[..., 1:] for gradient in gradients] for gradients in (mine, other)))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("queries", [1, 40, 128, 150, 300])
@pytest.mark.parametrize("dim", DIMS)
def test_a_bias_of_minus_infinity_in_a_column_of_k(dim, queries, dtype, causal):
    """A key that no query sees has gradients of 0, also where queries pad a tile: 0 · inf would be NaN. At D = 128, the
    last tile of the last block has no query where there are 1, 40, 150 or 300."""
    leaves, mask = on_hopper(dim, dtype, 1, (4, 2), (queries, 333))
    hide_a_key(*leaves[:2], 7)
    mask = torch.ones_like(mask)
    mine = everything(block_sparse_attention, leaves, mask, causal=causal, backward="cuda")
    other = everything(block_sparse_attention_reference, leaves, mask, causal=causal)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), mine, other, strict=True):
        assert torch.equal(a.isnan(), b.isnan()), name
    near([x.nan_to_num() for x in mine], [x.nan_to_num() for x in other])


@pytest.mark.gpu
@pytest.mark.parametrize("config", CUDA_BWD_CANDIDATES, ids=str)
def test_every_configuration(config, monkeypatch):
    leaves, mask = on_hopper(128, torch.bfloat16)
    other = everything(block_sparse_attention, leaves, mask, backward="portable")
    monkeypatch.setattr(configs, "pick_cuda_bwd_config", lambda *_: config)
    near(everything(block_sparse_attention, leaves, mask, backward="cuda"), other)


@pytest.mark.gpu
def test_the_deterministic_mode_picks_a_repeatable_backward():
    leaves, mask = on_hopper(64, torch.bfloat16)
    portable = everything(block_sparse_attention, leaves, mask, backward="portable")
    torch.use_deterministic_algorithms(True)
    try:
        picked = everything(block_sparse_attention, leaves, mask)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(picked, portable, strict=True))
    with pytest.raises(RuntimeError, match='backward="cuda" cannot run here: it does not support block_bias'):
        everything(block_sparse_attention, [*leaves, normal(*mask.shape)], mask, backward="cuda")

"""Tests that are specific to block_sparse_attention; `tests/test_specs.py` checks the rest from SPEC."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from . import BlockIndex, block_index, block_sparse_attention, configs, index
from .arguments import check_blocks
from .bench import CASES, cost, kept_pairs, make_mask
from .configs import Config
from .masks import visible_blocks
from .portable import backward, delta, forward, key_gradients
from .reference import _elements, block_sparse_attention_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAPABILITIES = ((8, 0), (8, 6), (9, 0), (10, 0))
SMALL = dict(block_size=64)


def normal(*shape: int, **options) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, **options)


@pytest.mark.parametrize(("queries", "keys"), [(0, 64), (64, 0), (0, 0)])
@pytest.mark.parametrize("frozen", ["", "q", "kv"])
def test_gradients_of_nothing_are_zeros(queries: int, keys: int, frozen: str):
    q, k, v = (
        normal(1, 2, n, 16, requires_grad=name not in frozen)
        for name, n in zip("qkv", (queries, keys, keys), strict=True)
    )
    mask = torch.ones(1, 2, -(-queries // 64), -(-keys // 64), dtype=torch.bool, device=DEVICE)
    block_sparse_attention(q, k, v, mask, **SMALL).sum().backward()
    for name, tensor in zip("qkv", (q, k, v), strict=True):
        assert tensor.grad is None if name in frozen else torch.equal(tensor.grad, torch.zeros_like(tensor))


def tensors(queries: int, keys: int, heads: int = 2, kv_heads: int = 1, dim: int = 16) -> list[torch.Tensor]:
    return [normal(1, heads, queries, dim), normal(1, kv_heads, keys, dim), normal(1, kv_heads, keys, dim)]


def random_mask(*shape: int, kept: float = 0.5) -> torch.Tensor:
    return torch.rand(shape, device=DEVICE) < kept


def everything(op, leaves: list[torch.Tensor], mask, **options) -> tuple[torch.Tensor, ...]:
    """Returns out, lse, and the gradients for fixed incoming gradients. A fourth leaf is the bias."""
    leaves = [t.detach().requires_grad_() for t in leaves]
    bias = dict(block_bias=leaves[3]) if len(leaves) > 3 else {}
    out, lse = op(*leaves[:3], mask, return_lse=True, **bias, **options)
    dout = torch.linspace(-2, 2, out.numel(), device=DEVICE).view(out.shape).to(out.dtype)
    dlse = torch.linspace(1, -1, lse.numel(), device=DEVICE).view(lse.shape)
    return out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, (dout, dlse))


def close(mine, other, **tolerance) -> None:
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b, **(tolerance or dict(rtol=3e-5, atol=3e-5)))


def small_tiles(monkeypatch: pytest.MonkeyPatch, block_m: int = 32, block_n: int = 32) -> None:
    """Sets tiles smaller than a block."""
    for name in ("pick_fwd_config", "pick_dkdv_config", "pick_dq_config"):
        config = Config(block_m, block_n, 16, 4, 1)
        monkeypatch.setattr(configs, name, lambda *_, config=config: config)


def test_all_blocks_kept_is_attention():
    leaves = [t.requires_grad_() for t in tensors(70, 70, 2, 2)]
    mine = block_sparse_attention(*leaves, torch.ones(2, 2, dtype=torch.bool, device=DEVICE), causal=True, **SMALL)
    other = F.scaled_dot_product_attention(*leaves, is_causal=True)
    close((mine, *torch.autograd.grad(mine.sum(), leaves)), (other, *torch.autograd.grad(other.sum(), leaves)))


@pytest.mark.parametrize("block_m, block_n", [(32, 64), (64, 32)])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_of_several_tiles(block_m, block_n, causal, monkeypatch):
    """Partial blocks with whole tiles past the end, and the gradient of a bias from several tiles."""
    small_tiles(monkeypatch, block_m, block_n)
    leaves = [*tensors(85, 150), normal(2, 2, 3)]
    mask = random_mask(2, 2, 3)
    mine = everything(block_sparse_attention, leaves, mask, causal=causal, **SMALL)
    close(mine, everything(block_sparse_attention_reference, leaves, mask, causal=causal, **SMALL))


def test_rows_and_columns_that_keep_nothing():
    mask = torch.tensor([[[True, False], [False, False]], [[False, False], [True, False]]], device=DEVICE)
    leaves = [*tensors(100, 90), normal(1, 2, 2, 2)]
    out, lse, dq, dk, dv, dbias = everything(block_sparse_attention, leaves, mask, **SMALL)
    assert not out[:, 0, 64:].any() and not out[:, 1, :64].any()
    assert (lse[:, 0, 64:] == -math.inf).all() and lse[:, 0, :64].isfinite().all()
    assert not dq[:, 0, 64:].any() and not dk[:, :, 64:].any() and not dv[:, :, 64:].any()
    assert not dbias[:, ~mask].any() and dbias[:, mask].all()
    assert all(t.isfinite().all() for t in (out, dq, dk, dv))
    nothing = everything(block_sparse_attention, leaves, torch.zeros_like(mask), **SMALL)
    assert not any(t.any() for t in (nothing[0], *nothing[2:]))


def test_a_bias_of_minus_infinity_is_as_good_as_dropped():
    leaves = tensors(100, 130)
    mask = torch.tensor([[True, False, True], [False, False, False]], device=DEVICE)
    bias = torch.zeros(2, 3, device=DEVICE).masked_fill(~mask, -math.inf)
    mine = everything(block_sparse_attention, [*leaves, bias], torch.ones_like(mask), **SMALL)
    assert not mine[5].isnan().any()
    close(mine[:5], everything(block_sparse_attention, leaves, mask, **SMALL))


@pytest.mark.parametrize(("queries", "keys"), [(300, 200), (384, 256)], ids=["ragged", "whole blocks"])
def test_the_gradient_of_a_bias_in_half_precision(queries, keys):
    """It is an fp32 sum of thousands of products whose factors are rounded to fp16, but still near the exact one."""
    leaves = [*(t.half() for t in tensors(queries, keys)), normal(2, 3, 2)]
    mask = random_mask(2, 3, 2)
    mine = everything(block_sparse_attention, leaves, mask)
    exact = everything(block_sparse_attention_reference, [t.double() for t in leaves], mask)
    assert mine[5].dtype == torch.float32
    torch.testing.assert_close(mine[5].double(), exact[5], rtol=2e-3, atol=2e-2)


def hide_a_key(q: torch.Tensor, k: torch.Tensor, key: int) -> None:
    """Makes a column of k a bias, which the queries' 1 adds to the scores: −inf for this key, so that none sees it."""
    q[..., 0], k[..., 0] = 1, 0
    k[:, :, key, 0] = -math.inf


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", [1, 37, 64, 70])
def test_a_bias_of_minus_infinity_in_a_column_of_k(queries, causal, biased, monkeypatch):
    """Nor do the queries that pad a tile see that key: its gradients are 0, and that of a block's bias is finite. The
    gradient of the column itself is NaN, as in the reference. Of 70 queries, the last tile of the last block has none.
    """
    small_tiles(monkeypatch)
    q, k, v = tensors(queries, 130)
    hide_a_key(q, k, 7)
    blocks = -(-queries // 64), 3
    leaves = [q, k, v, normal(*blocks)] if biased else [q, k, v]
    mask = torch.ones(blocks, dtype=torch.bool, device=DEVICE)
    mine = everything(block_sparse_attention, leaves, mask, causal=causal, **SMALL)
    other = everything(block_sparse_attention_reference, leaves, mask, causal=causal, **SMALL)
    close(mine, other, rtol=3e-5, atol=3e-5, equal_nan=True)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_an_infinite_gradient_of_lse():
    """The keys that pad a tile do not contribute 0 · inf to dq, which is inf, nor to the gradient of a block's bias."""
    leaves = [t.requires_grad_() for t in (*tensors(70, 100), normal(2, 2))]
    with torch.no_grad():
        leaves[1].abs_().add_(0.1)
    mask = torch.ones(2, 2, dtype=torch.bool, device=DEVICE)
    dlse = torch.ones(1, 2, 70, device=DEVICE)
    dlse[0, 1, 5] = math.inf
    results = []
    for op in (block_sparse_attention, block_sparse_attention_reference):
        out, lse = op(*leaves[:3], mask, block_bias=leaves[3], return_lse=True, **SMALL)
        results.append(torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), dlse)))
    assert (results[0][0][0, 1, 5] == math.inf).all()
    close(*results)


@pytest.mark.parametrize("special", [math.inf, math.nan])
def test_lse_alone_does_not_depend_on_v(special):
    """Nor do its gradients: 0 · inf of out and v would make them NaN."""
    q, k, v = tensors(70, 100)
    v[:, :, 3, 2] = special
    mask, results = torch.ones(2, 2, dtype=torch.bool, device=DEVICE), []
    for op in (block_sparse_attention, block_sparse_attention_reference):
        leaves = [t.detach().requires_grad_() for t in (q, k)]
        results.append(torch.autograd.grad(op(*leaves, v, mask, return_lse=True, **SMALL)[1].sum(), leaves))
    close(*results)


def test_dropped_keys_are_not_read():
    q, k, v = tensors(70, 130)
    mask = torch.tensor([[True, False, True], [True, False, True]], device=DEVICE)
    expected = everything(block_sparse_attention, [q, k, v], mask, **SMALL)
    for tensor in (k, v):
        tensor[:, :, 64:128] = math.nan
    for mine, other in zip(everything(block_sparse_attention, [q, k, v], mask, **SMALL), expected, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("shape", [(2, 3), (4, 2, 3), (2, 1, 2, 3)])
def test_an_index_in_place_of_its_mask(shape):
    q, k, v = normal(2, 4, 70, 8), normal(2, 2, 150, 8), normal(2, 2, 150, 8)
    mask = random_mask(*shape)
    made = block_index(mask, 70, 150, causal=True, **SMALL)
    assert made.table.shape[:2] == (shape[-4] if len(shape) > 3 else 1, shape[-3] if len(shape) > 2 else 1)
    mine, other = (block_sparse_attention(q, k, v, given, causal=True, **SMALL) for given in (made, mask))
    assert torch.equal(mine, other)


def test_masks_that_share_memory_share_their_lists():
    mask = random_mask(3, 2)
    for shared, shape in ((mask.expand(2, 4, 3, 2), (1, 1)), (mask.repeat(4, 1, 1).expand(2, 4, 3, 2), (1, 4))):
        assert block_index(shared, 170, 100, **SMALL).table.shape[:2] == shape


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(150, 9000), (5000, 100), (700, 700), (128, 192)])
def test_the_lists_and_their_order(queries, keys, causal):
    """More lines, and longer lines, than a CTA processes at a time; and masks of full blocks only."""
    rows, columns = -(-queries // 64), -(-keys // 64)
    mask = random_mask(2, rows, columns)
    made = block_index(mask, queries, keys, causal=causal, **SMALL)
    kept = mask & visible_blocks(queries, keys, 64, causal, device=DEVICE)
    whole = _elements(kept, 64, queries, keys)
    query, key = torch.arange(queries, device=DEVICE)[:, None], torch.arange(keys, device=DEVICE)
    if causal:
        whole = whole & (key <= query + keys - queries)
    assert made.table.shape == (1, 2, rows * (3 + columns) + columns * (3 + rows))
    for lines, wanted in ((made.rows[0], kept), (made.columns[0], kept.transpose(1, 2))):
        for head, line in itertools.product(range(2), range(wanted.shape[1])):
            expected = wanted[head, line].nonzero().flatten().tolist()
            count, _, _, *blocks = lines[head, line].tolist()
            assert count == len(expected)
            assert blocks == expected + [-1] * (len(blocks) - count)
        counts = wanted.sum(-1)
        order = counts.argsort(dim=-1, descending=True, stable=True)
        assert torch.equal(lines[..., 2], order.int())
    for head, row in itertools.product(range(2), range(rows)):
        count, many, _, *blocks = made.rows[0, head, row].tolist()
        pairs = whole[head, row * 64 : (row + 1) * 64]
        full = [bool(pairs[:, j * 64 : (j + 1) * 64].all()) and (j + 1) * 64 <= keys for j in blocks[:count]]
        assert full[:many] == [True] * many
        if row < rows - 1:  # in the last block of queries, padding rows count as well
            assert not any(full[many:])


def test_heads_inside_rows_are_read_in_place(monkeypatch):
    """[B, S, H, D] and slices of a packed projection are not copied, and the output has the same memory order."""
    packed = normal(1, 70, 3, 2, 16)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    mask, copies = random_mask(2, 2), []
    original = torch.Tensor.contiguous
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda t, *a: copies.append(t) or original(t, *a))
    out, lse, *grads = everything(block_sparse_attention, [q, k, v], mask, **SMALL)
    assert not [t for t in copies if t.shape == q.shape and t.stride(3) == 1]
    monkeypatch.undo()
    assert out.transpose(1, 2).is_contiguous()
    leaves = [t.contiguous() for t in (q, k, v)]
    close((out, lse, *grads), everything(block_sparse_attention, leaves, mask, **SMALL))


@pytest.mark.parametrize("passing", [False, True])
@pytest.mark.parametrize("queries", [4, 16, 70])
def test_sliding_windows_over_one_sequence(queries, passing):
    """Of `unfold`: rows overlap, and rows and columns both have stride 1. So they do in what torch.empty_like makes."""
    q, k, v = (normal(1, 2, n + 15).unfold(2, 16, 1) for n in (queries, 9, 9))
    assert q.stride()[2:] == (1, 1)
    mask = torch.ones(-(-queries // 64), 1, dtype=torch.bool, device=DEVICE)
    with Passing() if passing else nullcontext():
        mine = everything(block_sparse_attention, [q, k, v], mask, **SMALL)
    close(mine, everything(block_sparse_attention, [t.contiguous() for t in (q, k, v)], mask, **SMALL))


def test_a_batch_of_one_of_any_stride_keeps_the_order_of_q():
    """The stride of a dimension of size 1 is arbitrary, and may be 1 as that of D is."""
    q, k, v = (normal(5, 2, 16).transpose(0, 1)[None] for _ in range(3))
    q = q.as_strided(q.shape, (1, *q.stride()[1:]))
    out = block_sparse_attention(q, k, v, torch.ones(1, 1, dtype=torch.bool, device=DEVICE))
    assert out[0].transpose(0, 1).is_contiguous()


@pytest.mark.parametrize("size", [(1, 2**25), (2**25, 1)])
def test_masks_whose_rows_or_columns_32_bits_cannot_count(size):
    """Though their offsets fit."""
    check_blocks(*size, block_size=1)
    with pytest.raises(ValueError, match="too large for 32-bit offsets"):
        check_blocks(*size, block_size=64)


@pytest.mark.parametrize("needed", ["q", "k", "block_bias"])
def test_no_kernel_for_a_gradient_that_nobody_wants(needed, monkeypatch):
    called = []
    for name in ("key_gradients", "query_gradient"):
        original = getattr(backward, name)
        monkeypatch.setattr(
            backward, name, lambda *a, name=name, original=original: called.append(name) or original(*a)
        )
    inputs = dict(zip("qkv", tensors(5, 7), strict=True)) | dict(block_bias=normal(1, 1))
    inputs[needed].requires_grad_()
    mask = torch.ones(1, 1, dtype=torch.bool, device=DEVICE)
    block_sparse_attention(**inputs, block_mask=mask).square().sum().backward()
    assert called == ["key_gradients" if needed == "k" else "query_gradient"]
    assert inputs[needed].grad is not None


def test_compiles_with_an_index():
    leaves, mask = tensors(70, 70), random_mask(2, 2)

    @torch.compile(fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    def twice(q, k, v, mask):
        made = block_index(mask, q.shape[2], k.shape[2], **SMALL)
        return block_sparse_attention(q, k, v, made, **SMALL) + block_sparse_attention(q, k, -v, made, **SMALL)

    assert not twice(*leaves, mask).any()
    torch._dynamo.reset()


class Passing(TorchDispatchMode):
    """A dispatch mode that changes nothing, but makes calls go through torch.library."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_backward_outside_of_the_mode_that_saw_the_forward(dtype):
    """The forward goes through torch.library, the backward does not."""
    leaves, mask = [t.to(dtype) for t in tensors(70, 130)], random_mask(2, 3)
    want = everything(block_sparse_attention, leaves, mask, **SMALL)
    leaves = [t.requires_grad_() for t in leaves]
    with Passing():
        out, lse = block_sparse_attention(*leaves, mask, return_lse=True, **SMALL)
    dout = torch.linspace(-2, 2, out.numel(), device=DEVICE).view(out.shape).to(out.dtype)
    dlse = torch.linspace(1, -1, lse.numel(), device=DEVICE).view(lse.shape)
    mine = (out, lse, *torch.autograd.grad((out, lse), leaves, (dout, dlse)))
    assert all(torch.equal(a, b) for a, b in zip(mine, want, strict=True))


def test_sections_of_heads_that_do_not_divide_them(monkeypatch):
    """Every tile of every head is computed exactly once."""
    monkeypatch.setattr(configs, "pick_section", lambda *_: 2)
    leaves, mask = tensors(100, 130, heads=3, kv_heads=3), random_mask(3, 2, 3)
    mine = everything(block_sparse_attention, leaves, mask, **SMALL)
    close(mine, everything(block_sparse_attention_reference, leaves, mask, **SMALL))


def test_sections_keep_keys_in_l2():
    assert configs.pick_section(32, 1 << 20) == int(configs.SECTION_BYTES) >> 20
    assert configs.pick_section(4, 1) == 4
    assert configs.pick_section(4, 1 << 40) == 1


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_width_has_a_tile(dtype, capability):
    picks = (configs.pick_fwd_config, configs.pick_dkdv_config, configs.pick_dq_config)
    dims = (1, 16, 24, 32, 64, 80, 96, 128, 256)
    for dim, block, causal, pick in itertools.product(dims, (64, 128), (False, True), picks):
        config = pick(dim, block, causal, dtype, capability)
        assert dim <= config.block_d <= max(16, 2 * dim)
        assert block % config.block_m == 0 and block % config.block_n == 0
        assert delta.ROWS.value % config.block_m == 0
        # fp32 scores per thread, which are in registers in addition to the accumulators.
        assert config.block_m * config.block_n <= 64 * 32 * config.num_warps


@pytest.mark.parametrize("case", [c for c in CASES if c.dims["queries"] < 2000], ids=lambda case: case.name)
def test_cost_counts_the_pairs_of_the_mask(case):
    """Exact if no block is partial, else to within one block per row."""
    d, block = case.dims, case.params.get("block_size", 128)
    mask = make_mask(case, "cpu", torch.Generator().manual_seed(0))
    pairs = _elements(mask, block, d["queries"], d["keys"])
    if case.params.get("causal"):
        query, key = torch.arange(d["queries"])[:, None], torch.arange(d["keys"])
        pairs = pairs & (key <= query + d["keys"] - d["queries"])
    counts = pairs.sum((-1, -2)).flatten().tolist() if pairs.numel() else [0]
    ragged = bool(d["queries"] % block or d["keys"] % block)
    for count in counts:
        assert abs(count - kept_pairs(case)) <= ragged * block * d["queries"]
    for mode in ("fwd", "bwd"):
        assert sum(cost(case, mode).flops.values()) == {"fwd": 4, "bwd": 10}[mode] * d["dim"] * kept_pairs(case) * (
            d["batch"] * d["kv_heads"] * d["group"]
        )


def test_the_reference_in_pieces(monkeypatch):
    from . import reference

    leaves, mask = [*tensors(200, 90), normal(2, 4, 2)], random_mask(2, 4, 2)
    whole = everything(block_sparse_attention_reference, leaves, mask, causal=True, **SMALL)
    monkeypatch.setattr(reference, "MOST_SCORES", 30_000)
    close(everything(block_sparse_attention_reference, leaves, mask, causal=True, **SMALL), whole)


@pytest.mark.parametrize(
    ("change", "options", "error", "words"),
    [
        (dict(q=lambda t: t.double()), {}, TypeError, "q must be a tensor of .*, got torch.float64"),
        (dict(k=lambda t: t.half()), {}, TypeError, "k must be a tensor of q's dtype"),
        (dict(v=lambda t: None), {}, TypeError, "v must be .*, got NoneType"),
        (dict(q=lambda t: t[0]), {}, ValueError, r"q must be \[B, H, S, D\]"),
        (dict(k=lambda t: t[..., :8]), {}, ValueError, "k must be .* like q"),
        (dict(v=lambda t: t[:, :, :3]), {}, ValueError, "v must have k's shape"),
        (dict(q=lambda t: t[:, :1]), {}, ValueError, "q must have a multiple of k's 2 heads, got 1"),
        (dict(v=lambda t: t.to("meta")), {}, ValueError, "v must be on q's device"),
        (
            dict(block_mask=lambda t: t.float()),
            {},
            TypeError,
            "block_mask must be a tensor of torch.bool, got torch.fl",
        ),
        (dict(block_mask=lambda t: t[:1]), {}, ValueError, r"block_mask must be .*, 2, 3\], .*, got shape \(1, 3\)"),
        (dict(block_mask=lambda t: t.expand(3, 2, 3)), {}, ValueError, "block_mask must be"),
        (dict(block_mask=lambda t: t.to("meta")), {}, ValueError, "block_mask must be on q's device"),
        ({}, dict(block_bias=torch.zeros(2, 3, dtype=torch.float16)), TypeError, "block_bias must be .*float32, got"),
        ({}, dict(block_bias=torch.zeros(2, 2)), ValueError, "block_bias must be"),
        ({}, dict(scale=-1.0), ValueError, "scale must be a positive number in the range of fp32, got -1.0"),
        ({}, dict(scale=1e-46), ValueError, "scale must be a positive number in the range of fp32"),
        ({}, dict(scale=1e39), ValueError, "scale must be a positive number in the range of fp32"),
        ({}, dict(scale=math.nan), ValueError, "scale must be a positive number"),
        ({}, dict(block_size=32), ValueError, "block_size must be 64 or 128, got 32"),
        ({}, dict(forward="best"), ValueError, "forward must be one of auto, .*, got 'best'"),
        ({}, dict(backward="best"), ValueError, "backward must be one of auto, .*, got 'best'"),
        ({}, dict(forward="cuda"), RuntimeError, 'forward="cuda" cannot run here: it supports head dimensions 64'),
    ],
)
def test_says_what_is_wrong(change, options, error, words):
    inputs = dict(zip("qkv", tensors(70, 130, heads=4, kv_heads=2), strict=True)) | dict(block_mask=random_mask(2, 3))
    inputs = {n: change.get(n, lambda t: t)(t) for n, t in inputs.items()}
    options = {n: o.to(DEVICE) if isinstance(o, torch.Tensor) else o for n, o in options.items()}
    with pytest.raises(error, match=words):
        block_sparse_attention(**inputs, **{**SMALL, **options})


def test_says_what_is_wrong_with_an_index():
    q, k, v = tensors(70, 130)
    made = block_index(random_mask(3, 2, 3), 70, 130, **SMALL)
    for other, options, words in (
        (made, SMALL, "index for .* 2 or 1 heads, got one for 1 and 3"),
        (made, dict(block_size=64, causal=True), r"for .* = \(70, 130, 64, True\), got one for .*False"),
        (made, {}, "got one for"),
        (BlockIndex(made.table.to("meta"), *made[1:]), SMALL, "block_mask must be on q's device"),
    ):
        with pytest.raises(ValueError, match=words):
            block_sparse_attention(q, k, v, other, **options)
    with pytest.raises(ValueError, match=r"block_mask must be \[.., 2, 3\] for 70 queries and 130 keys"):
        block_index(random_mask(2, 2), 70, 130, **SMALL)
    with pytest.raises(TypeError, match="block_mask must be a tensor of bool, got torch.int64"):
        block_index(torch.ones(2, 3, dtype=torch.int64), 70, 130, **SMALL)
    most = 46339  # n · (n + 3) fits 31 bits
    assert most * (most + 3) < 2**31 <= (most + 1) * (most + 4)
    with pytest.raises(ValueError, match="a mask of 46340 by 46340 blocks is too large"):
        wide = torch.zeros((), dtype=torch.bool, device=DEVICE).expand(most + 1, most + 1)
        block_index(wide, 64 * most + 1, 64 * most + 1, **SMALL)


def test_kernels_are_not_specialised_for_sizes():
    for kernel in (
        forward._block_sparse_attention_fwd_kernel,
        key_gradients._block_sparse_attention_dkdv_kernel,
        index._block_sparse_attention_index_kernel,
        index._block_sparse_attention_order_kernel,
    ):
        params = getattr(kernel, "params", None)
        if params is None:
            pytest.skip("the interpreter specialises nothing")
        for param in params:
            if not param.is_constexpr and not param.name.endswith("_ptr"):
                assert param.do_not_specialize, param.name


@pytest.mark.gpu
@pytest.mark.parametrize("version", ["auto", "portable"])
def test_nothing_waits_for_the_gpu(version):
    leaves = [*(normal(1, 2, 1000, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3))]
    mask = random_mask(2, 8, 8)
    options = dict(forward=version, backward=version)
    block_sparse_attention(*leaves, mask, **options).sum().backward()  # compiling and loading may synchronise
    torch.cuda.set_sync_debug_mode("error")
    try:
        block_sparse_attention(*leaves, mask, **options).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("version", ["auto", "portable"])
def test_fifty_equal_repeats(version):
    leaves = [*(normal(2, 8, 1000, 64, dtype=torch.bfloat16) for _ in range(3)), normal(2, 8, 8, 8)]
    mask = random_mask(2, 8, 8, 8)
    options = dict(forward=version, backward="portable")
    first = everything(block_sparse_attention, leaves, mask, **options)
    for _ in range(49):
        again = everything(block_sparse_attention, leaves, mask, **options)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    """Offsets are 64 bits wide: the last heads are beyond the range of 32 bits."""
    shape = (1, 2**31 // (4096 * 64) + 2, 4096, 64)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = random_mask(32, 32)
    out = block_sparse_attention(q, k, v, mask)
    for part in (slice(0, 1), slice(-1, None)):
        expected = block_sparse_attention_reference(q[:, part], k[:, part], v[:, part], mask)
        torch.testing.assert_close(out[:, part], expected, rtol=2e-2, atol=2e-3)


@pytest.mark.gpu
def test_lists_of_more_than_two_to_the_31_elements():
    """The lists of the second head begin there. It keeps nothing, the first one everything."""
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free memory on the GPU")
    blocks = 1 << 15
    mask = torch.tensor([True, False], device="cuda")[:, None, None].expand(2, blocks, blocks)
    made = block_index(mask, 64 * blocks, 64 * blocks, **SMALL)
    for lines in (made.rows[0], made.columns[0]):
        assert (lines[0, :, 0] == blocks).all() and not lines[1, :, :2].any()
        assert (lines[:, :, 2] == torch.arange(blocks, device="cuda")).all()
        assert (lines[1, -1, 3:] == -1).all()

"""What is special to attention; `tests/test_specs.py` checks the rest from SPEC."""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from . import (
    attention,
    band,
    cuda_backward,
    cuda_driver,
    cuda_forward,
    cuda_fp8,
    delta,
    dispatch,
    forward,
    fused_backward,
    key_gradients,
    quantise,
    query_gradient,
    split,
)
from .backward import separate_bwd
from .bench import visible
from .dispatch import Config
from .problem import Problem, zero
from .reference import attention_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = ("separate", "fused")
CAPABILITIES = ((8, 0), (8, 6), (9, 0), (10, 0))


def normal(*shape: int, **options) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, **options)


def tensors(queries: int, keys: int, heads: int = 2, kv_heads: int = 1, dim: int = 16) -> list[torch.Tensor]:
    return [normal(1, heads, queries, dim), normal(1, kv_heads, keys, dim), normal(1, kv_heads, keys, dim)]


def everything(op, leaves: list[torch.Tensor], **options) -> tuple[torch.Tensor, ...]:
    """out, lse, and the gradients under fixed incoming ones."""
    leaves = [t.detach().requires_grad_() for t in leaves]
    out, lse = op(*leaves, return_lse=True, **options)
    dout = torch.linspace(-2, 2, out.numel(), device=DEVICE).view(out.shape).to(out.dtype)
    dlse = torch.linspace(1, -1, lse.numel(), device=DEVICE).view(lse.shape)
    return out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, (dout, dlse))


def close(mine, other) -> None:
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tiles in a small problem."""
    for name in ("pick_fwd_config", "pick_dkdv_config", "pick_dq_config", "pick_fused_config"):
        monkeypatch.setattr(dispatch, name, lambda dim, *_: Config(16, 16, dispatch.padded(dim), 4, 1))


@pytest.mark.parametrize("causal", [False, True])
def test_equals_pytorch(causal):
    leaves = [t.requires_grad_() for t in (normal(2, 2, 20, 16), normal(2, 2, 20, 16), normal(2, 2, 20, 16))]
    mine, other = attention(*leaves, causal=causal), F.scaled_dot_product_attention(*leaves, is_causal=causal)
    close((mine, *torch.autograd.grad(mine.sum(), leaves)), (other, *torch.autograd.grad(other.sum(), leaves)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dim", [1, 2, 4, 6, 64])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("first", [0, 3, 7])
def test_rows_are_zeroed_and_no_others(dtype, dim, inside, first):
    shape = (2, 7, 3, dim) if inside else (2, 3, 7, dim)
    x = torch.ones(torch.Size(shape).numel() + first, dtype=dtype, device=DEVICE)[first:].view(shape)
    x, expected = ((t.transpose(1, 2) if inside else t) for t in (x, torch.ones(shape, dtype=dtype, device=DEVICE)))
    zero(x[:, :, first:])
    expected[:, :, first:] = 0
    assert torch.equal(x, expected)


BANDS = [(-1, 0), (0, 0), (5, -1), (20, 3), (3, 40)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", BANDS)
def test_bands_over_many_tiles(window, form, monkeypatch):
    """Rows before the first key, the diagonal through the middle of tiles, and bands narrower than a tile."""
    small_tiles(monkeypatch)
    queries, keys = ((50, 35), (20, 50))[BANDS.index(window) % 2]
    leaves = tensors(queries, keys)
    mine = everything(attention, leaves, window=window, forward="portable", backward=form)
    close(mine, everything(attention_reference, leaves, window=window))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys", "heads", "kv_heads"), [(1, 70, 6, 2), (20, 60, 2, 1), (3, 33, 2, 2)])
def test_any_number_of_splits(queries, keys, heads, kv_heads, causal, monkeypatch):
    """Some of them see nothing, and the last one is ragged."""
    small_tiles(monkeypatch)
    monkeypatch.setattr(dispatch, "pick_split_config", lambda rows, dim, *_: Config(16, 16, dispatch.padded(dim), 4, 1))
    leaves = tensors(queries, keys, heads, kv_heads)
    expected = attention_reference(*leaves, causal=causal, return_lse=True)
    for splits in (1, 3, 50):
        monkeypatch.setattr(dispatch, "pick_splits", lambda *_, splits=splits: splits)
        close(attention(*leaves, causal=causal, return_lse=True, forward="split"), expected)


@pytest.mark.parametrize("splits", [1, 3, 16])
def test_the_fused_backward_with_any_number_of_parts(splits, monkeypatch):
    small_tiles(monkeypatch)
    monkeypatch.setattr(dispatch, "pick_fused_splits", lambda heads, tiles, _: min(splits, tiles))
    leaves = tensors(35, 50, heads=4, kv_heads=2)
    mine = everything(attention, leaves, causal=True, backward="fused")
    close(mine, everything(attention_reference, leaves, causal=True))


def test_queries_that_see_no_key():
    leaves = tensors(40, 10)
    out, lse, dq, dk, dv = everything(attention, leaves, causal=True)
    assert not out[:, :, :30].any()
    assert (lse[:, :, :30] == -math.inf).all()
    assert not dq[:, :, :30].any()
    assert all(t.isfinite().all() for t in (out, lse[:, :, 30:], dq, dk, dv))


def test_context_is_a_prefix_bit_for_bit():
    q, k, v = tensors(20, 45)
    poisoned = [torch.cat((t[:, :, :29], torch.full_like(t[:, :, 29:], math.nan)), dim=2) for t in (k, v)]
    alone = everything(attention, [q, k[:, :, :29].contiguous(), v[:, :, :29].contiguous()])
    for form in FORMS:
        *same, dk, dv = everything(attention, [q, *poisoned], num_context=29, backward=form)
        assert all(torch.equal(a, b) for a, b in zip(same[:2], alone[:2], strict=True))
        close((same[2], dk[:, :, :29], dv[:, :, :29]), alone[2:])
        assert not dk[:, :, 29:].any()
        assert not dv[:, :, 29:].any()


def test_heads_inside_rows_are_read_in_place(monkeypatch):
    """[B, S, H, D] and the parts of one packed projection: no copy, and the output in the same order."""
    packed = normal(2, 20, 3, 2, 16)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    copies = []
    original = torch.Tensor.contiguous
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda t, *a: copies.append(t) or original(t, *a))
    out, lse, *grads = everything(attention, [q, k, v])
    assert not [t for t in copies if t.shape == q.shape and t.stride(3) == 1]
    monkeypatch.undo()
    assert out.transpose(1, 2).is_contiguous()
    close((out, lse, *grads), everything(attention, [t.contiguous() for t in (q, k, v)]))


def test_a_layout_without_unit_stride_is_copied_once():
    q, k, v = (t.transpose(2, 3).contiguous().transpose(2, 3) for t in tensors(20, 33))
    close(everything(attention, [q, k, v]), everything(attention, [t.contiguous() for t in (q, k, v)]))


def test_gradient_of_lse_alone():
    q, k, v = tensors(9, 20)
    leaf = q.requires_grad_()
    (mine,) = torch.autograd.grad(attention(leaf, k, v, return_lse=True)[1].sum(), leaf)
    (other,) = torch.autograd.grad(attention_reference(leaf, k, v, return_lse=True)[1].sum(), leaf)
    close((mine,), (other,))


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("form", FORMS)
def test_all_scores_far_below_zero(form, monkeypatch):
    """exp(-lse) overflows, and keys that only pad a tile have the score 0."""
    small_tiles(monkeypatch)
    leaves = [20 * torch.ones(1, 1, 5, 16), -20 * torch.ones(1, 1, 20, 16) + 0.01 * torch.randn(1, 1, 20, 16)]
    leaves = [t.to(DEVICE) for t in (*leaves, torch.randn(1, 1, 20, 16))]
    mine = everything(attention, leaves, backward=form)
    assert mine[1].max() < -100
    for a, b in zip(mine, everything(attention_reference, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("needed", ["q", "k"])
def test_no_kernel_for_a_gradient_that_nobody_wants(needed, monkeypatch):
    called = []
    from . import backward

    for name in ("key_gradients", "query_gradient"):
        original = getattr(backward, name)
        monkeypatch.setattr(
            backward, name, lambda *a, name=name, original=original: called.append(name) or original(*a)
        )
    inputs = dict(zip("qkv", tensors(5, 7), strict=True))
    inputs[needed].requires_grad_()
    attention(**inputs).sum().backward()
    assert called == [{"q": "query_gradient", "k": "key_gradients"}[needed]]


def test_memory_of_the_backward_does_not_grow_with_the_keys():
    """Parts of dQ: no more than 16, whatever the number of key tiles."""
    for heads, tiles, multiprocessors in itertools.product((1, 8, 32, 500), (1, 7, 2000), (4, 108, 132)):
        splits = dispatch.pick_fused_splits(heads, tiles, multiprocessors)
        assert 1 <= splits <= min(tiles, 16)
        assert splits == 1 or splits * heads <= multiprocessors


@pytest.mark.parametrize(
    ("queries", "keys", "kv_heads", "group", "version"),
    [
        (11000, 10000, 32, 1, "portable"),
        (205000, 200000, 8, 1, "portable"),
        (564, 64, 512, 1, "portable"),
        (512, 512, 128, 1, "portable"),
        (8192, 8192, 8, 8, "portable"),
        (1, 200000, 8, 1, "split"),
        (1, 32768, 64, 8, "split"),
        (564, 64000, 8, 1, "split"),
        (1, 64, 8, 1, "portable"),
        (1, 64, 8, 8, "split"),  # a group in one tile, though nothing is shared out
    ],
)
def test_version_by_shape(queries, keys, kv_heads, group, version):
    chosen, splits = dispatch.pick_forward("auto", torch.bfloat16, queries, keys, kv_heads, group, multiprocessors=132)
    assert chosen == version
    assert dispatch.pick_forward("auto", torch.float32, queries, keys, kv_heads, group, 132) == ("portable", 1)
    assert splits == 1 or (version == "split" and keys // splits >= 256)
    on_hopper = dispatch.pick_forward("auto", torch.bfloat16, queries, keys, kv_heads, group, 132, "cuda", dim=128)
    assert on_hopper == ({"portable": "cuda", "split": "split"}[version], splits)
    for forced in ("portable", "split"):
        assert dispatch.pick_forward(forced, torch.float32, queries, keys, kv_heads, group, 132)[0] == forced


def forward_config(dim, queries, keys, causal=False, heads=8):
    return dispatch.pick_cuda_config(dim, queries, keys, causal, heads, 132)


def test_blocks_of_keys_at_64():
    """112 are the fastest, but where they leave too much of the last block empty."""
    for block, several in ((64, (1, 64, 128, 192, 256, 512)), (112, (65, 112, 224, 448, 3000, 10_000, 200_000))):
        for keys in several:
            assert forward_config(64, 8192, keys).block_n == block
    assert forward_config(64, 8192, 128, causal=True).block_n == 112


@pytest.mark.parametrize(
    ("queries", "heads", "full", "causal_64", "causal_128"),
    [
        (2048, 8, 2, 2, 2),  # 88 tiles of 192 queries, 128 of 128
        (3000, 8, 3, 3, 2),  # 128 and 192
        (1024, 32, 2, 3, 2),  # 192 and 256: two rounds of either
        (4096, 8, 2, 3, 2),
        (8192, 8, 3, 3, 3),  # three rounds and four
        (200_000, 8, 3, 3, 3),
    ],
)
def test_two_consumers_where_tiles_are_few(queries, heads, full, causal_64, causal_128):
    for dim in (64, 128):
        assert forward_config(dim, queries, 2048, False, heads).consumers == full
    assert forward_config(64, queries, 2048, True, heads).consumers == causal_64
    assert forward_config(128, queries, 2048, True, heads).consumers == causal_128


def test_splits_fill_the_gpu():
    sizes = itertools.product((1, 8, 100, 564), (4096, 65536, 200_000), (1, 2, 8, 40), (64, 128))
    for rows, keys, heads, dim in sizes:
        splits = dispatch.pick_splits(rows, keys, heads, 132, dim)
        ctas = heads * -(-rows // dispatch.block_of_rows(rows)) * splits
        most = min(128, keys // 256) * heads
        assert 1 <= splits <= max(1, min(128, keys // 256))
        assert ctas >= min(0.75 * 264 if dim == 64 else 0.75 * 132, 0.8 * most)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_width_has_a_tile(dtype, capability):
    picks = (
        dispatch.pick_fwd_config,
        dispatch.pick_dkdv_config,
        dispatch.pick_dq_config,
        dispatch.pick_fused_config,
        lambda *kind: dispatch.pick_split_config(5, *kind),
    )
    for dim, banded, pick in itertools.product((1, 16, 24, 32, 64, 80, 96, 128, 256), (False, True), picks):
        config = pick(dim, banded, dtype, capability)
        assert dim <= config.block_d <= max(16, 2 * dim)
        assert delta.ROWS.value % config.block_m == 0
        # Scores, in fp32, over the threads: what is in registers beside the accumulators.
        assert config.block_m * config.block_n <= 64 * 32 * config.num_warps


def test_sections_keep_keys_in_l2():
    assert band.section(32, 1 << 20, banded=False) == 1
    assert band.section(32, 1 << 20, banded=True) == int(band.SECTION_BYTES) >> 20
    assert band.section(4, 1, banded=True) == 4
    assert band.section(4, 1 << 40, banded=True) == 1


@pytest.mark.parametrize("form", FORMS)
def test_sections_of_heads_that_do_not_divide_them(form, monkeypatch):
    """Every tile of every head is visited, each once."""
    small_tiles(monkeypatch)
    for module in (forward, key_gradients, query_gradient):
        monkeypatch.setattr(module, "section", lambda *_: 2)
    leaves = tensors(20, 35, heads=3, kv_heads=3)
    mine = everything(attention, leaves, causal=True, forward="portable", backward=form)
    close(mine, everything(attention_reference, leaves, causal=True))


def test_visible_pairs_are_counted():
    for queries, keys in ((0, 3), (1, 1), (5, 9), (9, 5), (7, 7)):
        for left, right in itertools.product((-1, 0, 2, 100), (-1, 0, 3, 100)):
            pairs = sum(
                (left < 0 or j >= i + keys - queries - left) and (right < 0 or j <= i + keys - queries + right)
                for i in range(queries)
                for j in range(keys)
            )
            assert visible(queries, keys, left, right) == pairs


def test_the_reference_in_pieces(monkeypatch):
    from . import reference

    leaves = tensors(13, 21)
    whole = everything(attention_reference, leaves, causal=True)
    monkeypatch.setattr(reference, "MOST_SCORES", 300)
    close(everything(attention_reference, leaves, causal=True), whole)


@pytest.mark.parametrize(
    ("change", "options", "error", "words"),
    [
        (dict(q=lambda t: t.double()), {}, TypeError, "q must be a tensor of .*, got torch.float64"),
        (dict(k=lambda t: t.half()), {}, TypeError, "k must be a tensor of q's dtype"),
        (dict(v=lambda t: None), {}, TypeError, "v must be .*, got NoneType"),
        (dict(q=lambda t: t[0]), {}, ValueError, r"q must be \[B, H, S, D\]"),
        (dict(q=lambda t: t[..., :0]), {}, ValueError, "1 <= D <= 256"),
        (dict(k=lambda t: t[..., :8]), {}, ValueError, "k must be .* like q"),
        (dict(v=lambda t: t[:, :, :3]), {}, ValueError, "v must have k's shape"),
        (dict(q=lambda t: t[:, :1]), {}, ValueError, "q's 1 heads must be a multiple of k's, which has 2"),
        (dict(v=lambda t: t.to("meta")), {}, ValueError, "v must be on q's device"),
        ({}, dict(scale=-1.0), ValueError, "scale must be a positive number, got -1.0"),
        ({}, dict(scale=math.nan), ValueError, "scale must be a positive number"),
        ({}, dict(num_context=8), ValueError, "num_context must be from 0 to k's 7 rows, got 8"),
        ({}, dict(window=(-2, 0)), ValueError, "window must be"),
        ({}, dict(forward="best"), ValueError, "forward must be one of auto, .*, got 'best'"),
        (
            {},
            dict(fp8=True),
            RuntimeError,
            "fp8=True cannot run here: it needs a GPU of compute capability 9.0|it takes fl",
        ),
        ({}, dict(fp8=True, window=(3, 3)), ValueError, "fp8=True has no window"),
        (dict(q=lambda t: t.requires_grad_()), dict(fp8=True), RuntimeError, "fp8=True has no gradient"),
        ({}, dict(forward="gluon"), RuntimeError, 'forward="gluon" cannot run here: it (needs|takes)'),
        ({}, dict(forward="cuda"), RuntimeError, 'forward="cuda" cannot run here: it (needs|takes)'),
        ({}, dict(backward="both"), ValueError, "backward must be one of auto, .*, got 'both'"),
    ],
)
def test_says_what_is_wrong(change, options, error, words):
    inputs = dict(zip("qkv", tensors(5, 7, heads=4, kv_heads=2), strict=True))
    inputs = {n: change.get(n, lambda t: t)(t) for n, t in inputs.items()}
    with pytest.raises(error, match=words):
        attention(**inputs, **options)


def e4m3(x: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of x [S, D] in e4m3 with a scale for so many rows, and the scales."""
    blocks = x.float().split(rows)
    scales = [2.0 ** math.ceil(math.log2(b.abs().max().item() / 448)) if b.abs().max() > 0 else 1.0 for b in blocks]
    bits = [(b / s).to(torch.float8_e4m3fn).view(torch.uint8) for b, s in zip(blocks, scales, strict=True)]
    return torch.cat(bits), torch.tensor(scales)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("queries", "keys", "dim"), [(70, 300, 64), (1, 129, 24), (130, 2100, 80)])
def test_operands_of_the_forward_in_e4m3(queries, keys, dim, dtype):
    q, k, v = (normal(2, heads, rows, dim, dtype=dtype) for heads, rows in ((4, queries), (2, keys + 5), (2, keys + 5)))
    k[0, 0, :128] = 0
    v[1, 1, 7] *= 300
    made = quantise.quantise(q, k, v, keys, 128, 8)
    place = torch.arange(16)
    order = place // 8 * 2 + place % 8 // 2 * 4 + place % 2  # the column of each key of 16
    for b, h in itertools.product(range(2), range(2)):
        for x, y, scales, rows in (
            (q[b, 2 * h], made.q[b, 2 * h], made.q_scale[b, 2 * h], 64),
            (k[b, h, :keys], made.k[b, h], made.k_scale[b, h], 128),
        ):
            bits, wanted = e4m3(x.cpu(), rows)
            assert torch.equal(scales.cpu(), wanted)
            assert torch.equal(y[:, :dim].cpu(), bits) and not y[:, dim:].any()
        bits, wanted = e4m3(v[b, h, :keys].cpu(), 1024)
        assert torch.equal(made.v_scale[b, h].cpu(), wanted)
        columns = torch.arange(keys) // 16 * 16 + order[torch.arange(keys) % 16]
        values = made.v[b, h].cpu()
        assert torch.equal(values[:dim, columns].T, bits)
        values[:, columns] = 0
        assert not values.any()  # what pads keys and widths


def test_the_reference_in_e4m3_rounds_but_in_fp64():
    q, k, v = (t.cpu() for t in tensors(70, 150, dim=32))
    exact = attention_reference(q.double(), k.double(), v.double(), fp8=True)
    assert torch.equal(exact, attention_reference(q.double(), k.double(), v.double()))
    rounded = attention_reference(q, k, v, fp8=True)
    error = (rounded - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0.005 < error < 0.1


def test_the_forward_in_e4m3_fits():
    for dim in (32, 64, 80, 128):
        width, config = 64 if dim <= 64 else 128, dispatch.pick_fp8_config(dim, exact_lse=True)
        assert cuda_fp8.shared_bytes(width, config) <= 232_448


def test_kernels_are_not_specialised_for_sizes():
    for kernel in (
        forward._attention_fwd_kernel,
        split._attention_split_fwd_kernel,
        fused_backward._attention_fused_bwd_kernel,
    ):
        params = getattr(kernel, "params", None)
        if params is None:
            pytest.skip("the interpreter specialises nothing")
        for param in params:
            if not param.is_constexpr and not param.name.endswith("_ptr"):
                assert param.do_not_specialize, param.name


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_fifty_equal_repeats(form):
    leaves = [normal(2, 8, 1000, 64, dtype=torch.bfloat16) for _ in range(3)]
    first = everything(attention, leaves, backward=form)
    for _ in range(49):
        assert all(torch.equal(a, b) for a, b in zip(everything(attention, leaves, backward=form), first, strict=True))


def on_hopper(dim: int, causal: bool, dtype: torch.dtype) -> tuple[list[torch.Tensor], dict]:
    """Ragged, with more tiles than multiprocessors, heads inside rows, shared heads, and keys that do not count."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0 (Hopper)")
    leaves = [
        normal(3, rows, heads, dim, dtype=dtype).transpose(1, 2) for rows, heads in ((1333, 16), (1717, 8), (1717, 8))
    ]
    return leaves, dict(causal=causal, num_context=1511)


def attend(leaves: list[torch.Tensor], version: str, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse by that version of the forward, if it can be had here."""
    try:
        return attention(*leaves, forward=version, return_lse=True, **options)
    except RuntimeError as error:
        if "comes with CuPy" in str(error):
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
    # Both round p to the dtype, each by a maximum of its own.
    torch.testing.assert_close(out, other, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(lse, other_lse, rtol=1e-5, atol=1e-4)
    assert torch.equal(out, attend(leaves, version, **options)[0])


QUERY_TILES = [(64, 128), (128, 64), (128, 80)]  # with the width of the head


def near(mine, other) -> None:
    """Both rounded p and ds to 16 bits; the smallest numbers may be sums of larger ones."""
    for a, b in zip(mine, other, strict=True):
        scale = b[b.isfinite()].float().square().mean().sqrt().item()
        torch.testing.assert_close(a, b, rtol=2e-2, atol=3e-2 * scale)


def leaves_of(queries: int, keys: int, heads: tuple[int, int], dtype: torch.dtype, batch: int = 2):
    """q, k and v for D = 128, heads inside rows."""
    shapes = (heads[0], queries), (heads[1], keys), (heads[1], keys)
    return [normal(batch, n, h, 128, dtype=dtype).transpose(1, 2) for h, n in shapes]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dim", "tile"), QUERY_TILES)
def test_backward_in_cuda_agrees(dim, tile, causal, dtype, monkeypatch):
    leaves, options = on_hopper(dim, causal, dtype)
    attend(leaves, "cuda", **options)
    monkeypatch.setattr(dispatch, "cuda_query_tile", lambda *_: tile)
    mine = everything(attention, leaves, backward="cuda", **options)
    near(mine, everything(attention, leaves, backward="separate", **options))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(6, 6), (6, 2)])
@pytest.mark.parametrize(("queries", "keys"), [(700, 333), (333, 700), (1, 129), (700, 100)])
@pytest.mark.parametrize(("dim", "tile"), QUERY_TILES)
def test_sections_and_directions_of_the_backward_in_cuda(dim, tile, queries, keys, heads, monkeypatch):
    """Under a causal mask: queries that see nothing, and sections of which the last is not full; up, and by turns."""
    on_hopper(dim, True, torch.bfloat16)
    if tile == 80 and keys <= dispatch.CUDA_BWD_KEYS:
        pytest.skip("tiles of 80 are not for a single block of keys")
    shapes = ((heads[0], queries), (heads[1], keys), (heads[1], keys))
    leaves = [normal(2, *shape, dim, dtype=torch.bfloat16) for shape in shapes]
    attend(leaves, "cuda", causal=True)
    other = everything(attention, leaves, causal=True, backward="separate")
    for section, alternate in itertools.product((1, 3, 2 * heads[1]), (False, True)):
        config = dispatch.CudaBackwardConfig(tile, section, dim == 64, alternate=alternate)
        monkeypatch.setattr(dispatch, "pick_cuda_bwd_config", lambda *_, config=config: config)
        near(everything(attention, leaves, causal=True, backward="cuda"), other)


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "tile"), QUERY_TILES)
def test_shared_blocks_of_the_backward_in_cuda(dim, tile, monkeypatch):
    """Shares that begin in the middle of a group, more of them than there are heads, or all blocks."""
    on_hopper(dim, False, torch.float16)
    leaves = [normal(1, heads, rows, dim, dtype=torch.float16) for heads, rows in ((6, 405), (2, 517), (2, 517))]
    attend(leaves, "cuda")
    other = everything(attention, leaves, backward="separate")
    monkeypatch.setattr(Problem, "multiprocessors", lambda self: 3)
    for (shared, splits), chained in itertools.product(((1, 2), (7, 5), (10, 9)), {False, dim == 64}):
        config = dispatch.CudaBackwardConfig(tile, 1, dim == 64, shared, splits, chained=chained)
        monkeypatch.setattr(dispatch, "pick_cuda_bwd_config", lambda *_, config=config: config)
        near(everything(attention, leaves, backward="cuda"), other)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("keys", [129, 1000, 20_000])
@pytest.mark.parametrize("queries", [1, 100, 564, 700])
def test_chains_of_the_backward_in_cuda(queries, keys, group, dtype, monkeypatch):
    """On few multiprocessors, so that chains are long; of one tile a block and of many; with shares at the end of a
    chain or without. Against the separate form. Memory is NaN before, and stays so beyond the rows."""
    on_hopper(64, False, dtype)
    q, k, v = (
        normal(2, rows, heads, 64, dtype=dtype).transpose(1, 2)
        for rows, heads in ((queries, 2 * group), (keys, 2), (keys, 2))
    )
    out, lse = attend([q, k, v], "cuda")
    dout = torch.randn_like(out)
    problem, saved = Problem(q, k, v, 64**-0.5, -1, -1, keys), delta.Saved(out, lse, None, dout, None)
    wanted = [torch.empty_like(x) for x in (q, k, v)]
    separate_bwd(problem, saved, *wanted)
    for multiprocessors in (1, 3, 7):
        monkeypatch.setattr(Problem, "multiprocessors", lambda self, count=multiprocessors: count)
        grads = [torch.full((*x.shape[:2], x.shape[2] + 60, 64), math.nan).to(x) for x in (q, k, v)]
        poison = [torch.full((size,), math.nan, device="cuda") for size in (1 << 20, 1 << 22, 1 << 24)]
        del poison
        cuda_backward.cuda_bwd(problem, saved, *(x[:, :, :-60] for x in grads))
        near([x[:, :, :-60] for x in grads], wanted)
        assert all(x[:, :, -60:].isnan().all() for x in grads)


@pytest.mark.gpu
def test_chains_of_the_backward_in_cuda_change_nothing(monkeypatch):
    """dK and dV are those of a CTA for each block bit for bit, and the same in each run."""
    on_hopper(64, False, torch.bfloat16)
    shapes = ((4, 564), (2, 2999), (2, 2999))
    leaves = [normal(2, heads, rows, 64, dtype=torch.bfloat16) for heads, rows in shapes]
    attend(leaves, "cuda")
    monkeypatch.setattr(Problem, "multiprocessors", lambda self: 5)
    found = []
    for chained in (False, True, True, True):
        config = dispatch.CudaBackwardConfig(128, 1, True, 3, 4, chained=chained)
        monkeypatch.setattr(dispatch, "pick_cuda_bwd_config", lambda *_, config=config: config)
        found.append(everything(attention, leaves, backward="cuda"))
    for _, _, _, dk, dv in found[1:]:
        assert torch.equal(dk, found[0][3]) and torch.equal(dv, found[0][4])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(564, 64), (77, 128), (128, 1), (1, 100)])
@pytest.mark.parametrize("dim", [64, 128])
def test_a_single_block_of_the_backward_in_cuda(dim, queries, keys, causal, dtype):
    """One launch: last tiles that are not full, heads inside rows, shared heads, and, under a causal mask, tiles of
    queries that see nothing. No CTAs add to one sum, so that all is the same bit for bit."""
    on_hopper(dim, causal, dtype)
    leaves = [
        normal(3, rows, heads, dim, dtype=dtype).transpose(1, 2) for rows, heads in ((queries, 6), (keys, 2), (keys, 2))
    ]
    attend(leaves, "cuda", causal=causal)
    mine = everything(attention, leaves, causal=causal, backward="cuda")
    near(mine, everything(attention, leaves, causal=causal, backward="separate"))
    again = everything(attention, leaves, causal=causal, backward="cuda")
    assert all(torch.equal(a, b) for a, b in zip(mine, again, strict=True))


@pytest.mark.gpu
def test_a_thread_without_a_context_launches_in_cuda():
    """As one of autograd's is, where all memory that it asked for came from the cache."""
    leaves, options = on_hopper(64, False, torch.bfloat16)
    wanted, _ = attend(leaves, "cuda", **options)
    with ThreadPoolExecutor(1) as threads, torch.no_grad():
        found, _ = threads.submit(attend, leaves, "cuda", **options).result()
    assert torch.equal(found, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_rows_that_a_single_block_of_the_backward_in_cuda_writes(dim, causal):
    """All that there are, those that see nothing too, and none beyond: 311 is not a multiple of the 16 of a store."""
    (q, k, v), _ = on_hopper(dim, causal, torch.bfloat16)
    q, k, v = q[:, :, :311], k[:, :, :100], v[:, :, :100]
    out, lse = attend([q, k, v], "cuda", causal=causal)
    dq, dk, dv = (torch.full((*x.shape[:2], x.shape[2] + 60, dim), math.nan).to(x) for x in (q, k, v))
    problem = Problem(q, k, v, dim**-0.5, -1, 0 if causal else -1, 100)
    saved = delta.Saved(out, lse, None, torch.ones_like(out), None)
    cuda_backward.cuda_bwd(problem, saved, dq[:, :, :311], dk[:, :, :100], dv[:, :, :100])
    for x, rows in ((dq, 311), (dk, 100), (dv, 100)):
        assert x[:, :, :rows].isfinite().all() and x[:, :, rows:].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "causal"), [(64, False), (128, True)])
def test_the_separate_backward_is_the_same_fifty_times(dim, causal):
    """Bit for bit, while copies of another size move the CTAs against each other."""
    leaves = [normal(2, heads, rows, dim, dtype=torch.bfloat16) for heads, rows in ((16, 1100), (8, 1000), (8, 1000))]
    noise, stream = normal(1 << 24), torch.cuda.Stream()
    first = everything(attention, leaves, causal=causal, backward="separate")
    for repeat in range(50):
        with torch.cuda.stream(stream):
            noise[: 1 << (repeat % 25)].mul_(1.0)
        again = everything(attention, leaves, causal=causal, backward="separate")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), repeat
    torch.cuda.synchronize()


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


def test_a_repeatable_backward_is_picked_where_it_is_wanted():
    assert dispatch.pick_backward("auto", "cuda") == "cuda"
    assert dispatch.pick_backward("auto", "cuda", repeatable=True) == "separate"
    assert dispatch.pick_backward("auto") == "separate"
    assert dispatch.pick_backward("fused", "cuda", repeatable=True) == "fused"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_the_forward_in_cuda_fits(dim, causal):
    for queries, keys, heads in itertools.product((1, 512, 8192), (1, 64, 512, 513, 200_000), (1, 32)):
        config = forward_config(dim, queries, keys, causal, heads)
        assert cuda_forward.shared_bytes(dim, config) <= 232_448
        assert config.block_n % (8 * config.cluster) == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_shares_of_the_backward_in_cuda(dim, causal):
    for queries, keys, heads, group in itertools.product((1, 200, 8192), (1, 128, 4096, 200_000), (1, 8, 32), (1, 8)):
        config = dispatch.pick_cuda_bwd_config(queries, keys, dim, heads, group, causal, 132)
        blocks, tiles = heads * -(-keys // 128), group * -(-queries // config.queries)
        assert 1 <= config.section <= heads
        assert 0 <= config.shared <= blocks and 1 <= config.splits <= min(16, tiles)
        assert config.shared == 0 or (config.splits > 1 and not causal)
        assert config.alternate == (causal and group > 1)
        assert (dim, config.queries) in QUERY_TILES
        # Tiles of 80 have no registers left to add dQ from, nor rows of dQ that a single block could store.
        assert config.direct == (dim == 64)
        assert config.queries != 80 or (dim == 128 and keys > 128)
        assert config.queries % cuda_backward.helper_rows(config.queries) == 0
        # Shared memory has room for a second block's keys at D = 64 alone.
        rounds = blocks + config.shared * (config.splits - 1) > 132
        assert config.chained == (dim == 64 and not causal and keys > 128 and rounds)


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_the_backward_in_cuda_is_told(chained, dtype, monkeypatch):
    """Launched on nothing. A chain has a CTA to a multiprocessor and stores dK and dV from registers."""
    compiled, launched = [], []
    monkeypatch.setattr(cuda_driver, "kernels", lambda *arguments: compiled.append(arguments) or (None,) * 4)
    monkeypatch.setattr(cuda_backward, "tensor_map", lambda *arguments: arguments)
    monkeypatch.setattr(cuda_backward, "launch", lambda *arguments: launched.append(arguments))
    monkeypatch.setattr(Problem, "multiprocessors", lambda self: 4 if chained else 100)
    q, k, v = (normal(2, heads, rows, 64, dtype=dtype) for heads, rows in ((6, 1000), (2, 600), (2, 600)))
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    saved = delta.Saved(torch.empty_like(q), torch.empty(2, 6, 1000, device=DEVICE), None, torch.empty_like(q), None)
    cuda_backward.cuda_bwd(Problem(q, k, v, 0.125, -1, -1, 515), saved, dq, dk, dv)
    ((_, source, names, defines, room),) = compiled
    assert (source, names, room) == ("cuda_backward.cu", cuda_backward.NAMES, 232_448)
    sizes = ("HEAD_DIM=64", "IS_CAUSAL=0", f"FP16={int(dtype == torch.float16)}", "QUERIES=128")
    assert defines == (*sizes, "DIRECT=1", "SINGLE=0", "WHOLE=0", f"CHAINED={int(chained)}", "ROLES=0")
    # 20 blocks of 24 tiles: five rounds of four, or, with more multiprocessors, shares of less than a round.
    told = next(x for x in launched[1][4] if isinstance(x, cuda_backward._Problem))
    assert (told.queries, told.keys, told.m_tiles, told.n_blocks) == (1000, 515, 8, 5)
    assert (told.kv_heads, told.group, told.all_kv_heads, told.section) == (2, 3, 4, 1)
    assert (told.whole, told.splits) == ((20, 1) if chained else (0, 5))
    assert len(launched) == (3 if chained else 4)
    assert launched[1][1:4] == (4 if chained else 100, 384, room)
    made = [x for x in launched[1][4] if isinstance(x, tuple)]
    loaded = [(q, 1000, 128), (saved.dout, 1000, 128), (k, 515, 64), (v, 515, 64)]
    if chained:
        rows = [x for x in launched[1][4] if isinstance(x, cuda_driver.Rows)]
        assert [x[1:] for x in made] == [x[1:] for x in loaded]
        assert [x.at for x in rows] == [dk.data_ptr(), dv.data_ptr()]
        assert [(x.batch, x.head, x.row) for x in rows] == [dk.stride()[:3], dv.stride()[:3]]
        assert launched[1][4] == [*made, *rows, told]
    else:
        assert [x[1:] for x in made[:6]] == [x[1:] for x in [*loaded, (dk, 515, 64), (dv, 515, 64)]]
        assert launched[1][4] == [*made[:6], told, *made[:2]]
    assert all(x[0] is y[0] for x, y in zip(made, loaded, strict=False))


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "chained"),
    [(564, 64_000, 8, True), (11_000, 10_000, 32, True), (564, 1000, 512, True), (2048, 2048, 8, False)],
)
def test_where_the_backward_in_cuda_is_chained(queries, keys, heads, chained):
    """At D = 64, where there are more blocks and shares than multiprocessors, of more than one block of keys."""
    assert dispatch.pick_cuda_bwd_config(queries, keys, 64, heads, 1, False, 132).chained == chained
    assert not dispatch.pick_cuda_bwd_config(queries, 128, 64, heads, 1, False, 132).chained
    assert not dispatch.pick_cuda_bwd_config(queries, keys, 128, heads, 1, False, 132).chained
    assert not dispatch.pick_cuda_bwd_config(queries, keys, 64, heads, 1, True, 132).chained


@pytest.mark.parametrize(
    ("dim", "keys", "group", "causal", "tile"),
    [
        (64, 200_000, 1, False, 128),
        (128, 8192, 1, False, 80),
        (128, 129, 8, False, 80),
        (128, 128, 1, False, 64),
        (128, 4096, 1, True, 64),
        (128, 16_384, 1, True, 80),
        (128, 16_384, 8, True, 64),
    ],
)
def test_queries_of_a_tile_of_the_backward_in_cuda(dim, keys, group, causal, tile):
    assert dispatch.cuda_query_tile(dim, keys, group, causal) == tile


@pytest.mark.parametrize(("keys", "section"), [(2048, 8), (4096, 4), (8192, 2), (16_384, 1), (100_000, 1)])
def test_a_section_of_shared_heads_has_a_block_for_each_multiprocessor(keys, section):
    config = dispatch.pick_cuda_bwd_config(keys, keys, 128, 8, 8, True, 132)
    assert (config.section, config.alternate) == (section, True)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    """Offsets are 64 bits wide: the last heads lie past what 32 reach."""
    q, k, v = (
        torch.randn(1, 2**31 // (4096 * 64) + 2, 4096, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    out = attention(q, k, v)
    for part in (slice(0, 1), slice(-1, None)):
        torch.testing.assert_close(
            out[:, part], attention_reference(q[:, part], k[:, part], v[:, part]), rtol=2e-2, atol=1e-3
        )

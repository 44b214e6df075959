"""Tests that are specific to attention; `tests/test_specs.py` checks the rest from SPEC."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from . import attention
from .bench import visible
from .configs import forward as forward_configs
from .configs import portable as configs
from .configs.portable import Config
from .op_blocks import attention_in_blocks
from .portable import forward, fused_backward, key_gradients, query_gradient, split
from .problem import Problem, zero
from .reference import attention_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = ("separate", "fused")


class Passing(TorchDispatchMode):
    """A dispatch mode that changes nothing, but makes calls go through torch.library."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def normal(*shape: int, **options) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, **options)


def tensors(queries: int, keys: int, heads: int = 2, kv_heads: int = 1, dim: int = 16) -> list[torch.Tensor]:
    return [normal(1, heads, queries, dim), normal(1, kv_heads, keys, dim), normal(1, kv_heads, keys, dim)]


def everything(op, leaves: list[torch.Tensor], **options) -> tuple[torch.Tensor, ...]:
    """Returns out, lse, and the gradients for fixed incoming gradients."""
    leaves = [t.detach().requires_grad_() for t in leaves]
    out, lse = op(*leaves, return_lse=True, **options)
    dout = torch.linspace(-2, 2, out.numel(), device=DEVICE).view(out.shape).to(out.dtype)
    dlse = torch.linspace(1, -1, lse.numel(), device=DEVICE).view(lse.shape)
    return out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, (dout, dlse))


def close(mine, other) -> None:
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets small tiles, so that a small problem has many."""
    for name in ("pick_fwd_config", "pick_dkdv_config", "pick_dq_config", "pick_fused_config"):
        monkeypatch.setattr(configs, name, lambda dim, *_: Config(16, 16, configs.padded(dim), 4, 1))


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
    """Queries that see no key, a diagonal through the middle of tiles, and bands narrower than a tile."""
    small_tiles(monkeypatch)
    queries, keys = ((50, 35), (20, 50))[BANDS.index(window) % 2]
    leaves = tensors(queries, keys)
    mine = everything(attention, leaves, window=window, forward="portable", backward=form)
    close(mine, everything(attention_reference, leaves, window=window))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys", "heads", "kv_heads"), [(1, 70, 6, 2), (20, 60, 2, 1), (3, 33, 2, 2)])
def test_any_number_of_splits(queries, keys, heads, kv_heads, causal, monkeypatch):
    """Some splits have no visible keys, and the last one is partial."""
    small_tiles(monkeypatch)
    monkeypatch.setattr(configs, "pick_split_config", lambda rows, dim, *_: Config(16, 16, configs.padded(dim), 4, 1))
    leaves = tensors(queries, keys, heads, kv_heads)
    expected = attention_reference(*leaves, causal=causal, return_lse=True)
    for splits in (1, 3, 50):
        monkeypatch.setattr(forward_configs, "pick_splits", lambda *_, splits=splits: splits)
        close(attention(*leaves, causal=causal, return_lse=True, forward="split"), expected)


@pytest.mark.parametrize(("splits", "expected"), [(1, (1, 80)), (2, (2, 48)), (3, (3, 32)), (50, (5, 16))])
def test_there_are_no_more_splits_than_asked_for(splits, expected, monkeypatch):
    """Splits are whole blocks of 16 keys, divided as evenly as possible."""
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *tensors, **given: launched.append(given)

    monkeypatch.setattr(configs, "pick_split_config", lambda rows, dim, *_: Config(16, 16, configs.padded(dim), 4, 1))
    monkeypatch.setattr(forward_configs, "pick_splits", lambda *_: splits)
    monkeypatch.setattr(split, "_attention_split_fwd_kernel", Kernel())
    monkeypatch.setattr(split, "_attention_combine_kernel", Kernel())
    attention(*tensors(1, 70), forward="split")
    assert (launched[0]["splits"], launched[0]["keys_per_split"]) == expected


@pytest.mark.parametrize("version", ["portable", "split"])
def test_keys_that_no_query_of_a_tile_sees_are_not_read(version, monkeypatch):
    """They are not multiplied by a probability of 0 either: values of NaN would show that."""
    small_tiles(monkeypatch)
    monkeypatch.setattr(configs, "pick_split_config", lambda rows, dim, *_: Config(16, 16, configs.padded(dim), 4, 1))
    monkeypatch.setattr(forward_configs, "pick_splits", lambda *_: 2)
    q, k, v = tensors(64, 64, heads=4)
    before, behind = v.clone(), v.clone()
    before[:, :, :16], behind[:, :, 16:] = math.nan, math.nan
    assert attention(q, k, behind, causal=True, forward=version)[:, :, :16].isfinite().all()
    assert attention(q, k, before, window=(16, -1), forward=version)[:, :, 48:].isfinite().all()
    assert attention(q, k, behind, window=(-1, 0), forward=version)[:, :, 16:].isnan().all()


@pytest.mark.parametrize(("left", "right", "banded"), [(-1, -1, False), (-1, 0, True), (3, -1, True), (0, 5, True)])
def test_a_mask_or_a_window_is_a_band(left, right, banded):
    """In a band, the longest tiles of many heads are launched first."""
    assert Problem(*tensors(3, 4), 1.0, left, right, 4).banded == banded


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_backward_outside_of_the_mode_that_saw_the_forward(dtype):
    """The forward goes through torch.library, the backward does not."""
    leaves = [t.to(dtype) for t in tensors(20, 33)]
    want = everything(attention, leaves)
    leaves = [t.requires_grad_() for t in leaves]
    with Passing():
        out, lse = attention(*leaves, return_lse=True)
    dout = torch.linspace(-2, 2, out.numel(), device=DEVICE).view(out.shape).to(out.dtype)
    dlse = torch.linspace(1, -1, lse.numel(), device=DEVICE).view(lse.shape)
    mine = (out, lse, *torch.autograd.grad((out, lse), leaves, (dout, dlse)))
    assert all(torch.equal(a, b) for a, b in zip(mine, want, strict=True))


@pytest.mark.parametrize("splits", [1, 3, 16])
def test_the_fused_backward_with_any_number_of_parts(splits, monkeypatch):
    small_tiles(monkeypatch)
    monkeypatch.setattr(configs, "pick_fused_splits", lambda heads, tiles, _: min(splits, tiles))
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
    """[B, S, H, D] and slices of a packed projection are not copied, and the output has the same memory order."""
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


@pytest.mark.parametrize("passing", [False, True])
@pytest.mark.parametrize("queries", [4, 16, 20])
def test_sliding_windows_over_one_sequence(queries, passing):
    """Of `unfold`: rows overlap, and rows and columns both have stride 1. So they do in what torch.empty_like makes."""
    q, k, v = (normal(1, 2, n + 15).unfold(2, 16, 1) for n in (queries, 9, 9))
    assert q.stride()[2:] == (1, 1)
    with Passing() if passing else nullcontext():
        mine = everything(attention, [q, k, v])
    close(mine, everything(attention, [t.contiguous() for t in (q, k, v)]))
    close((attention_in_blocks(q, k, v),), mine[:1])


def test_gradient_of_lse_alone():
    q, k, v = tensors(9, 20)
    leaf = q.requires_grad_()
    (mine,) = torch.autograd.grad(attention(leaf, k, v, return_lse=True)[1].sum(), leaf)
    (other,) = torch.autograd.grad(attention_reference(leaf, k, v, return_lse=True)[1].sum(), leaf)
    close((mine,), (other,))


@pytest.mark.parametrize("passing", [False, True])
@pytest.mark.parametrize("special", [math.inf, math.nan])
def test_lse_alone_does_not_depend_on_v(special, passing):
    """Nor do its gradients: 0 · inf of out and v would make them NaN."""
    q, k, v = tensors(9, 20)
    v[:, :, 3, 2] = special
    results = []
    for op in (attention, attention_reference):
        leaves = [t.detach().requires_grad_() for t in (q, k)]
        with Passing() if passing else nullcontext():
            results.append(torch.autograd.grad(op(*leaves, v, return_lse=True)[1].sum(), leaves))
    close(*results)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("special", [math.inf, -math.inf])
def test_an_infinite_gradient_of_lse(special, form):
    """The keys that pad a tile do not contribute 0 · inf to dq, which is ±inf."""
    leaves = [t.requires_grad_() for t in tensors(9, 41)]
    with torch.no_grad():
        leaves[1].abs_().add_(0.1)
    dlse = torch.ones(1, 2, 9, device=DEVICE)
    dlse[0, 1, 5] = special
    results = []
    for op, options in ((attention, dict(backward=form)), (attention_reference, {})):
        out, lse = op(*leaves, return_lse=True, **options)
        results.append(torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), dlse)))
    assert (results[0][0][0, 1, 5] == special).all()
    close(*results)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("form", FORMS)
def test_all_scores_far_below_zero(form, monkeypatch):
    """exp(-lse) overflows, and the padding keys of a tile have score 0."""
    small_tiles(monkeypatch)
    leaves = [20 * torch.ones(1, 1, 5, 16), -20 * torch.ones(1, 1, 20, 16) + 0.01 * torch.randn(1, 1, 20, 16)]
    leaves = [t.to(DEVICE) for t in (*leaves, torch.randn(1, 1, 20, 16))]
    mine = everything(attention, leaves, backward=form)
    assert mine[1].max() < -100
    for a, b in zip(mine, everything(attention_reference, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def hide_a_key(q: torch.Tensor, k: torch.Tensor, key: int) -> None:
    """Makes a column of k a bias, which the queries' 1 adds to the scores: −inf for this key, so that none sees it."""
    q[..., 0], k[..., 0] = 1, 0
    k[:, :, key, 0] = -math.inf


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("queries", [1, 37, 64])
def test_a_bias_of_minus_infinity_in_a_column_of_k(queries, form):
    """Nor do the queries that pad a tile see that key: its gradients are 0, however many they are. That of the column
    itself is NaN, as in the reference."""
    q, k, v = tensors(queries, 41)
    hide_a_key(q, k, 7)
    mine = everything(attention, [q, k, v], backward=form)
    other = everything(attention_reference, [q, k, v])
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("needed", ["q", "k"])
def test_no_kernel_for_a_gradient_that_nobody_wants(needed, monkeypatch):
    called = []
    from .portable import backward

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
    """There are at most 16 partial dQ, independent of the number of key tiles."""
    for heads, tiles, sms in itertools.product((1, 8, 32, 500), (1, 7, 2000), (4, 108, 132)):
        splits = configs.pick_fused_splits(heads, tiles, sms)
        assert 1 <= splits <= min(tiles, 16)
        assert splits == 1 or splits * heads <= sms


@pytest.mark.parametrize("form", FORMS)
def test_sections_of_heads_that_do_not_divide_them(form, monkeypatch):
    """Every tile of every head is computed exactly once."""
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
        (dict(q=lambda t: t[:, :1]), {}, ValueError, "q must have a multiple of k's 2 heads, got 1"),
        (dict(v=lambda t: t.to("meta")), {}, ValueError, "v must be on q's device"),
        ({}, dict(scale=-1.0), ValueError, "scale must be a positive number in the range of fp32, got -1.0"),
        ({}, dict(scale=1e-46), ValueError, "scale must be a positive number in the range of fp32"),
        ({}, dict(scale=1e39), ValueError, "scale must be a positive number in the range of fp32"),
        ({}, dict(scale=math.nan), ValueError, "scale must be a positive number"),
        ({}, dict(num_context=8), ValueError, "num_context must be from 0 to k's 7 rows, got 8"),
        ({}, dict(window=(-2, 0)), ValueError, "window must be"),
        ({}, dict(forward="best"), ValueError, "forward must be one of auto, .*, got 'best'"),
        (
            {},
            dict(fp8=True),
            RuntimeError,
            "fp8=True cannot run here: it needs a GPU of compute capability 9.0|it supports fl",
        ),
        ({}, dict(fp8=True, window=(3, 3)), ValueError, r"window must be None with fp8=True, got \(3, 3\)"),
        (dict(q=lambda t: t.requires_grad_()), dict(fp8=True), RuntimeError, "must not require grad with fp8=True"),
        ({}, dict(forward="gluon"), RuntimeError, 'forward="gluon" cannot run here: it (needs|supports)'),
        ({}, dict(forward="cuda"), RuntimeError, 'forward="cuda" cannot run here: it (needs|supports)'),
        ({}, dict(backward="both"), ValueError, "backward must be one of auto, .*, got 'both'"),
    ],
)
def test_says_what_is_wrong(change, options, error, words):
    inputs = dict(zip("qkv", tensors(5, 7, heads=4, kv_heads=2), strict=True))
    inputs = {n: change.get(n, lambda t: t)(t) for n, t in inputs.items()}
    with pytest.raises(error, match=words):
        attention(**inputs, **options)


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


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "causal"), [(64, False), (128, True)])
def test_the_separate_backward_is_the_same_fifty_times(dim, causal):
    """Results are bitwise equal while concurrent copies of varying size disturb the timing of CTAs."""
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
def test_more_than_two_to_the_31_elements():
    """Offsets are 64 bits wide: the last heads are beyond the range of 32 bits."""
    q, k, v = (
        torch.randn(1, 2**31 // (4096 * 64) + 2, 4096, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    out = attention(q, k, v)
    for part in (slice(0, 1), slice(-1, None)):
        torch.testing.assert_close(
            out[:, part], attention_reference(q[:, part], k[:, part], v[:, part]), rtol=2e-2, atol=1e-3
        )


def test_a_window_is_two_integers():
    """A list, as read from JSON, is accepted too."""
    q, k, v = (torch.randn(1, 2, 8, 16, device=DEVICE) for _ in range(3))
    assert torch.equal(attention(q, k, v, window=[1, 0]), attention(q, k, v, window=(1, 0)))
    for window in (3, (1, 2, 3), (1.5, 0), "ab"):
        with pytest.raises(TypeError, match="window must be .left, right., two integers, or None"):
            attention(q, k, v, window=window)

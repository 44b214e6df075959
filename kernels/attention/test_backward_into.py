"""The backward alone: the gradients of attention, in the caller's memory."""

from __future__ import annotations

import math

import pytest
import torch

from . import attention, attention_backward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _inputs(dtype, batch=2, heads=4, kv_heads=2, queries=37, keys=21, dim=16):
    """Returns q as a GEMM writes it, k and v packed in one tensor, and dout."""
    source = torch.Generator(DEVICE).manual_seed(0)
    q, dout = (torch.randn(batch, queries, heads, dim, device=DEVICE, generator=source) for _ in range(2))
    kv = torch.randn(batch, keys, 2, kv_heads, dim, device=DEVICE, generator=source)
    q, dout, kv = (x.to(dtype) for x in (q, dout, kv))
    k, v = (x.transpose(1, 2) for x in kv.unbind(2))
    return q.transpose(1, 2), k, v, dout.transpose(1, 2)


def _packed(k):
    """Returns memory for dk and dv, slices of one tensor filled with NaN, and a guard region after them."""
    batch, heads, keys, dim = k.shape
    room = torch.full((batch, keys, 3, heads, dim), math.nan, dtype=k.dtype, device=k.device)
    dk, dv, guard = (x.transpose(1, 2) for x in room.unbind(2))
    return dk, dv, guard


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "options",
    [{}, dict(causal=True), dict(num_context=9), dict(num_context=0), dict(window=(5, 3), scale=0.3)],
    ids=str,
)
@pytest.mark.parametrize("backward", ["separate", "fused"])
def test_gradients_are_attentions(dtype, options, backward) -> None:
    q, k, v, dout = _inputs(dtype)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(attention(*leaves, backward=backward, **options), leaves, dout)
    out, lse = attention(q, k, v, return_lse=True, **options)
    dq = torch.full_like(q, math.nan)
    dk, dv, guard = _packed(k)
    found = attention_backward(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, backward=backward, **options)
    assert all(a is b for a, b in zip(found, (dq, dk, dv), strict=True))
    assert guard.isnan().all()
    # fp32 has no saved statistics here: p is computed from lse, which adds a rounding.
    limit = 2e-6 if dtype == torch.float32 else 0.0
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=limit, atol=limit * 5)
    made = attention_backward(dout, q, k, v, out, lse, backward=backward, **options)
    assert all(torch.equal(a, b) for a, b in zip(made, found, strict=True))


def test_the_gradient_of_lse() -> None:
    q, k, v, dout = _inputs(torch.float32)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves, return_lse=True)
    dlse = torch.randn_like(lse)
    expected = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    with torch.no_grad():
        found = attention_backward(dout, q, k, v, out, lse, dlse=dlse)
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=2e-6, atol=1e-5)


def test_no_queries() -> None:
    q, k, v, dout = _inputs(torch.float16, queries=0)
    out, lse = attention(q, k, v, return_lse=True)
    dk, dv, guard = _packed(k)
    attention_backward(dout, q, k, v, out, lse, dk=dk, dv=dv)
    assert not dk.any() and not dv.any() and guard.isnan().all()


def test_inside_a_compiled_function() -> None:
    q, k, v, dout = _inputs(torch.float32)
    out, lse = attention(q, k, v, return_lse=True)

    def run(dout, out, lse):
        dk = torch.empty_like(k)
        dq, _, dv = attention_backward(dout, q, k, v, out, lse, dk=dk)
        return dq * 2, dk * 2, dv * 2

    found = torch.compile(run, fullgraph=True, backend="aot_eager")(dout, out, lse)
    for mine, right in zip(found, run(dout, out, lse), strict=True):
        torch.testing.assert_close(mine, right)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(dq=torch.empty(2, 4, 37, 16, dtype=torch.float64)), TypeError, "dq must be a tensor of q's dtype"),
        (dict(dk=torch.empty(2, 2, 20, 16)), ValueError, "dk must be"),
        (dict(dv=torch.empty(2, 2, 16, 21).transpose(2, 3)), ValueError, "dv must have contiguous rows"),
        (dict(dk=lambda: torch.empty(2, 1, 21, 16, device=DEVICE).expand(2, 2, 21, 16)), ValueError, "not expanded"),
        (dict(lse=torch.empty(2, 4, 37, dtype=torch.float64)), TypeError, "lse must be a tensor of float32"),
        (dict(lse=torch.empty(37, 4, 2).permute(2, 1, 0)), ValueError, "lse must be contiguous"),
        (dict(dlse=torch.empty(2, 4, 1)), ValueError, "dlse must be"),
        (dict(dout=torch.empty(2, 4, 36, 16)), ValueError, "dout must be"),
        (dict(out=None), TypeError, "out must be a tensor"),
        (dict(backward="none"), ValueError, "backward must be one of"),
        (dict(scale=-1.0), ValueError, "scale must be"),
    ],
)
def test_refusals(change, error, message) -> None:
    q, k, v, dout = _inputs(torch.float32)
    given = dict(dout=dout, q=q, k=k, v=v, out=torch.zeros_like(q), lse=torch.zeros(2, 4, 37, device=DEVICE))
    for name, x in change.items():  # `to` would make an expanded tensor contiguous
        given[name] = x() if callable(x) else x.to(DEVICE) if isinstance(x, torch.Tensor) else x
    with torch.no_grad(), pytest.raises(error, match=message):
        attention_backward(**given)


def test_it_has_no_gradient() -> None:
    q, k, v, dout = _inputs(torch.float32)
    with pytest.raises(RuntimeError, match="q must not require grad"):
        attention_backward(dout, q.requires_grad_(), k, v, dout, torch.zeros(2, 4, 37, device=DEVICE))


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize(
    ("sizes", "causal"),
    [
        ((1, 8, 8, 564, 64, 64), False),
        ((4, 8, 8, 1100, 1000, 64), False),
        ((2, 8, 2, 700, 4500, 128), False),
        ((2, 8, 2, 700, 4500, 128), True),
        ((4, 32, 32, 1024, 1024, 128), True),
    ],
    ids=str,
)
def test_cuda_writes_into_slices(sizes, causal) -> None:
    """Gradients are stored by TMA and by plain stores, depending on the schedule."""
    q, k, v, dout = _inputs(torch.bfloat16, *sizes)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in leaves[1:])
    s = leaves[0] @ keys.transpose(2, 3) / math.sqrt(q.shape[3])
    if causal:
        hidden = torch.ones(s.shape[2:], device=DEVICE, dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
        s = s.masked_fill(hidden, -math.inf)
    expected = torch.autograd.grad(s.softmax(-1) @ values, leaves, dout.double())
    out, lse = attention(q, k, v, causal=causal, return_lse=True)
    dk, dv, guard = _packed(k)
    dq = torch.full_like(q, math.nan)
    attention_backward(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, causal=causal, backward="cuda")
    assert guard.isnan().all()
    for mine, right in zip((dq, dk, dv), expected, strict=True):
        error = (mine.double() - right).abs().max() / right.abs().max()
        assert error < 2e-2, float(error)

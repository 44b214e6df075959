"""attention_backward: the gradients of attention, in slices of one tensor."""

from __future__ import annotations

import pytest
import torch

from . import attention, attention_backward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if DEVICE == "cuda" else (torch.float32, torch.float16)


def packed(batch: int, length: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(batch, length, heads + 2 * kv_heads, dim, device=DEVICE).to(dtype)


def slices(qkv: torch.Tensor, kv_heads: int) -> list[torch.Tensor]:
    heads = qkv.shape[2] - 2 * kv_heads
    return [t.transpose(1, 2) for t in qkv.split((heads, kv_heads, kv_heads), dim=2)]


def both(qkv: torch.Tensor, kv_heads: int, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of a packed tensor by autograd, and by attention_backward."""
    leaf = qkv.clone().requires_grad_()
    out, lse = attention(*slices(leaf, kv_heads), return_lse=True, **options)
    dout = torch.randn_like(out)
    (want,) = torch.autograd.grad(out, leaf, dout)
    # A number beyond each head's rows tells of a write outside of a slice.
    room = torch.full((*qkv.shape[:2], qkv.shape[2] + 1, qkv.shape[3]), torch.nan, device=DEVICE, dtype=qkv.dtype)
    room[:, :, -1] = 7
    with torch.no_grad():
        into = slices(room[:, :, :-1], kv_heads)
        attention_backward(dout, *slices(qkv, kv_heads), out.detach(), lse.detach(), *into, **options)
    assert (room[:, :, -1] == 7).all()
    return room[:, :, :-1], want


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "length", "dim"), [(2, 2, 33, 16), (4, 2, 70, 24), (1, 1, 1, 8)])
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_what_autograd_has(heads, kv_heads, length, dim, causal, dtype) -> None:
    found, want = both(packed(2, length, heads, kv_heads, dim, dtype), kv_heads, causal=causal)
    tolerance = dict(rtol=2e-3, atol=2e-3) if dtype != torch.float32 else dict(rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, want, **tolerance)


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("length", [300, 2048])
@pytest.mark.parametrize("causal", [False, True])
def test_hopper_writes_into_slices(causal, length, kv_heads) -> None:
    """D of 128 in CUDA C++: what it stores by TMA and by rows lies at the slices' strides."""
    found, want = both(packed(2, length, 8, kv_heads, 128, torch.bfloat16), kv_heads, causal=causal, backward="cuda")
    assert torch.isfinite(found).all()
    # dq's sums have no fixed order.
    assert (found.float() - want.float()).square().mean().sqrt() < 2e-3 * want.float().square().mean().sqrt()


def test_through_torch_library_and_without_a_query() -> None:
    qkv = packed(1, 9, 2, 1, 16, torch.float32)
    q, k, v = slices(qkv, 1)
    out, lse = attention(q, k, v, return_lse=True)
    direct, by_library = (slices(torch.zeros_like(qkv), 1) for _ in range(2))
    attention_backward(out, q, k, v, out, lse, *direct)
    op = getattr(torch.ops, __package__.replace(".", "_")).attention_backward
    op(out, q, k, v, out, lse, *by_library, 0.25, False, "auto")
    assert all(torch.equal(a, b) for a, b in zip(direct, by_library, strict=True))
    torch.library.opcheck(op, (out, q, k, v, out, lse, *map(torch.empty_like, (q, k, v)), 0.25, True, "auto"))
    none = q[:, :, :0], k, v
    out, lse = attention(*none, return_lse=True)
    with torch.no_grad():
        attention_backward(out, *none, out, lse, out, *direct[1:])
    assert not direct[1].any() and not direct[2].any()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(dq=torch.zeros(1, 2, 9, 16).half()), TypeError, "dq must be a tensor of q's dtype"),
        (dict(dk=torch.zeros(1, 2, 9, 16)), ValueError, r"dk must be \[1, 1, 9, 16\]"),
        (dict(dv=torch.zeros(1, 1, 16, 9).transpose(2, 3)), ValueError, "dv must have contiguous rows"),
        (dict(dv=torch.zeros(1, 1, 1, 16).expand(1, 1, 9, 16)), ValueError, "dv must have contiguous rows"),
        (dict(lse=torch.zeros(1, 2, 8)), ValueError, r"lse must be \[1, 2, 9\]"),
        (dict(lse=torch.zeros(1, 2, 9).half()), TypeError, "lse must be a tensor of float32"),
        (dict(dout=None), TypeError, "dout must be a tensor"),
        (dict(scale=-1.0), ValueError, "attention: scale must be a positive number"),
        (dict(backward="flash"), ValueError, "attention: backward must be one of"),
    ],
)
def test_bad_input_raises_an_error_that_names_it(change, error, words) -> None:
    qkv = packed(1, 9, 2, 1, 16, torch.float32)
    q, k, v = slices(qkv, 1)
    out, lse = attention(q, k, v, return_lse=True)
    good = dict(dout=out, q=q, k=k, v=v, out=out, lse=lse, dq=q.clone(), dk=k.clone(), dv=v.clone())
    changed = {name: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for name, t in change.items()}
    with pytest.raises(error, match=words):
        attention_backward(**good | changed)
    with pytest.raises(RuntimeError, match="q must not require grad"):
        attention_backward(**good | dict(q=q.clone().requires_grad_()))

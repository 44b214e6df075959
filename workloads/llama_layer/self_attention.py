"""Causal attention on the output of one GEMM for q, k and v, whose slices are rotated and read in place."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from kernels.attention import attention, attention_backward
from kernels.rope import rope


def self_attention(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    """Attention [B, S, heads · D], before W_o, of qkv [B, S, (heads + 2 · kv_heads) · D]. qkv may be overwritten, so
    the caller must not use it afterwards."""
    recorded = torch.is_grad_enabled() and qkv.requires_grad
    # In fp32, autograd of `attention` saves more of the softmax than lse. rope rejects tables that require a gradient.
    packed = qkv.dtype != torch.float32 and eager() and not cos.requires_grad and not sin.requires_grad
    if recorded and packed:
        return _SelfAttention.apply(qkv, cos, sin, heads, kv_heads)
    q, k, v = _heads(qkv, heads, kv_heads)
    q, k = rope(q, k, cos, sin, inplace=eager() and not recorded)
    out = attention(*_by_heads(q, k, v), causal=True)
    assert isinstance(out, torch.Tensor)
    return out.transpose(1, 2).flatten(2)


def eager() -> bool:
    """Whether the call is eager: neither under torch.compile nor in a functorch transform, which forbid overwriting."""
    return not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()


class _SelfAttention(torch.autograd.Function):
    """The autograd function of `self_attention`. It writes the gradients of q, k and v to slices of one tensor, in
    which it inverts the rotation; autograd of the slices would concatenate them with a copy. The rotation overwrites
    qkv, which no GEMM's backward reads."""

    @staticmethod
    def forward(ctx, qkv, cos, sin, heads, kv_heads):
        q, k, v = _heads(qkv, heads, kv_heads)
        rope(q, k, cos, sin, inplace=True)
        out, lse = attention(*_by_heads(q, k, v), causal=True, return_lse=True)
        ctx.save_for_backward(qkv, cos, sin, out, lse)
        ctx.heads = heads, kv_heads
        return out.transpose(1, 2).flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx, dattended):
        qkv, cos, sin, out, lse = ctx.saved_tensors
        dqkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
        dq, dk, dv = _heads(dqkv, *ctx.heads)
        dout = dattended.unflatten(-1, (ctx.heads[0], -1)).transpose(1, 2)
        q, k, v = _heads(qkv, *ctx.heads)
        into = dict(zip(("dq", "dk", "dv"), _by_heads(dq, dk, dv), strict=True))
        attention_backward(dout, *_by_heads(q, k, v), out, lse, **into, causal=True)
        rope(dq, dk, cos, -sin, inplace=True)
        return dqkv, None, None, None, None


def _heads(qkv: torch.Tensor, heads: int, kv_heads: int) -> tuple[torch.Tensor, ...]:
    """q, k and v [B, S, heads, D] as slices of qkv."""
    return qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).split((heads, kv_heads, kv_heads), dim=2)


def _by_heads(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in attention's layout, [B, heads, S, D]."""
    return tuple(t.transpose(1, 2) for t in tensors)

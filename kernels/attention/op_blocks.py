"""Attention over blocks of keys, one call each: `attention_partial` and its backward as ring attention calls them, but
on one GPU. The benchmark measures their cost over that of `attention`, and the sanitizer runs them."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from .op_partial import attention_delta, attention_partial, attention_partial_backward
from .problem import empty_like


def attention_in_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    blocks: int = 2,
) -> torch.Tensor:
    """Computes `attention(q, k, v, causal=causal, scale=scale)`, differentiable, in `blocks` blocks of keys."""
    return _InBlocks.apply(q, k, v, causal, scale, blocks)


def _spans(keys: int, blocks: int) -> list[tuple[int, int]]:
    return [(keys * i // blocks, keys * (i + 1) // blocks) for i in range(blocks)]


class _InBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, scale, blocks):
        queries, keys = q.shape[2], k.shape[2]
        ctx.options = dict(causal=causal, scale=scale, q_offset=keys - queries if causal else 0)
        ctx.spans = _spans(keys, blocks)
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
        result = empty_like(q)
        for number, (first, last) in enumerate(ctx.spans):
            block = (x[:, :, first:last] for x in (k, v))
            to = result if number == blocks - 1 else None
            attention_partial(q, *block, out, lse, k_offset=first, result=to, **ctx.options)
        ctx.save_for_backward(q, k, v, result, lse)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        delta = attention_delta(dout, out)
        dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
        for first, last in ctx.spans:
            keys, values, dkeys, dvalues = (x[:, :, first:last] for x in (k, v, dk, dv))
            given = (dout, q, keys, values, out, lse, dq, dkeys, dvalues)
            attention_partial_backward(*given, delta=delta, k_offset=first, **ctx.options)
        return *(torch.empty_like(x).copy_(sums) for x, sums in zip((q, k, v), (dq, dk, dv), strict=True)), *[None] * 3

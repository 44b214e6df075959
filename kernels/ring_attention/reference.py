"""Ring attention in plain PyTorch, on one process that has the whole sequence: the oracle. Computes in fp32 or, given
fp64, in fp64."""

from __future__ import annotations

import math

import torch


def ring_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    layout: str = "zigzag",
    rotate: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes `ring_attention` by its definition, from whole q, k and v. Options about distribution have no effect."""
    (batch, heads, queries, dim), (_, kv_heads, keys, _) = q.shape, k.shape
    if k.shape != v.shape or (k.shape[0], k.shape[3]) != (batch, dim) or heads % kv_heads:
        raise ValueError(
            f"q, k and v must have matching shapes, got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    wide = torch.promote_types(q.dtype, torch.float32)
    wide_k, wide_v = (t.to(wide).repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
    scores = (q.to(wide) * (1 / math.sqrt(dim) if scale is None else scale)) @ wide_k.mT
    if causal:
        position = torch.arange(queries, device=q.device)[:, None] + keys - queries
        scores = scores.masked_fill(torch.arange(keys, device=q.device) > position, -math.inf)
    if keys == 0:
        out, lse = scores @ wide_v, scores.sum(-1) - math.inf
    else:
        highest = scores.detach().amax(-1, keepdim=True)
        highest = torch.where(highest == -math.inf, 0, highest)  # a row that sees no key: exp(−inf), not exp(nan)
        powers = (scores - highest).exp()
        total = powers.sum(-1, keepdim=True)
        some = torch.where(total == 0, 1, total)
        out = powers @ wide_v / some
        lse = (highest + torch.where(total == 0, -math.inf, some.log())).squeeze(-1)
    return (out.to(q.dtype), lse.to(torch.promote_types(lse.dtype, torch.float32))) if return_lse else out.to(q.dtype)

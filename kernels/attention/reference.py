"""Attention in plain PyTorch: the oracle. Computes in fp32 or, given fp64, in fp64."""

from __future__ import annotations

import math

import torch
from torch.utils.checkpoint import checkpoint

# Most scores in memory at a time: 8 GiB in fp64, and the backward needs a few such tensors.
MOST_SCORES = 1 << 30


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    num_context: int | None = None,
    window: tuple[int, int] | None = None,
    return_lse: bool = False,
    fp8: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes `attention` by its definition. If the scores do not fit memory, it computes them for chunks of queries,
    and recomputes them in the backward. fp8: q, k and v are rounded to e4m3 first, except in fp64."""
    if fp8 and q.dtype != torch.float64:
        q, k, v = _to_e4m3(q, 64), _to_e4m3(k, 128), _to_e4m3(v, 1024)
    batch, heads, queries, dim = q.shape
    kv_heads = k.shape[1]
    if k.shape != v.shape or (k.shape[0], k.shape[3]) != (batch, dim) or heads % kv_heads:
        raise ValueError(
            f"q, k and v must have matching shapes, got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    keys = k.shape[2] if num_context is None else num_context
    wide = torch.promote_types(q.dtype, torch.float32)
    group = heads // kv_heads
    wide_k = k[:, :, :keys].to(wide).repeat_interleave(group, dim=1)
    wide_v = v[:, :, :keys].to(wide).repeat_interleave(group, dim=1)
    left, right = (-1, -1) if window is None else window
    right = 0 if causal else right
    scale = 1 / math.sqrt(dim) if scale is None else scale

    def rows(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        part = q[:, :, first:last].to(wide) * scale
        return _rows(part, wide_k, wide_v, first + keys - queries, left, right)

    many = batch * heads * queries * keys > MOST_SCORES
    step = max(1, MOST_SCORES // (4 * batch * heads * keys)) if many else max(queries, 1)
    pieces = [(first, min(first + step, queries)) for first in range(0, max(queries, 1), step)]
    if many:
        results = [checkpoint(rows, *piece, use_reentrant=False) for piece in pieces]
    else:
        results = [rows(*piece) for piece in pieces]
    out = torch.cat([o for o, _ in results], dim=2).to(q.dtype)
    lse = torch.cat([s for _, s in results], dim=2)
    return (out, lse.to(torch.promote_types(lse.dtype, torch.float32))) if return_lse else out


def _rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int, left: int, right: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns output and log-sum-exp of some rows, the first of which is aligned with key `position`."""
    scores = q @ k.transpose(-1, -2)
    if left >= 0 or right >= 0:
        here = torch.arange(q.shape[2], device=q.device)[:, None] + position
        key = torch.arange(k.shape[2], device=q.device)[None, :]
        hidden = torch.zeros_like(here == key)
        if left >= 0:
            hidden |= key < here - left
        if right >= 0:
            hidden |= key > here + right
        scores = scores.masked_fill(hidden, -math.inf)
    if not k.shape[2]:
        return scores @ v, scores.sum(-1) - math.inf
    highest = scores.detach().amax(-1, keepdim=True)
    highest = torch.where(highest == -math.inf, 0, highest)  # a row that sees no key: exp(-inf), not exp(nan)
    powers = (scores - highest).exp()
    total = powers.sum(-1, keepdim=True)
    out = powers @ v / torch.where(total == 0, 1, total)
    return out, (highest + _log(total)).squeeze(-1)


def _log(total: torch.Tensor) -> torch.Tensor:
    """Returns log(total). The log of 0 is -inf, with gradient 0."""
    return torch.where(total == 0, -math.inf, torch.where(total == 0, 1, total).log())


def _to_e4m3(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns x rounded to e4m3. Each block of `rows` rows has the smallest power-of-two scale that avoids overflow."""
    if x.numel() == 0:
        return x
    blocks = [block.to(torch.promote_types(x.dtype, torch.float32)) for block in x.split(rows, dim=2)]
    rounded = []
    for block in blocks:
        largest = block.abs().amax((2, 3), keepdim=True)
        scale = torch.where(largest > 0, torch.exp2(torch.ceil(torch.log2(largest / 448))), 1.0)
        rounded.append((block / scale).to(torch.float8_e4m3fn).to(block.dtype) * scale)
    return torch.cat(rounded, dim=2).to(x.dtype)

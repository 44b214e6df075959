"""Block-sparse attention in plain PyTorch: the oracle. Dense, in fp32 or, given fp64, in fp64."""

from __future__ import annotations

import math

import torch
from torch.utils.checkpoint import checkpoint

# Most scores in memory at a time: 8 GiB in fp64, and the backward needs a few such tensors.
MOST_SCORES = 1 << 30


def block_sparse_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_mask: torch.Tensor,
    *,
    block_size: int = 128,
    scale: float | None = None,
    causal: bool = False,
    return_lse: bool = False,
    block_bias: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes `block_sparse_attention` by its definition, from the mask. If the scores do not fit memory, it computes
    some rows of blocks at a time, and recomputes them in the backward."""
    batch, heads, queries, dim = q.shape
    keys, kv_heads = k.shape[2], k.shape[1]
    if k.shape != v.shape or (k.shape[0], k.shape[3]) != (batch, dim) or heads % kv_heads:
        raise ValueError(
            f"q, k and v must have matching shapes, got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    rows, columns = -(-queries // block_size), -(-keys // block_size)
    for tensor in (block_mask, block_bias):
        if tensor is not None and tensor.shape[-2:] != (rows, columns):
            raise ValueError(f"block_mask and block_bias must end with [{rows}, {columns}], got {tuple(tensor.shape)}")
    kept = block_mask.expand(batch, heads, rows, columns)
    bias = None if block_bias is None else block_bias.expand(batch, heads, rows, columns)
    wide = torch.promote_types(q.dtype, torch.float32)
    wide_k, wide_v = (t.to(wide).repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
    scale = 1 / math.sqrt(dim) if scale is None else scale

    def part(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the rows of blocks in [first, last)."""
        begin, end = first * block_size, min(last * block_size, queries)
        hidden = ~_elements(kept[:, :, first:last], block_size, end - begin, keys)
        if causal:
            key = torch.arange(keys, device=q.device)
            hidden = hidden | (key > torch.arange(begin, end, device=q.device)[:, None] + (keys - queries))
        own = None if bias is None else _elements(bias[:, :, first:last].to(wide), block_size, end - begin, keys)
        return _attend(q[:, :, begin:end].to(wide) * scale, wide_k, wide_v, hidden, own)

    many = batch * heads * queries * keys > MOST_SCORES
    step = max(1, MOST_SCORES // (4 * batch * heads * keys * block_size)) if many else max(rows, 1)
    pieces = [(first, min(first + step, rows)) for first in range(0, max(rows, 1), step)]
    if many:
        results = [checkpoint(part, *piece, use_reentrant=False) for piece in pieces]
    else:
        results = [part(*piece) for piece in pieces]
    out = torch.cat([o for o, _ in results], dim=2).to(q.dtype)
    lse = torch.cat([s for _, s in results], dim=2)
    return (out, lse.to(torch.promote_types(lse.dtype, torch.float32))) if return_lse else out


def _elements(blocks: torch.Tensor, block: int, queries: int, keys: int) -> torch.Tensor:
    """Repeats each block's element for all its pairs: [.., nq, nk] to [.., queries, keys]."""
    *leading, rows, columns = blocks.shape
    wide = blocks[..., :, None, :, None].expand(*leading, rows, block, columns, block)
    return wide.reshape(*leading, rows * block, columns * block)[..., :queries, :keys]


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns output and log-sum-exp of some rows."""
    scores = q @ k.transpose(-1, -2)
    if bias is not None:
        scores = scores + bias
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

"""Masks of blocks for `block_sparse_attention`: fixed patterns, and those found from the queries and keys themselves.

All give bool tensors, True where a block is kept, of a shape that depends on sizes alone, without host synchronisation.
The diagonal of block i of the queries is block i + nk − nq of the keys: the last blocks are aligned.
"""

from __future__ import annotations

import math

import torch


def sliding_window_blocks(
    rows: int,
    columns: int,
    left: int,
    right: int,
    global_blocks: int = 0,
    *,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """[rows, columns]: the blocks from `left` before the diagonal to `right` after it, and of the first `global_blocks`
    rows and columns all (Beltagy, Peters and Cohan 2020, *Longformer*, arXiv:2004.05150; under a causal mask the first
    columns are the attention sinks of Xiao et al. 2023, arXiv:2309.17453)."""
    row = torch.arange(rows, device=device)[:, None]
    column = torch.arange(columns, device=device)[None, :]
    apart = column - row - (columns - rows)
    return (apart >= -left) & (apart <= right) | (row < global_blocks) | (column < global_blocks)


def strided_blocks(
    rows: int, columns: int, local: int, stride: int, *, device: torch.device | str | None = None
) -> torch.Tensor:
    """[rows, columns]: the `local` blocks up to the diagonal and every `stride`-th column (Child et al. 2019, *Sparse
    Transformers*, arXiv:1904.10509, the fixed pattern), both for a causal mask."""
    column = torch.arange(columns, device=device)[None, :]
    window = sliding_window_blocks(rows, columns, local - 1, 0, device=device)
    return window | (column % stride == stride - 1)


def big_bird_blocks(
    rows: int,
    columns: int,
    window: int,
    global_blocks: int,
    random_blocks: int,
    *,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """[rows, columns]: `window` blocks to either side of the diagonal, the first `global_blocks` rows and columns, and
    `random_blocks` blocks of each row that may be among them (Zaheer et al. 2020, *Big Bird*, arXiv:2007.14062). The
    same for a seed on every device."""
    scores = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed))
    chosen = torch.zeros(rows, columns, dtype=torch.bool)
    chosen.scatter_(1, scores.topk(min(random_blocks, columns), dim=1).indices, True)
    return sliding_window_blocks(rows, columns, window, window, global_blocks, device=device) | chosen.to(device)


def visible_blocks(
    queries: int, keys: int, block_size: int, causal: bool, *, device: torch.device | str | None = None
) -> torch.Tensor:
    """[nq, nk]: the blocks in which some query sees some key: all, but for those above the diagonal if it is causal."""
    row = torch.arange(-(-queries // block_size), device=device)[:, None]
    column = torch.arange(-(-keys // block_size), device=device)[None, :]
    if not causal:
        return (row >= 0) & (column >= 0)
    return column * block_size <= ((row + 1) * block_size).clamp(max=queries) - 1 + (keys - queries)


def pooled(x: torch.Tensor, block_size: int) -> torch.Tensor:
    """[B, H, S, D] to the mean of each block, fp32 [B, H, ceil(S / block_size), D]; the last block may be shorter."""
    length = x.shape[2]
    blocks = -(-length // block_size)
    padded = torch.nn.functional.pad(x, (0, 0, 0, blocks * block_size - length))
    sums = padded.unflatten(2, (blocks, block_size)).sum(3, dtype=torch.float32)
    sizes = torch.full((blocks, 1), float(block_size), device=x.device)
    sizes[blocks - 1 :] = length - (blocks - 1) * block_size
    return sums / sizes


def best_blocks(scores: torch.Tensor, *, sparsity: float, visible: torch.Tensor, diagonal: bool) -> torch.Tensor:
    """bool like `scores` [B, H, nq, nk]: of each head the blocks of the highest scores among the `visible` [nq, nk],
    so many that the share `sparsity` of these is dropped: exactly round((1 − sparsity) · visible), unless more than
    that are forced.

    Forced are the best block of each row, and with `diagonal` the last one that it sees. The number is fixed for a
    head, not for each row: rows whose attention is spread out get more blocks, which makes the threshold dynamic. It
    does not depend on the scores, so that no host synchronisation is needed.
    """
    if not 0 <= sparsity <= 1:
        raise ValueError(f"best_blocks: sparsity must be from 0 to 1, got {sparsity}")
    rows, columns = scores.shape[-2:]
    if rows == 0 or columns == 0:
        return torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    scores = scores.masked_fill(~visible, -math.inf)
    forced = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.argmax(-1, keepdim=True), True)
    if diagonal:
        last = visible.sum(-1, keepdim=True).clamp(min=1) - 1
        forced = forced | (torch.arange(columns, device=scores.device) == last)
    forced = forced & visible
    # By rank rather than by a threshold, so that the number is exact with equal scores too.
    order = torch.where(forced, math.inf, scores).flatten(-2).argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(rows * columns, device=order.device).expand_as(order)
    )
    wanted = ((1 - sparsity) * visible.sum()).round()
    return ((rank.unflatten(-1, (rows, columns)) < wanted) | forced) & visible


def threshold_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    sparsity: float,
    block_size: int = 128,
    scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """A dynamic threshold: bool [B, Hq, nq, nk], the blocks that are expected to hold the most of the attention.

        estimate = softmax over a row of (scale · mean of the block's queries · mean of its keys)

    The estimate is of the share that a row of blocks gives to each block, so that blocks of different rows can be
    compared; of each head the highest are kept, as many as `best_blocks` says. No gradient. The estimate by means is
    that of MInference (Jiang et al. 2024, arXiv:2407.02490) and Quest (Tang et al. 2024, arXiv:2406.10774, by bounds);
    XAttention (Xu et al. 2025, arXiv:2503.16428) adds up antidiagonals instead. It is good where neighbouring keys
    resemble each other, and blind to a single key that stands out.

    q, k       as those of the attention; scale, causal and block_size too
    sparsity   the share of the visible blocks that is dropped, from 0 to 1
    """
    with torch.no_grad():
        visible = visible_blocks(q.shape[2], k.shape[2], block_size, causal, device=q.device)
        scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
        keys = pooled(k, block_size).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = scale * (pooled(q, block_size) @ keys.transpose(-1, -2))
        estimate = scores.masked_fill(~visible, -math.inf).log_softmax(-1)
        # A row that sees nothing is NaN throughout.
        return best_blocks(estimate.nan_to_num(neginf=-math.inf), sparsity=sparsity, visible=visible, diagonal=causal)


def block_shares(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    block_size: int = 128,
    scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """What the estimate of `threshold_blocks` estimates: of each block the mean over its queries of the probability
    that they give to its keys in dense attention, fp32 [B, Hq, nq, nk]. Computes all scores, a row of blocks at a time:
    for tests, reports, and as a target to train a `BlockGate` towards. No gradient."""
    (batch, heads, queries, dim), keys = q.shape, k.shape[2]
    rows, columns = -(-queries // block_size), -(-keys // block_size)
    shares = torch.zeros(batch, heads, rows, columns, device=q.device)
    scale = 1 / math.sqrt(dim) if scale is None else scale
    with torch.no_grad():
        wide = k.float().repeat_interleave(heads // k.shape[1], dim=1).transpose(-1, -2)
        key = torch.arange(keys, device=q.device)
        for row in range(rows):
            query = torch.arange(row * block_size, min((row + 1) * block_size, queries), device=q.device)
            scores = scale * (q[:, :, row * block_size : (row + 1) * block_size].float() @ wide)
            if causal:
                scores = scores.masked_fill(key > query[:, None] + (keys - queries), -math.inf)
            p = torch.nn.functional.pad(scores.softmax(-1).nan_to_num(0.0), (0, columns * block_size - keys))
            shares[:, :, row] = p.unflatten(-1, (columns, block_size)).sum(-1).mean(-2)
    return shares

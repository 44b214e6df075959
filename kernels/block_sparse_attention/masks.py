"""Block masks for `block_sparse_attention`: fixed patterns, and masks computed from the queries and keys.

All functions return bool tensors, True where a block is kept. Shapes depend on sizes only, without host
synchronisation. The diagonal of query block i is key block i + nk − nq: the last blocks are aligned.
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
    """Returns a mask [rows, columns] of the blocks from `left` before the diagonal to `right` after it, and of all
    blocks of the first `global_blocks` rows and columns.

    Source: Beltagy, Peters and Cohan 2020, *Longformer*, arXiv:2004.05150. Under a causal mask the first columns are
    the attention sinks of Xiao et al. 2023, arXiv:2309.17453."""
    row = torch.arange(rows, device=device)[:, None]
    column = torch.arange(columns, device=device)[None, :]
    apart = column - row - (columns - rows)
    return (apart >= -left) & (apart <= right) | (row < global_blocks) | (column < global_blocks)


def strided_blocks(
    rows: int, columns: int, local: int, stride: int, *, device: torch.device | str | None = None
) -> torch.Tensor:
    """Returns a mask [rows, columns] of the `local` blocks up to the diagonal and of every `stride`-th column, for
    causal attention.

    Source: the fixed pattern of Child et al. 2019, *Sparse Transformers*, arXiv:1904.10509."""
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
    """Returns a mask [rows, columns] of `window` blocks to either side of the diagonal, the first `global_blocks` rows
    and columns, and `random_blocks` random blocks of each row, which may coincide with the others. The mask depends on
    the seed, but not on the device.

    Source: Zaheer et al. 2020, *Big Bird*, arXiv:2007.14062."""
    scores = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed))
    chosen = torch.zeros(rows, columns, dtype=torch.bool)
    chosen.scatter_(1, scores.topk(min(random_blocks, columns), dim=1).indices, True)
    return sliding_window_blocks(rows, columns, window, window, global_blocks, device=device) | chosen.to(device)


def visible_blocks(
    queries: int, keys: int, block_size: int, causal: bool, *, device: torch.device | str | None = None
) -> torch.Tensor:
    """Returns a mask [nq, nk] of the blocks in which some query sees some key: all, or with `causal` all except those
    above the diagonal."""
    row = torch.arange(-(-queries // block_size), device=device)[:, None]
    column = torch.arange(-(-keys // block_size), device=device)[None, :]
    if not causal:
        return (row >= 0) & (column >= 0)
    return column * block_size <= ((row + 1) * block_size).clamp(max=queries) - 1 + (keys - queries)


def pooled(x: torch.Tensor, block_size: int) -> torch.Tensor:
    """Returns the mean of each block of x [B, H, S, D], fp32 [B, H, ceil(S / block_size), D]; the last block may be
    partial."""
    length = x.shape[2]
    blocks = -(-length // block_size)
    padded = torch.nn.functional.pad(x, (0, 0, 0, blocks * block_size - length))
    sums = padded.unflatten(2, (blocks, block_size)).sum(3, dtype=torch.float32)
    sizes = torch.full((blocks, 1), float(block_size), device=x.device)
    sizes[blocks - 1 :] = length - (blocks - 1) * block_size
    return sums / sizes


def best_blocks(scores: torch.Tensor, *, sparsity: float, visible: torch.Tensor, diagonal: bool) -> torch.Tensor:
    """Returns a mask like `scores` [B, H, nq, nk]. It keeps in each head the blocks with the highest scores among the
    `visible` [nq, nk], so that the fraction `sparsity` of these is dropped. Exactly round((1 − sparsity) · visible)
    blocks are kept, unless more are forced.

    The best block of each row is always kept, and with `diagonal` also the last block that the row sees. The number of
    blocks is fixed per head, not per row: rows whose attention is spread out get more blocks. So each row has a dynamic
    threshold. The number does not depend on the scores, so no host synchronisation is needed.
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
    # Selection by rank, not by a threshold: the number is then exact for equal scores too.
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
    """Returns a mask, bool [B, Hq, nq, nk], of the blocks that are estimated to receive most of the attention.

        estimate = softmax over a row of (scale · mean of the block's queries · mean of its keys)

    The estimate is the fraction of the attention of a row of blocks that goes to each block, so blocks of different
    rows can be compared. In each head the highest are kept, as many as in `best_blocks`. No gradient. The estimate is
    good where neighbouring keys are similar, but it misses a single outlier key.

    q, k       as in `block_sparse_attention`, as are scale, causal and block_size
    sparsity   the fraction of the visible blocks that is dropped, from 0 to 1

    Source: means are used by MInference (Jiang et al. 2024, arXiv:2407.02490), and bounds by Quest (Tang et al. 2024,
    arXiv:2406.10774). XAttention (Xu et al. 2025, arXiv:2503.16428) sums antidiagonals instead.
    """
    with torch.no_grad():
        visible = visible_blocks(q.shape[2], k.shape[2], block_size, causal, device=q.device)
        scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
        keys = pooled(k, block_size).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = scale * (pooled(q, block_size) @ keys.transpose(-1, -2))
        estimate = scores.masked_fill(~visible, -math.inf).log_softmax(-1)
        # All blocks of a row that sees no key are NaN.
        return best_blocks(estimate.nan_to_num(neginf=-math.inf), sparsity=sparsity, visible=visible, diagonal=causal)


def block_shares(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    block_size: int = 128,
    scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Returns the exact values that `threshold_blocks` estimates, fp32 [B, Hq, nq, nk]: for each block, the probability
    of its keys in dense attention, averaged over its queries. It computes all scores, one row of blocks at a time. For
    tests, reports, and as the target of `BlockGate.distillation`. No gradient."""
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

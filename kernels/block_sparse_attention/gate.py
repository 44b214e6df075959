"""A learned mask: a small gate module that scores blocks from the means of their queries and keys."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .masks import best_blocks, pooled, visible_blocks


class GatedBlocks(NamedTuple):
    """The output of a `BlockGate`, [B, Hq, nq, nk]: mask, bool; bias and score, fp32, differentiable."""

    mask: torch.Tensor
    bias: torch.Tensor
    score: torch.Tensor


class BlockGate(torch.nn.Module):
    """Learns which blocks to keep: `block_sparse_attention(q, k, v, gate.mask, block_bias=gate.bias)`.

        score = (W_q · mean of the block's queries) · (W_k · mean of its keys) / sqrt(gate_dim) + offset
        bias  = log sigmoid(score)              mask = the highest-scored blocks, a fraction 1 − sparsity of the visible

    Each query head has its own W_q and each KV head its own W_k, as in SeerAttention (Gao et al. 2024,
    arXiv:2410.13276). The bias multiplies the unnormalised probabilities of a kept block by its gate, sigmoid(score),
    as the gates of Native Sparse Attention (Yuan et al. 2025, arXiv:2502.11089) multiply its branches.

    Gradient estimator: the choice of blocks is treated as constant, and the gradient through the bias of the kept
    blocks is exact. So the loss trains the gate to rank the blocks that it keeps, and gives no signal for those that it
    drops. `explore` and `distillation` give one for these. `explore` adds Gumbel noise of that scale to the scores
    before the choice, in training mode only. `distillation` is SeerAttention's objective.

    heads, kv_heads   Hq and Hkv; each query head has its own scores
    offset            initial value; 4 gives gates of 0.98, so that a new gate hardly changes the attention

    Raises ValueError if heads is no multiple of kv_heads, or sparsity is not from 0 to 1.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        dim: int,
        gate_dim: int = 64,
        *,
        sparsity: float,
        block_size: int = 128,
        causal: bool = False,
        explore: float = 0.0,
        offset: float = 4.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"BlockGate: heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
        if not 0 <= sparsity <= 1:
            raise ValueError(f"BlockGate: sparsity must be from 0 to 1, got {sparsity}")
        self.sparsity, self.block_size, self.causal, self.explore = sparsity, block_size, causal, explore
        self.query_map = torch.nn.Parameter(torch.randn(heads, dim, gate_dim, device=device) / math.sqrt(dim))
        self.key_map = torch.nn.Parameter(torch.randn(kv_heads, dim, gate_dim, device=device) / math.sqrt(dim))
        self.offset = torch.nn.Parameter(torch.full((heads, 1, 1), offset, device=device))

    def score(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Returns scores, fp32 [B, Hq, nq, nk], for q [B, Hq, Sq, D] and k [B, Hkv, Sk, D]. Differentiable in the
        parameters of the gate only: the means are detached, so that the gate does not train queries and keys."""
        queries = pooled(q.detach(), self.block_size) @ self.query_map
        keys = pooled(k.detach(), self.block_size) @ self.key_map
        keys = keys.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        return queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1]) + self.offset

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> GatedBlocks:
        score = self.score(q, k)
        visible = visible_blocks(q.shape[2], k.shape[2], self.block_size, self.causal, device=q.device)
        ranked = score.detach()
        if self.training and self.explore:
            uniform = torch.rand_like(ranked).clamp(1e-6, 1 - 1e-6)
            ranked = ranked - self.explore * (-uniform.log()).log()
        mask = best_blocks(ranked, sparsity=self.sparsity, visible=visible, diagonal=self.causal)
        return GatedBlocks(mask, F.logsigmoid(score), score)

    def distillation(self, score: torch.Tensor, shares: torch.Tensor, queries: int, keys: int) -> torch.Tensor:
        """Returns a loss, the mean over rows of KL(shares ‖ softmax of the scores), with `shares` from
        `masks.block_shares` and sequences of these lengths. Dropped blocks receive gradients too."""
        visible = visible_blocks(queries, keys, self.block_size, self.causal, device=score.device)
        # A finite value in place of −inf, whose product with a share of 0 would be NaN.
        estimate = score.masked_fill(~visible, -1e4).log_softmax(-1)
        rows = max(1, int(math.prod(shares.shape[:-1])))
        return F.kl_div(estimate, shares, reduction="sum") / rows

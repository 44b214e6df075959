"""Linear layer and cross entropy in plain PyTorch: the oracle. The logits are in memory, in hidden's dtype, and the
loss is computed from them in fp32 or, given fp64, in fp64."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def linear_cross_entropy_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    scratch_bytes: int | None = None,
) -> torch.Tensor:
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    valid = target != ignore_index
    if logits.dtype == torch.float64:
        # As the oracle: an ignored row has the gradient 0 whatever its logits are. Without this it is NaN if they are.
        logits = torch.where(valid.unsqueeze(-1), logits, 0)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits, dim=-1)
    loss = -(1 - label_smoothing) * log_p.gather(-1, torch.where(valid, target, 0).unsqueeze(-1)).squeeze(-1)
    if label_smoothing:
        loss = loss - label_smoothing * log_p.mean(dim=-1)
    if z_loss:
        loss = loss + z_loss * torch.logsumexp(logits, dim=-1).square()
    loss = torch.where(valid, loss, 0)
    if reduction == "none":
        return loss
    return loss.sum() / valid.sum() if reduction == "mean" else loss.sum()

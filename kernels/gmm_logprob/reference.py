"""Gaussian mixture log-density in plain PyTorch: the oracle. Computes in fp32 or, given fp64, in fp64."""

from __future__ import annotations

import math

import torch


def gmm_logprob_reference(
    logits: torch.Tensor, mu: torch.Tensor, log_sigma: torch.Tensor, y: torch.Tensor, reduction: str = "mean"
) -> torch.Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_weight = torch.log_softmax(logits.to(wide), dim=-1)
    # Multiplied by exp(−log_sigma), not divided by exp(log_sigma): autograd of a quotient divides by sigma twice, which
    # overflows at log_sigma = −30.
    z = (y.to(wide).unsqueeze(-1) - mu.to(wide)) * (-log_sigma.to(wide)).exp()
    log_normal = -0.5 * z.square() - log_sigma.to(wide) - 0.5 * math.log(2 * math.pi)
    log_p = torch.logsumexp(log_weight + log_normal, dim=-1)
    if reduction == "mean":
        log_p = log_p.mean()
    elif reduction == "sum":
        log_p = log_p.sum()
    return log_p.to(logits.dtype)

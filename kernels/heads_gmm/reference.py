"""The heads and their mixture in plain PyTorch, the reference of the tests. The mixture is computed in fp32 or, given
fp64, in fp64."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def heads_gmm_reference(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "silu",
    reduction: str = "mean",
    save: str = "auto",
) -> torch.Tensor:
    """Arguments and result as `heads_gmm`. `save` has no effect on the result and is ignored."""
    heads, hidden = w1.shape[:2]
    pre = F.linear(x.reshape(x.shape[:-1].numel(), x.shape[-1]), w1.flatten(0, 1)).unflatten(1, (heads, hidden))
    parameters = torch.bmm(_activation(pre, activation).transpose(0, 1), w2.mT).transpose(0, 1)
    if bias is not None:
        parameters = parameters + bias
    wide = torch.promote_types(x.dtype, torch.float32)
    logits, mu, log_sigma = parameters.to(wide).unbind(-1)
    log_weight = torch.log_softmax(logits, dim=-1)
    # Multiplies by exp(−log_sigma): for a division by exp(log_sigma) autograd squares sigma, and overflows at −30.
    z = (y.to(wide).reshape(-1, 1) - mu) * (-log_sigma).exp()
    log_normal = -0.5 * z.square() - log_sigma - 0.5 * math.log(2 * math.pi)
    loss = -torch.logsumexp(log_weight + log_normal, dim=-1)
    if reduction == "none":
        return loss.reshape(y.shape)
    return loss.mean() if reduction == "mean" else loss.sum()


def _activation(x: torch.Tensor, name: str) -> torch.Tensor:
    if name.startswith("gelu"):
        return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
    return {"silu": F.silu, "relu": F.relu}[name](x)

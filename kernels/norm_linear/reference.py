"""RMSNorm and a linear layer in plain PyTorch: the oracle. The norm computes in fp32 or, given fp64, in fp64."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def norm_linear_reference(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    activation: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    h = x if residual is None else x + residual
    wide = h.to(torch.promote_types(h.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * norm_weight.to(wide.dtype)
    y = F.linear(normed.to(h.dtype), weight)
    if activation is not None:
        y = _activation(y, activation)
    return y if residual is None else (y, h)


def _activation(x: torch.Tensor, name: str) -> torch.Tensor:
    if name.startswith("gelu"):
        return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
    if name == "relu_sq":
        return F.relu(x).square()
    return {"silu": F.silu, "relu": F.relu}[name](x)

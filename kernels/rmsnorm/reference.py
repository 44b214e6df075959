"""RMSNorm in plain PyTorch: the oracle. Computes in fp32 or, given fp64, in fp64."""

from __future__ import annotations

import torch


def rmsnorm_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    h = x if residual is None else x + residual
    wide = h.to(torch.promote_types(h.dtype, torch.float32))
    y = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (weight.to(wide.dtype) + weight_offset)
    y = y.to(x.dtype)
    return y if residual is None else (y, h)

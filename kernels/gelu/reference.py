"""GELU in plain PyTorch: the oracle. Computes in fp32 or, given fp64, in fp64."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def gelu_reference(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return _Precise.apply(x, approximate) if x.dtype == torch.float64 else F.gelu(x, approximate=approximate)


class _Precise(torch.autograd.Function):
    """GELU in fp64 without the cancellation in 1 + erf and 1 + tanh. Those sums are 0 below x = -9, where GELU is not
    yet 0 in fp32."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, approximate: str) -> torch.Tensor:
        if approximate == "tanh":
            twice_u = math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)
            slope_of_u = math.sqrt(8 / math.pi) * (1 + 0.134145 * x**2)
            cdf = torch.sigmoid(twice_u)
            density = cdf * torch.sigmoid(-twice_u) * slope_of_u
        else:
            cdf = 0.5 * torch.erfc(x * -math.sqrt(0.5))
            density = torch.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)
        ctx.save_for_backward(cdf + x * density)
        return x * cdf

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        (slope,) = ctx.saved_tensors
        return dy * slope, None

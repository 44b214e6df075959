"""Gated linear units in plain PyTorch: the oracle. Computes in fp32 or, given fp64, in fp64."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor | None = None, *, activation: str = "silu") -> torch.Tensor:
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (_activation(gate.to(wide), activation) * up.to(wide)).to(gate.dtype)


def _activation(x: torch.Tensor, name: str) -> torch.Tensor:
    if name in ("gelu", "gelu_tanh"):
        approximate = "tanh" if name == "gelu_tanh" else "none"
        return _PreciseGelu.apply(x, approximate) if x.dtype == torch.float64 else F.gelu(x, approximate=approximate)
    return {"silu": F.silu, "relu": F.relu, "sigmoid": torch.sigmoid, "identity": torch.clone}[name](x)


class _PreciseGelu(torch.autograd.Function):
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

"""The heads in plain PyTorch: the reference of the tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def heads_mlp_reference(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    (heads, dim_out, hidden), dim = w2.shape, x.shape[-1]
    if w1.shape != (heads, hidden, dim):
        raise ValueError(f"w1 must be {(heads, hidden, dim)}, got {tuple(w1.shape)}")
    pre = F.linear(x.reshape(x.shape[:-1].numel(), dim), w1.flatten(0, 1)).unflatten(1, (heads, hidden))
    y = torch.bmm(_activation(pre, activation).transpose(0, 1), w2.mT)
    return y.transpose(0, 1).reshape(*x.shape[:-1], heads, dim_out)


def _activation(x: torch.Tensor, name: str) -> torch.Tensor:
    if name.startswith("gelu"):
        return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
    return {"silu": F.silu, "relu": F.relu}[name](x)

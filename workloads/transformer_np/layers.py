"""The GEMMs of TransformerNP: linear layers that compute in the dtype of their input, the MLP and the heads.

Only `feed_forward` and `mixture_heads` choose among the kernels for these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from kernels.fused_mlp import fused_mlp
from kernels.heads_gmm import heads_gmm
from kernels.heads_mlp import heads_mlp


class Linear(nn.Linear):
    """nn.Linear whose weights are rounded to the dtype of the input: fp32 weights, GEMMs in bf16."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.weight.to(input.dtype), bias)


def feed_forward(name: str) -> Callable[..., torch.Tensor]:
    """The implementation of (x [..., D], w1 [H, D], w2 [D, H]) -> w2 · silu(w1 · x) by name: "torch", "fused"
    (ridgeline's fused_mlp) or "auto", which is "fused"."""
    return _choice("mlp", name, fused_mlp, _torch_feed_forward)


def mixture_heads(name: str) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """The implementation of (x [..., D], w1 [K, H, D], w2 [K, 3, H]) -> [..., K, 3], one MLP per component, by name:
    "torch", "fused" (ridgeline's heads_mlp) or "auto", which is "fused"."""
    return _choice("heads_impl", name, heads_mlp, _torch_heads)


def _choice(option: str, name: str, fused: Callable[..., Any], plain: Callable[..., Any]) -> Any:
    if name not in ("torch", "fused", "auto"):
        raise ValueError(f"TransformerNP: {option} must be torch, fused or auto, got {name!r}")
    return plain if name == "torch" else fused


def _torch_feed_forward(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    return F.linear(F.silu(F.linear(x, w1)), w2)


def _torch_heads(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    hidden = F.silu(F.linear(x, w1.flatten(0, 1))).unflatten(-1, w1.shape[:2])
    return torch.einsum("...kh,kch->...kc", hidden, w2)


def rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class FeedForward(nn.Module):
    """down · silu(up · x). The hidden size is padded with zeros to a multiple of `padding`, so that rows are aligned.
    The padding has no gradient and stays zero: silu(0) = 0 on one side, a column of zeros on the other."""

    def __init__(self, dim: int, hidden: int, padding: int, implementation: str) -> None:
        super().__init__()
        self.hidden, padded = hidden, rounded_up(hidden, padding)
        self.up, self.down = nn.Parameter(torch.empty(padded, dim)), nn.Parameter(torch.empty(dim, padded))
        self.compute, self.fused = feed_forward(implementation), implementation != "torch"

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        """down · silu(up · x). `options` are passed to the implementation."""
        return self.compute(x, self.up.to(x.dtype), self.down.to(x.dtype), **options)


class MixtureHeads(nn.Module):
    """K MLPs over one input, each with three results: logit, mean and log standard deviation of a component. The hidden
    size is padded as in FeedForward."""

    def __init__(self, dim: int, hidden: int, components: int, padding: int, implementation: str) -> None:
        super().__init__()
        self.hidden, padded = hidden, rounded_up(hidden, padding)
        self.up = nn.Parameter(torch.empty(components, padded, dim))
        self.down = nn.Parameter(torch.empty(components, 3, padded))
        self.bias = nn.Parameter(torch.empty(components, 3))
        self.compute = mixture_heads(implementation)

    def weights(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.up.to(x.dtype), self.down.to(x.dtype)

    def negative_log_density(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean negative log-density over all rows of x, by ridgeline's heads_gmm: the parameters of the mixture are
        saved for the backward, but no separate pass reads them."""
        exact = torch.promote_types(self.bias.dtype, torch.float32)
        return heads_gmm(x, *self.weights(x), y.to(exact), self.bias, save="parameters")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., 3, K] in fp32, contiguous, so that each of the three parameters can be read without a copy."""
        out = self.compute(x, *self.weights(x))
        return (out.float() if out.dtype != torch.float64 else out).add(self.bias).transpose(-1, -2).contiguous()

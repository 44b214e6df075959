"""The feed-forward layer in plain PyTorch: the reference of the tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def fused_mlp_reference(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    *,
    w_gate: torch.Tensor | None = None,
    activation: str = "silu",
    save: str = "activations",
) -> torch.Tensor:
    """Arguments and result as `fused_mlp`. `save` has no effect on the result and is ignored."""
    for name, tensor, shape in (("b1", b1, w1.shape[:1]), ("b2", b2, w2.shape[:1]), ("w_gate", w_gate, w1.shape)):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must be {tuple(shape)}, got {tuple(tensor.shape)}")
    hidden = F.linear(x, w1, b1)
    if w_gate is None:
        hidden = _activation(hidden, activation)
    else:
        hidden = _activation(F.linear(x, w_gate), activation) * hidden
    return F.linear(hidden, w2, b2)


def _activation(x: torch.Tensor, name: str) -> torch.Tensor:
    if name.startswith("gelu"):
        return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
    if name == "relu_sq":
        return F.relu(x).square()
    return {"silu": F.silu, "relu": F.relu}[name](x)

"""The launch of heads_mlp's forward for Hopper in CUDA C++ (forward.cu)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..configs import heads_forward
from ..heads_backward.operands import device_of
from .heads import forward_launch


def launch(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, activation: str) -> Callable[..., None]:
    """Returns a function of (x, w1, w2, y), for tensors like these, that writes y [rows, K, O]; x is [rows, D].
    Requires that `heads.unsupported_reason` is None."""
    rows, (heads, hidden, _), (_, sms) = x.shape[0], w1.shape, device_of(x)
    config = heads_forward.pick_cuda_config(rows, heads, hidden, sms)
    # Output of forward.cu: y.
    start = forward_launch("forward.cu", "heads_mlp_forward", "P", x, w1, w2, activation, config)

    def run(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, y: torch.Tensor) -> None:
        start(x, w1, w2, y.data_ptr())

    return run

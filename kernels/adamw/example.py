"""One call of adamw, small or of a size typical of models.

`selftest` compares it with the reference; `info` records which kernels it launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def example(device: torch.device | str, dtype: torch.dtype, small: bool) -> dict[str, Any]:
    """`inputs` of the public function, those that have a gradient (none), and those that it updates."""
    shapes = [(3, 5), (7,), (2, 2, 3)] if small else [(4096, 4096), (4096,)]

    def made(draw: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        return [draw(shape, device=device, dtype=dtype) for shape in shapes]

    fp32 = torch.float32
    inputs = {
        "params": made(torch.randn, dtype),
        "grads": made(torch.randn, dtype),
        "exp_avgs": made(torch.randn, fp32),
        "exp_avg_sqs": made(torch.rand, fp32),
        "step": 3,
        "lr": 1e-2,
    }
    return {"inputs": inputs, "grads": (), "updates": ("params", "exp_avgs", "exp_avg_sqs")}

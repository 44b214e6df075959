"""One call of gradient_compression, small or of a size typical of models.

`selftest` compares it with the reference; `info` records which kernels it launches.
"""

from __future__ import annotations

from typing import Any

import torch


def example(device: torch.device | str, dtype: torch.dtype, small: bool) -> dict[str, Any]:
    """`inputs` of the public function, those that have a gradient (none), and those that it updates; `exact`: every bit
    is defined."""
    numel = 600 if small else 1 << 22
    return {
        "inputs": {"tensor": torch.randn(numel, device=device, dtype=dtype)},
        "grads": (),
        "exact": True,
        "updates": ("tensor",),
    }

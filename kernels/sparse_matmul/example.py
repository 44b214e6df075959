"""One call of sparse_matmul, small or of a size that models have.

`selftest` holds it against the reference, `info` asks which kernels it launches.
"""

from __future__ import annotations

from typing import Any

import torch

from .op_compress import compress, prune


def example(device: torch.device | str, dtype: torch.dtype, small: bool) -> dict[str, Any]:
    """`inputs` of the public function, those that have a gradient, and options that choose a version."""
    rows, cols, depth = (5, 20, 32) if small else (4096, 11008, 4096)
    weight, _ = prune(torch.randn(cols, depth, device=device, dtype=dtype) * depth**-0.5)
    inputs = {
        "x": torch.randn(rows, depth, device=device, dtype=dtype),
        "compressed": compress(weight),
        "bias": torch.randn(cols, device=device, dtype=dtype),
        "activation": "gelu_tanh",
    }
    return {"inputs": inputs, "grads": ("x", "bias")}

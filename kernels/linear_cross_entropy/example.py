"""One call of linear_cross_entropy, small or of a size typical of models.

`selftest` compares it with the reference; `info` records which kernels it launches.
"""

from __future__ import annotations

from typing import Any

import torch


def example(device: torch.device | str, dtype: torch.dtype, small: bool) -> dict[str, Any]:
    """`inputs` of the public function, those that have a gradient."""
    rows, dim, vocab = (7, 24, 131) if small else (4096, 4096, 32000)
    inputs = {
        "hidden": torch.randn(rows, dim, device=device, dtype=dtype),
        "weight": torch.randn(vocab, dim, device=device, dtype=dtype) * dim**-0.5,
        "target": torch.randint(vocab, (rows,), device=device),
    }
    return {"inputs": inputs, "grads": ("hidden", "weight")}

"""One call of rope, small or of a size that models have.

`selftest` compares it with the reference, `info` lists the kernels that it launches.
"""

from __future__ import annotations

from typing import Any

import torch


def example(device: torch.device | str, dtype: torch.dtype, small: bool) -> dict[str, Any]:
    """The `inputs` of the public function, and the names of those with a gradient (`grads`)."""
    batch, length, heads, kv_heads, dim = (2, 5, 3, 1, 8) if small else (1, 4096, 32, 8, 128)
    angles = torch.rand(length, dim // 2, device=device) * 6.28
    inputs = {
        "q": torch.randn(batch, length, heads, dim, device=device, dtype=dtype),
        "k": torch.randn(batch, length, kv_heads, dim, device=device, dtype=dtype),
        "cos": angles.cos(),
        "sin": angles.sin(),
    }
    return {"inputs": inputs, "grads": ("q", "k")}

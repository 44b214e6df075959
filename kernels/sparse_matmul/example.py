"""One call of sparse_matmul, small or of a size that models have.

`selftest` compares it with the reference, `info` lists the kernels that it launches.
"""

from __future__ import annotations

from typing import Any

import torch


def example(device: torch.device | str, dtype: torch.dtype, small: bool) -> dict[str, Any]:
    """The `inputs` of the public function, the names of those with a gradient (`grads`), the options that select a
    version (`versions`), and the ones that "auto" selects on Hopper (`hopper`)."""
    rows, cols, depth = (5, 20, 32) if small else (4096, 11008, 4096)
    # In each word of metadata the last chunk keeps elements 0 and 1, the others 0 and one of 1 to 3.
    words = -(-depth // 64), -(-cols // 16), 64
    metadata = 0x4000 + 0x0444 * torch.randint(1, 4, words, device=device, dtype=torch.int16)
    values = torch.randn(cols, depth // 2, device=device, dtype=dtype) * (2 / depth) ** 0.5
    inputs = {
        "x": torch.randn(rows, depth, device=device, dtype=dtype),
        "compressed": (values, metadata),
        "bias": torch.randn(cols, device=device, dtype=dtype),
        "activation": "gelu_tanh",
    }
    versions = {"versions": {"backend": ("triton", "cuda")}, "hopper": {"backend": "cuda"}}
    return {"inputs": inputs, "grads": ("x", "bias"), **versions}

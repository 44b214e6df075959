"""One call of mxfp_matmul, small or of a size that models have.

`selftest` compares it with the reference, `info` lists the kernels that it launches.
"""

from __future__ import annotations

from typing import Any

import torch


def example(device: torch.device | str, dtype: torch.dtype, small: bool) -> dict[str, Any]:
    """The `inputs` of the public function, the names of those with a gradient (none), the options that select a version
    (`versions`), and the ones that "auto" selects on Hopper (`hopper`)."""
    rows, columns, chunks = (3, 32, 2) if small else (16, 8192, 64)
    inputs = {
        "x": torch.randn(rows, 128 * chunks, device=device, dtype=dtype),
        "w": torch.randint(256, (chunks, (columns + 15) // 16, 1024), device=device, dtype=torch.uint8),
        "scales": torch.randint(119, 124, (chunks, columns, 4), device=device, dtype=torch.uint8),
        "format": "mxfp4",
    }
    versions = {"versions": {"backend": ("triton", "cuda")}, "hopper": {"backend": "cuda"}}
    return {"inputs": inputs, "grads": (), **versions}

"""One call of mxfp_matmul, small or of a size that models have.

`selftest` holds it against the reference, `info` asks which kernels it launches.
"""

from __future__ import annotations

from typing import Any

import torch


def example(device: torch.device | str, dtype: torch.dtype, small: bool) -> dict[str, Any]:
    """`inputs` of the public function, those that have a gradient (none), and options that choose a version, and
    what "auto" is of them on Hopper."""
    rows, columns, chunks = (3, 32, 2) if small else (16, 8192, 64)
    inputs = {
        "x": torch.randn(rows, 128 * chunks, device=device, dtype=dtype),
        "w": torch.randint(256, (chunks, (columns + 15) // 16, 1024), device=device, dtype=torch.uint8),
        "scales": torch.randint(119, 124, (chunks, columns, 4), device=device, dtype=torch.uint8),
        "format": "mxfp4",
    }
    versions = {"versions": {"backend": ("triton", "cuda")}, "hopper": {"backend": "cuda"}}
    return {"inputs": inputs, "grads": (), **versions}

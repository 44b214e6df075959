"""One call of grouped_gemm, small or of a size that models have.

`selftest` compares it with the reference; `info` lists the kernels that it launches.
"""

from __future__ import annotations

from typing import Any

import torch


def example(device: torch.device | str, dtype: torch.dtype, small: bool) -> dict[str, Any]:
    """`inputs` of the public function, those that have a gradient, options that choose a version, and the version that
    "auto" is on Hopper."""
    groups, rows, cols, depth = (3, 40, 24, 20) if small else (8, 8192, 4096, 4096)
    ends = [rows * (group + 1) // (groups + 1) for group in range(groups)]
    inputs = {
        "x": torch.randn(rows, depth, device=device, dtype=dtype),
        "weights": torch.randn(groups, cols, depth, device=device, dtype=dtype) * depth**-0.5,
        "offsets": torch.tensor(ends, device=device, dtype=torch.int32),
    }
    versions = {"versions": {"backend": ("triton", "cuda")}, "hopper": {"backend": "cuda"}}
    return {"inputs": inputs, "grads": ("x", "weights"), **versions}

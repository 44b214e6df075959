"""One call of rmsnorm, small or of a size typical of models.

`selftest` compares it with the reference; `info` records which kernels it launches.
"""

from __future__ import annotations

from typing import Any

import torch


def example(device: torch.device | str, dtype: torch.dtype, small: bool) -> dict[str, Any]:
    """`inputs` of the public function, those that have a gradient, and options that choose a version, and
    what "auto" is of them on Hopper."""
    rows, dim = (5, 37) if small else (4096, 4096)
    x, residual = (torch.randn(rows, dim, device=device, dtype=dtype) for _ in range(2))
    inputs = {"x": x, "weight": torch.randn(dim, device=device, dtype=dtype), "residual": residual}
    versions = {"versions": {"backend": ("triton", "cuda")}, "hopper": {"backend": "triton"}}
    return {"inputs": inputs, "grads": ("x", "weight", "residual"), **versions}

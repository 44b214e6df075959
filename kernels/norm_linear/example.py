"""One call of norm_linear, small or of a size that models have.

`selftest` holds it against the reference, `info` asks which kernels it launches.
"""

from __future__ import annotations

from typing import Any

import torch


def example(device: torch.device | str, dtype: torch.dtype, small: bool) -> dict[str, Any]:
    """`inputs` of the public function, and those that have a gradient."""
    rows, dim, cols = (19, 24, 37) if small else (564, 512, 1536)
    shapes = {"x": (rows, dim), "norm_weight": (dim,), "weight": (cols, dim), "residual": (rows, dim)}
    inputs = {name: torch.randn(shape, device=device, dtype=dtype) for name, shape in shapes.items()}
    inputs["weight"] *= dim**-0.5
    return {"inputs": inputs, "grads": tuple(shapes)}

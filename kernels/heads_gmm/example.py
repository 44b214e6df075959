"""One call of heads_gmm, small or of a size that models have.

`selftest` compares it with the reference; `info` lists the kernels that it launches.
"""

from __future__ import annotations

from typing import Any

import torch


def example(device: torch.device | str, dtype: torch.dtype, small: bool) -> dict[str, Any]:
    """`inputs` of the public function, and those that have a gradient."""
    rows, dim, heads, hidden = (19, 16, 3, 37) if small else (8192, 512, 10, 1365)
    shapes = {"x": (rows, dim), "w1": (heads, hidden, dim), "w2": (heads, 3, hidden), "y": (rows,), "bias": (heads, 3)}
    inputs = {name: torch.randn(shape, device=device, dtype=dtype) for name, shape in shapes.items()}
    inputs["w1"] *= dim**-0.5
    inputs["w2"] *= hidden**-0.5
    return {"inputs": inputs, "grads": tuple(shapes)}

"""One call of fused_mlp, small or of a size that models have.

`selftest` compares it with the reference; `info` lists the kernels that it launches.
"""

from __future__ import annotations

from typing import Any

import torch


def example(device: torch.device | str, dtype: torch.dtype, small: bool) -> dict[str, Any]:
    """`inputs` of the public function, `grads`: those with a gradient, `versions`: options that choose a version."""
    rows, dim, hidden = (19, 16, 37) if small else (8192, 4096, 11008)
    shapes = {"x": (rows, dim), "w1": (hidden, dim), "w2": (dim, hidden), "w_gate": (hidden, dim)}
    inputs = {name: torch.randn(shape, device=device, dtype=dtype) for name, shape in shapes.items()}
    for name in ("w1", "w2", "w_gate"):
        inputs[name] *= shapes[name][1] ** -0.5
    return {"inputs": inputs, "grads": tuple(shapes), "versions": {"backend": ("fused", "two_gemms", "cuda", "narrow")}}

"""One call of gelu, small or of a size that models have.

`selftest` holds it against the reference, `info` asks which kernels it launches.
"""

from __future__ import annotations

from typing import Any

import torch


def example(device: torch.device | str, dtype: torch.dtype, small: bool) -> dict[str, Any]:
    """`inputs` of the public function, those that have a gradient."""
    shape = (5, 37) if small else (4096, 4096)
    return {"inputs": {"x": torch.randn(shape, device=device, dtype=dtype)}, "grads": ("x",)}

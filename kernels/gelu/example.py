"""One call of gelu, small or of a size that models have.

`selftest` compares it with the reference, `info` lists the kernels that it launches.
"""

from __future__ import annotations

from typing import Any

import torch


def example(device: torch.device | str, dtype: torch.dtype, small: bool) -> dict[str, Any]:
    """The `inputs` of the public function, and the names of those with a gradient (`grads`)."""
    shape = (5, 37) if small else (4096, 4096)
    return {"inputs": {"x": torch.randn(shape, device=device, dtype=dtype)}, "grads": ("x",)}

"""One call of fp8, small or of a size that models have.

`selftest` compares it with the reference, `info` lists the kernels that it launches.
"""

from __future__ import annotations

from typing import Any

import torch


def example(device: torch.device | str, dtype: torch.dtype, small: bool) -> dict[str, Any]:
    """The `inputs` of the public function, the names of those with a gradient (none), and `exact`: every bit is
    defined."""
    shape = (5, 144) if small else (4096, 4096)
    x = torch.randn(shape, device=device, dtype=dtype)
    return {"inputs": {"x": x, "granularity": "1x128"}, "grads": (), "exact": True}

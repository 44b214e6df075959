"""One call of swiglu, small or of a size that models have.

`selftest` compares it with the reference, `info` lists the kernels that it launches.
"""

from __future__ import annotations

from typing import Any

import torch


def example(device: torch.device | str, dtype: torch.dtype, small: bool) -> dict[str, Any]:
    """The `inputs` of the public function, the names of those with a gradient (`grads`), the options that select a
    version (`versions`), and the ones that "auto" selects on Hopper (`hopper`)."""
    shape = (5, 37) if small else (4096, 11008)
    inputs = {name: torch.randn(shape, device=device, dtype=dtype) for name in ("gate", "up")}
    versions = {"versions": {"backend": ("triton", "cuda")}, "hopper": {"backend": "triton"}}
    return {"inputs": inputs, "grads": ("gate", "up"), **versions}

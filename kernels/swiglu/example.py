"""One call of swiglu, small or of a size that models have.

`selftest` holds it against the reference, `info` asks which kernels it launches.
"""

from __future__ import annotations

from typing import Any

import torch


def example(device: torch.device | str, dtype: torch.dtype, small: bool) -> dict[str, Any]:
    """`inputs` of the public function, those that have a gradient, and options that choose a version, and
    what "auto" is of them on Hopper."""
    shape = (5, 37) if small else (4096, 11008)
    inputs = {name: torch.randn(shape, device=device, dtype=dtype) for name in ("gate", "up")}
    versions = {"versions": {"backend": ("triton", "cuda")}, "hopper": {"backend": "triton"}}
    return {"inputs": inputs, "grads": ("gate", "up"), **versions}

"""One call of attention, small or of a size that models have.

`selftest` compares it with the reference, and `info` lists the kernels that it launches.
"""

from __future__ import annotations

from typing import Any

import torch


def example(device: torch.device | str, dtype: torch.dtype, small: bool) -> dict[str, Any]:
    """Returns `inputs` of the public function, the names of those with gradients, options that choose a version, and
    the version that "auto" picks on Hopper."""
    batch, heads, kv_heads, length, dim = (1, 2, 1, 37, 16) if small else (1, 32, 8, 4096, 128)
    inputs: dict[str, Any] = {"q": torch.randn(batch, heads, length, dim, device=device, dtype=dtype)}
    for name in ("k", "v"):
        inputs[name] = torch.randn(batch, kv_heads, length, dim, device=device, dtype=dtype)
    versions = {"forward": ("portable", "split", "gluon", "cuda"), "backward": ("separate", "fused", "cuda")}
    hopper = {"forward": "cuda", "backward": "cuda"}
    return {"inputs": {**inputs, "causal": True}, "grads": ("q", "k", "v"), "versions": versions, "hopper": hopper}

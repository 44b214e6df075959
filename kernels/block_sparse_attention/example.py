"""One call of block_sparse_attention, small or of a size that models have.

`selftest` compares it with the reference, and `info` lists the kernels that it launches.
"""

from __future__ import annotations

from typing import Any

import torch


def example(device: torch.device | str, dtype: torch.dtype, small: bool) -> dict[str, Any]:
    """Returns `inputs` of the public function, the names of those with gradients, options that choose a version, and
    the version that "auto" picks on Hopper."""
    heads, length, dim, block = (1, 100, 16, 64) if small else (16, 4096, 128, 128)
    inputs: dict[str, Any] = {
        n: torch.randn(1, heads, length, dim, device=device, dtype=dtype) for n in ("q", "k", "v")
    }
    blocks = -(-length // block)
    mask = torch.rand(blocks, blocks, device=device) < 0.5
    inputs |= {"block_mask": mask.logical_or_(torch.eye(blocks, device=device, dtype=torch.bool)), "block_size": block}
    versions = {"forward": ("portable", "cuda"), "backward": ("portable", "cuda")}
    hopper = {"forward": "cuda", "backward": "cuda"}
    return {"inputs": inputs, "grads": ("q", "k", "v"), "versions": versions, "hopper": hopper}

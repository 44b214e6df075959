"""One call of fp8_matmul, small or of a size that models have.

`selftest` compares it with the reference; `info` lists the kernels that it launches.
"""

from __future__ import annotations

from typing import Any

import torch


def example(device: torch.device | str, dtype: torch.dtype, small: bool) -> dict[str, Any]:
    """`inputs` of the public function, those that have a gradient (none), options that choose a version, and the
    version that "auto" is on Hopper. `dtype` is the result's. fp8 values are small integers, whose sums are exact in
    tensor cores too."""
    rows, depth, cols = (5, 272, 144) if small else (8192, 4096, 4096)
    a, b = (torch.randint(-2, 3, (n, depth), device=device).to(torch.float8_e4m3fn) for n in (rows, cols))
    blocks = (depth + 127) // 128
    inputs = {
        "a": a,
        "b": b,
        "scale_a": torch.rand(rows, blocks, device=device) + 0.5,
        "scale_b": torch.rand((cols + 127) // 128, blocks, device=device) + 0.5,
        "out_dtype": dtype,
    }
    versions = {"versions": {"backend": ("triton", "cuda")}, "hopper": {"backend": "cuda"}}
    return {"inputs": inputs, "grads": (), **versions}

"""One call of grouped_gemm_fp8, small or of a size that models have.

`selftest` compares it with the reference; `info` lists the kernels that it launches.
"""

from __future__ import annotations

from typing import Any

import torch


def example(device: torch.device | str, dtype: torch.dtype, small: bool) -> dict[str, Any]:
    """`inputs` of the public function, those that have a gradient (none), options that choose a version, and the
    version that "auto" is on Hopper. `dtype` is the result's. fp8 values are small integers, whose sums are exact in
    tensor cores too."""
    groups, rows, cols, depth = (3, 40, 144, 272) if small else (8, 8192, 4096, 4096)
    ends = [rows * (group + 1) // (groups + 1) for group in range(groups)]

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, device=device).to(torch.float8_e4m3fn)

    blocks = (depth + 127) // 128
    inputs = {
        "x": codes(rows, depth),
        "weights": codes(groups, cols, depth),
        "scale_x": torch.rand(rows, blocks, device=device) + 0.5,
        "scale_w": torch.rand(groups, (cols + 127) // 128, blocks, device=device) + 0.5,
        "offsets": torch.tensor(ends, device=device, dtype=torch.int32),
        "out_dtype": dtype,
    }
    versions = {"versions": {"backend": ("triton", "cuda")}, "hopper": {"backend": "cuda"}}
    return {"inputs": inputs, "grads": (), **versions}

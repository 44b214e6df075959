"""The grouped GEMM in plain PyTorch, the reference of the tests: a linear layer for each group. The host reads the
offsets."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def grouped_gemm_reference(
    x: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor, *, bias: torch.Tensor | None = None
) -> torch.Tensor:
    (rows, depth), (groups, cols, _) = x.shape, weights.shape
    shapes = [(weights, (groups, cols, depth)), (offsets, (groups,)), (bias, (groups, cols))]
    for tensor, shape in shapes:
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"expected a tensor of shape {shape}, got {tuple(tensor.shape)}")
    if not groups:
        return x.new_zeros(rows, cols)
    ends = offsets.clamp(0, rows).cummax(0).values.tolist()
    pieces = []
    for group, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        pieces.append(F.linear(x[start:end], weights[group], None if bias is None else bias[group]))
    return torch.cat([*pieces, x.new_zeros(rows - ends[-1], cols)])

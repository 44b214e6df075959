"""The product with a compressed weight in plain PyTorch: the oracle."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def sparse_matmul_reference(
    x: torch.Tensor,
    compressed: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    values, metadata = compressed
    weight = decompressed(values, metadata).to(x.dtype)
    for name, tensor, shape in (("x", x, (*x.shape[:-1], weight.shape[1])), ("bias", bias, weight.shape[:1])):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must be {tuple(shape)}, got {tuple(tensor.shape)}")
    return activated(F.linear(x, weight, bias), activation)


def decompressed(values: torch.Tensor, metadata: torch.Tensor) -> torch.Tensor:
    """The weight [N, K], differentiable in values."""
    rows, half = values.shape
    return values.new_zeros(rows, 2 * half).scatter(1, kept(metadata, rows, 2 * half), values)


def kept(metadata: torch.Tensor, rows: int, depth: int) -> torch.Tensor:
    """The column of each value: int64 [rows, depth / 2]."""
    blocks_k, blocks_n, _ = metadata.shape
    # [k block, n block, row of 8, 16 of k, half of the rows] -> [N, 16 of k]
    words = metadata.view(blocks_k, blocks_n, 8, 4, 2).permute(1, 4, 2, 0, 3).reshape(16 * blocks_n, 4 * blocks_k)
    bits = words[:rows].long().unsqueeze(-1) >> torch.arange(0, 16, 2, device=words.device)
    chunk = torch.arange(0, depth, 4, device=words.device).repeat_interleave(2)
    return (bits & 3).flatten(1)[:, : depth // 2] + chunk


def activated(z: torch.Tensor, name: str | None) -> torch.Tensor:
    if name is None:
        return z
    if name.startswith("gelu"):
        return F.gelu(z, approximate="tanh" if name == "gelu_tanh" else "none")
    if name == "relu_sq":
        return F.relu(z).square()
    return {"silu": F.silu, "relu": F.relu}[name](z)

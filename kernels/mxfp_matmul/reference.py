"""mxfp_matmul in plain PyTorch: the oracle. Weights come from tables. Computes in fp32 or, given fp64, in fp64."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp_matmul_reference(
    x: torch.Tensor,
    w: torch.Tensor,
    scales: torch.Tensor,
    format: str = "mxfp4",
    *,
    tensor_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dense = dequantized(w, scales, format).to(wide.dtype)
    y = F.pad(wide, (0, -wide.shape[-1] % 128)) @ dense.t()
    if tensor_scale is not None:
        y = y * tensor_scale
    return y.to(x.dtype)


def dequantized(w: torch.Tensor, scales: torch.Tensor, format: str) -> torch.Tensor:
    """Packed weights as fp64 [N, 128 · chunks], without the tensor scale."""
    chunks, columns, each = scales.shape
    table = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float64, device=w.device)
    scale = torch.tensor(_scale_values(format), dtype=torch.float64, device=w.device)[scales.long()]
    scale = scale.repeat_interleave(128 // each, -1).transpose(0, 1).reshape(columns, chunks * 128)
    return table[codes(w)[:columns]] * scale


def codes(w: torch.Tensor) -> torch.Tensor:
    """The 4-bit codes [16 · tiles, 128 · chunks] of packed weights."""
    chunks, tiles, _ = w.shape
    byte = w.reshape(chunks, tiles, 2, 8, 4, 4, 4).int()  # halves of a chunk, rows, pairs of K, 16 of K
    q = byte[..., 0] | (byte[..., 1] << 8) | (byte[..., 2] << 16) | (byte[..., 3] << 24)
    pairs = torch.stack([q, q << 6, (q << 3) ^ (q << 5), (q >> 6) ^ (q << 4)], -1).unflatten(-1, (2, 2))
    both = torch.stack([pairs, pairs >> 16], -1)  # two of K, after the halves of 16 of K and of 16 rows
    found = (both >> 6 & 7) | (both >> 12 & 8)
    return found.permute(1, 7, 3, 0, 2, 5, 6, 4, 8).reshape(16 * tiles, 128 * chunks)


def _scale_values(format: str) -> list[float]:
    """The value of each byte of a packed scale."""
    if format == "mxfp4":
        return [*(math.ldexp(1.0, code - 127) for code in range(255)), math.nan]
    return [math.nan if code == 255 else math.ldexp(1 + code % 8 / 8, code // 8 - 22) for code in range(256)]

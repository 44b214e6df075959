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
    """[N, 128 · chunks] in fp64 of packed weights, without the scale of the tensor."""
    chunks, columns, _ = w.shape
    table = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float64, device=w.device)
    codes = torch.cat([w % 16, w // 16], -1).long()
    scale = torch.tensor(_scale_values(format), dtype=torch.float64, device=w.device)[scales.long()]
    values = table[codes] * scale.repeat_interleave(128 // scales.shape[-1], -1)
    return values.transpose(0, 1).reshape(columns, chunks * 128)


def _scale_values(format: str) -> list[float]:
    """The number that each byte of a scale stands for."""
    if format == "mxfp4":
        return [*(math.ldexp(1.0, code - 127) for code in range(255)), math.nan]
    positive = []
    for code in range(128):
        exponent, mantissa = divmod(code, 8)
        number = math.ldexp(1 + mantissa / 8, exponent - 7) if exponent else math.ldexp(mantissa / 8, -6)
        positive.append(math.nan if code == 127 else number)
    return [*positive, *(-v for v in positive)]

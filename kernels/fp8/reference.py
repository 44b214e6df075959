"""fp8 in plain PyTorch: the oracle. Computes in fp32 or, given fp64, in fp64. With fp64 it returns the values of data
and scales in fp64."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def fp8_reference(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    granularity: str = "row",
    *,
    scale_format: str = "fp32",
    transpose: bool = False,
    scale: torch.Tensor | None = None,
    mn_major_scales: bool = False,
    return_amax: bool = False,
) -> tuple[torch.Tensor, ...]:
    *lead, dim = x.shape
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(math.prod(lead), dim)
    wide = wide + 0 * wide  # NaN in place of ±inf
    data, found = _quantize(wide, dtype, granularity, scale_format, scale)
    if granularity != "128x128":
        found = found.reshape(
            {"tensor": (), "column": (*(1 for _ in lead), dim)}.get(granularity, (*lead, found.shape[-1]))
        )
    result = [data.reshape(x.shape), found if scale is None else scale]
    if transpose:
        given = scale.t() if scale is not None and granularity == "128x128" else scale
        data, found = _quantize(wide.t(), dtype, granularity, scale_format, given)
        found = found.reshape(()) if granularity == "tensor" else found
        result += [data.contiguous(), found if given is None else given]
    return (*result, _magnitude(wide).max() if wide.numel() else wide.sum()) if return_amax else tuple(result)


def _quantize(
    x: torch.Tensor, dtype: torch.dtype, granularity: str, scale_format: str, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns data [R, D] and a two-dimensional tensor of scales, one per block, of x [R, D] in fp32 or fp64."""
    rows, dim = x.shape
    sizes = {"tensor": (rows, dim), "row": (1, dim), "column": (rows, 1), "1x128": (1, 128), "128x128": (128, 128)}
    height, width = (max(size, 1) for size in sizes[granularity])
    down = 1 if granularity in ("tensor", "column") else -(-rows // height)
    across = 1 if granularity in ("tensor", "row") else -(-dim // width)
    below, right = down * height - rows, across * width - dim
    blocks = (F.pad(x, (0, right, 0, below)) if below or right else x).reshape(down, height, across, width)
    if scale is None:
        found = _scale(_magnitude(blocks).amax((1, 3), keepdim=True), dtype, scale_format)
    else:
        found = scale.to(x.dtype).reshape(down, 1, across, 1)
    data = (blocks * (1 / found.to(x.dtype))).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
    data = data.reshape(down * height, across * width)[:rows, :dim]
    if x.dtype == torch.float64:
        data, found = data.to(x.dtype), found.to(x.dtype)
    return data, found.reshape(down, across)


def _magnitude(x: torch.Tensor) -> torch.Tensor:
    """|x|, but 0 where x is NaN."""
    return torch.where(x.isnan(), 0, x.abs())


def _scale(amax: torch.Tensor, dtype: torch.dtype, scale_format: str) -> torch.Tensor:
    if scale_format == "fp32":
        return torch.where(amax > 0, (amax * (1 / LARGEST[dtype])).clamp(min=2.0**-126), 1.0)
    # amax = mantissa · 2^exponent with 0.5 <= mantissa < 1; largest = 0.875 · 2^9 or 0.875 · 2^16.
    mantissa, exponent = torch.frexp(amax)
    exponent = exponent - (9 if dtype == torch.float8_e4m3fn else 16) + (mantissa > 0.875)
    biased = torch.where(amax > 0, (exponent + 127).clamp(min=1), 127).to(torch.int32)
    if scale_format == "e8m0" and amax.dtype == torch.float32:
        return biased.to(torch.uint8).view(torch.float8_e8m0fnu)
    return (biased << 23).view(torch.float32).to(amax.dtype)

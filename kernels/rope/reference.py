"""Rotary position embedding in plain PyTorch: the oracle. Computes in fp32 or, given fp64, in fp64."""

from __future__ import annotations

import torch


def rope_reference(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    position_ids: torch.Tensor | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    layout: str = "bshd",
    inplace: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Returns a new tensor for each of q and k; `inplace` is ignored."""
    dim, width = q.shape[-1], cos.shape[-1]
    rotary = rotary_dim or (dim if width == dim else 2 * width)
    if width == rotary:
        step = slice(0, rotary, 2) if interleaved else slice(0, rotary // 2)
        cos, sin = cos[..., step], sin[..., step]
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    elif cos.dim() == 2:
        seq = q.shape[-3 if layout == "bshd" else -2]
        cos, sin = cos[:seq], sin[:seq]
    heads = -2 if layout == "bshd" else -3  # where the tables get a broadcast head dimension
    wide = torch.promote_types(q.dtype, torch.float32)
    cos, sin = cos.to(wide).unsqueeze(heads), sin.to(wide).unsqueeze(heads)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        pairs = x[..., :rotary].to(wide)
        if interleaved:
            a, b = pairs[..., 0::2], pairs[..., 1::2]
            rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            a, b = pairs.chunk(2, dim=-1)
            rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        rotated = rotated.to(x.dtype)
        return rotated if rotary == dim else torch.cat((rotated, x[..., rotary:]), dim=-1)

    return rotate(q) if k is None else (rotate(q), rotate(k))

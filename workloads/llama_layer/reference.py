"""llama_layer in plain PyTorch, in the dtype that it is given, attention's matrix in memory: in fp64 the oracle.

A weight may be a pair of codes [N, K] in float8_e4m3fn and scales [N, 1]: what it is multiplied by is then rounded to
e4m3 with a scale for each row too, as kernels/fp8 defines it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

Weight = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def llama_layer_reference(
    x: torch.Tensor,
    norm_attention: torch.Tensor | None = None,
    w_qkv: Weight | None = None,
    w_o: Weight | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    norm_ffn: torch.Tensor | None = None,
    w_up: Weight | None = None,
    w_down: Weight | None = None,
    *,
    heads: int,
    kv_heads: int,
    eps: float = 1e-5,
    part: str = "layer",
) -> torch.Tensor:
    if part != "ffn":
        groups = heads + 2 * kv_heads
        qkv = _product(_normed(x, norm_attention, eps), w_qkv).unflatten(-1, (groups, -1))
        q, k, v = (t.transpose(1, 2) for t in qkv.split((heads, kv_heads, kv_heads), dim=2))
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
        x = x + _product((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), w_o)
    if part != "attention":
        up = _product(_normed(x, norm_ffn, eps), w_up)
        if up.shape[-1] == (w_down if isinstance(w_down, torch.Tensor) else w_down[0]).shape[1]:
            inner = F.gelu(up)
        else:
            gate, up = up.chunk(2, -1)
            inner = F.silu(gate) * up
        x = x + _product(inner, w_down)
    return x


def _product(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        return F.linear(x, weight)
    codes, scale = weight
    wide = torch.promote_types(x.dtype, torch.float32)
    rounded, of_rows = _quantised(x.to(wide))
    return (F.linear(rounded, codes.to(wide)) * of_rows * scale.to(wide).t()).to(x.dtype)


def _quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of e4m3 and the scale of each row: x ≈ values · scale. What is not finite is NaN."""
    x = torch.where(x.isfinite(), x, torch.nan)
    amax = torch.where(x.isnan(), 0, x.abs()).amax(-1, keepdim=True)
    scale = torch.where(amax > 0, (amax * (1 / 448)).clamp(min=2.0**-126), 1.0)
    return (x * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype), scale


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, cos.dtype)
    a, b = x.to(wide).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

"""llama_layer in plain PyTorch, in the dtype that it is given, attention's matrix in memory: in fp64 the oracle."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def llama_layer_reference(
    x: torch.Tensor,
    norm_attention: torch.Tensor | None = None,
    w_qkv: torch.Tensor | None = None,
    w_o: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    norm_ffn: torch.Tensor | None = None,
    w_up: torch.Tensor | None = None,
    w_down: torch.Tensor | None = None,
    *,
    heads: int,
    kv_heads: int,
    eps: float = 1e-5,
    part: str = "layer",
) -> torch.Tensor:
    if part != "ffn":
        groups = heads + 2 * kv_heads
        qkv = F.linear(_normed(x, norm_attention, eps), w_qkv).unflatten(-1, (groups, -1))
        q, k, v = (t.transpose(1, 2) for t in qkv.split((heads, kv_heads, kv_heads), dim=2))
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
        x = x + F.linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), w_o)
    if part != "attention":
        up = F.linear(_normed(x, norm_ffn, eps), w_up)
        if w_up.shape[0] == w_down.shape[1]:
            inner = F.gelu(up)
        else:
            gate, up = up.chunk(2, -1)
            inner = F.silu(gate) * up
        x = x + F.linear(inner, w_down)
    return x


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, cos.dtype)
    a, b = x.to(wide).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

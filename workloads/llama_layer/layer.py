"""The layer: one function over its weights, and a module that owns them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from kernels.attention import attention
from kernels.gelu import gelu
from kernels.rmsnorm import rmsnorm
from kernels.rope import rope
from kernels.swiglu import swiglu

PARTS = ("layer", "attention", "ffn")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class LayerConfig:
    """Sizes of a decoder layer. `ffn`: "swiglu" (Llama's: gate, up and down) or "gelu" (up and down)."""

    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    ffn: str = "swiglu"
    eps: float = 1e-5
    rope_base: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


#: Touvron et al. 2023, Llama 2 (arXiv:2307.09288), table 1, and the published configurations
LLAMA2 = {
    "7b": LayerConfig(4096, 32, 32, 11008),
    "13b": LayerConfig(5120, 40, 40, 13824),
    "70b": LayerConfig(8192, 64, 8, 28672),
}


def llama_layer(
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
    """A decoder layer of Llama (Touvron et al. 2023, arXiv:2302.13971, section 2.2).

        a   = x + W_o · attention(rope(q), rope(k), v)        q, k, v = W_qkv · rmsnorm(x), causal
        out = a + W_down · (silu(gate) · up)                  gate, up = W_up · rmsnorm(a)
        out = a + W_down · gelu(W_up · rmsnorm(a))            where W_up has as many rows as W_down columns

    x               [B, S, hidden]
    norm_attention  [hidden], the weight of the norm before attention; norm_ffn that before the feed-forward
    w_qkv           [(heads + 2 · kv_heads) · D, hidden]: the rows of W_q, W_k and W_v one after the other
    w_o             [hidden, heads · D]
    cos, sin        [S, D / 2] of `rope`, halves
    w_up            [2 · intermediate, hidden], the rows of the gate first, or [intermediate, hidden] for GELU
    w_down          [hidden, intermediate]
    part            "layer", "attention" (returns a) or "ffn" (x is a); what a part does not use may be None

    Products are cuBLAS's. The first residual is added in the norm's launch, the second in that of W_down's product.
    Returns [B, S, hidden] in dtype of x. Differentiable in x and all weights.

    Raises TypeError for a wrong dtype, ValueError for an unknown part and for a weight that is missing, of a wrong
    shape or on another device, RuntimeError for CPU tensors outside Triton's interpreter.
    """
    _check(part, x, heads, kv_heads, norm_attention, w_qkv, w_o, cos, sin, norm_ffn, w_up, w_down)
    if part == "ffn":
        return _ffn(rmsnorm(x, norm_ffn, eps), x, w_up, w_down)
    attended = _attention(rmsnorm(x, norm_attention, eps), w_qkv, cos, sin, heads, kv_heads)
    if part == "attention":
        return _added(attended, w_o, x)
    normed, a = rmsnorm(F.linear(attended, w_o), norm_ffn, eps, residual=x)
    return _ffn(normed, a, w_up, w_down)


def _attention(normed, w_qkv, cos, sin, heads: int, kv_heads: int) -> torch.Tensor:
    """[B, S, heads · D], before W_o."""
    head_dim = w_qkv.shape[0] // (heads + 2 * kv_heads)
    # One product for all three. rope and attention read its slices in place.
    qkv = F.linear(normed, w_qkv).unflatten(-1, (heads + 2 * kv_heads, head_dim))
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=2)
    q, k = rope(q, k, cos, sin)
    out = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True)
    assert isinstance(out, torch.Tensor)
    return out.transpose(1, 2).flatten(2)


def _ffn(normed, residual, w_up, w_down) -> torch.Tensor:
    up = F.linear(normed, w_up)
    return _added(gelu(up) if w_up.shape[0] == w_down.shape[1] else swiglu(up), w_down, residual)


def _added(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """residual + x · weightᵀ, added in the product's epilogue."""
    sum_ = torch.addmm(residual.flatten(0, -2), x.flatten(0, -2), weight.t())
    return sum_.view(residual.shape)


def _check(part, x, heads, kv_heads, norm_attention, w_qkv, w_o, cos, sin, norm_ffn, w_up, w_down) -> None:
    if part not in PARTS:
        raise ValueError(f"llama_layer: part must be one of {', '.join(PARTS)}, got {part!r}")
    if x.dim() != 3:
        raise ValueError(f"llama_layer: x must be [B, S, hidden], got {tuple(x.shape)}")
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"llama_layer: heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
    hidden = x.shape[-1]
    needed = {}
    if part != "ffn":
        needed |= dict(norm_attention=norm_attention, w_qkv=w_qkv, w_o=w_o, cos=cos, sin=sin)
    if part != "attention":
        needed |= dict(norm_ffn=norm_ffn, w_up=w_up, w_down=w_down)
    if missing := [name for name, value in needed.items() if value is None]:
        raise ValueError(f"llama_layer: {part!r} needs {', '.join(missing)}")
    if x.dtype not in FLOATS:
        raise TypeError(f"llama_layer: x must be float32, float16 or bfloat16, got {x.dtype}")
    for name, value in needed.items():
        if value.dtype != x.dtype and not (name in ("cos", "sin") and value.dtype in FLOATS):
            raise TypeError(f"llama_layer: {name} must be of x's dtype {x.dtype}, got {value.dtype}")
        if value.device != x.device:
            raise ValueError(f"llama_layer: {name} must be on x's device {x.device}, got {value.device}")
    for name in ("norm_attention", "norm_ffn"):
        if name in needed:
            _shape(name, needed[name], (hidden,))
    if part != "ffn":
        groups = heads + 2 * kv_heads
        if w_qkv.dim() != 2 or w_qkv.shape[1] != hidden or w_qkv.shape[0] % groups:
            raise ValueError(f"llama_layer: w_qkv must be [{groups} · D, {hidden}], got {tuple(w_qkv.shape)}")
        head_dim = w_qkv.shape[0] // groups
        _shape("w_o", w_o, (hidden, head_dim * heads))
        _shape("cos", cos, (x.shape[1], head_dim // 2))
        _shape("sin", sin, (x.shape[1], head_dim // 2))
    if part != "attention":
        if w_down.dim() != 2 or w_down.shape[0] != hidden:
            raise ValueError(f"llama_layer: w_down must be [{hidden}, intermediate], got {tuple(w_down.shape)}")
        rows = w_down.shape[1]
        if w_up.dim() != 2 or w_up.shape[1] != hidden or w_up.shape[0] not in (rows, 2 * rows):
            wanted = f"[{2 * rows} or {rows}, {hidden}]"
            raise ValueError(f"llama_layer: w_up must be {wanted} like w_down, got {tuple(w_up.shape)}")


def _shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"llama_layer: {name} must be {list(shape)}, got {list(tensor.shape)}")


class LlamaLayer(nn.Module):
    """`llama_layer` with weights of its own, initialised as Hugging Face does: normal, of deviation 0.02.

    forward(x [B, S, hidden]) returns [B, S, hidden]; positions are 0 … S − 1. `load_llama` takes the state dict of a
    LlamaDecoderLayer, whose matrices it joins.
    """

    def __init__(
        self,
        config: LayerConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if config.ffn not in ("swiglu", "gelu"):
            raise ValueError(f"LlamaLayer: ffn must be 'swiglu' or 'gelu', got {config.ffn!r}")
        self.config = config
        rows = (config.heads + 2 * config.kv_heads) * config.head_dim
        up = config.intermediate * (2 if config.ffn == "swiglu" else 1)

        def matrix(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(rows, columns, device=device, dtype=dtype).normal_(std=0.02))

        def ones() -> nn.Parameter:
            return nn.Parameter(torch.ones(config.hidden, device=device, dtype=dtype))

        self.norm_attention, self.norm_ffn = ones(), ones()
        self.w_qkv, self.w_o = matrix(rows, config.hidden), matrix(config.hidden, config.heads * config.head_dim)
        self.w_up, self.w_down = matrix(up, config.hidden), matrix(config.hidden, config.intermediate)
        self._angles: dict[tuple[torch.device, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def load_llama(self, state: dict[str, torch.Tensor]) -> None:
        """Takes the weights of a LlamaDecoderLayer. Raises KeyError for a missing one."""
        joined = {
            "norm_attention": [state["input_layernorm.weight"]],
            "w_qkv": [state[f"self_attn.{name}_proj.weight"] for name in "qkv"],
            "w_o": [state["self_attn.o_proj.weight"]],
            "norm_ffn": [state["post_attention_layernorm.weight"]],
            "w_up": [state[f"mlp.{name}_proj.weight"] for name in ("gate", "up")],
            "w_down": [state["mlp.down_proj.weight"]],
        }
        self.load_state_dict({name: torch.cat(parts) for name, parts in joined.items()})

    def angles(self, device: torch.device, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [length, D / 2] in fp32, kept for the lengths that were used."""
        key = device, length
        if key not in self._angles:
            self._angles[key] = rope_tables(length, self.config.head_dim, self.config.rope_base, device)
        return self._angles[key]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self.angles(x.device, x.shape[1])
        config = self.config
        return llama_layer(
            x,
            self.norm_attention,
            self.w_qkv,
            self.w_o,
            cos,
            sin,
            self.norm_ffn,
            self.w_up,
            self.w_down,
            heads=config.heads,
            kv_heads=config.kv_heads,
            eps=config.eps,
        )

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_angles": {}}


def rope_tables(
    length: int, head_dim: int, base: float, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [length, head_dim / 2] of the angles p · base^(−2i / head_dim), in fp32."""
    pairs = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), base**-pairs)
    return angles.cos(), angles.sin()

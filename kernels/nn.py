"""Modules over the kernels: `from ridgeline.nn import RMSNorm`.

Each module is a thin wrapper around one public function. It has the parameters of the module that it replaces, under
the same names: of torch.nn if there is one, otherwise of Hugging Face's Llama. So state dicts can be exchanged with
that module. The docstring of the function says what it computes, for which dtypes, and what it raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .attention import attention
from .cross_entropy import cross_entropy
from .fused_mlp import fused_mlp
from .gelu import gelu
from .linear_cross_entropy import linear_cross_entropy
from .rmsnorm import rmsnorm
from .rope import rope
from .swiglu import swiglu

__all__ = [
    "GELU",
    "Attention",
    "CrossEntropyLoss",
    "FusedMLP",
    "LinearCrossEntropyLoss",
    "RMSNorm",
    "RotaryEmbedding",
    "SwiGLU",
]


class RMSNorm(nn.Module):
    """`rmsnorm` over the last dimension, with the parameter `weight` [D] of torch.nn.RMSNorm and LlamaRMSNorm.

    eps            None: the machine epsilon of fp32, as in torch.nn.RMSNorm, also for 16 bits; Hugging Face's models
                   specify theirs
    weight_offset  added to the weight: 1 is Gemma's convention, whose weights are initialised to 0

    forward(x) returns y. forward(x, residual) adds the residual first, in the same launch, and returns (y, x +
    residual); the latter is the next layer's residual.
    """

    def __init__(
        self,
        normalized_shape: int | tuple[int] | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        *,
        weight_offset: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if len(shape) != 1:
            raise ValueError(f"RMSNorm: normalized_shape must have one dimension, the last of x, got {shape}")
        self.normalized_shape, self.eps, self.weight_offset = shape, eps, weight_offset
        self.elementwise_affine = elementwise_affine
        if elementwise_affine:
            self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight so that it does not change the normalised values."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if x.shape[-1:] != self.normalized_shape:
            raise ValueError(f"RMSNorm: x must be [..., {self.normalized_shape[0]}], got {tuple(x.shape)}")
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        return rmsnorm(x, self.weight, eps, residual, self.weight_offset)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape[0]}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class GELU(nn.Module):
    """`gelu`, with the argument of torch.nn.GELU."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gelu(x, self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class SwiGLU(nn.Module):
    """down_proj(act(gate_proj(x)) · up_proj(x)): the feed-forward layer of Llama, with LlamaMLP's parameters.

    activation  as in `swiglu`: "silu" (Llama, Mistral, Qwen), "gelu_tanh" (Gemma), "gelu", "relu", "sigmoid",
                "identity"
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        activation: str = "silu",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x), activation=self.activation))

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class FusedMLP(nn.Module):
    """`fused_mlp` with the parameters of LlamaMLP (gate_proj, up_proj, down_proj) or, without a gate, of PhiMLP (fc1,
    fc2). The activation is fused into the GEMMs, whereas SwiGLU uses PyTorch's GEMMs.

    activation, save, backend  as in `fused_mlp`
    bias                       whether fc1 and fc2 have a bias; a gated layer has none
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        activation: str = "silu",
        gated: bool = True,
        *,
        save: str = "activations",
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if gated and bias:
            raise ValueError("FusedMLP: bias must be False with a gated layer, got True")
        self.gated = gated
        self.options: dict[str, Any] = dict(activation=activation, save=save, backend=backend)
        if gated:
            self.gate_proj = nn.Linear(hidden_size, intermediate_size, False, device, dtype)
            self.up_proj = nn.Linear(hidden_size, intermediate_size, False, device, dtype)
            self.down_proj = nn.Linear(intermediate_size, hidden_size, False, device, dtype)
        else:
            self.fc1 = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
            self.fc2 = nn.Linear(intermediate_size, hidden_size, bias, device, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gated:
            up, down, gate = self.up_proj.weight, self.down_proj.weight, self.gate_proj.weight
            return fused_mlp(x, up, down, w_gate=gate, **self.options)
        return fused_mlp(x, self.fc1.weight, self.fc2.weight, self.fc1.bias, self.fc2.bias, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class RotaryEmbedding(nn.Module):
    """`rope` with the angles p · base^(−2i / dim) of position p and pair i (arXiv:2104.09864, section 3.2.2).

    It has no parameters and no buffers. Tables of cos and sin, always in fp32, are computed for a device when they are
    first needed there, and for twice the positions whenever they are too short.

    dim            rotated columns of a head; the others are not changed
    base           10 000 in Llama 2, 500 000 in Llama 3
    max_positions  positions of the initial table. With position_ids it is the limit: nothing is read from the device,
                   so a position outside the table gives NaN.
    interleaved    pairs are columns (2i, 2i + 1) instead of (i, i + dim / 2)
    layout         "bshd", or "bhsd" with heads before tokens

    forward(q, k=None, position_ids=None) returns (q', k'), or q' without k.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        max_positions: int = 4096,
        *,
        interleaved: bool = False,
        layout: str = "bshd",
    ) -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            raise ValueError(f"RotaryEmbedding: dim must be even and positive, got {dim}")
        if max_positions < 1:
            raise ValueError(f"RotaryEmbedding: max_positions must be positive, got {max_positions}")
        self.dim, self.base, self.max_positions = dim, base, max_positions
        self.interleaved, self.layout = interleaved, layout
        self._tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self._outgrown: list[tuple[torch.Tensor, torch.Tensor]] = []  # a CUDA graph may still read them

    def tables(self, device: torch.device, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [P, dim / 2], fp32, P at least `positions` and max_positions."""
        found = self._tables.get(device)
        if found is None or found[0].shape[0] < positions:
            if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
                # Tensors of inference mode could not be saved for a backward later.
                with torch.inference_mode(False):
                    return self.tables(device, positions)
            length = max(self.max_positions, positions if found is None else max(positions, 2 * found[0].shape[0]))
            pair = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim
            angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), self.base**-pair)
            made = angles.cos(), angles.sin()
            if type(made[0]) is not torch.Tensor:  # of FakeTensorMode: it has no values for later calls
                return made
            if found is not None:
                self._outgrown.append(found)
            found = self._tables[device] = made
        return found

    def forward(
        self, q: torch.Tensor, k: torch.Tensor | None = None, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        length = q.shape[-3 if self.layout == "bshd" else -2]
        cos, sin = self.tables(q.device, length)
        return rope(
            q,
            k,
            cos,
            sin,
            position_ids=position_ids,
            rotary_dim=self.dim,
            interleaved=self.interleaved,
            layout=self.layout,
        )

    def __getstate__(self) -> dict:
        """The state without tables, which a copy computes again."""
        return {**self.__dict__, "_tables": {}, "_outgrown": []}

    def extra_repr(self) -> str:
        return f"{self.dim}, base={self.base}, interleaved={self.interleaved}"


class Attention(nn.Module):
    """Multi-head attention with grouped keys, with the parameters of LlamaAttention: q_proj, k_proj, v_proj, o_proj.

    num_kv_heads  heads of k and v, a divisor of num_heads; by default num_heads
    head_dim      by default hidden_size / num_heads
    bias          of q_proj, k_proj and v_proj; out_bias of o_proj, by default the same
    causal, window  as in `attention`
    rotary        a RotaryEmbedding of layout "bshd" that is applied to q and k, or None

    forward(x [B, S, hidden_size], context=None, position_ids=None) returns [B, S, hidden_size]. Keys and values are
    projections of `context` [B, Sk, hidden_size], by default of x. With a context there is no rotary embedding.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        bias: bool = False,
        out_bias: bool | None = None,
        causal: bool = False,
        window: tuple[int, int] | None = None,
        rotary: RotaryEmbedding | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if min(num_heads, num_kv_heads) < 1:
            raise ValueError(f"Attention: num_heads and num_kv_heads must be at least 1, got {num_heads, num_kv_heads}")
        if rotary is not None and rotary.layout != "bshd":
            raise ValueError(f'Attention: rotary must have layout "bshd", got {rotary.layout!r}')
        if num_heads % num_kv_heads:
            raise ValueError(f"Attention: num_heads must be a multiple of num_kv_heads, got {num_heads, num_kv_heads}")
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(f"Attention: hidden_size must be a multiple of num_heads, got {hidden_size, num_heads}")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        self.causal, self.window, self.rotary = causal, window, rotary
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias, device, dtype)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias, device, dtype)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias, device, dtype)
        out_bias = bias if out_bias is None else out_bias
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, out_bias, device, dtype)

    def forward(
        self, x: torch.Tensor, context: torch.Tensor | None = None, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        if context is not None and self.rotary is not None:
            raise ValueError("Attention: context must be None with rotary, as its rows have no positions")
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        keys = x if context is None else context
        k = self.k_proj(keys).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = self.v_proj(keys).unflatten(-1, (self.num_kv_heads, self.head_dim))
        if self.rotary is not None:
            q, k = self.rotary(q, k, position_ids)
        elif position_ids is not None:
            raise ValueError("Attention: position_ids must be None without rotary")
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = attention(q, k, v, causal=self.causal, window=self.window)
        assert isinstance(out, torch.Tensor)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, causal={self.causal}"


class CrossEntropyLoss(nn.Module):
    """`cross_entropy` with the arguments, and the buffer `weight`, of torch.nn.CrossEntropyLoss; targets are indices.

    z_loss, softcap  as in `cross_entropy`

    forward(input, target) takes input [V], [N, V] or [N, V, d1, …] and target [], [N] or [N, d1, …], as in torch, and
    returns the loss.
    """

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.weight: torch.Tensor | None
        self.register_buffer("weight", weight)
        self.options: dict[str, Any] = dict(
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
        )

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = input if input.dim() <= 2 else input.movedim(1, -1)
        loss = cross_entropy(logits, target, weight=self.weight, **self.options)
        assert isinstance(loss, torch.Tensor)
        return loss

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class LinearCrossEntropyLoss(nn.Module):
    """`linear_cross_entropy` of a linear layer with the parameters `weight` [V, H] and `bias` [V] of torch.nn.Linear,
    so that the logits are never all in memory. For tied embeddings, assign the embedding to `weight`.

    ignore_index, label_smoothing, softcap, z_loss, reduction, scratch_bytes  as in `linear_cross_entropy`

    forward(hidden [..., H], target [...]) returns the loss.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        z_loss: float = 0.0,
        reduction: str = "mean",
        scratch_bytes: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        layer = nn.Linear(in_features, out_features, bias, device, dtype)
        self.in_features, self.out_features = in_features, out_features
        self.options: dict[str, Any] = dict(
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            softcap=softcap,
            z_loss=z_loss,
            reduction=reduction,
            scratch_bytes=scratch_bytes,
        )
        self.weight = layer.weight
        self.bias: nn.Parameter | None
        self.register_parameter("bias", layer.bias)

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(hidden, self.weight, target, bias=self.bias, **self.options)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

"""The new forward of norms, of attention layers with rotary embeddings, and of feed-forward layers."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from ..gelu import gelu
from ..rmsnorm import rmsnorm
from ..rope import rope
from ..swiglu import swiglu

FAMILIES = "Llama|Mistral|Qwen2|Qwen3|Gemma|Gemma2|Gemma3|Phi|Phi3"
# transformers' names of activations -> those of `swiglu`
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}
APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}  # `approximate` of `gelu`


def _family(module: nn.Module, layer: str) -> str | None:
    """The model family of a layer, by the name of its class, or None."""
    found = re.fullmatch(f"({FAMILIES}){layer}", type(module).__name__)
    return found[1] if found else None


def norm(module: nn.Module) -> Callable | None:
    family = _family(module, "RMSNorm")
    if family is None or not isinstance(getattr(module, "weight", None), nn.Parameter):
        return None
    return _gemma_norm if family.startswith("Gemma") else _llama_norm


def _llama_norm(self, hidden_states):
    return rmsnorm(hidden_states, self.weight, self.variance_epsilon)


def _gemma_norm(self, x):
    return rmsnorm(x, self.weight, self.eps, weight_offset=1.0)


def gated(module: nn.Module) -> Callable | None:
    """The new forward of a feed-forward layer, gated or Phi's without a gate, or None."""
    if _family(module, "MLP") is None:
        return None
    activation = _activation(module)
    if activation is None:
        return None
    original: Callable = type(module).forward
    kind: Any = type(_activation_of(module))
    if hasattr(module, "gate_up_proj"):
        return _packed(activation, kind, original)
    if hasattr(module, "gate_proj"):
        return _separate(activation, kind, original)
    return _two_matrices(APPROXIMATE[activation], kind, original) if activation in APPROXIMATE else None


def _activation(module: nn.Module) -> str | None:
    """The activation that a feed-forward layer has, in `swiglu`'s name, or None if `swiglu` does not support it. It may
    differ from its configuration's, which can have several, and is not read again after the layer is made."""
    from transformers.activations import ACT2FN

    own = type(_activation_of(module))
    return next((ours for name, ours in ACTIVATIONS.items() if type(ACT2FN[name]) is own), None)


def _activation_of(module: nn.Module) -> Any:
    return getattr(module, "act_fn", getattr(module, "activation_fn", None))


def called_only(layer: nn.Module) -> bool:
    """Whether a call of the layer does no more than its class's forward. Hooks may also compute a weight, as those of
    torch.nn.utils.prune do, or move it to the device."""
    hooks = (layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks)
    return "forward" not in vars(layer) and not any(hooks)


def _plain(activation: nn.Module, kind: type) -> bool:
    """Whether a layer still has the activation with which it was patched, and a call of it does no more."""
    return type(activation) is kind and called_only(activation)


@cache
def _separate(activation: str, kind: type, original: Callable) -> Callable:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not _plain(self.act_fn, kind):
            return original(self, x)
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x), activation=activation))

    return forward


@cache
def _packed(activation: str, kind: type, original: Callable) -> Callable:
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not _plain(self.activation_fn, kind):
            return original(self, hidden_states)
        return self.down_proj(swiglu(self.gate_up_proj(hidden_states), activation=activation))

    return forward


@cache
def _two_matrices(approximate: str, kind: type, original: Callable) -> Callable:
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not _plain(self.activation_fn, kind):
            return original(self, hidden_states)
        return self.fc2(gelu(self.fc1(hidden_states), approximate))

    return forward


def rotation(module: nn.Module) -> Callable | None:
    forward = type(module).forward
    called = getattr(getattr(forward, "__code__", None), "co_names", ())
    if _family(module, "Attention") is None or "apply_rotary_pos_emb" not in called:
        return None
    return _with_our_rotation(forward)


@cache
def _with_our_rotation(forward: types.FunctionType) -> Callable:
    """A copy of the layer's own forward in which one global name refers to another function. The module that defines
    the forward, and so every other model, is not changed."""
    names = {**forward.__globals__, "apply_rotary_pos_emb": _rotate}
    copy = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    copy.__doc__ = forward.__doc__
    return copy


def _rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates the first W columns of each head of q and k. cos and sin are [B, S, W], with each value twice."""
    layout = "bhsd" if unsqueeze_dim == 1 else "bshd"
    rotated = rope(q, k, cos, sin, rotary_dim=cos.shape[-1], layout=layout)
    assert isinstance(rotated, tuple)
    return rotated

"""`torch.nn.attention.activate_flash_attention_impl("ridgeline")`: PyTorch's flash attention runs these kernels.

Once activated, F.scaled_dot_product_attention and PyTorch's context parallelism call them instead of PyTorch's own
flash attention. A problem that these kernels do not support raises an error with the reason, as with PyTorch's other
implementations.
"""

from __future__ import annotations

import math

import torch
from torch.library import Library

from .op import _backward, _forward
from .problem import LEAST_SCALE, MOST_SCALE

NAME = "ridgeline"


class Registration:
    """Holds the registration of these kernels in PyTorch's dispatcher until `remove`."""

    def __init__(self) -> None:
        self._library: Library | None = Library("aten", "IMPL")
        self._library.impl("_scaled_dot_product_flash_attention", flash_forward, "CUDA")
        self._library.impl("_scaled_dot_product_flash_attention_backward", flash_backward, "CUDA")

    def remove(self) -> None:
        self._library = None


def register() -> bool:
    """Adds the name to PyTorch's registry; False for a PyTorch without one. Nothing changes until it is activated."""
    enter = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if enter is None:
        return False
    enter(NAME, register_fn=Registration)
    return True


def flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple:
    """Implements aten::_scaled_dot_product_flash_attention. Raises RuntimeError for dropout, a debug mask, a scale
    that is not positive, and a causal mask with more or fewer queries than keys, where PyTorch aligns query 0 with
    key 0."""
    if return_debug_mask:
        raise RuntimeError(f"{NAME}: return_debug_mask must be False, got True")
    _check(query, key, dropout_p, is_causal, scale)
    out, lse, _ = _forward(query, key, value, _options(query, key, is_causal, scale))
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    offset = torch.zeros((), dtype=torch.uint64, device=query.device)
    return out, lse, None, None, query.shape[2], key.shape[2], state, offset, query.new_empty(0)


def flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Implements aten::_scaled_dot_product_flash_attention_backward. logsumexp and out may cover more keys than `key`
    has, as in ring attention: the gradients are then the contribution of this block of keys."""
    _check(query, key, dropout_p, is_causal, scale)
    tensors = (grad_out, None, query, key, value, out, logsumexp.contiguous(), None)
    dq, dk, dv = _backward(tensors, _options(query, key, is_causal, scale), True, True)
    return dq, dk, dv


def _check(query: torch.Tensor, key: torch.Tensor, dropout_p: float, is_causal: bool, scale: float | None) -> None:
    if dropout_p:
        raise RuntimeError(f"{NAME}: dropout_p must be 0, got {dropout_p}")
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError(f"{NAME}: query must be float16 or bfloat16, got {query.dtype}")
    if is_causal and query.shape[2] != key.shape[2]:
        lengths = f"{query.shape[2]} queries and {key.shape[2]} keys"
        raise RuntimeError(f"{NAME}: is_causal requires as many queries as keys, got {lengths}")
    if scale is not None and not LEAST_SCALE <= scale <= MOST_SCALE:
        raise RuntimeError(f"{NAME}: scale must be positive and in the range of fp32, got {scale}")


def _options(query: torch.Tensor, key: torch.Tensor, is_causal: bool, scale: float | None) -> tuple:
    """Returns the options that `attention` passes to its launch plans."""
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    return float(scale), -1, 0 if is_causal else -1, key.shape[2], "auto", "auto"

"""The gradients of attention, written where a caller has a place for them.

Nothing is differentiated here: a caller has an autograd.Function.
"""

from __future__ import annotations

import torch

from .checks import kind
from .launch import Plans, lean, signature
from .op import _options, check_qkv
from .problem import readable
from .versions import bwd_plan

_NAMESPACE = __package__.replace(".", "_")
_BACKWARD = Plans()


def attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    backward: str = "auto",
) -> None:
    """Writes the gradients of `attention` into dq, dk and dv, which may be slices of one tensor (Dao et al. 2022,
    arXiv:2205.14135, algorithm 4).

        p = exp(s − lse)     ds = p ∘ (dout vᵀ − rowsum(dout ∘ out))     dq = scale · ds k     dk = scale · dsᵀ q
        dv = pᵀ dout

    So that q, k and v that are slices of one product have their gradients in one tensor, without a copy.

    dout, out    [B, Hq, Sq, D], dtype and device of q: out as `attention` gives it with return_lse=True
    q, k, v      as of attention, and so are causal, scale and backward
    lse          [B, Hq, Sq], fp32, contiguous
    dq, dk, dv   shapes, dtype and device of q, k and v, rows of D contiguous; no two of their elements at one address

    The backward has lse alone, whose rounding is that of the largest score: where scores are in the thousands the
    gradients of fp32 inputs are less exact than those that autograd has of attention. Deterministic as these are.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, layout, device or option, RuntimeError for a
    tensor that requires grad while grad mode is on, for a CPU tensor outside Triton's interpreter, or for a version
    that this GPU or problem does not have.
    """
    tensors, given = (dout, q, k, v, out, lse, dq, dk, dv), (causal, scale, backward)
    if lean(*tensors) and not torch.is_grad_enabled():
        key = (*map(signature, tensors), given, torch.get_deterministic_debug_mode())
        plan = _BACKWARD.find(key)
        if plan is None:
            _check(*tensors)
            plan = _BACKWARD.keep(key, _plan(*tensors, *_scaled(q, k, *given)))
        plan(dout, None, q, k, v, out, lse, None, (dq, dk, dv))
        return
    _check(*tensors)
    for name, tensor in zip(("dout", "q", "k", "v", "out", "lse", "dq", "dk", "dv"), tensors, strict=True):
        if tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"attention_backward: has no gradient: {name} must not require grad, or use torch.no_grad()"
            )
    _op(*tensors, *_scaled(q, k, *given))


def _scaled(q, k, causal, scale, backward) -> tuple[float, bool, str]:
    """(scale, causal, backward) as the op has them."""
    number, _, right, *_ = _options(q, k, causal, scale, None, None, "auto", backward)
    return number, right == 0, backward


def _plan(dout, q, k, v, out, lse, dq, dk, dv, scale, causal, backward):
    options = scale, -1, 0 if causal else -1, k.shape[2], backward
    return bwd_plan(dout, None, q, k, v, out, lse, None, *options, True, True, (dq, dk, dv))


def _check(dout, q, k, v, out, lse, dq, dk, dv) -> None:
    name = "attention_backward"
    check_qkv(name, q, k, v)
    for label, tensor, like in (("dout", dout, q), ("out", out, q), ("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != q.dtype:
            raise TypeError(f"{name}: {label} must be a tensor of q's dtype {q.dtype}, got {kind(tensor)}")
        if tensor.shape != like.shape or tensor.device != q.device:
            wanted = f"{list(like.shape)} on {q.device}"
            raise ValueError(f"{name}: {label} must be {wanted}, got {list(tensor.shape)} on {tensor.device}")
    for label, tensor in (("dq", dq), ("dk", dk), ("dv", dv)):
        expanded = any(not stride and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.numel() and (expanded or readable(tensor) is not tensor):
            raise ValueError(f"{name}: {label} must have contiguous rows, not expanded, got strides {tensor.stride()}")
    if not isinstance(lse, torch.Tensor) or lse.dtype != torch.float32:
        raise TypeError(f"{name}: lse must be a tensor of float32, got {kind(lse)}")
    if lse.shape != q.shape[:3] or lse.device != q.device or not lse.is_contiguous():
        raise ValueError(f"{name}: lse must be {list(q.shape[:3])}, contiguous, on {q.device}, got {list(lse.shape)}")


@torch.library.custom_op(f"{_NAMESPACE}::attention_backward", mutates_args=("dq", "dk", "dv"))
def _op(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    scale: float,
    causal: bool,
    backward: str,
) -> None:
    plan = _plan(dout, q, k, v, out, lse, dq, dk, dv, scale, causal, backward)
    plan(dout, None, q, k, v, out, lse, None, (dq, dk, dv))


@_op.register_fake
def _(dout, q, k, v, out, lse, dq, dk, dv, scale, causal, backward):
    return None

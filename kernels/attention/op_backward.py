"""The backward alone, into the caller's memory: for autograd functions that compute more than attention."""

from __future__ import annotations

import torch

from .checks import kind
from .launch import Plans, lean, signature
from .op import attention_options, check_qkv
from .problem import MOST_STRIDE, empty_like
from .versions import bwd_plan

_NAMESPACE = __package__.replace(".", "_")
_PLANS = Plans()


def attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    dlse: torch.Tensor | None = None,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    num_context: int | None = None,
    window: tuple[int, int] | None = None,
    backward: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes dq, dk and dv of `attention` from its results.

        p = exp(s − lse)     ds = p ∘ (dout vᵀ − rowsum(dout ∘ out) + dlse)
        dq = scale · ds k     dk = scale · dsᵀ q     dv = pᵀ dout          over the keys that a query sees

    For an autograd function that computes more than attention. The gradients are written where its next GEMM reads
    them, such as dk and dv into slices of one [B, Sk, 2, Hkv, D], without a concatenation.

    dout        [B, Hq, Sq, D], dtype of q: gradient of out
    q, k, v     as in `attention`, and so are causal, scale, num_context, window and backward
    out, lse    what `attention(q, k, v, …, return_lse=True)` returned
    dlse        [B, Hq, Sq], fp32: gradient of lse; None is 0
    dq, dk, dv  None, or memory for the gradients: like q, k and v in shape and dtype, of any strides with contiguous
                rows of D, without overlap. All of it is overwritten.

    Returns dq, dk and dv, in the given memory or in new tensors. Deterministic as `attention` is. The row statistics
    are lse alone, whose rounding error grows with the largest score: where fp32 scores are in the thousands, gradients
    are less exact than those of `attention`.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, layout, device or option, RuntimeError for a
    tensor that requires grad while grad mode is on, for a CPU tensor outside Triton's interpreter, or for a version
    that does not support the problem.

    Source: Dao et al. 2022, arXiv:2205.14135, algorithm 4.
    """
    tensors, given = (dout, dlse, q, k, v, out, lse, dq, dk, dv), (causal, scale, num_context, window, backward)
    if lean(*tensors) and not torch.is_grad_enabled():
        key = (*map(signature, tensors), given, torch.get_deterministic_debug_mode())
        plan = _PLANS.find(key)
        if plan is None:
            _check(*tensors)
            plan = _PLANS.keep(key, _plan(*tensors, *_options(q, k, *given)))
        return plan(dout, dlse, q, k, v, out, lse, None, dq, dk, dv)
    _check(*tensors)
    dq, dk, dv = (empty_like(like) if to is None else to for to, like in ((dq, q), (dk, k), (dv, v)))
    _into_op(dout, dlse, q, k, v, out, lse, dq, dk, dv, *_options(q, k, *given))
    return dq, dk, dv


def _options(q, k, causal, scale, num_context, window, backward) -> tuple[float, int, int, int, str]:
    """Returns (scale, left, right, keys, backward), the arguments of the op."""
    scale, left, right, keys, _, backward = attention_options(
        q, k, causal, scale, num_context, window, "auto", backward
    )
    return scale, left, right, keys, backward


def _plan(dout, dlse, q, k, v, out, lse, dq, dk, dv, scale, left, right, keys, backward):
    tensors, into = (dout, dlse, q, k, v, out, lse, None), (dq, dk, dv)
    return bwd_plan(*tensors, scale, left, right, keys, backward, True, True, into)


def _check(dout, dlse, q, k, v, out, lse, dq, dk, dv) -> None:
    name = "attention_backward"
    check_qkv(name, q, k, v)
    read = (("dout", dout, q), ("out", out, q))
    written = [("dq", dq, q), ("dk", dk, k), ("dv", dv, v)]
    written = [given for given in written if given[1] is not None]
    for label, tensor, same in (*read, *written):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != q.dtype:
            raise TypeError(f"{name}: {label} must be a tensor of q's dtype {q.dtype}, got {kind(tensor)}")
        if tensor.shape != same.shape or tensor.device != q.device:
            wanted = f"{tuple(same.shape)} on {q.device}"
            raise ValueError(f"{name}: {label} must be {wanted}, got {tuple(tensor.shape)} on {tensor.device}")
    for label, tensor, _ in written:
        expanded = any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.numel() and (tensor.stride(3) != 1 or tensor.stride(2) > MOST_STRIDE or expanded):
            raise ValueError(f"{name}: {label} must have contiguous rows, not expanded, got strides {tensor.stride()}")
    for label, tensor in (("lse", lse), ("dlse", dlse)):
        if tensor is None and label == "dlse":
            continue
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32:
            raise TypeError(f"{name}: {label} must be a tensor of float32, got {kind(tensor)}")
        if tensor.shape != q.shape[:3] or tensor.device != q.device:
            wanted = f"{tuple(q.shape[:3])} on {q.device}"
            raise ValueError(f"{name}: {label} must be {wanted}, got {tuple(tensor.shape)} on {tensor.device}")
    if not lse.is_contiguous():
        raise ValueError(f"{name}: lse must be contiguous, as attention returns it, got strides {lse.stride()}")
    if torch.is_grad_enabled():
        every = dict(dout=dout, dlse=dlse, q=q, k=k, v=v, out=out, lse=lse, dq=dq, dk=dk, dv=dv)
        for label, tensor in every.items():
            if tensor is not None and tensor.requires_grad:
                raise RuntimeError(
                    f"{name}: {label} must not require grad, as {name} has no backward: use torch.no_grad()"
                )


@torch.library.custom_op(f"{_NAMESPACE}::attention_backward_into", mutates_args=("dq", "dk", "dv"))
def _into_op(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    scale: float,
    left: int,
    right: int,
    keys: int,
    backward: str,
) -> None:
    tensors = (dout, dlse, q, k, v, out, lse, dq, dk, dv)
    _plan(*tensors, scale, left, right, keys, backward)(dout, dlse, q, k, v, out, lse, None, dq, dk, dv)

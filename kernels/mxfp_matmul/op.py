"""The public function: checks, the lean eager call, registration with torch.library, autograd."""

from __future__ import annotations

import torch

from .checks import FLOATS, kind, runnable
from .launch import Plans, lean, signature
from .plans import bwd_plan, fwd_plan

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")
_FORWARD, _BACKWARD = Plans(), Plans()


def mxfp_matmul(x: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    """y = alpha · x, computed in fp32. Differentiable in x.

    x      [..., D], fp32, fp16 or bf16, any strides. Rows are read in place when the leading dimensions flatten to one
           stride and the last stride is 1; otherwise they are copied first.

    Returns y in shape and dtype of x, contiguous.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, RuntimeError for a CPU tensor outside Triton's
    interpreter.
    """
    if lean(x):
        plan = _fwd_plan(x, alpha)
        if torch.is_grad_enabled() and x.requires_grad:
            return _apply(x, plan, alpha)
        return plan(x)
    _check(x, alpha)
    return _fwd_op(x, alpha)


def _check(x, alpha) -> None:
    if not isinstance(x, torch.Tensor) or x.dtype not in FLOATS:
        raise TypeError(f"mxfp_matmul: x must be float32, float16 or bfloat16, got {kind(x)}")
    if x.dim() == 0:
        raise ValueError("mxfp_matmul: x must be [..., D], got a tensor without dimensions")
    if not isinstance(alpha, int | float):
        raise TypeError(f"mxfp_matmul: alpha must be a number, got {kind(alpha)}")
    runnable("mxfp_matmul", "x", x)


def _fwd_plan(x, alpha):
    """The plan for these arguments, kept. For plain tensors alone: of others the key does not say all."""
    key = signature(x), alpha
    plan = _FORWARD.find(key)
    if plan is None:
        _check(x, alpha)
        plan = _FORWARD.keep(key, fwd_plan(x, alpha))
    return plan


def _backward(dy, alpha):
    if not lean(dy):
        return bwd_plan(dy, alpha)(dy)
    key = signature(dy), alpha
    plan = _BACKWARD.find(key) or _BACKWARD.keep(key, bwd_plan(dy, alpha))
    return plan(dy)


class _Function(torch.autograd.Function):
    """Of eager calls. The gradient goes through torch.library where something traces, transforms or derives it."""

    @staticmethod
    def forward(ctx, x, plan, *options):
        ctx.options = options
        return plan(x)

    @staticmethod
    def backward(ctx, dy):
        fast = lean(dy) and not torch.is_grad_enabled()
        return (_backward if fast else _bwd_op)(dy, *ctx.options), None, *(None for _ in ctx.options)


# What torch.autograd.Function.apply does before this is for functorch, and `lean` has seen that it is not at work.
_apply = super(torch.autograd.Function, _Function).apply


@torch.library.custom_op(f"{_NAMESPACE}::mxfp_matmul_fwd", mutates_args=())
def _fwd_op(x: torch.Tensor, alpha: float) -> torch.Tensor:
    return (_fwd_plan if lean(x) else fwd_plan)(x, alpha)(x)


@_fwd_op.register_fake
def _(x, *options):
    return x.new_empty(x.shape)


@torch.library.custom_op(f"{_NAMESPACE}::mxfp_matmul_bwd", mutates_args=())
def _bwd_op(dy: torch.Tensor, alpha: float) -> torch.Tensor:
    return _backward(dy, alpha)


@_bwd_op.register_fake
def _(dy, *options):
    return dy.new_empty(dy.shape)


def _save(ctx, inputs, output) -> None:
    _, *ctx.options = inputs


def _autograd(ctx, dy):
    return _bwd_op(dy, *ctx.options), *(None for _ in ctx.options)


_fwd_op.register_autograd(_autograd, setup_context=_save)

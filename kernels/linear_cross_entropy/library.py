"""The ops of torch.library, which serve compiled, exported and transformed calls and tensor subclasses, and the
gradients, which eager calls use too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor

from . import calls
from .launch import Launch, lean
from .launches import scale_launch
from .layout import Optional
from .loss import Loss

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")
_INPUTS = "Tensor hidden, Tensor weight, Tensor target, Tensor? bias"
# The fields of `Loss` in the same order, in the schema language of torch.library.
_LOSS = (
    "int ignore_index, float label_smoothing, float? softcap, float z_loss, str reduction, int? scratch_bytes, "
    "str backend"
)
_NEEDS = "bool need_hidden, bool need_weight, bool need_bias"
_OPTIONS = len(Loss._fields)
_batched = torch._C._functorch.is_legacy_batchedtensor  # of torch.autograd.grad(..., is_grads_batched=True)


def _given(like: torch.Tensor, grads: Sequence[Optional]) -> tuple[torch.Tensor, ...]:
    """The gradients, with an empty tensor for each that is None, as an op must return tensors."""
    return tuple(like.new_empty(0) if grad is None else grad for grad in grads)


def _fake_loss(hidden, reduction):
    return hidden.new_empty(hidden.shape[:-1] if reduction == "none" else (), dtype=torch.float32)


def _fake_gradients(hidden, weight, bias, needs):
    dtypes = (hidden.dtype, hidden.dtype, torch.float32)
    return tuple(
        like.new_empty(like.shape, dtype=dtype) if need else hidden.new_empty(0)
        for like, dtype, need in zip((hidden, weight, bias), dtypes, needs, strict=True)
    )


@torch.library.custom_op(
    f"{_NAMESPACE}::linear_cross_entropy_fwd", mutates_args=(), schema=f"({_INPUTS}, {_LOSS}) -> Tensor"
)
def fwd_op(hidden, weight, target, bias, *loss):
    return calls.loss_alone(hidden, weight, target, bias, Loss(*loss))


@fwd_op.register_fake
def _(hidden, weight, target, bias, *loss):
    return _fake_loss(hidden, Loss(*loss).reduction)


@torch.library.custom_op(
    f"{_NAMESPACE}::linear_cross_entropy_ready",
    mutates_args=(),
    schema=f"({_INPUTS}, {_LOSS}, {_NEEDS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def ready_op(hidden, weight, target, bias, *options):
    """Returns the loss, and the gradients of hidden, weight and bias for an incoming gradient of 1."""
    loss, needs = Loss(*options[:_OPTIONS]), options[_OPTIONS:]
    value, *grads = calls.loss_and_gradients(None, hidden, weight, target, bias, loss, needs)
    return value, *_given(hidden, grads)


@ready_op.register_fake
def _(hidden, weight, target, bias, *options):
    grads = _fake_gradients(hidden, weight, bias, options[_OPTIONS:])
    return _fake_loss(hidden, Loss(*options[:_OPTIONS]).reduction), *grads


@torch.library.custom_op(
    f"{_NAMESPACE}::linear_cross_entropy_bwd",
    mutates_args=(),
    schema=f"(Tensor dloss, {_INPUTS}, {_LOSS}, {_NEEDS}) -> (Tensor, Tensor, Tensor)",
)
def bwd_op(dloss, hidden, weight, target, bias, *options):
    """Returns the gradients of hidden, weight and bias, computed from the inputs."""
    loss, needs = Loss(*options[:_OPTIONS]), options[_OPTIONS:]
    _, *grads = calls.loss_and_gradients(dloss, hidden, weight, target, bias, loss, needs)
    return _given(hidden, grads)


@bwd_op.register_fake
def _(dloss, hidden, weight, target, bias, *options):
    return _fake_gradients(hidden, weight, bias, options[_OPTIONS:])


@torch.library.custom_op(f"{_NAMESPACE}::linear_cross_entropy_scale_", mutates_args=("dhidden", "dweight", "dbias"))
def scale_op(dloss: torch.Tensor, dhidden: torch.Tensor, dweight: torch.Tensor, dbias: torch.Tensor) -> None:
    scale = scale_launch(dloss.device, dhidden, dweight, dbias)
    if scale is not None:
        scale(dloss, *(grad if grad.numel() else None for grad in (dhidden, dweight, dbias)))


@scale_op.register_fake
def _(dloss, dhidden, dweight, dbias):
    return None


def gradients(
    dloss: Optional, saved: Any, loss: Loss, needs: tuple[bool, bool, bool]
) -> tuple[Optional, Optional, Optional]:
    """The gradients of hidden, weight and bias, None where not needed. `saved` are hidden, weight, target and bias.

    An eager call runs the plan; a call that is traced, transformed or differentiated goes through an op."""
    if dloss is None:
        return None, None, None
    hidden, weight, target, bias = saved
    if lean(dloss, *saved) and not torch.is_grad_enabled():
        _, hidden, weight, bias = calls.loss_and_gradients(dloss, hidden, weight, target, bias, loss, needs)
    else:
        grads = bwd_op(dloss, *saved, *loss, *needs)
        hidden, weight, bias = (grad if need else None for grad, need in zip(grads, needs, strict=True))
    return hidden, weight, None if bias is None else bias.to(saved[3].dtype)


def usable_once(dloss: Optional) -> bool:
    """Whether a backward may scale and return the gradients that the forward computed: not if it is itself to be
    differentiated (grad mode is then on), or if dloss is a batch of gradients."""
    if dloss is None or torch.is_grad_enabled():
        return False
    return torch.compiler.is_compiling() or not _batched(dloss)


def scaled(dloss: torch.Tensor, ready: Sequence[Optional], scale: Launch | None) -> Sequence[Optional]:
    """Multiplies the gradients that the forward computed by dloss, in place. `scale` is the launch for them, if any."""
    if lean(dloss, *ready) and not torch.is_grad_enabled():
        if scale is not None:
            # An element of a vector may be off the alignment for which the launch, that of the forward's plan, is made.
            scale(dloss if dloss.data_ptr() % 16 == 0 else dloss.clone(), *ready)
        return ready
    scale_op(dloss, *_given(dloss, ready))
    return ready


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.loss, ctx.unused = Loss(*inputs[4 : 4 + _OPTIONS]), (None,) * (len(inputs) - 4)
    ctx.save_for_backward(*inputs[:4])


def _backward(ctx, dloss, *_):
    needs = tuple(ctx.needs_input_grad[i] for i in (0, 1, 3))
    hidden, weight, bias = gradients(dloss, ctx.saved_tensors, ctx.loss, needs)
    return hidden, weight, None, bias, *ctx.unused


def _ready_save(ctx, inputs, output) -> None:
    _save(ctx, inputs, output)
    ctx.mark_non_differentiable(*output[1:])
    # Not saved for backward: they are scaled in place and returned, so they can be used once.
    ctx.ready, ctx.needs = output[1:], inputs[4 + _OPTIONS :]


def _ready_backward(ctx, dloss, *_):
    if ctx.ready is None or not usable_once(dloss):
        return _backward(ctx, dloss)
    grads, ctx.ready = ctx.ready, None
    if isinstance(dloss, FunctionalTensor):
        # torch.compile traces this branch. Inductor decides what to do in place, and fuses the multiplication.
        grads = [grad * dloss for grad in grads]
    else:
        scale_op(dloss, *grads)
    hidden, weight, bias = (grad if need else None for grad, need in zip(grads, ctx.needs, strict=True))
    bias = None if bias is None else bias.to(ctx.saved_tensors[3].dtype)
    return hidden, weight, None, bias, *ctx.unused


fwd_op.register_autograd(_backward, setup_context=_save)
ready_op.register_autograd(_ready_backward, setup_context=_ready_save)

"""The ops of torch.library, which serve compiled, exported and transformed calls and tensor subclasses, and the
gradients, which eager calls use too."""

from __future__ import annotations

import torch

from . import calls
from .launch import lean
from .layout import stats_size
from .loss import LOSS_SCHEMA, Loss

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
_written = torch.autograd.graph.increment_version
_batched = torch._C._functorch.is_legacy_batchedtensor  # of torch.autograd.grad(..., is_grads_batched=True)

_BWD = "Tensor? g_loss, Tensor? g_z, Tensor? g_lse"
_SAVED = "Tensor target, Tensor? weight, Tensor stats"
_INPUTS = "Tensor target, Tensor? weight, str backend"


def _given(logits: torch.Tensor, out, z, lse) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, z, lse) with an empty tensor for each that was not requested, as an op must return tensors."""
    z = logits.new_empty(0, dtype=out.dtype) if z is None else z
    return out, z, logits.new_empty(0, dtype=torch.float32) if lse is None else lse


def _fake_outputs(logits: torch.Tensor, target: torch.Tensor, loss: Loss) -> tuple[torch.Tensor, ...]:
    shape = target.shape if loss.reduction == "none" else ()
    value = logits.new_empty(shape, dtype=loss.dtype)
    z = logits.new_empty(shape if loss.return_z_loss else 0, dtype=loss.dtype)
    return value, z, logits.new_empty(target.shape if loss.return_lse else 0, dtype=torch.float32)


@torch.library.custom_op(
    f"{_NAMESPACE}::cross_entropy_fwd",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor target, Tensor? weight, bool save, bool inplace, {LOSS_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
def fwd_op(logits, target, weight, save, inplace, *loss):
    """Returns (loss, z-loss, lse, statistics for the backward). The statistics are empty unless `save`."""
    out, z, lse, scratch, _ = calls.forward(logits, target, weight, Loss(*loss), save, None, "auto")
    stats = scratch[: stats_size(target.numel(), loss[2])] if save else logits.new_empty(0, dtype=torch.float32)
    return *_given(logits, out, z, lse), stats


@fwd_op.register_fake
def _(logits, target, weight, save, inplace, *loss):
    stats = logits.new_empty(stats_size(target.numel(), loss[2]) if save else 0, dtype=torch.float32)
    return *_fake_outputs(logits, target, Loss(*loss)), stats


@torch.library.custom_op(
    f"{_NAMESPACE}::cross_entropy_bwd",
    mutates_args=(),
    schema=f"({_BWD}, Tensor logits, {_SAVED}, {LOSS_SCHEMA}) -> Tensor",
)
def bwd_op(g_loss, g_z, g_lse, logits, target, weight, stats, *loss):
    return calls.backward(g_loss, g_z, g_lse, logits, target, weight, stats, Loss(*loss), False)


@bwd_op.register_fake
def _(g_loss, g_z, g_lse, logits, *rest):
    return logits.new_empty(logits.shape)


@torch.library.custom_op(
    f"{_NAMESPACE}::cross_entropy_bwd_in_place",
    mutates_args=("logits",),
    schema=f"({_BWD}, Tensor(a!) logits, {_SAVED}, {LOSS_SCHEMA}) -> ()",
)
def bwd_in_place_op(g_loss, g_z, g_lse, logits, target, weight, stats, *loss):
    calls.backward(g_loss, g_z, g_lse, logits, target, weight, stats, Loss(*loss), True)


def gradient(g_loss, g_z, g_lse, logits, target, weight, stats, loss: Loss, inplace: bool) -> torch.Tensor | None:
    """The gradient of the logits, given the incoming gradients of the three outputs. With `inplace` it overwrites the
    logits if nothing reads them again.

    An eager call runs the plan. A call that is traced, transformed or differentiated goes through an op."""
    if g_loss is None and g_z is None and g_lse is None:
        return None
    eager = lean(logits, g_loss, g_z, g_lse, target, weight, stats) and not torch.is_grad_enabled()
    if inplace and last_use(logits, g_loss, g_z, g_lse):
        if eager:
            calls.backward(g_loss, g_z, g_lse, logits, target, weight, stats, loss, True)
            _written(logits)
        else:
            bwd_in_place_op(g_loss, g_z, g_lse, logits, target, weight, stats, *loss)
        return logits.detach()
    if eager:
        return calls.backward(g_loss, g_z, g_lse, logits, target, weight, stats, loss, False)
    return bwd_op(g_loss, g_z, g_lse, logits, target, weight, stats, *loss)


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)  # the gradient of an unused output is then None, not a tensor of zeros
    logits, target, weight, _, ctx.inplace, *loss = inputs
    ctx.loss = Loss(*loss)
    ctx.save_for_backward(logits, target, weight, output[3])


def _backward(ctx, g_loss, g_z, g_lse, _stats):
    unused, loss = (None,) * (4 + len(ctx.loss)), ctx.loss
    if not ctx.needs_input_grad[0]:
        return None, *unused
    # An output that was not requested is empty; a caller that differentiates the op directly passes an empty gradient.
    given = g_loss, g_z if loss.return_z_loss else None, g_lse if loss.return_lse else None
    return gradient(*given, *ctx.saved_tensors, loss, ctx.inplace), *unused


fwd_op.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op(
    f"{_NAMESPACE}::cross_entropy_fwd_grad",
    mutates_args=(),
    schema=f"(Tensor logits, {_INPUTS}, {LOSS_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def fwd_grad_op(logits, target, weight, backend, *loss):
    """Returns (loss, z-loss, lse, gradient)."""
    out, z, lse, _, grad = calls.forward(logits, target, weight, Loss(*loss), False, "new", backend)
    return *_given(logits, out, z, lse), grad


@fwd_grad_op.register_fake
def _(logits, target, weight, backend, *loss):
    return *_fake_outputs(logits, target, Loss(*loss)), logits.new_empty(logits.shape)


@torch.library.custom_op(
    f"{_NAMESPACE}::cross_entropy_fwd_grad_in_place",
    mutates_args=("logits",),
    schema=f"(Tensor(a!) logits, {_INPUTS}, {LOSS_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
def fwd_grad_in_place_op(logits, target, weight, backend, *loss):
    """Returns (loss, z-loss, lse). The gradient overwrites the logits."""
    out, z, lse, *_ = calls.forward(logits, target, weight, Loss(*loss), False, "inplace", backend)
    return _given(logits, out, z, lse)


@fwd_grad_in_place_op.register_fake
def _(logits, target, weight, backend, *loss):
    return _fake_outputs(logits, target, Loss(*loss))


@torch.library.custom_op(f"{_NAMESPACE}::cross_entropy_scale", mutates_args=())
def scale_op(grad: torch.Tensor, g_loss: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    scaled = calls.scale(grad, g_loss, target, ignore_index, False)
    return scaled.clone() if scaled is grad else scaled  # an op must not return its input


@scale_op.register_fake
def _(grad, g_loss, target, ignore_index):
    return grad.new_empty(grad.shape)


@torch.library.custom_op(f"{_NAMESPACE}::cross_entropy_scale_in_place", mutates_args=("grad",))
def scale_in_place_op(grad: torch.Tensor, g_loss: torch.Tensor, target: torch.Tensor, ignore_index: int) -> None:
    calls.scale(grad, g_loss, target, ignore_index, True)


class _Once(torch.autograd.Function):
    """The identity, whose backward raises RuntimeError: the gradient cannot be differentiated again."""

    @staticmethod
    def forward(ctx, grad):
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx, _):
        raise RuntimeError("cross_entropy: double backward is not supported with grad_in_forward=True")


def scaled(
    grad: torch.Tensor, target: torch.Tensor, g_loss: torch.Tensor | None, ignore_index: int
) -> torch.Tensor | None:
    """The gradient that the forward wrote for an incoming gradient of 1, scaled by the actual incoming gradient."""
    if g_loss is None:
        return None
    found = _scaled(grad, g_loss, target, ignore_index)
    return _Once.apply(found.detach().requires_grad_()) if torch.is_grad_enabled() else found


def _scaled(grad: torch.Tensor, g_loss: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    given = grad, g_loss, target, ignore_index
    eager = lean(grad, g_loss, target) and not torch.is_grad_enabled()
    if not last_use(grad, g_loss):
        return calls.scale(*given, False) if eager else scale_op(*given)
    if eager:
        calls.scale(*given, True)
        _written(grad)
    else:
        scale_in_place_op(*given)
    return grad.detach()


def last_use(saved: torch.Tensor, *incoming: torch.Tensor | None) -> bool:
    """Whether a saved tensor may be overwritten: not if the graph is retained or being traced, or if an incoming
    gradient is a batch of gradients, for each of which the tensor is read."""
    if type(saved) not in (torch.Tensor, torch.nn.Parameter) or torch.compiler.is_compiling():
        return False
    return not _keeps_graph() and not any(g is not None and _batched(g) for g in incoming)


def _save_gradient(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    _, target, _, _, ctx.ignore_index, *_ = inputs
    ctx.inputs = len(inputs)
    ctx.save_for_backward(output[3], target)


def _backward_of_gradient(ctx, g_loss, *_):
    return scaled(*ctx.saved_tensors, g_loss, ctx.ignore_index), *((None,) * (ctx.inputs - 1))


fwd_grad_op.register_autograd(_backward_of_gradient, setup_context=_save_gradient)

"""The public function linear_cross_entropy, and the autograd functions of eager calls."""

from __future__ import annotations

import torch

from . import calls, library
from .checks import FLOATS, no_tangent
from .launch import lean
from .loss import Loss, check, check_options


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    scratch_bytes: int | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Computes the cross entropy of a linear layer's output without storing all of the logits.

        z    = hidden · weightᵀ + bias                    rounded to their dtype, as a linear layer's output is
        l    = softcap · tanh(z / softcap)                z itself without a softcap
        lse  = log Σ_v exp(l_v)
        loss = lse − (1 − ε) · l_target − ε · mean_v(l_v) + z_loss · lse²

    with ε = label_smoothing. Differentiable once in hidden, weight and bias. With reduction "mean" or "sum" the forward
    computes the gradients, and the backward only scales them, unless the incoming gradient is 1. The backward computes
    them for reduction "none", for a second backward through a retained graph, and for float16, whose gradients need the
    loss scale to be representable. If no gradient is required, none is computed.

    hidden         [..., H], at most 2³¹ − 2¹⁶ rows, like weight, float32, float16 or bfloat16, any strides
    weight         [V, H], dtype of hidden, row- or column-major (otherwise copied)
    target         [...], int64 or int32, the index of each row's correct class, in [0, V), or ignore_index
    bias           [V], dtype of hidden, or None
    ignore_index   rows with this target have loss and gradient 0 and do not count in the mean
    reduction      "mean" over the rows that are not ignored (nan if there are none), "sum" or "none"
    scratch_bytes  upper bound of the memory for logits, in bytes. None: 64 MiB for the loss alone; with gradients the
                   largest of 640 MiB less the gradients' size, a sixteenth of that size and, if weight needs a
                   gradient, the logits of 1024 entries of all rows. If all logits fit, none are computed twice.
    backend        how logits are computed: "triton" (cuBLAS and Triton), "cuda" (CUDA C++, compiled by CuPy, on compute
                   capability 9.0: float16 and bfloat16, H and row strides multiples of 8) or "auto", "cuda" where
                   it can run and "triton" elsewhere

    Returns the loss in float32: a scalar, or of the shape of target for "none". Under autocast hidden, weight and bias
    are cast first, like those of a linear layer.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or option, RuntimeError for a CPU tensor
    outside Triton's interpreter and for backend="cuda" where it cannot run. A target out of range is a ValueError on
    the CPU and a device-side assertion on a GPU.

    Label smoothing: Szegedy et al. 2016, arXiv:1512.00567. Softcap: Gemma 2, arXiv:2408.00118. z-loss: PaLM,
    arXiv:2204.02311, section 5.
    """
    if _autocast(hidden):
        dtype = torch.get_autocast_dtype("cuda" if hidden.is_cuda else "cpu")
        hidden, weight, bias = (_cast(t, dtype) for t in (hidden, weight, bias))
    if weight is None or not lean(hidden, weight, target, bias):
        loss = Loss(ignore_index, label_smoothing, softcap, z_loss, reduction, scratch_bytes, backend)
        return _through_library(hidden, weight, target, bias, loss)
    needs = (False, False, False)
    if torch.is_grad_enabled():
        needs = hidden.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad
    options = ignore_index, label_smoothing, softcap, z_loss, reduction, scratch_bytes, backend
    plan = calls.eager_plan(hidden, weight, target, bias, options, needs)
    if True not in needs:
        return plan.run(hidden, weight, target, bias)
    return (_apply_ready if plan.ready else _apply)(hidden, weight, target, bias, plan)


def _autocast(hidden) -> bool:
    """Whether autocast is on for hidden's device."""
    if not isinstance(hidden, torch.Tensor):
        return False
    return torch.is_autocast_enabled("cuda") if hidden.is_cuda else hidden.is_cpu and torch.is_autocast_enabled("cpu")


def _cast(tensor, dtype: torch.dtype):
    """Casts an operand as autocast casts a linear layer's. Anything else is returned for the checks to reject."""
    known = isinstance(tensor, torch.Tensor) and tensor.dtype in FLOATS and (tensor.is_cuda or tensor.is_cpu)
    return tensor.to(dtype) if known else tensor


def _through_library(hidden, weight, target, bias, loss: Loss) -> torch.Tensor:
    """Runs the call through torch.library: for calls that are traced or transformed, and for tensor subclasses."""
    check(hidden, weight, target, bias)
    no_tangent("linear_cross_entropy", hidden, weight, bias)
    check_options(loss.label_smoothing, loss.softcap, loss.reduction, loss.scratch_bytes, loss.backend)
    loss = calls.in_floats(loss)
    needs = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    if any(needs) and calls.ready_in_forward(hidden, loss):
        return library.ready_op(hidden, weight, target, bias, *loss, *needs)[0]
    return library.fwd_op(hidden, weight, target, bias, *loss)


class _LinearCrossEntropy(torch.autograd.Function):
    """The autograd function of eager calls whose backward computes the gradients. The backward goes through
    torch.library where it is traced, transformed or itself differentiated."""

    @staticmethod
    def forward(ctx, hidden, weight, target, bias, plan):
        ctx.set_materialize_grads(False)
        ctx.loss = plan.loss
        ctx.save_for_backward(hidden, weight, target, bias)
        return plan.run(hidden, weight, target, bias)

    @staticmethod
    def backward(ctx, dloss):
        needs = ctx.needs_input_grad
        hidden, weight, bias = library.gradients(dloss, ctx.saved_tensors, ctx.loss, (needs[0], needs[1], needs[3]))
        return hidden, weight, None, bias, None


class _ReadyGradients(torch.autograd.Function):
    """The autograd function of eager calls whose forward computes the gradients."""

    @staticmethod
    def forward(ctx, hidden, weight, target, bias, plan):
        loss, *grads = plan.run(hidden, weight, target, bias, None)
        ctx.set_materialize_grads(False)
        ctx.loss, ctx.scale = plan.loss, plan.scale
        # Not saved for backward: they are scaled in place and returned, so they can be used once.
        ctx.ready = grads
        ctx.save_for_backward(hidden, weight, target, bias)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        ready = ctx.ready
        if ready is None or not library.usable_once(dloss):
            return _LinearCrossEntropy.backward(ctx, dloss)
        ctx.ready = None
        hidden, weight, bias = library.scaled(dloss, ready, ctx.scale)
        if bias is not None:
            bias = bias.to(ctx.saved_tensors[3].dtype)
        return hidden, weight, None, bias, None


# Skips torch.autograd.Function.apply, which only adds the functorch checks: `lean` has excluded functorch.
_apply = super(torch.autograd.Function, _LinearCrossEntropy).apply
_apply_ready = super(torch.autograd.Function, _ReadyGradients).apply

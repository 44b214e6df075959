"""The public functions of cross_entropy, and the autograd functions of eager calls."""

from __future__ import annotations

import torch

from . import calls, library
from .checks import no_tangent
from .launch import lean
from .loss import Loss, check, check_inplace

_written = torch.autograd.graph.increment_version


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    z_loss: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_lse: bool = False,
    grad_in_forward: bool = False,
    inplace: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Computes the cross entropy of logits against class indices, as torch.nn.functional.cross_entropy defines it, with
    an optional z-loss and softcap.

        y    = softcap · tanh(logits / softcap)          (the logits without a softcap),   lse = logsumexp(y)
        ce_i = w_t · (1 − ε) · (lse − y_t) + ε / V · Σ_c w_c · (lse − y_c)        t = target_i, ε = label_smoothing
        z_i  = z_loss · lse²

    reduction "none": ce_i + z_i. "sum": their sum. "mean": Σ ce_i / Σ w_t + Σ z_i / R, over the R rows whose target is
    not ignore_index. Ignored rows count as 0 and have a gradient of 0, whatever their logits are; the forward does not
    read them, the backward may. If all rows are ignored, the sum is 0 and the mean NaN. All arithmetic is fp32. All
    sums have a fixed order, so the result is deterministic.

    logits           [..., V], 1 <= V <= 2²⁴, at most 2³¹ − 2¹⁷ rows, fp32, fp16 or bf16, any strides. Rows are read in
                     place when the leading dimensions flatten to one stride and the last stride is 1; otherwise they
                     are copied first.
    target           [...], int64 or int32, any strides. A value that is neither ignore_index nor in [0, V) is an error:
                     on a GPU a device-side assertion, as in PyTorch, which the next synchronisation reports.
    weight           class weights w, [V], floating point, finite, not differentiated
    return_z_loss    also return the z-loss, which the loss includes, with the same reduction
    return_lse       also return lse, [...] in fp32, for ignored rows too, which are then read
    grad_in_forward  the forward also writes the gradient, for an incoming gradient of 1. The backward scales it if the
                     incoming gradient differs. The logits are then read once in all; z-loss and lse are not
                     differentiable. Not for fp16 with a loss scale: small gradients underflow before it is applied.
    inplace          the gradient may overwrite the logits, in the forward with grad_in_forward, else in the backward.
                     The logits are not overwritten where no gradient is needed, the graph is retained or torch.compile
                     manages memory.
    backend          of the forward that writes the gradient: "triton"; "cuda" (CUDA C++, compiled by CuPy: rows of more
                     than 32 and up to 512 KiB that begin and end on 16-byte boundaries, no weight and no softcap, on
                     compute capability 9.0); or "auto", which uses "cuda" where it can. All else is Triton.

    Returns loss, or (loss, z_loss), (loss, lse), (loss, z_loss, lse). loss and z_loss have the dtype of the logits, or
    fp32 under autocast, as in PyTorch.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, device, value or strides, RuntimeError for
    CPU tensors outside Triton's interpreter and for backend="cuda" where it cannot run.

    z-loss: PaLM (Chowdhery et al. 2022, arXiv:2204.02311, section 5). softcap: Gemma 2 (arXiv:2408.00118).
    """
    if backend == "cuda" and not grad_in_forward:
        raise RuntimeError('cross_entropy: backend="cuda" cannot run here: it requires grad_in_forward=True')
    wanted = torch.is_grad_enabled() and isinstance(logits, torch.Tensor) and logits.requires_grad
    options = label_smoothing, reduction, z_loss, softcap, return_z_loss, return_lse
    ready = grad_in_forward and wanted
    if not lean(logits, target, weight):
        return _through_library(logits, target, weight, ignore_index, options, wanted, ready, inplace, backend)
    inplace = inplace and wanted
    gradient = None if not ready else "inplace" if inplace else "new"
    options = (*options, _autocast(logits))
    save = wanted and not ready
    run, loss = calls.eager_plan(logits, target, weight, ignore_index, options, save, gradient, inplace, backend)
    if inplace and logits.is_leaf:
        raise ValueError(_LEAF)
    if save:
        return _apply(logits, target, weight, run, loss, inplace)
    if ready:
        return _apply_ready(logits, target, weight, run, ignore_index, inplace)
    out, z, lse, _, _ = run(logits, target, weight)
    return _asked(out, z, lse)


_LEAF = "cross_entropy: logits must not be a leaf that requires grad with inplace=True, got one"


def cross_entropy_and_grad(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    z_loss: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_lse: bool = False,
    inplace: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, ...]:
    """Computes the loss and its gradient with respect to the logits in one pass, without autograd, for use in a custom
    backward.

    Formula, arguments and errors are those of `cross_entropy`. The gradient is that of the loss, or with
    reduction="none" of the sum of the losses, in the shape and dtype of the logits. With `inplace` the gradient
    overwrites the logits, and the tensor `logits` itself is returned as the gradient.

    Returns (loss, gradient), followed by z_loss and lse if they are requested.
    """
    options = label_smoothing, reduction, z_loss, softcap, return_z_loss, return_lse
    if lean(logits, target, weight):
        options = (*options, _autocast(logits))
        gradient = "inplace" if inplace else "new"
        run, _ = calls.eager_plan(logits, target, weight, ignore_index, options, False, gradient, inplace, backend)
        out, z, lse, _, grad = run(logits, target, weight)
        assert grad is not None
        if inplace:
            _written(logits)
    else:
        loss = _checked(logits, target, weight, ignore_index, options, inplace, backend)
        if inplace:
            out, z, lse = library.fwd_grad_in_place_op(logits.detach(), target, weight, backend, *loss)
            grad = logits
        else:
            out, z, lse, grad = library.fwd_grad_op(logits.detach(), target, weight, backend, *loss)
    asked = z if return_z_loss else None, lse if return_lse else None
    return (out, grad, *(t for t in asked if t is not None))


def _autocast(logits: torch.Tensor) -> bool:
    """Whether autocast is on for the logits' device: the loss is then fp32, as in PyTorch."""
    return torch.is_autocast_enabled("cuda") if logits.is_cuda else logits.is_cpu and torch.is_autocast_enabled("cpu")


def _asked(out: torch.Tensor, z: torch.Tensor | None, lse: torch.Tensor | None):
    """The loss, or a tuple of the loss and those of z-loss and lse that are not None."""
    if z is None:
        return out if lse is None else (out, lse)
    return (out, z) if lse is None else (out, z, lse)


def _checked(logits, target, weight, ignore_index, options, inplace, backend) -> Loss:
    """Raises the errors that the public functions document; returns the options of the loss."""
    no_tangent("cross_entropy", logits, weight)
    label_smoothing, reduction, z_loss, softcap, *_ = options
    check(logits, target, weight, ignore_index, label_smoothing, reduction, z_loss, softcap, backend)
    if inplace:
        check_inplace(logits)
    return calls.loss_of(logits, ignore_index, (*options, _autocast(logits)))


def _through_library(logits, target, weight, ignore_index, options, wanted, ready, inplace, backend):
    """Runs `cross_entropy` through torch.library: for calls that are traced or transformed, and for tensor
    subclasses."""
    inplace = inplace and wanted and not torch.compiler.is_compiling()
    loss = _checked(logits, target, weight, ignore_index, options, inplace, backend)
    if inplace and logits.is_leaf:
        raise ValueError(_LEAF)
    if not ready:
        out, z, lse, _ = library.fwd_op(logits, target, weight, wanted, inplace, *loss)
    elif inplace:

        def run(logits, target, weight):
            out, z, lse = library.fwd_grad_in_place_op(logits, target, weight, backend, *loss)
            return out, z if loss.return_z_loss else None, lse if loss.return_lse else None, None, logits

        return _ReadyGradient.apply(logits, target, weight, run, ignore_index, True)
    else:
        out, z, lse, _ = library.fwd_grad_op(logits, target, weight, backend, *loss)
        z, lse = z.detach(), lse.detach()
    return _asked(out, z if loss.return_z_loss else None, lse if loss.return_lse else None)


class _CrossEntropy(torch.autograd.Function):
    """The autograd function of eager calls. The backward goes through torch.library where it is traced, transformed or
    itself differentiated."""

    @staticmethod
    def forward(ctx, logits, target, weight, run, loss, inplace):
        out, z, lse, stats, _ = run(logits, target, weight)
        ctx.set_materialize_grads(False)
        ctx.loss, ctx.inplace = loss, inplace
        ctx.save_for_backward(logits, target, weight, stats)
        return _asked(out, z, lse)

    @staticmethod
    def backward(ctx, g_loss, *others):
        loss = ctx.loss
        g_z = others[0] if loss.return_z_loss else None
        g_lse = others[-1] if loss.return_lse else None
        grad = library.gradient(g_loss, g_z, g_lse, *ctx.saved_tensors, loss, ctx.inplace)
        return grad, None, None, None, None, None


class _ReadyGradient(torch.autograd.Function):
    """The autograd function of a forward that also writes the gradient. In place, it serves all eager calls, those
    through torch.library too: an op that mutates its input cannot have an autograd formula of its own."""

    @staticmethod
    def forward(ctx, logits, target, weight, run, ignore_index, inplace):
        out, z, lse, _, grad = run(logits, target, weight)
        if inplace:
            _written(logits)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in (z, lse) if t is not None))
        ctx.ignore_index = ignore_index
        ctx.save_for_backward(grad, target)
        return _asked(out, z, lse)

    @staticmethod
    def backward(ctx, g_loss, *_):
        return library.scaled(*ctx.saved_tensors, g_loss, ctx.ignore_index), None, None, None, None, None


# Skips torch.autograd.Function.apply, which only adds the functorch checks: `lean` has excluded functorch.
_apply = super(torch.autograd.Function, _CrossEntropy).apply
_apply_ready = super(torch.autograd.Function, _ReadyGradient).apply

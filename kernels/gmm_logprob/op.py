"""The public function gmm_logprob: checks, the fast path of eager calls, registration with torch.library, autograd."""

from __future__ import annotations

import torch

from .checks import FLOATS, kind, no_tangent, runnable
from .configs import MAX_K
from .launch import Plans, lean, signature
from .plans import REDUCTIONS, Backward, Forward, bwd_plan, fwd_plan, skipped

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")
_FORWARD, _BACKWARD = Plans(), Plans()
_grad_enabled = torch.is_grad_enabled  # used in every call; bound once, because a dotted name costs a look-up


def gmm_logprob(
    logits: torch.Tensor, mu: torch.Tensor, log_sigma: torch.Tensor, y: torch.Tensor, reduction: str = "mean"
) -> torch.Tensor:
    """Computes the log-density of y under a mixture of K Gaussians, whose parameters differ from row to row.

        log p(y) = logsumexp_k( log_softmax(logits)_k − ½ z_k² − log_sigma_k − ½ log 2π ),   z_k = (y − mu_k) / sigma_k

    sigma = exp(log_sigma). All arithmetic is fp32. Differentiable in all four inputs, the only saved tensors. Valid for
    |log_sigma| up to 87, beyond which sigma or its inverse overflows in fp32. A component whose logit is −inf has
    weight 0; a row whose logits are all −inf is NaN, as in PyTorch.

    logits, mu, log_sigma  [..., K] with 1 <= K <= 128, all of the same shape. Rows are read in place if the leading
                           dimensions flatten to one stride and the last stride is 1, so the chunks of one [..., 3K] are
                           not copied; otherwise they are copied first.
    y                      [...], the leading dimensions of logits, any strides
    reduction              "none", "mean" or "sum". The mean and the sum over all rows are accumulated in fp32 within a
                           CTA and in fixed point between CTAs, which is bit-wise repeatable in any order.

    All inputs are fp32, all fp16 or all bf16, on one device.

    Returns [...], contiguous, for "none", otherwise a scalar, in the dtype of the inputs, as in PyTorch. Without rows
    the mean is NaN and the sum 0.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, device or reduction, RuntimeError for CPU
    tensors outside Triton's interpreter.

    Source: Bishop 1994, Mixture Density Networks, eq. 22 and 23, up to the sign and the parametrisation by logarithms.
    """
    if lean(logits, mu, log_sigma, y):
        plan = _fwd_plan(logits, mu, log_sigma, y, reduction)
        if _grad_enabled() and (logits.requires_grad or mu.requires_grad or log_sigma.requires_grad or y.requires_grad):
            return _apply(logits, mu, log_sigma, y, plan, reduction)
        return plan(logits, mu, log_sigma, y)
    _check(logits, mu, log_sigma, y, reduction)
    no_tangent("gmm_logprob", logits, mu, log_sigma, y)
    return _fwd_op(logits, mu, log_sigma, y, reduction)


def _check(logits: torch.Tensor, mu: torch.Tensor, log_sigma: torch.Tensor, y: torch.Tensor, reduction: str) -> None:
    if not isinstance(logits, torch.Tensor) or logits.dtype not in FLOATS:
        raise TypeError(f"gmm_logprob: logits must be a tensor of float32, float16 or bfloat16, got {kind(logits)}")
    if logits.dim() == 0 or not 1 <= logits.shape[-1] <= MAX_K:
        raise ValueError(
            f"gmm_logprob: logits must be [..., K] with 1 <= K <= {MAX_K}, got shape {tuple(logits.shape)}"
        )
    for name, tensor in (("mu", mu), ("log_sigma", log_sigma), ("y", y)):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != logits.dtype:
            raise TypeError(f"gmm_logprob: {name} must be a tensor of logits' dtype {logits.dtype}, got {kind(tensor)}")
        shape = logits.shape[:-1] if name == "y" else logits.shape
        if tensor.shape != shape:
            whose = "logits' leading dimensions" if name == "y" else "logits' shape"
            raise ValueError(f"gmm_logprob: {name} must have {whose} {tuple(shape)}, got {tuple(tensor.shape)}")
        if tensor.device != logits.device:
            raise ValueError(f"gmm_logprob: {name} must be on logits' device {logits.device}, got {tensor.device}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"gmm_logprob: reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    runnable("gmm_logprob", "logits", logits)


def _signature(tensor):
    """(signature, elements to skip from the last 16-byte boundary, which are a constexpr of the kernel)."""
    plain = signature(tensor)
    return plain if plain is None or plain[-1] else (plain, skipped(tensor))


def _fwd_plan(logits, mu, log_sigma, y, reduction) -> Forward:
    """The cached plan for these arguments, built if missing. For plain tensors only (see `lean`)."""
    key = (_signature(logits), _signature(mu), _signature(log_sigma), signature(y), reduction)
    plan = _FORWARD.find(key)
    if plan is None:
        _check(logits, mu, log_sigma, y, reduction)
        plan = _FORWARD.keep(key, fwd_plan(logits, mu, log_sigma, y, reduction))
    return plan


def _bwd_plan(grad, logits, mu, log_sigma, y, reduction, needed) -> Backward:
    inputs = _signature(logits), _signature(mu), _signature(log_sigma), signature(y)
    key = (signature(grad), inputs, reduction, needed)
    plan = _BACKWARD.find(key)
    if plan is None:
        plan = _BACKWARD.keep(key, bwd_plan(grad, logits, mu, log_sigma, y, reduction, needed))
    return plan


class _GMMLogProb(torch.autograd.Function):
    """The autograd function of eager calls. The backward goes through torch.library where it is traced, transformed or
    itself differentiated."""

    @staticmethod
    def forward(ctx, logits, mu, log_sigma, y, plan, reduction):
        ctx.set_materialize_grads(False)
        ctx.reduction = reduction
        ctx.save_for_backward(logits, mu, log_sigma, y)
        return plan(logits, mu, log_sigma, y)

    @staticmethod
    def backward(ctx, grad):
        return *_gradients(ctx, grad), None, None


# Skips torch.autograd.Function.apply, which only adds the functorch checks: `lean` has excluded functorch.
_apply = super(torch.autograd.Function, _GMMLogProb).apply


def _gradients(ctx, grad):
    """The gradients of the four inputs, None for each that is not needed, or if the output has no gradient."""
    if grad is None:
        return None, None, None, None
    needed, inputs = ctx.needs_input_grad[:4], ctx.saved_tensors
    if lean(grad, *inputs) and not _grad_enabled():
        return _bwd_plan(grad, *inputs, ctx.reduction, needed)(grad, *inputs)
    grads = _bwd_op(grad, *inputs, ctx.reduction, list(needed))
    return tuple(grad if need else None for grad, need in zip(grads, needed, strict=True))


@torch.library.custom_op(f"{_NAMESPACE}::gmm_logprob_fwd", mutates_args=())
def _fwd_op(
    logits: torch.Tensor, mu: torch.Tensor, log_sigma: torch.Tensor, y: torch.Tensor, reduction: str
) -> torch.Tensor:
    make = _fwd_plan if lean(logits, mu, log_sigma, y) else fwd_plan
    return make(logits, mu, log_sigma, y, reduction)(logits, mu, log_sigma, y)


@_fwd_op.register_fake
def _(logits, mu, log_sigma, y, reduction):
    return y.new_empty(y.shape if reduction == "none" else ())


@torch.library.custom_op(f"{_NAMESPACE}::gmm_logprob_bwd", mutates_args=())
def _bwd_op(
    grad: torch.Tensor,
    logits: torch.Tensor,
    mu: torch.Tensor,
    log_sigma: torch.Tensor,
    y: torch.Tensor,
    reduction: str,
    needed: list[bool],
) -> list[torch.Tensor]:
    inputs = logits, mu, log_sigma, y
    make = _bwd_plan if lean(grad, *inputs) else bwd_plan
    grads = make(grad, *inputs, reduction, tuple(needed))(grad, *inputs)
    # An op may not return None among tensors: a gradient that is not needed is an empty tensor.
    return [logits.new_empty(0) if grad is None else grad for grad in grads]


@_bwd_op.register_fake
def _(grad, logits, mu, log_sigma, y, reduction, needed):
    inputs = (logits, mu, log_sigma, y)
    return [x.new_empty(x.shape if need else 0) for x, need in zip(inputs, needed, strict=True)]


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    *tensors, ctx.reduction = inputs
    ctx.save_for_backward(*tensors)


def _autograd(ctx, grad):
    return *_gradients(ctx, grad), None


_fwd_op.register_autograd(_autograd, setup_context=_save)

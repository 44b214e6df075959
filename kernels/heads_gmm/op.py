"""The public function: argument checks, the eager fast path, registration with torch.library, autograd."""

from __future__ import annotations

import torch

from . import configs
from .checks import FLOATS, kind, no_tangent, runnable
from .launch import Plans, lean, signature
from .plans import BACKENDS, REDUCTIONS, Gradients, Needs, bwd_plan, fwd_plan

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
SAVES = ("input", "parameters", "auto")
MAX_ROWS = 2**31 - 1
MAX_HEADS = 128  # the backward keeps all heads of a row in registers

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")
_FORWARD, _BACKWARD = Plans(), Plans()

Optional = torch.Tensor | None


def heads_gmm(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "silu",
    reduction: str = "mean",
    *,
    save: str = "auto",
    backend: str = "auto",
) -> torch.Tensor:
    """Computes the negative log-likelihood of y under a mixture of K Gaussians. K feed-forward layers (heads) of x
    compute the parameters of the mixture.

        (logit_g, mu_g, log_sigma_g) = w2[g] · act(w1[g] · x) + bias[g]
        loss = −logsumexp_g( log_softmax(logit)_g − ½ z_g² − log_sigma_g − ½ log 2π ),   z_g = (y − mu_g) / sigma_g

    Accumulation is in fp32 (fp32 operands are not rounded to tf32); act(...) is rounded to the dtype of x, the
    parameters are not. Differentiable once, in all tensors; the gradients of the parameters are rounded to the dtype of
    x, as in PyTorch. All sums have a fixed order: repeated runs agree bit for bit. The hidden is never in memory; its
    gradient is, for at most 8448 rows at a time. The parameters of all rows are in memory only if they are saved
    (`save`). Valid for |log_sigma| up to 87, above which sigma or its inverse overflows in fp32. A component whose
    logit is −inf has weight 0; a row whose logits are all −inf is NaN, as in PyTorch.

    x           [..., D], float32, float16 or bfloat16, fewer than 2^31 rows, any strides. It is read in place if its
                leading dimensions flatten to one stride, else copied.
    w1          [K, H, D], dtype of x, 1 <= K <= 128, any strides
    w2          [K, 3, H], likewise: logit, mean, logarithm of the standard deviation
    y           [...], the leading dimensions of x, dtype of x or float32, any strides
    bias        [K, 3], dtype of x or float32, any strides, or None
    activation  "silu", "gelu", "gelu_tanh" or "relu"
    reduction   "mean" or "sum" over all rows, a scalar, or "none". Without rows the mean is NaN.
    save        the tensors saved for the backward: "input" saves only the arguments; "parameters" also saves those of
                the mixture, 12 K bytes a row, which the backward then need not recompute; "auto" saves them if they
                need at most an eighth of the bytes of x (`configs.pick_save`)
    backend     of the forward: "triton", "cuda" (CUDA C++, compiled by CuPy, on compute capability 9.0; requires
                float16 or bfloat16, D at most 512, rows of x and w1 that are contiguous and on 16-byte boundaries), or
                "auto": "cuda" where it can run and is faster (`configs.pick_backend`), else "triton"

    Returns the loss in float32: a scalar, or [...] for "none".

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or option, RuntimeError for a CPU tensor
    outside Triton's interpreter and for backend="cuda" where it cannot run, NotImplementedError for a forward-mode
    tangent.

    Source: Bishop 1994, Mixture Density Networks, equations 22 to 24, with logarithms of the standard deviations.
    """
    # `lean` accepts None, which is valid for the optional operand only: bias.
    if lean(x, w1, w2, y, bias) and w1 is not None and w2 is not None and y is not None:
        recorded = torch.is_grad_enabled() and (
            x.requires_grad
            or w1.requires_grad
            or w2.requires_grad
            or y.requires_grad
            or (bias is not None and bias.requires_grad)
        )
        plan = _fwd_plan(x, w1, w2, y, bias, activation, reduction, save, backend, recorded)
        if recorded:
            return _apply(x, w1, w2, y, bias, plan, activation, reduction)
        return plan(x, w1, w2, y, bias)[0]
    _check(x, w1, w2, y, bias, activation, reduction, save, backend)
    no_tangent("heads_gmm", x, w1, w2, y, bias)
    keep = configs.pick_save(save, w1.shape[0], x.shape[-1], x.dtype)
    return _fwd_op(x, w1, w2, y, bias, activation, reduction, keep, backend)[0]


def _check(x, w1, w2, y, bias, activation, reduction, save, backend) -> None:
    if not isinstance(x, torch.Tensor) or x.dtype not in FLOATS:
        raise TypeError(f"heads_gmm: x must be a tensor of float32, float16 or bfloat16, got {kind(x)}")
    if x.dim() == 0 or x.shape[:-1].numel() > MAX_ROWS:
        raise ValueError(f"heads_gmm: x must be [..., D] with less than 2^31 rows, got shape {tuple(x.shape)}")
    for name, tensor in (("w1", w1), ("w2", w2)):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != x.dtype:
            raise TypeError(f"heads_gmm: {name} must be a tensor of x's dtype {x.dtype}, got {kind(tensor)}")
    wide = {"y": y} if bias is None else {"y": y, "bias": bias}
    for name, tensor in wide.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in (x.dtype, torch.float32):
            raise TypeError(f"heads_gmm: {name} must be a tensor of x's dtype {x.dtype} or float32, got {kind(tensor)}")
    if w1.dim() != 3 or w1.shape[2] != x.shape[-1] or not 1 <= w1.shape[0] <= MAX_HEADS:
        expected = f"[K, H, {x.shape[-1]}] like x's rows, with 1 <= K <= {MAX_HEADS}"
        raise ValueError(f"heads_gmm: w1 must be {expected}, got {tuple(w1.shape)}")
    heads, hidden = w1.shape[:2]
    shapes = {"w2": (w2, (heads, 3, hidden)), "y": (y, x.shape[:-1])}
    if bias is not None:
        shapes["bias"] = bias, (heads, 3)
    for name, (tensor, shape) in shapes.items():
        if tensor.shape != shape:
            raise ValueError(f"heads_gmm: {name} must be {tuple(shape)}, got {tuple(tensor.shape)}")
    for name, tensor in {"w1": w1, "w2": w2, **wide}.items():
        if tensor.device != x.device:
            raise ValueError(f"heads_gmm: {name} must be on x's device {x.device}, got {tensor.device}")
    for name, value, allowed in (
        ("activation", activation, ACTIVATIONS),
        ("reduction", reduction, REDUCTIONS),
        ("save", save, SAVES),
        ("backend", backend, BACKENDS),
    ):
        if value not in allowed:
            raise ValueError(f"heads_gmm: {name} must be one of {', '.join(allowed)}, got {value!r}")
    runnable("heads_gmm", "x", x)


def _fwd_plan(x, w1, w2, y, bias, activation, reduction, save, backend, recorded):
    """The cached plan for these arguments. Only for plain tensors: the key does not describe others completely."""
    key = (*map(signature, (x, w1, w2, y, bias)), activation, reduction, save, backend, recorded)
    plan = _FORWARD.find(key)
    if plan is None:
        _check(x, w1, w2, y, bias, activation, reduction, save, backend)
        keep = recorded and configs.pick_save(save, w1.shape[0], x.shape[-1], x.dtype)
        plan = _FORWARD.keep(key, fwd_plan(x, w1, w2, y, bias, activation, reduction, keep, backend))
    return plan


def _backward(tensors, activation: str, reduction: str, needs: Needs) -> Gradients:
    """The gradients, given `tensors` = (dloss, x, w1, w2, y, bias, parameters)."""
    if not lean(*tensors):
        return bwd_plan(*tensors, activation=activation, reduction=reduction, needs=needs)(*tensors)
    key = (*map(signature, tensors), activation, reduction, needs)
    plan = _BACKWARD.find(key)
    if plan is None:
        plan = _BACKWARD.keep(key, bwd_plan(*tensors, activation=activation, reduction=reduction, needs=needs))
    return plan(*tensors)


def _gradients(ctx, dloss) -> Gradients:
    """The gradients, None where not needed. A tracer or transform of the call sees the custom op of the backward."""
    if dloss is None:
        return None, None, None, None, None
    tensors = (dloss, *ctx.saved_tensors)
    x_needs, w1_needs, w2_needs, y_needs, bias_needs = ctx.needs_input_grad[:5]
    needs = x_needs, w1_needs, w2_needs, y_needs, bias_needs
    if lean(*tensors) and not torch.is_grad_enabled():
        return _backward(tensors, ctx.activation, ctx.reduction, needs)
    grads = _bwd_op(*tensors, ctx.activation, ctx.reduction, *needs)
    dx, dw1, dw2, dy, dbias = (grad if need else None for grad, need in zip(grads, needs, strict=True))
    return dx, dw1, dw2, dy, dbias


class _HeadsGMM(torch.autograd.Function):
    """The autograd function of eager calls. Its backward uses the custom op if it is traced, transformed or itself
    differentiated."""

    @staticmethod
    def forward(ctx, x, w1, w2, y, bias, plan, activation, reduction):
        ctx.set_materialize_grads(False)
        ctx.activation, ctx.reduction = activation, reduction
        loss, parameters = plan(x, w1, w2, y, bias)
        ctx.save_for_backward(x, w1, w2, y, bias, parameters)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        return (*_gradients(ctx, dloss), None, None, None)


# Skips the functorch handling of torch.autograd.Function.apply: `lean` has checked that no transform is active.
_apply = super(torch.autograd.Function, _HeadsGMM).apply


@torch.library.custom_op(f"{_NAMESPACE}::heads_gmm_fwd", mutates_args=())
def _fwd_op(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    reduction: str,
    keep: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and the parameters of the mixture: an empty tensor if they are not saved."""
    save = SAVES[keep]
    if lean(x, w1, w2, y, bias):
        plan = _fwd_plan(x, w1, w2, y, bias, activation, reduction, save, backend, True)
    else:
        plan = fwd_plan(x, w1, w2, y, bias, activation, reduction, keep, backend)
    loss, parameters = plan(x, w1, w2, y, bias)
    return loss, parameters if keep else x.new_empty(0, dtype=torch.float32)


@_fwd_op.register_fake
def _(x, w1, w2, y, bias, activation, reduction, keep, backend):
    shape = (x.shape[:-1].numel(), w1.shape[0], 3) if keep else (0,)
    loss = x.new_empty(y.shape if reduction == "none" else (), dtype=torch.float32)
    return loss, x.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op(f"{_NAMESPACE}::heads_gmm_bwd", mutates_args=())
def _bwd_op(
    dloss: torch.Tensor,
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None,
    parameters: torch.Tensor | None,
    activation: str,
    reduction: str,
    need_x: bool,
    need_w1: bool,
    need_w2: bool,
    need_y: bool,
    need_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    needs = need_x, need_w1, need_w2, need_y, need_bias
    grads = _backward((dloss, x, w1, w2, y, bias, parameters), activation, reduction, needs)
    dx, dw1, dw2, dy, dbias = (x.new_empty(0) if grad is None else grad for grad in grads)
    return dx, dw1, dw2, dy, dbias


@_bwd_op.register_fake
def _(dloss, x, w1, w2, y, bias, parameters, activation, reduction, *needs):
    likes = x, w1, w2, y, x.new_empty(0) if bias is None else bias
    return tuple(
        like.new_empty(like.shape) if need else x.new_empty(0) for like, need in zip(likes, needs, strict=True)
    )


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    *tensors, ctx.activation, ctx.reduction, keep, _ = inputs
    parameters = output[1]
    if keep:
        ctx.mark_non_differentiable(parameters)
    ctx.save_for_backward(*tensors, parameters if keep else None)


def _autograd(ctx, dloss, _):
    return (*_gradients(ctx, dloss), None, None, None, None)


_fwd_op.register_autograd(_autograd, setup_context=_save)

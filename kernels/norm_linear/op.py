"""The public function: checks, the lean eager call, registration with torch.library, autograd."""

from __future__ import annotations

import torch

from .activation import ACTIVATIONS
from .checks import FLOATS, kind, no_tangent, runnable
from .launch import Plans, lean, signature
from .plans import Gradients, Made, Needs, bwd_plan, fwd_plan

MAX_SIZE = 2**31 - 512  # tile coordinates have 32 bits, also those of the last tile's end

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")
_FORWARD, _BACKWARD = Plans(), Plans()


def norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    activation: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4) and a linear layer without a bias, in one kernel.

        h = x + residual                                       (x alone without a residual), rounded to x's dtype
        n = h / sqrt(mean(h²) + eps) · norm_weight
        y = act(n · weightᵀ)

    Statistics and sums are fp32 (fp32 operands are not rounded to tf32). Differentiable, once, in x, norm_weight,
    weight and residual. Everything is summed in a fixed order: repeated runs agree bit for bit. It is for few rows,
    where launches are what takes the time; of many, each row of tiles computes the statistics again.

    x            [..., D], float32, float16 or bfloat16, any strides. Rows are read in place where the leading
                 dimensions flatten to one stride and the last stride is 1; otherwise they are copied first
    norm_weight  [D], floating point; may be of another dtype than x
    weight       [N, D], dtype of x, any strides, as torch.nn.Linear has it. Rows, D and N are at most 2^31 - 512
    residual     shape and dtype of x
    activation   None, "silu", "gelu", "gelu_tanh", "relu" or "relu_sq", the square of relu

    The gradient of x is made of y before the activation, in x's dtype: where that is not finite, in fp16 beyond 65504,
    neither is the gradient of its row.

    Returns y [..., N], in dtype of x, contiguous; with a residual (y, h), where h is the next layer's residual.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or activation, RuntimeError for a CPU
    tensor outside Triton's interpreter.
    """
    # `lean` takes None for an operand that may be left out, which these two are not.
    if lean(x, norm_weight, weight, residual) and norm_weight is not None and weight is not None:
        keep = torch.is_grad_enabled() and (
            x.requires_grad
            or norm_weight.requires_grad
            or weight.requires_grad
            or (residual is not None and residual.requires_grad)
        )
        plan = _fwd_plan(x, norm_weight, weight, residual, eps, activation, keep)
        if keep:
            return _apply(x, norm_weight, weight, residual, plan, activation)
        made = plan(x, norm_weight, weight, residual)
        return made.y if residual is None else (made.y, made.h)
    _check("norm_linear", x, norm_weight, weight, residual, eps, activation)
    no_tangent("norm_linear", x, norm_weight, weight, residual)
    tensors = x, norm_weight, weight, residual
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    y, h, *_ = _fwd_op(*tensors, eps, activation, keep)
    return y if residual is None else (y, h)


def _check(op, x, norm_weight, weight, residual, eps, activation) -> None:
    if not isinstance(x, torch.Tensor) or x.dtype not in FLOATS:
        raise TypeError(f"{op}: x must be a tensor of float32, float16 or bfloat16, got {kind(x)}")
    if x.dim() == 0 or not 1 <= x.shape[-1] <= MAX_SIZE or x.shape[:-1].numel() > MAX_SIZE:
        wanted = f"[..., D] with D at least 1, and D and the number of rows at most {MAX_SIZE}"
        raise ValueError(f"{op}: x must be {wanted}, got shape {tuple(x.shape)}")
    if not isinstance(norm_weight, torch.Tensor) or norm_weight.dtype not in FLOATS:
        raise TypeError(f"{op}: norm_weight must be a tensor of float32, float16 or bfloat16, got {kind(norm_weight)}")
    if norm_weight.shape != x.shape[-1:]:
        raise ValueError(f"{op}: norm_weight must be [{x.shape[-1]}] like x's rows, got {tuple(norm_weight.shape)}")
    if not isinstance(weight, torch.Tensor) or weight.dtype != x.dtype:
        raise TypeError(f"{op}: weight must be a tensor of x's dtype {x.dtype}, got {kind(weight)}")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or not 1 <= weight.shape[0] <= MAX_SIZE:
        wanted = f"[N, {x.shape[-1]}] like x's rows with N from 1 to {MAX_SIZE}"
        raise ValueError(f"{op}: weight must be {wanted}, got {tuple(weight.shape)}")
    if residual is not None:
        if not isinstance(residual, torch.Tensor) or residual.dtype != x.dtype:
            raise TypeError(f"{op}: residual must be a tensor of x's dtype {x.dtype}, got {kind(residual)}")
        if residual.shape != x.shape:
            raise ValueError(f"{op}: residual must have x's shape {tuple(x.shape)}, got {tuple(residual.shape)}")
    for name, tensor in (("norm_weight", norm_weight), ("weight", weight), ("residual", residual)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{op}: {name} must be on x's device {x.device}, got {tensor.device}")
    if not isinstance(eps, int | float):
        raise TypeError(f"{op}: eps must be a number, got {kind(eps)}")
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be None or one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    runnable(op, "x", x)


def _fwd_plan(x, norm_weight, weight, residual, eps, activation, keep, op="norm_linear"):
    """The plan for these arguments, made and kept if it is missing. For plain tensors only (see `lean`): for others the
    key does not hold all that a plan depends on."""
    tensors = signature(x), signature(norm_weight), signature(weight), signature(residual)
    key = tensors, eps, activation, keep
    plan = _FORWARD.find(key)
    if plan is None:
        _check(op, x, norm_weight, weight, residual, eps, activation)
        plan = _FORWARD.keep(key, fwd_plan(x, norm_weight, weight, residual, eps, activation, keep))
    return plan


def _backward(dy, dh, pre, h, rstd, normed, norm_weight, weight, activation: str | None, needs: Needs) -> Gradients:
    """normed and rstd need no key: they are as the forward made them."""
    tensors = dy, dh, pre, h, norm_weight, weight
    if not lean(*tensors, rstd, normed):
        plan = bwd_plan(*tensors, activation, needs)
    else:
        key = (*map(signature, tensors), activation, needs)
        plan = _BACKWARD.find(key)
        if plan is None:
            plan = _BACKWARD.keep(key, bwd_plan(*tensors, activation, needs))
    return plan(dy, dh, pre, h, rstd, normed, norm_weight, weight)


class _NormLinear(torch.autograd.Function):
    """Autograd of eager calls. Its backward goes through torch.library where it is traced, transformed or itself
    differentiated."""

    @staticmethod
    def forward(ctx, x, norm_weight, weight, residual, plan, activation):
        y, h, pre, normed, rstd = plan(x, norm_weight, weight, residual)
        ctx.set_materialize_grads(False)
        ctx.activation = activation
        ctx.save_for_backward(y if pre is None else pre, h, rstd, normed, norm_weight, weight)
        return y if residual is None else (y, h)

    @staticmethod
    def backward(ctx, dy, dh=None):
        need_x, need_gain, need_w, need_residual, *_ = ctx.needs_input_grad
        dx, dgain, dw = _gradients(ctx, dy, dh, Needs(need_x or need_residual, need_gain, need_w))
        return dx if need_x else None, dgain, dw, dx if need_residual else None, None, None


# torch.autograd.Function.apply handles functorch before it calls this; `lean` has ruled functorch out.
_apply = super(torch.autograd.Function, _NormLinear).apply


def _gradients(ctx, dy, dh, needs: Needs):
    """Those of x, norm_weight and weight; each is None where it is not needed, or is zero."""
    if dy is None:  # y was not used: h's gradient passes through
        return (dh if needs.x else None), None, None
    pre, h, rstd, normed, norm_weight, weight = ctx.saved_tensors
    tensors = dy, dh if needs.x else None, pre, h, rstd, normed, norm_weight, weight
    if lean(*tensors) and not torch.is_grad_enabled():
        dx, _, dgain, dw = _backward(*tensors, ctx.activation, needs)
        return dx, dgain, dw
    grads = _bwd_op(*tensors, ctx.activation, *needs)
    return tuple(grad if need else None for grad, need in zip(grads, needs, strict=True))


@torch.library.custom_op(f"{_NAMESPACE}::norm_linear_fwd", mutates_args=())
def _fwd_op(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    eps: float,
    activation: str | None,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tensors = x, norm_weight, weight, residual
    plan = (_fwd_plan if lean(*tensors) else fwd_plan)(*tensors, eps, activation, keep)
    y, h, *kept = plan(*tensors)
    return y, x.new_empty(0) if residual is None else h, *(x.new_empty(0) if t is None else t for t in kept)  # type: ignore[return-value]


@_fwd_op.register_fake
def _(x, norm_weight, weight, residual, eps, activation, keep):
    y_shape = (*x.shape[:-1], weight.shape[0])
    h = x.new_empty(0 if residual is None else x.shape)
    pre = x.new_empty(y_shape if keep and activation is not None else 0)
    rstd = x.new_empty(x.shape[:-1].numel() if keep else 0, dtype=torch.float32 if keep else x.dtype)
    return x.new_empty(y_shape), h, pre, x.new_empty(x.shape if keep else 0), rstd


@torch.library.custom_op(f"{_NAMESPACE}::norm_linear_bwd", mutates_args=())
def _bwd_op(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    pre: torch.Tensor,
    h: torch.Tensor,
    rstd: torch.Tensor,
    normed: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    activation: str | None,
    need_x: bool,
    need_gain: bool,
    need_w: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    needs = Needs(need_x, need_gain, need_w)
    dx, _, dgain, dw = _backward(dy, dh, pre, h, rstd, normed, norm_weight, weight, activation, needs)
    return tuple(h.new_empty(0) if grad is None else grad for grad in (dx, dgain, dw))  # type: ignore[return-value]


@_bwd_op.register_fake
def _(dy, dh, pre, h, rstd, normed, norm_weight, weight, activation, need_x, need_gain, need_w):
    dgain = norm_weight.new_empty(norm_weight.shape) if need_gain else h.new_empty(0)
    return h.new_empty(h.shape if need_x else 0), dgain, h.new_empty(weight.shape if need_w else 0)


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    x, norm_weight, weight, residual, _, ctx.activation, _ = inputs
    y, h, pre, normed, rstd = output
    ctx.mark_non_differentiable(pre, normed, rstd, *(() if residual is not None else (h,)))
    pre, h = y if ctx.activation is None else pre, x if residual is None else h
    ctx.save_for_backward(pre, h, rstd, normed, norm_weight, weight)


def _autograd(ctx, dy, dh, _pre, _normed, _rstd):
    need_x, need_gain, need_w, need_residual, *_ = ctx.needs_input_grad
    dx, dgain, dw = _gradients(ctx, dy, dh, Needs(need_x or need_residual, need_gain, need_w))
    return dx if need_x else None, dgain, dw, dx if need_residual else None, None, None, None


_fwd_op.register_autograd(_autograd, setup_context=_save)


def forward_made(x, norm_weight, weight, residual, eps, activation) -> Made:
    """What a forward that is differentiated makes, by torch.library; h is x itself without a residual."""
    y, h, pre, normed, rstd = _fwd_op(x, norm_weight, weight, residual, eps, activation, True)
    return Made(y, x if residual is None else h, None if activation is None else pre, normed, rstd)

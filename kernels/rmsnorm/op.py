"""The public function rmsnorm: checks, the fast path of eager calls, registration with torch.library, autograd."""

from __future__ import annotations

import torch

from .checks import FLOATS, kind, no_tangent, runnable
from .launch import Plans, lean, signature
from .plans import BACKENDS, bwd_plan, fwd_plan

MAX_DIM = 65536

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")
_FORWARD, _BACKWARD = Plans(), Plans()


def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    backend: str = "auto",
    *,
    return_h: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes root-mean-square normalisation over the last dimension.

        h = x + residual                         (x alone without a residual), rounded to x's dtype
        y = h / sqrt(mean(h²) + eps) · (weight + weight_offset)

    All arithmetic is fp32. Differentiable in x, weight and residual; dW is summed in fp32 in a fixed order, so that
    repeated runs agree bit for bit.

    x              [..., D] with 1 <= D <= 65536 (or no element at all), fp32, fp16 or bf16, any strides, at most
                   2^31 - 2048 rows. Rows are read in place if the leading dimensions flatten to one stride and the last
                   stride is 1; otherwise x is copied first.
    weight         [D], floating point; its dtype may differ from that of x
    residual       shape and dtype of x
    weight_offset  added to the weight; 1 is Gemma's convention
    backend        of the forward: "triton", "cuda" (CUDA C++, compiled by CuPy: rows of 16 385 to 65 536 elements on
                   16-byte boundaries, on compute capability 9.0, a weight of x's dtype), or "auto", which uses "cuda"
                   where it can
    return_h       also return h if there is no residual: it is then x, or a view of x. Use h in place of x in a later
                   residual addition: the kernel of the backward then adds the gradient of h, without a separate pass.

    Returns y, in shape and dtype of x, contiguous; with a residual (y, h), where h is the next layer's residual.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or backend, RuntimeError for a CPU tensor
    outside Triton's interpreter and for backend="cuda" where it cannot run.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4.
    """
    if lean(x, weight, residual):
        save = torch.is_grad_enabled() and (
            x.requires_grad
            or (weight is not None and weight.requires_grad)
            or (residual is not None and residual.requires_grad)
        )
        plan = _fwd_plan(x, weight, residual, eps, weight_offset, save, backend)
        if save:
            passed = return_h and residual is None and x.requires_grad
            made = _apply(x, weight, residual, plan, weight_offset, passed)
            return (made, x) if return_h and residual is None and not passed else made
        y, h, _ = plan(x, weight, residual)
        if residual is None:
            return (y, x) if return_h else y
        return y, h
    _check(x, weight, residual, eps, weight_offset, backend)
    no_tangent("rmsnorm", x, weight, residual)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, residual))
    if residual is None:
        y = _fwd_op(x, weight, eps, weight_offset, save, backend)[0]
        return (y, x) if return_h else y
    y, h, _ = _add_fwd_op(x, residual, weight, eps, weight_offset, save, backend)
    return y, h


def _check(x, weight, residual, eps, weight_offset, backend) -> None:
    if not isinstance(x, torch.Tensor) or x.dtype not in FLOATS:
        raise TypeError(f"rmsnorm: x must be a tensor of float32, float16 or bfloat16, got {kind(x)}")
    if x.dim() == 0 or x.shape[-1] > MAX_DIM:
        raise ValueError(f"rmsnorm: x must be [..., D] with D <= {MAX_DIM}, got shape {tuple(x.shape)}")
    if weight is not None:
        if not isinstance(weight, torch.Tensor) or weight.dtype not in FLOATS:
            raise TypeError(f"rmsnorm: weight must be a tensor of float32, float16 or bfloat16, got {kind(weight)}")
        if weight.shape != x.shape[-1:]:
            raise ValueError(f"rmsnorm: weight must be [{x.shape[-1]}] like x's rows, got {tuple(weight.shape)}")
        if weight.device != x.device:
            raise ValueError(f"rmsnorm: weight must be on x's device {x.device}, got {weight.device}")
    if residual is not None:
        if not isinstance(residual, torch.Tensor) or residual.dtype != x.dtype:
            raise TypeError(f"rmsnorm: residual must be a tensor of x's dtype {x.dtype}, got {kind(residual)}")
        if residual.shape != x.shape:
            raise ValueError(f"rmsnorm: residual must have x's shape {tuple(x.shape)}, got {tuple(residual.shape)}")
        if residual.device != x.device:
            raise ValueError(f"rmsnorm: residual must be on x's device {x.device}, got {residual.device}")
    for name, number in (("eps", eps), ("weight_offset", weight_offset)):
        if not isinstance(number, int | float):
            raise TypeError(f"rmsnorm: {name} must be a number, got {kind(number)}")
    if backend not in BACKENDS:
        raise ValueError(f"rmsnorm: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    runnable("rmsnorm", "x", x)


def _fwd_plan(x, weight, residual, eps, weight_offset, save, backend):
    """The cached plan for these arguments, built if missing. For plain tensors only (see `lean`): for others the key
    does not contain everything that a plan depends on."""
    key = (signature(x), signature(weight), signature(residual), eps, weight_offset, save, backend)
    plan = _FORWARD.find(key)
    if plan is None:
        _check(x, weight, residual, eps, weight_offset, backend)
        plan = _FORWARD.keep(key, fwd_plan(x, weight, residual, eps, weight_offset, save, backend))
    return plan


def _forward(x, weight, residual, eps, weight_offset, save, backend):
    make = _fwd_plan if lean(x, weight, residual) else fwd_plan
    return make(x, weight, residual, eps, weight_offset, save, backend)(x, weight, residual)


def _backward(dy, dh, h, rstd, weight, weight_offset, need_dx, need_dw):
    if not lean(dy, dh, h, rstd, weight):
        return bwd_plan(dy, dh, h, weight, weight_offset, need_dx, need_dw)(dy, dh, h, rstd, weight)
    key = (*map(signature, (dy, dh, h, rstd, weight)), weight_offset, need_dx, need_dw)
    plan = _BACKWARD.find(key)
    if plan is None:
        plan = _BACKWARD.keep(key, bwd_plan(dy, dh, h, weight, weight_offset, need_dx, need_dw))
    return plan(dy, dh, h, rstd, weight)


class _RMSNorm(torch.autograd.Function):
    """The autograd function of eager calls. The backward goes through torch.library where it is traced, transformed or
    itself differentiated."""

    @staticmethod
    def forward(ctx, x, weight, residual, plan, weight_offset, passed):
        y, h, rstd = plan(x, weight, residual)
        ctx.set_materialize_grads(False)
        ctx.weight_offset = weight_offset
        ctx.save_for_backward(h, weight, rstd)
        if residual is not None:
            return y, h
        return (y, x) if passed else y

    @staticmethod
    def backward(ctx, dy, dh=None):
        need_dx, need_dw, need_dr, *_ = ctx.needs_input_grad
        d, dw = _gradients(ctx, dy, dh, need_dx or need_dr, need_dw)
        return d if need_dx else None, dw, d if need_dr else None, None, None, None


# Skips torch.autograd.Function.apply, which only adds the functorch checks: `lean` has excluded functorch.
_apply = super(torch.autograd.Function, _RMSNorm).apply


def _gradients(ctx, dy, dh, need_dh, need_dw):
    """(dh, dw), None for each that is not needed or is zero."""
    if dy is None:  # y was not used: the gradient of h passes through unchanged
        return (dh if need_dh else None), None
    h, weight, rstd = ctx.saved_tensors
    dh = dh if need_dh else None
    if lean(dy, dh, h, rstd, weight) and not torch.is_grad_enabled():
        return _backward(dy, dh, h, rstd, weight, ctx.weight_offset, need_dh, need_dw)
    d, dw = _bwd_op(dy, dh, h, rstd, weight, ctx.weight_offset, need_dh, need_dw)
    return d if need_dh else None, dw if need_dw else None


@torch.library.custom_op(f"{_NAMESPACE}::rmsnorm_fwd", mutates_args=())
def _fwd_op(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_offset: float, save_rstd: bool, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    y, _, rstd = _forward(x, weight, None, eps, weight_offset, save_rstd, backend)
    return y, _fake_rstd(x, False) if rstd is None else rstd


@_fwd_op.register_fake
def _(x, weight, eps, weight_offset, save_rstd, backend):
    return x.new_empty(x.shape), _fake_rstd(x, save_rstd)


@torch.library.custom_op(f"{_NAMESPACE}::rmsnorm_add_fwd", mutates_args=())
def _add_fwd_op(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    save_rstd: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, h, rstd = _forward(x, weight, residual, eps, weight_offset, save_rstd, backend)
    return y, h, _fake_rstd(x, False) if rstd is None else rstd


@_add_fwd_op.register_fake
def _(x, residual, weight, eps, weight_offset, save_rstd, backend):
    return x.new_empty(x.shape), x.new_empty(x.shape), _fake_rstd(x, save_rstd)


@torch.library.custom_op(f"{_NAMESPACE}::rmsnorm_bwd", mutates_args=())
def _bwd_op(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    weight_offset: float,
    need_dx: bool,
    need_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    dx, dw = _backward(dy, dh, h, rstd, weight, weight_offset, need_dx, need_dw)
    return h.new_empty(0) if dx is None else dx, h.new_empty(0) if dw is None else dw


@_bwd_op.register_fake
def _(dy, dh, h, rstd, weight, weight_offset, need_dx, need_dw):
    return h.new_empty(h.shape if need_dx else 0), weight.new_empty(weight.shape) if need_dw else h.new_empty(0)


def _fake_rstd(x: torch.Tensor, save: bool) -> torch.Tensor:
    return x.new_empty(x.shape[:-1].numel() if save else 0, dtype=torch.float32)


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)  # rstd has no gradient, so no kernel needs to fill one with zeros
    x, weight, _, ctx.weight_offset, *_ = inputs
    ctx.save_for_backward(x, weight, output[1])


def _autograd(ctx, dy, _drstd):
    need_dx, need_dw = ctx.needs_input_grad[:2]
    dx, dw = _gradients(ctx, dy, None, need_dx, need_dw)
    return dx, dw, None, None, None, None


def _add_save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    _, _, weight, _, ctx.weight_offset, *_ = inputs
    ctx.save_for_backward(output[1], weight, output[2])


def _add_autograd(ctx, dy, dh, _drstd):
    need_dx, need_dr, need_dw = ctx.needs_input_grad[:3]
    d, dw = _gradients(ctx, dy, dh, need_dx or need_dr, need_dw)
    return d if need_dx else None, d if need_dr else None, dw, None, None, None, None


_fwd_op.register_autograd(_autograd, setup_context=_save)
_add_fwd_op.register_autograd(_add_autograd, setup_context=_add_save)

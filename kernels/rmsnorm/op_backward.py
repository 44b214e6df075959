"""The forward and the backward of rmsnorm as separate functions, for an autograd function that fuses more than the
norm."""

from __future__ import annotations

import torch

from .checks import FLOATS, kind, runnable
from .launch import Plans, lean, signature
from .op import MAX_DIM, _add_fwd_op, _check, _fwd_op, _fwd_plan
from .plans import bwd_plan, partial_sums

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")
_PLANS = Plans()


def rmsnorm_forward(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes `rmsnorm` without autograd, with the results that `rmsnorm_backward` needs.

    Formula and arguments are those of `rmsnorm`.

    Returns (y, h, rstd). h is x + residual, or x itself without a residual. rstd is 1 / sqrt(mean(h²) + eps), fp32, one
    element per row.

    Raises as `rmsnorm`, and RuntimeError for a tensor that requires grad while grad mode is on.
    """
    _refuse_grad("rmsnorm_forward", x=x, weight=weight, residual=residual)
    if lean(x, weight, residual):
        return _fwd_plan(x, weight, residual, eps, weight_offset, True, "auto")(x, weight, residual)
    _check(x, weight, residual, eps, weight_offset, "auto")
    if residual is None:
        y, rstd = _fwd_op(x, weight, eps, weight_offset, True, "auto")
        return y, x, rstd
    return _add_fwd_op(x, residual, weight, eps, weight_offset, True, "auto")


def rmsnorm_backward(
    dy: torch.Tensor,
    h: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    dh: torch.Tensor | None = None,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the gradient of x, which is also that of residual, and partial sums of the weight's gradient.

        g = dy · (weight + weight_offset)     x̂ = h · rstd
        dx = rstd · (g − x̂ · mean(g · x̂)) + dh        dw = Σ dy · x̂ over all rows = Σ of the partial sums

    The caller can then sum the weight gradients of many layers in one launch, instead of one launch per layer.

    dy        [..., D], incoming gradient of y; fp32, fp16 or bf16
    h, rstd   as returned by `rmsnorm_forward`; h has dy's shape and dtype
    weight    [D], as in the forward
    dh        incoming gradient of h, in its shape and dtype; None for 0

    Returns dx, in shape and dtype of h, contiguous, and the partial sums [P, D], fp32. P depends on shape, dtype and
    GPU. Each partial sum is over the rows of one CTA, in a fixed order.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device, RuntimeError for a CPU tensor outside
    Triton's interpreter and for a tensor that requires grad while grad mode is on.
    """
    _refuse_grad("rmsnorm_backward", dy=dy, h=h, weight=weight, dh=dh)
    if not lean(dy, h, rstd, weight, dh):
        _check_backward(dy, h, rstd, weight, dh, weight_offset)
        return _partial_op(dy, dh, h, rstd, weight, weight_offset)
    key = (*map(signature, (dy, dh, h, rstd, weight)), weight_offset)
    plan = _PLANS.find(key)
    if plan is None:
        _check_backward(dy, h, rstd, weight, dh, weight_offset)
        plan = _PLANS.keep(key, bwd_plan(dy, dh, h, weight, weight_offset, True, True, summed=False))
    return plan(dy, dh, h, rstd, weight)


def _refuse_grad(name: str, **tensors: torch.Tensor | None) -> None:
    if torch.is_grad_enabled():
        for label, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                raise RuntimeError(
                    f"{name}: {label} must not require grad, as {name} has no backward: use torch.no_grad()"
                )


def _check_backward(dy, h, rstd, weight, dh, weight_offset) -> None:
    name = "rmsnorm_backward"
    if not isinstance(h, torch.Tensor) or h.dtype not in FLOATS:
        raise TypeError(f"{name}: h must be a tensor of float32, float16 or bfloat16, got {kind(h)}")
    if h.dim() == 0 or h.shape[-1] > MAX_DIM:
        raise ValueError(f"{name}: h must be [..., D] with D <= {MAX_DIM}, got shape {tuple(h.shape)}")
    if not isinstance(weight, torch.Tensor) or weight.dtype not in FLOATS:
        raise TypeError(f"{name}: weight must be a tensor of float32, float16 or bfloat16, got {kind(weight)}")
    rows = torch.Size([h.shape[:-1].numel()])
    wanted = [("dy", dy, h.dtype, h.shape), ("rstd", rstd, torch.float32, rows)]
    wanted += [("weight", weight, weight.dtype, h.shape[-1:])]
    wanted += [] if dh is None else [("dh", dh, h.dtype, h.shape)]
    for label, tensor, dtype, shape in wanted:
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype:
            raise TypeError(f"{name}: {label} must be a tensor of {dtype}, got {kind(tensor)}")
        if tensor.shape != shape or tensor.device != h.device:
            given = f"{tuple(tensor.shape)} on {tensor.device}"
            raise ValueError(f"{name}: {label} must be {tuple(shape)} on {h.device}, got {given}")
    if not rstd.is_contiguous():
        raise ValueError(f"{name}: rstd must be contiguous, as rmsnorm_forward returns it, got {rstd.stride()}")
    if not isinstance(weight_offset, int | float):
        raise TypeError(f"{name}: weight_offset must be a number, got {kind(weight_offset)}")
    runnable(name, "h", h)


@torch.library.custom_op(f"{_NAMESPACE}::rmsnorm_bwd_partial", mutates_args=())
def _partial_op(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    weight_offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    plan = bwd_plan(dy, dh, h, weight, weight_offset, True, True, summed=False)
    return plan(dy, dh, h, rstd, weight)  # type: ignore[return-value]


@_partial_op.register_fake
def _(dy, dh, h, rstd, weight, weight_offset):
    return h.new_empty(h.shape), h.new_empty((partial_sums(h, dh), h.shape[-1]), dtype=torch.float32)

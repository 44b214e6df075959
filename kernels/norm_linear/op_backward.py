"""The two directions of norm_linear by themselves, for an autograd.Function that holds more than these layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .activation import ACTIVATIONS
from .checks import FLOATS, kind, runnable
from .launch import Plans, lean, signature
from .op import _check, _fwd_plan, forward_made
from .plans import ALIGNMENT, Gradients, Made, Needs, bwd_plan, partial_sums

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")
_PLANS = Plans()
_NEEDS = Needs(True, True, False)


def norm_linear_forward(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    activation: str | None = None,
    y: torch.Tensor | None = None,
    normed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`norm_linear` without autograd, with all that a gradient takes.

    y, normed  tensors to write these results to: contiguous, of their shape, x's dtype and device. None makes new ones.
               One that does not begin on a 16-byte boundary is written by a copy

    Returns (y, pre, h, normed, rstd). pre is y before the activation, and y itself without one; h is x + residual, and
    x itself without a residual; normed is the norm's result, of which weight's gradient is dpreᵀ · normed; rstd is
    1 / sqrt(mean(h²) + eps), fp32, one number a row.

    Other arguments and errors are those of `norm_linear`; and RuntimeError for a tensor that requires grad while grad
    mode is on.
    """
    name = "norm_linear_forward"
    _refuse_grad(name, x=x, norm_weight=norm_weight, weight=weight, residual=residual)
    tensors = x, norm_weight, weight, residual
    if lean(*tensors) and norm_weight is not None and weight is not None:
        plan = _fwd_plan(*tensors, eps, activation, True, name)
        if y is not None or normed is not None:
            _check_results(name, x, {"y": (y, (*x.shape[:-1], weight.shape[0])), "normed": (normed, x.shape)})
        made: Made = plan(*tensors, _aligned(y), _aligned(normed))
    else:
        _check(name, *tensors, eps, activation)
        _check_results(name, x, {"y": (y, (*x.shape[:-1], weight.shape[0])), "normed": (normed, x.shape)})
        made = forward_made(*tensors, eps, activation)
    assert made.normed is not None and made.rstd is not None
    written = _written(made.y, y)
    return written, written if made.pre is None else made.pre, made.h, _written(made.normed, normed), made.rstd


def norm_linear_backward(
    dy: torch.Tensor,
    pre: torch.Tensor,
    h: torch.Tensor,
    rstd: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    dh: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    dpre: torch.Tensor | None = None,
    through: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient of x and of residual, what weight's gradient takes, and partial sums of norm_weight's.

        dpre = dy · act'(pre)     dn = dpre · weight     x̂ = h · rstd
        dx = rstd · (dn · norm_weight − x̂ · mean(dn · norm_weight · x̂)) + dh
        dnorm_weight = Σ dn · x̂ over all rows = Σ of the partial sums          dweight = dpreᵀ · normed

    The weights' gradients of many layers are then computed together.

    dy           [..., N], gradient of y; fp32, fp16 or bf16
    pre, h, rstd what `norm_linear_forward` returned; pre and h of dy's dtype
    norm_weight, weight  as in the forward
    dh           gradient of h, like h; None is 0
    dpre         with an activation or `through`: where it is written to, contiguous, like pre; as `y` of the forward.
                 None makes a new tensor
    through      [M, N], dtype of dy, any strides: the weight of a linear layer that follows. Then dy [..., M] is the
                 gradient of y · throughᵀ, and act' is in the epilogue of dy · through

    Returns dx, like h, contiguous; dpre, which is dy itself without an activation and `through`; and the partial sums
    [P, D], fp32. P depends on shape, dtype and GPU, and each sum is over the rows of one CTA, in a fixed order.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or activation, RuntimeError for a CPU
    tensor outside Triton's interpreter and for a tensor that requires grad while grad mode is on.
    """
    name = "norm_linear_backward"
    _refuse_grad(name, dy=dy, pre=pre, h=h, norm_weight=norm_weight, weight=weight, dh=dh, through=through)
    tensors, given = (dy, dh, pre, h, norm_weight, weight), (dy, dh, pre, h, rstd, norm_weight, weight, through)
    same = activation is None and through is None
    if not lean(*given):
        _check_backward(*given, activation)
        _check_dpre(pre, dpre, same)
        dx, made, partial = _partial_op(*given, activation)
        return dx, dy if same else _written(made, dpre), partial
    key = (*map(signature, given), activation)
    plan = _PLANS.find(key)
    if plan is None:
        _check_backward(*given, activation)
        plan = _PLANS.keep(key, bwd_plan(*tensors, activation, _NEEDS, summed=False, through=through))
    if dpre is not None:
        _check_dpre(pre, dpre, same)
    found: Gradients = plan(dy, dh, pre, h, rstd, None, norm_weight, weight, _aligned(dpre), through)
    assert found.dx is not None and found.dpre is not None and found.dgain is not None
    return found.dx, dy if same else _written(found.dpre, dpre), found.dgain


def _aligned(out):
    """A tensor that a launch can write to, which a plan has for aligned ones; None for another."""
    return None if out is None or out.data_ptr() % ALIGNMENT else out


def _written(made: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """What was made, in `out` where that is given."""
    return made if out is None or out is made else out.copy_(made)


def _refuse_grad(name: str, **tensors: torch.Tensor | None) -> None:
    if torch.is_grad_enabled():
        for label, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                raise RuntimeError(f"{name}: has no gradient: {label} must not require grad, or use torch.no_grad()")


def _check_results(name: str, like, results: Mapping[str, tuple[torch.Tensor | None, tuple[int, ...]]]) -> None:
    """Tensors that are written to: what they are called, and the shape that they must have."""
    for label, (tensor, shape) in results.items():
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != like.dtype:
            raise TypeError(f"{name}: {label} must be a tensor of {like.dtype}, got {kind(tensor)}")
        if tensor.shape != shape or tensor.device != like.device or not tensor.is_contiguous():
            given = f"{tuple(tensor.shape)} on {tensor.device} with strides {tensor.stride()}"
            raise ValueError(f"{name}: {label} must be {tuple(shape)} on {like.device}, contiguous, got {given}")


def _check_dpre(pre, dpre, same: bool) -> None:
    name = "norm_linear_backward"
    if dpre is not None and same:
        wanted = "None without an activation and through, where it is dy"
        raise ValueError(f"{name}: dpre must be {wanted}, got {kind(dpre)}")
    _check_results(name, pre, {"dpre": (dpre, pre.shape)})


def _check_backward(dy, dh, pre, h, rstd, norm_weight, weight, through, activation) -> None:
    name = "norm_linear_backward"
    if not isinstance(h, torch.Tensor) or h.dtype not in FLOATS:
        raise TypeError(f"{name}: h must be a tensor of float32, float16 or bfloat16, got {kind(h)}")
    if h.dim() == 0 or h.shape[-1] < 1:
        raise ValueError(f"{name}: h must be [..., D] with D at least 1, got shape {tuple(h.shape)}")
    if not isinstance(norm_weight, torch.Tensor) or norm_weight.dtype not in FLOATS:
        raise TypeError(
            f"{name}: norm_weight must be a tensor of float32, float16 or bfloat16, got {kind(norm_weight)}"
        )
    if not isinstance(weight, torch.Tensor) or weight.dtype != h.dtype:
        raise TypeError(f"{name}: weight must be a tensor of h's dtype {h.dtype}, got {kind(weight)}")
    if weight.dim() != 2 or weight.shape[1] != h.shape[-1] or weight.shape[0] < 1:
        raise ValueError(f"{name}: weight must be [N, {h.shape[-1]}] like h's rows, got {tuple(weight.shape)}")
    if through is not None:
        if not isinstance(through, torch.Tensor) or through.dtype != h.dtype:
            raise TypeError(f"{name}: through must be a tensor of h's dtype {h.dtype}, got {kind(through)}")
        if through.dim() != 2 or through.shape[1] != weight.shape[0] or through.shape[0] < 1:
            columns = weight.shape[0]
            raise ValueError(f"{name}: through must be [M, {columns}] like weight's rows, got {tuple(through.shape)}")
        if through.device != h.device:
            raise ValueError(f"{name}: through must be on {h.device}, got {through.device}")
    y_shape = torch.Size((*h.shape[:-1], weight.shape[0]))
    dy_shape = y_shape if through is None else torch.Size((*h.shape[:-1], through.shape[0]))
    wanted = [("dy", dy, h.dtype, dy_shape), ("pre", pre, h.dtype, y_shape)]
    wanted += [("rstd", rstd, torch.float32, torch.Size([h.shape[:-1].numel()]))]
    wanted += [("norm_weight", norm_weight, norm_weight.dtype, h.shape[-1:]), ("weight", weight, h.dtype, weight.shape)]
    wanted += [] if dh is None else [("dh", dh, h.dtype, h.shape)]
    for label, tensor, dtype, shape in wanted:
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype:
            raise TypeError(f"{name}: {label} must be a tensor of {dtype}, got {kind(tensor)}")
        if tensor.shape != shape or tensor.device != h.device:
            given = f"{tuple(tensor.shape)} on {tensor.device}"
            raise ValueError(f"{name}: {label} must be {tuple(shape)} on {h.device}, got {given}")
    for label, tensor in (("pre", pre), ("rstd", rstd)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: {label} must be contiguous, as the forward returns it, got {tensor.stride()}")
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"{name}: activation must be None or one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    runnable(name, "h", h)


@torch.library.custom_op(f"{_NAMESPACE}::norm_linear_bwd_partial", mutates_args=())
def _partial_op(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    pre: torch.Tensor,
    h: torch.Tensor,
    rstd: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    through: torch.Tensor | None,
    activation: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    plan = bwd_plan(dy, dh, pre, h, norm_weight, weight, activation, _NEEDS, summed=False, through=through)
    dx, dpre, partial, _ = plan(dy, dh, pre, h, rstd, None, norm_weight, weight, None, through)
    assert dx is not None and dpre is not None and partial is not None
    return dx, h.new_empty(0) if activation is None and through is None else dpre, partial


@_partial_op.register_fake
def _(dy, dh, pre, h, rstd, norm_weight, weight, through, activation):
    same = activation is None and through is None
    partial = h.new_empty((partial_sums(h, weight, same), h.shape[-1]), dtype=torch.float32)
    return h.new_empty(h.shape), h.new_empty(0 if same else pre.shape), partial

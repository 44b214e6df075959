"""The public function: checks, registration with torch.library, autograd."""

from __future__ import annotations

import torch
import triton

from .kernel import rmsnorm_bwd, rmsnorm_fwd

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_DIM = 65536

# As @triton.jit decided it when the kernels were imported; torch.compile cannot trace the knob itself.
INTERPRETED: bool = triton.knobs.runtime.interpret

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")


def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Root-mean-square normalisation over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4).

        h = x + residual                         (x alone without a residual), rounded to x's dtype
        y = h / sqrt(mean(h²) + eps) · (weight + weight_offset)

    All arithmetic is fp32. weight_offset = 1 is Gemma's convention. Differentiable in x, weight and residual; dW is
    summed in fp32 in a fixed order, so that repeated runs agree bit for bit.

    x         [..., D] with 1 <= D <= 65536 (or no element at all), fp32, fp16 or bf16, any strides. Rows are read in
              place when the leading dimensions flatten to one stride and the last stride is 1; otherwise copied first.
    weight    [D], floating point; may be of another dtype than x
    residual  shape and dtype of x

    Returns y, in shape and dtype of x, contiguous; with a residual (y, h), where h is the next layer's residual.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device, RuntimeError for a CPU tensor outside
    Triton's interpreter.
    """
    _check(x, weight, residual)
    given = (x, weight, residual)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    if residual is None:
        return _fwd_op(x, weight, eps, weight_offset, save)[0]
    y, h, _ = _add_fwd_op(x, residual, weight, eps, weight_offset, save)
    return y, h


def _check(x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None) -> None:
    if not isinstance(x, torch.Tensor) or x.dtype not in DTYPES:
        raise TypeError(f"rmsnorm: x must be a tensor of float32, float16 or bfloat16, got {_kind(x)}")
    if x.dim() == 0 or x.shape[-1] > MAX_DIM:
        raise ValueError(f"rmsnorm: x must be [..., D] with D <= {MAX_DIM}, got shape {tuple(x.shape)}")
    if weight is not None:
        if not isinstance(weight, torch.Tensor) or weight.dtype not in DTYPES:
            raise TypeError(f"rmsnorm: weight must be a tensor of float32, float16 or bfloat16, got {_kind(weight)}")
        if weight.shape != x.shape[-1:]:
            raise ValueError(f"rmsnorm: weight must be [{x.shape[-1]}] like x's rows, got {tuple(weight.shape)}")
        if weight.device != x.device:
            raise ValueError(f"rmsnorm: weight must be on x's device {x.device}, got {weight.device}")
    if residual is not None:
        if not isinstance(residual, torch.Tensor) or residual.dtype != x.dtype:
            raise TypeError(f"rmsnorm: residual must be a tensor of x's dtype {x.dtype}, got {_kind(residual)}")
        if residual.shape != x.shape:
            raise ValueError(f"rmsnorm: residual must have x's shape {tuple(x.shape)}, got {tuple(residual.shape)}")
        if residual.device != x.device:
            raise ValueError(f"rmsnorm: residual must be on x's device {x.device}, got {residual.device}")
    if x.device.type == "cpu" and not INTERPRETED:
        raise RuntimeError("rmsnorm: x must be on a GPU; the CPU needs Triton's interpreter (TRITON_INTERPRET=1)")


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__


@torch.library.custom_op(f"{_NAMESPACE}::rmsnorm_fwd", mutates_args=())
def _fwd_op(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_offset: float, save_rstd: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    y, _, rstd = rmsnorm_fwd(x, weight, None, eps, weight_offset, save_rstd)
    return y, rstd


@_fwd_op.register_fake
def _(x, weight, eps, weight_offset, save_rstd):
    return x.new_empty(x.shape), _fake_rstd(x, save_rstd)


@torch.library.custom_op(f"{_NAMESPACE}::rmsnorm_add_fwd", mutates_args=())
def _add_fwd_op(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    save_rstd: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return rmsnorm_fwd(x, weight, residual, eps, weight_offset, save_rstd)


@_add_fwd_op.register_fake
def _(x, residual, weight, eps, weight_offset, save_rstd):
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
    dx, dw = rmsnorm_bwd(dy, dh, h, rstd, weight, weight_offset, need_dx, need_dw)
    return h.new_empty(0) if dx is None else dx, h.new_empty(0) if dw is None else dw


@_bwd_op.register_fake
def _(dy, dh, h, rstd, weight, weight_offset, need_dx, need_dw):
    return h.new_empty(h.shape if need_dx else 0), weight.new_empty(weight.shape) if need_dw else h.new_empty(0)


def _fake_rstd(x: torch.Tensor, save: bool) -> torch.Tensor:
    return x.new_empty(x.shape[:-1].numel() if save else 0, dtype=torch.float32)


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)  # rstd has no gradient: no kernel to fill one with zeros
    x, weight, _, ctx.weight_offset, _ = inputs
    ctx.save_for_backward(x, weight, output[1])


def _backward(ctx, dy, _drstd):
    if dy is None:
        return None, None, None, None, None
    h, weight, rstd = ctx.saved_tensors
    need_dx, need_dw = ctx.needs_input_grad[:2]
    dx, dw = _bwd_op(dy, None, h, rstd, weight, ctx.weight_offset, need_dx, need_dw)
    return dx if need_dx else None, dw if need_dw else None, None, None, None


def _add_save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    _, _, weight, _, ctx.weight_offset, _ = inputs
    ctx.save_for_backward(output[1], weight, output[2])


def _add_backward(ctx, dy, dh, _drstd):
    need_dx, need_dr, need_dw = ctx.needs_input_grad[:3]
    if dy is None:  # y was not used: h's gradient passes through
        return dh if need_dx else None, dh if need_dr else None, None, None, None, None
    h, weight, rstd = ctx.saved_tensors
    need_dh = need_dx or need_dr
    d, dw = _bwd_op(dy, dh if need_dh else None, h, rstd, weight, ctx.weight_offset, need_dh, need_dw)
    return d if need_dx else None, d if need_dr else None, dw if need_dw else None, None, None, None


_fwd_op.register_autograd(_backward, setup_context=_save)
_add_fwd_op.register_autograd(_add_backward, setup_context=_add_save)

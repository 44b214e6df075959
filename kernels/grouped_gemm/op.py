"""The public function: argument checks, the eager fast path, registration with torch.library, autograd."""

from __future__ import annotations

import torch

from .checks import FLOATS, kind, no_tangent, runnable
from .launch import Plans, lean, signature
from .plans import BACKENDS, Needs, Optional, bwd_plan, fwd_plan
from .schedule import table_size

MAX_SIZE = 2**31 - 512  # row and column indices are 32-bit, including the end of the last tile
INTEGERS = (torch.int32, torch.int64)

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")
_FORWARD, _BACKWARD = Plans(), Plans()


def grouped_gemm(
    x: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Computes a grouped GEMM: a linear layer for each group of consecutive rows, as in a mixture of experts.

        y[r] = weights[g] · x[r] + bias[g]     for the rows r of group g: offsets[g - 1] <= r < offsets[g]
        y[r] = 0                               for the rows past the last offset

    Accumulation is in fp32 (fp32 operands are not rounded to tf32), and the result is rounded once. Differentiable
    once, in x, weights and bias. The gradients of a group without rows, and of rows past the last offset, are zero. All
    sums have a fixed order: repeated runs agree bit for bit. The host never reads the offsets: there is no
    synchronisation, and one CUDA graph serves all of their values.

    x        [T, K], float32, float16 or bfloat16, any strides. T, K and N are at most 2^31 - 512.
    weights  [G, N, K], dtype of x, any strides. A weight [G, K, N] is passed as its view `weights.mT`, and is read in
             place as well. The gradient has the strides of weights if these are dense.
    offsets  [G], int32 or int64, on x's device: the end of each group's rows; group 0 begins at row 0. They should be
             monotonic and at most T, which is not checked: each is clamped to [0, T], and to the largest offset before
             it.
    bias     [G, N], dtype of x, or None
    backend  "triton", "cuda" (CUDA C++, compiled by CuPy, on compute capability 9.0; requires float16 or bfloat16, rows
             of x and rows or columns of weights that are contiguous and on 16-byte boundaries, N and K multiples of 8,
             groups of more than 64 rows on average), or "auto": "cuda" where it can run, else "triton". With
             both of these the backward uses Triton if CUDA C++ does not support the layout of the incoming gradient.

    Returns y [T, N], dtype of x, contiguous.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or backend, RuntimeError for a CPU tensor
    outside Triton's interpreter and for backend="cuda" where it cannot run, NotImplementedError for a forward-mode
    tangent.

    Source: the "grouped GEMM" of CUTLASS and of MegaBlocks (Gale et al. 2022, arXiv:2211.15841).
    """
    if lean(x, weights, offsets, bias):
        plan = _fwd_plan(x, weights, offsets, bias, backend)
        if torch.is_grad_enabled() and (
            x.requires_grad or weights.requires_grad or (bias is not None and bias.requires_grad)
        ):
            return _apply(x, weights, offsets, bias, plan, backend)
        return plan(x, weights, offsets, bias)[0]
    _check(x, weights, offsets, bias, backend)
    no_tangent("grouped_gemm", x, weights, bias)
    return _fwd_op(x, weights, offsets, bias, backend)[0]


def _check(x, weights, offsets, bias, backend) -> None:
    if not isinstance(x, torch.Tensor) or x.dtype not in FLOATS:
        raise TypeError(f"grouped_gemm: x must be a tensor of float32, float16 or bfloat16, got {kind(x)}")
    if x.dim() != 2 or max(x.shape) > MAX_SIZE:
        wanted = f"[T, K] with both at most {MAX_SIZE}"
        raise ValueError(f"grouped_gemm: x must be {wanted}, got shape {tuple(x.shape)}")
    if not isinstance(weights, torch.Tensor) or weights.dtype != x.dtype:
        raise TypeError(f"grouped_gemm: weights must be a tensor of x's dtype {x.dtype}, got {kind(weights)}")
    if weights.dim() != 3 or weights.shape[2] != x.shape[1] or weights.shape[1] > MAX_SIZE:
        wanted = f"[G, N, {x.shape[1]}] like x with N at most {MAX_SIZE}"
        raise ValueError(f"grouped_gemm: weights must be {wanted}, got {tuple(weights.shape)}")
    if not isinstance(offsets, torch.Tensor) or offsets.dtype not in INTEGERS:
        raise TypeError(f"grouped_gemm: offsets must be a tensor of int32 or int64, got {kind(offsets)}")
    if offsets.shape != weights.shape[:1]:
        expected = f"[{weights.shape[0]}] like weights' groups"
        raise ValueError(f"grouped_gemm: offsets must be {expected}, got {tuple(offsets.shape)}")
    if bias is not None:
        if not isinstance(bias, torch.Tensor) or bias.dtype != x.dtype:
            raise TypeError(f"grouped_gemm: bias must be a tensor of x's dtype {x.dtype}, got {kind(bias)}")
        if bias.shape != weights.shape[:2]:
            raise ValueError(f"grouped_gemm: bias must be {list(weights.shape[:2])}, got {tuple(bias.shape)}")
    for name, tensor in (("weights", weights), ("offsets", offsets), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"grouped_gemm: {name} must be on x's device {x.device}, got {tensor.device}")
    if backend not in BACKENDS:
        raise ValueError(f"grouped_gemm: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    runnable("grouped_gemm", "x", x)


def _fwd_plan(x, weights, offsets, bias, backend):
    """The cached plan for these arguments. Only for plain tensors: the key does not describe others completely."""
    key = signature(x), signature(weights), signature(offsets), signature(bias), backend
    plan = _FORWARD.find(key)
    if plan is None:
        _check(x, weights, offsets, bias, backend)
        plan = _FORWARD.keep(key, fwd_plan(x, weights, offsets, bias, backend))
    return plan


def _backward(dy, x, weights, table, biased: bool, needs: Needs, backend: str):
    if not lean(dy, x, weights, table):
        return bwd_plan(dy, x, weights, biased, needs, backend)(dy, x, weights, table)
    key = signature(dy), signature(x), signature(weights), signature(table), biased, needs, backend
    plan = _BACKWARD.find(key)
    if plan is None:
        plan = _BACKWARD.keep(key, bwd_plan(dy, x, weights, biased, needs, backend))
    return plan(dy, x, weights, table)


def _gradients(ctx, dy) -> tuple[Optional, Optional, Optional]:
    """The gradients of x, weights and bias, None where not needed. A tracer or transform sees the custom op."""
    if dy is None:
        return None, None, None
    x, weights, table = ctx.saved_tensors
    needs = ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3]
    if lean(dy, x, weights, table) and not torch.is_grad_enabled():
        return _backward(dy, x, weights, table, ctx.biased, needs, ctx.backend)
    grads = _bwd_op(dy, x, weights, table, ctx.biased, *needs, ctx.backend)
    dx, dweights, dbias = (grad if need else None for grad, need in zip(grads, needs, strict=True))
    return dx, dweights, dbias


class _GroupedGemm(torch.autograd.Function):
    """The autograd function of eager calls. Its backward uses the custom op if it is traced, transformed or itself
    differentiated."""

    @staticmethod
    def forward(ctx, x, weights, offsets, bias, plan, backend):
        y, table = plan(x, weights, offsets, bias)
        ctx.set_materialize_grads(False)
        ctx.biased, ctx.backend = bias is not None, backend
        ctx.save_for_backward(x, weights, table)
        return y

    @staticmethod
    def backward(ctx, dy):
        dx, dweights, dbias = _gradients(ctx, dy)
        return dx, dweights, None, dbias, None, None


# Skips the functorch handling of torch.autograd.Function.apply: `lean` has checked that no transform is active.
_apply = super(torch.autograd.Function, _GroupedGemm).apply


@torch.library.custom_op(f"{_NAMESPACE}::grouped_gemm_fwd", mutates_args=())
def _fwd_op(
    x: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    make = _fwd_plan if lean(x, weights, offsets, bias) else fwd_plan
    return make(x, weights, offsets, bias, backend)(x, weights, offsets, bias)


@_fwd_op.register_fake
def _(x, weights, offsets, bias, backend):
    rows, groups = x.shape[0], weights.shape[0]
    return x.new_empty(rows, weights.shape[1]), x.new_empty(table_size(rows, groups), dtype=torch.int32)


@torch.library.custom_op(f"{_NAMESPACE}::grouped_gemm_bwd", mutates_args=())
def _bwd_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor,
    table: torch.Tensor,
    biased: bool,
    need_dx: bool,
    need_dweights: bool,
    need_dbias: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grads = _backward(dy, x, weights, table, biased, (need_dx, need_dweights, need_dbias), backend)
    dx, dweights, dbias = (x.new_empty(0) if grad is None else grad for grad in grads)
    return dx, dweights, dbias


@_bwd_op.register_fake
def _(dy, x, weights, table, biased, need_dx, need_dweights, need_dbias, backend):
    return (
        x.new_empty(x.shape if need_dx else 0),
        torch.empty_like(weights) if need_dweights else x.new_empty(0),
        x.new_empty(weights.shape[:2] if need_dbias and biased else 0),
    )


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    x, weights, _, bias, ctx.backend = inputs
    ctx.biased = bias is not None
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weights, output[1])


def _autograd(ctx, dy, _):
    dx, dweights, dbias = _gradients(ctx, dy)
    return dx, dweights, None, dbias, None


_fwd_op.register_autograd(_autograd, setup_context=_save)

"""The public function: argument checks, the fast eager path, registration with torch.library, autograd."""

from __future__ import annotations

import torch

from . import op_fp8
from .activation import ACTIVATIONS
from .checks import FLOATS, kind, no_tangent, runnable
from .formats import EIGHT_BITS
from .launch import Plans, lean, signature
from .op_compress import MAX_SIZE, Compressed, check_compressed
from .plans import BACKENDS, Needs, Optional, bwd_plan, fwd_plan

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")
_FORWARD, _BACKWARD = Plans(), Plans()


def sparse_matmul(
    x: torch.Tensor,
    compressed: Compressed,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    scale_x: torch.Tensor | None = None,
    scale_w: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """A linear layer with a compressed weight w [N, K] of 2:4 sparsity, and an activation in the epilogue.

        y = act(x · wᵀ + bias)

    Accumulation is in fp32 (fp32 operands are not rounded to tf32). Differentiable, once, in x, the values and bias.
    The gradient of the values is that of the dense weight, dyᵀ · x, at the kept positions. All sums have a fixed order,
    so that repeated runs agree bit for bit. With an activation and gradients, the pre-activation is saved in x's dtype.

    With x and values in fp8, each in either format, the accumulators are scaled in fp32 before the bias is added:

        y[m, n] = act(scale_x[m] · scale_w[n] · Σ_k x[m, k] · w[n, k] + bias[n])

    The tensor cores accumulate over all of K; Hopper's fp8 accumulators have about 14 bits. The fp8 GEMM has no
    gradient: an input that requires one is an error where gradients are recorded, never a zero gradient.

    x           [..., K] float32, float16 or bfloat16. Rows are read without a copy when the leading dimensions flatten
                to one stride and the last stride is 1; otherwise they are copied first. Or [M, K] float8_e4m3fn or
                float8_e5m2, K a multiple of 64; contiguous, 16-byte aligned rows are read without a copy. At most
                2^31 - 512 rows.
    compressed  as `compress` returns it, values in x's dtype; with fp8 in either fp8 format
    bias        [N] in x's dtype, or None; with fp8 in out_dtype or float32
    activation  "silu", "gelu", "gelu_tanh", "relu", "relu_sq", or None
    scale_x, scale_w   float32, [] and [], or [M] or [M, 1] and [N] or [N, 1], any strides: the factors of fp8 data.
                Required with fp8 and only allowed there.
    out_dtype   of y: with fp8 float32, float16 or bfloat16 (the default), otherwise x's dtype
    backend     "triton", "cuda" (CUDA C++ on the sparse tensor cores, compiled by CuPy, on compute capability 9.0:
                float16 and bfloat16 with 16-byte aligned rows of x and values, K a multiple of 16 and N of 8; fp8 with
                y in float16 or bfloat16 and N a multiple of 8; forward only, the backward is Triton's), or "auto". With
                more than 64 rows in 16 bits "auto" is "cuda" where that can run, else, and always for the gradients,
                cuBLAS with the weight decompressed into memory during the call. With more than 64 rows in fp8 "auto" is
                "cuda" where that can run. In all other cases it is "triton". "cuda" skips pruned elements, so an inf or
                NaN of x there does not reach y.

    Returns y [..., N] in x's dtype or out_dtype, contiguous.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or option, RuntimeError for a CPU tensor
    outside Triton's interpreter, for backend="cuda" where it cannot run, and in fp8 for a GPU below compute capability
    8.9 and an input that requires a gradient, NotImplementedError for forward-mode differentiation.

    Source: Mishra et al. 2021 (arXiv:2104.08378).
    """
    if not isinstance(compressed, tuple) or len(compressed) != 2 or compressed[0] is None:
        check_compressed("sparse_matmul", compressed)
    if isinstance(x, torch.Tensor) and x.dtype in EIGHT_BITS:
        return op_fp8.product(x, compressed, bias, activation, scale_x, scale_w, out_dtype, backend)
    if scale_x is not None or scale_w is not None or out_dtype is not None:
        _check_of_8_bits(x, scale_x, scale_w, out_dtype)
    values, metadata = compressed
    if lean(x, values, metadata, bias):
        needed = torch.is_grad_enabled() and (
            x.requires_grad or values.requires_grad or (bias is not None and bias.requires_grad)
        )
        plan = _fwd_plan(x, values, metadata, bias, activation, needed and activation is not None, backend)
        if needed:
            return _apply(x, values, metadata, bias, plan, activation, backend)
        return plan(x, values, metadata, bias)[0]
    _check(x, values, metadata, bias, activation, backend)
    no_tangent("sparse_matmul", x, values, bias)
    save = activation is not None and torch.is_grad_enabled()
    return _fwd_op(x, values, metadata, bias, activation, save, backend)[0]


def _check_of_8_bits(x, scale_x, scale_w, out_dtype) -> None:
    """Raises for arguments that are only allowed with fp8 x."""
    for name, scale in (("scale_x", scale_x), ("scale_w", scale_w)):
        if scale is not None:
            raise ValueError(f"sparse_matmul: {name} must be None unless x is fp8, got x of {kind(x)}")
    if out_dtype is not None and isinstance(x, torch.Tensor) and out_dtype != x.dtype:
        raise ValueError(f"sparse_matmul: out_dtype must be None or x's dtype {x.dtype}, got {out_dtype}")


def _check(x, values, metadata, bias, activation, backend) -> None:
    check_compressed("sparse_matmul", (values, metadata))
    if not isinstance(x, torch.Tensor) or x.dtype not in FLOATS:
        wanted = "float32, float16 or bfloat16, float8_e4m3fn or float8_e5m2"
        raise TypeError(f"sparse_matmul: x must be a tensor of {wanted}, got {kind(x)}")
    if values.dtype != x.dtype:
        raise TypeError(f"sparse_matmul: values must be a tensor of x's dtype {x.dtype}, got {kind(values)}")
    if x.dim() == 0 or x.shape[-1] != 2 * values.shape[1] or x.shape[:-1].numel() > MAX_SIZE:
        wanted = f"[..., {2 * values.shape[1]}] like values with at most {MAX_SIZE} rows"
        raise ValueError(f"sparse_matmul: x must be {wanted}, got {list(x.shape)}")
    if values.device != x.device:
        raise ValueError(f"sparse_matmul: values must be on x's device {x.device}, got {values.device}")
    if bias is not None:
        if not isinstance(bias, torch.Tensor) or bias.dtype != x.dtype:
            raise TypeError(f"sparse_matmul: bias must be a tensor of x's dtype {x.dtype}, got {kind(bias)}")
        if bias.shape != values.shape[:1]:
            raise ValueError(f"sparse_matmul: bias must be [{values.shape[0]}], got {list(bias.shape)}")
        if bias.device != x.device:
            raise ValueError(f"sparse_matmul: bias must be on x's device {x.device}, got {bias.device}")
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"sparse_matmul: activation must be None or one of {ACTIVATIONS}, got {activation!r}")
    if backend not in BACKENDS:
        raise ValueError(f"sparse_matmul: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    runnable("sparse_matmul", "x", x)


def _fwd_plan(x, values, metadata, bias, activation, save, backend):
    """The cached plan for these arguments. For plain tensors only: the key does not fully describe other tensors."""
    key = signature(x), signature(values), signature(metadata), signature(bias), activation, save, backend
    plan = _FORWARD.find(key)
    if plan is None:
        _check(x, values, metadata, bias, activation, backend)
        plan = _FORWARD.keep(key, fwd_plan(x, values, metadata, bias, activation, save, backend))
    return plan


def _backward(dy, x, values, metadata, z, biased: bool, activation: str | None, needs: Needs, backend: str):
    options = biased, activation, needs, backend
    if not lean(dy, x, values, metadata, z):
        return bwd_plan(dy, x, values, metadata, *options)(dy, x, values, metadata, z)
    key = signature(dy), signature(x), signature(values), signature(metadata), signature(z), *options
    plan = _BACKWARD.find(key)
    if plan is None:
        plan = _BACKWARD.keep(key, bwd_plan(dy, x, values, metadata, *options))
    return plan(dy, x, values, metadata, z)


def _gradients(ctx, dy) -> tuple[Optional, Optional, Optional]:
    """Returns the gradients of x, values and bias, None where not needed. Under tracing or transforms it calls the
    custom op."""
    if dy is None:
        return None, None, None
    x, values, metadata, z = ctx.saved_tensors
    needs = ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3]
    if lean(dy, x, values, metadata, z) and not torch.is_grad_enabled():
        return _backward(dy, x, values, metadata, z, ctx.biased, ctx.activation, needs, ctx.backend)
    grads = _bwd_op(dy, x, values, metadata, z, ctx.biased, ctx.activation, *needs, ctx.backend)
    dx, dvalues, dbias = (grad if need else None for grad, need in zip(grads, needs, strict=True))
    return dx, dvalues, dbias


class _SparseMatmul(torch.autograd.Function):
    """The autograd function of eager calls. Its backward calls the custom op where it is traced, transformed by
    functorch or itself differentiated."""

    @staticmethod
    def forward(ctx, x, values, metadata, bias, plan, activation, backend):
        y, z = plan(x, values, metadata, bias)
        ctx.set_materialize_grads(False)
        ctx.biased, ctx.activation, ctx.backend = bias is not None, activation, backend
        ctx.save_for_backward(x, values, metadata, z)
        return y

    @staticmethod
    def backward(ctx, dy):
        dx, dvalues, dbias = _gradients(ctx, dy)
        return dx, dvalues, None, dbias, None, None, None


# torch.autograd.Function.apply first handles functorch, then calls this method. `lean` is False under functorch.
_apply = super(torch.autograd.Function, _SparseMatmul).apply


@torch.library.custom_op(f"{_NAMESPACE}::sparse_matmul_fwd", mutates_args=())
def _fwd_op(
    x: torch.Tensor,
    values: torch.Tensor,
    metadata: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    save: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    make = _fwd_plan if lean(x, values, metadata, bias) else fwd_plan
    y, z = make(x, values, metadata, bias, activation, save, backend)(x, values, metadata, bias)
    return y, x.new_empty(0) if z is None else z


@_fwd_op.register_fake
def _(x, values, metadata, bias, activation, save, backend):
    shape = (*x.shape[:-1], values.shape[0])
    return x.new_empty(shape), x.new_empty(shape if save else 0)


@torch.library.custom_op(f"{_NAMESPACE}::sparse_matmul_bwd", mutates_args=())
def _bwd_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    values: torch.Tensor,
    metadata: torch.Tensor,
    z: torch.Tensor | None,
    biased: bool,
    activation: str | None,
    need_dx: bool,
    need_dvalues: bool,
    need_dbias: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    needs = need_dx, need_dvalues, need_dbias
    grads = _backward(dy, x, values, metadata, z, biased, activation, needs, backend)
    dx, dvalues, dbias = (x.new_empty(0) if grad is None else grad for grad in grads)
    return dx, dvalues, dbias


@_bwd_op.register_fake
def _(dy, x, values, metadata, z, biased, activation, need_dx, need_dvalues, need_dbias, backend):
    return (
        x.new_empty(x.shape if need_dx else 0),
        x.new_empty(values.shape if need_dvalues else 0),
        x.new_empty(values.shape[:1] if need_dbias and biased else 0),
    )


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    x, values, metadata, bias, ctx.activation, _, ctx.backend = inputs
    ctx.biased = bias is not None
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, values, metadata, output[1] if ctx.activation is not None else None)


def _autograd(ctx, dy, _):
    dx, dvalues, dbias = _gradients(ctx, dy)
    return dx, dvalues, None, dbias, None, None, None


_fwd_op.register_autograd(_autograd, setup_context=_save)

"""The public function: argument checks, the eager fast path, registration with torch.library."""

from __future__ import annotations

import torch

from .checks import FLOATS, kind, no_gradient, no_tangent, runnable
from .launch import Plans, lean, signature
from .plans import BACKENDS, VECTOR, capability, product_plan
from .scaling import expected, scaling_of

CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = (torch.float32, torch.float8_e8m0fnu)
FIRST_CAPABILITY = (8, 9)
MAX_SIZE = 2**31 - 512  # row and column indices are 32-bit, including the end of the last tile

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")
_PRODUCT = Plans()


def fp8_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    fast_accum: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """Computes a linear layer in fp8: the GEMM of a and the transpose of b, with scales.

        y[m, n] = Σ_k a[m, k] · scale_a[m, k] · b[n, k] · scale_b[n, k] + bias[n]

    The shapes of the scales determine which elements share a scale; with L = ceil(K / 128):

        scale_a         scale_b               one scale for
        []              []                    the tensor
        [M] or [M, 1]   [N] or [N, 1]         a row of a, a row of b
        [M, L]          [ceil(N / 128), L]    1x128 elements of a, 128x128 of b
        [M, L]          [N, L]                1x128 elements of both: the gradient of weights

    Elements are multiplied by their scale, as in DeepGEMM and torch._scaled_mm: `ridgeline.fp8` returns data and scales
    in this form. Tensor cores accumulate K-blocks of at most 128, which are added in fp32 (promotion). Block scales are
    applied before that addition. The result is rounded once. Deterministic.

    a        [M, K] float8_e4m3fn or float8_e5m2
    b        [N, K] float8_e4m3fn or float8_e5m2, the layout of torch.nn.Linear's weight. K and N are multiples of 16;
             M, N and K are at most 2^31 - 512. Both operands are read in place if their rows are contiguous and on
             16-byte boundaries, else copied first.
    scale_*  float32 or float8_e8m0fnu, any strides
    bias     [N] float32, float16 or bfloat16, or None
    out_dtype   dtype of the result: bfloat16, float16 or float32
    fast_accum  accumulates all of K in the tensor cores, as torch._scaled_mm's use_fast_accum. Hopper's tensor cores
                accumulate with about 14 bits. Only for scales of tensors and rows. Ignored by CUDA C++ with few rows,
                where it would not be faster.
    backend  "triton", "cuda" (CUDA C++, compiled by CuPy, on compute capability 9.0, with scales in float32),
             or "auto", the faster of those that can run (`configs.pick_backend`)

    Returns y [M, N], contiguous. Not differentiable: fp8 tensors have no gradient. The README shows the three GEMMs of
    a layer. An input that requires a gradient is an error in grad mode.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or option, RuntimeError for a GPU below
    compute capability 8.9, a CPU tensor outside Triton's interpreter, an input that requires a gradient, and for
    backend="cuda" where it cannot run.

    Source: Micikevicius et al. 2022 (arXiv:2209.05433); block scales and promotion to fp32, DeepSeek-V3 (2024,
    arXiv:2412.19437, section 3.3).
    """
    no_gradient("fp8_matmul", a=a, b=b, scale_a=scale_a, scale_b=scale_b, bias=bias)
    if lean(a, b, scale_a, scale_b, bias):
        plan = _product_plan(a, b, scale_a, scale_b, bias, out_dtype, fast_accum, backend)
        return plan(a, b, _bits(scale_a), _bits(scale_b), bias)
    _check(a, b, scale_a, scale_b, bias, out_dtype, fast_accum, backend)
    no_tangent("fp8_matmul", a, b, scale_a, scale_b, bias)
    formats = a.dtype == CODES[0], b.dtype == CODES[0]
    codes = a.view(torch.uint8), b.view(torch.uint8)
    return _product_op(*codes, _bits(scale_a), _bits(scale_b), bias, *formats, out_dtype, fast_accum, backend)


def _check(a, b, scale_a, scale_b, bias, out_dtype, fast_accum, backend) -> None:
    for name, codes in (("a", a), ("b", b)):
        if not isinstance(codes, torch.Tensor) or codes.dtype not in CODES:
            raise TypeError(f"fp8_matmul: {name} must be a tensor of float8_e4m3fn or float8_e5m2, got {kind(codes)}")
    if a.dim() != 2 or a.shape[1] % VECTOR or max(a.shape) > MAX_SIZE:
        wanted = f"[M, K] with K a multiple of {VECTOR} and both at most {MAX_SIZE}"
        raise ValueError(f"fp8_matmul: a must be {wanted}, got shape {tuple(a.shape)}")
    (rows, depth) = a.shape
    if b.dim() != 2 or b.shape[1] != depth or b.shape[0] % VECTOR or b.shape[0] > MAX_SIZE:
        wanted = f"[N, {depth}] like a with N a multiple of {VECTOR} and at most {MAX_SIZE}"
        raise ValueError(f"fp8_matmul: b must be {wanted}, got shape {tuple(b.shape)}")
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if not isinstance(scale, torch.Tensor) or scale.dtype not in SCALES:
            raise TypeError(f"fp8_matmul: {name} must be a tensor of float32 or float8_e8m0fnu, got {kind(scale)}")
    scaling = scaling_of(rows, b.shape[0], depth, scale_a.shape, scale_b.shape)
    if scaling is None:
        got = f"{list(scale_a.shape)} and {list(scale_b.shape)}"
        wanted = expected(rows, b.shape[0], depth)
        raise ValueError(f"fp8_matmul: scale_a and scale_b must have one of these pairs of shapes: {wanted}; got {got}")
    if bias is not None:
        if not isinstance(bias, torch.Tensor) or bias.dtype not in FLOATS:
            raise TypeError(f"fp8_matmul: bias must be a tensor of float32, float16 or bfloat16, got {kind(bias)}")
        if bias.shape != b.shape[:1]:
            raise ValueError(f"fp8_matmul: bias must be [{b.shape[0]}], got {list(bias.shape)}")
    for name, tensor in (("b", b), ("scale_a", scale_a), ("scale_b", scale_b), ("bias", bias)):
        if tensor is not None and tensor.device != a.device:
            raise ValueError(f"fp8_matmul: {name} must be on a's device {a.device}, got {tensor.device}")
    _check_options(scaling, out_dtype, fast_accum, backend)
    runnable("fp8_matmul", "a", a)
    if a.is_cuda and capability(a) < FIRST_CAPABILITY:
        needed, found = ("{}.{}".format(*of) for of in (FIRST_CAPABILITY, capability(a)))
        raise RuntimeError(f"fp8_matmul: a must be on a GPU of compute capability {needed} or later, got {found}")


def _check_options(scaling, out_dtype, fast_accum, backend) -> None:
    if out_dtype not in FLOATS:
        raise TypeError(f"fp8_matmul: out_dtype must be float32, float16 or bfloat16, got {out_dtype}")
    if not isinstance(fast_accum, bool):
        raise TypeError(f"fp8_matmul: fast_accum must be a bool, got {kind(fast_accum)}")
    if fast_accum and scaling not in ("tensor", "row"):
        raise ValueError("fp8_matmul: fast_accum must be False with block scales, which are applied per K-block of 128")
    if backend not in BACKENDS:
        raise ValueError(f"fp8_matmul: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")


def _bits(scale: torch.Tensor) -> torch.Tensor:
    """The scale as the kernels read it, UE8M0 as bytes: Triton has no type for UE8M0."""
    return scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale


def _product_plan(a, b, scale_a, scale_b, bias, out_dtype, fast_accum, backend):
    """The cached plan for these arguments. Only for plain tensors: the key does not describe others completely."""
    tensors = signature(a), signature(b), signature(scale_a), signature(scale_b), signature(bias)
    key = (*tensors, out_dtype, fast_accum, backend)
    plan = _PRODUCT.find(key)
    if plan is None:
        _check(a, b, scale_a, scale_b, bias, out_dtype, fast_accum, backend)
        made = product_plan(a, b, _bits(scale_a), _bits(scale_b), bias, out_dtype, fast_accum, backend)
        plan = _PRODUCT.keep(key, made)
    return plan


# The custom op takes fp8 tensors and UE8M0 scales as bytes: most operations that torch.library's checks use are
# undefined for float8.
@torch.library.custom_op(f"{_NAMESPACE}::fp8_matmul", mutates_args=())
def _product_op(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    a_e4m3: bool,
    b_e4m3: bool,
    out_dtype: torch.dtype,
    fast_accum: bool,
    backend: str,
) -> torch.Tensor:
    a, b = a.view(CODES[not a_e4m3]), b.view(CODES[not b_e4m3])
    if not lean(a, b, scale_a, scale_b, bias):
        return product_plan(a, b, scale_a, scale_b, bias, out_dtype, fast_accum, backend)(a, b, scale_a, scale_b, bias)
    of_a, of_b = (s.view(torch.float8_e8m0fnu) if s.dtype == torch.uint8 else s for s in (scale_a, scale_b))
    return _product_plan(a, b, of_a, of_b, bias, out_dtype, fast_accum, backend)(a, b, scale_a, scale_b, bias)


@_product_op.register_fake
def _(a, b, scale_a, scale_b, bias, a_e4m3, b_e4m3, out_dtype, fast_accum, backend):
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)

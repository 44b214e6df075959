"""rmsnorm_fp8, the forward with an fp8 output: checks, fast path of eager calls, registration with torch.library."""

from __future__ import annotations

import torch

from .checks import no_gradient, no_tangent
from .configs import MAX_BLOCK
from .launch import Plans, lean, signature
from .op import _check as _check_tensors
from .plans_fp8 import quantise_plan, result_shapes, scale_dtype

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
GRANULARITIES, SCALE_FORMATS = ("row", "1x128"), ("fp32", "pow2", "e8m0")

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")
_QUANTISE = Plans()


def rmsnorm_fp8(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    granularity: str = "row",
    scale_format: str = "fp32",
    transpose: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Computes RMSNorm and quantises the result to fp8 in the same pass, as the operand of an fp8 GEMM.

        h    = x + residual                     (x alone without a residual), rounded to x's dtype
        y    = h / sqrt(mean(h²) + eps) · (weight + weight_offset), rounded to x's dtype
        data = y / scale                        scale = amax of the group / largest of dtype, 1 where amax is 0

    The result of `ridgeline.fp8` for y, with its rules for NaN, infinities and zeros, but without storing y. It is the
    same bit for bit for the y of `rmsnorm` (with backend "triton") where mean(h²) is: the order of the sum depends on
    the dtypes that a kernel stores, so that the last bit of 1 / sqrt(…) may be another. With `transpose` x is read a
    second time.

    x, weight, eps, residual, weight_offset   as in `rmsnorm`, with D <= 16384
    dtype         of the data: torch.float8_e4m3fn or torch.float8_e5m2
    granularity   the group that shares a scale: "row", scales [..., 1], or "1x128", scales [..., ceil(D / 128)]
    scale_format  "fp32"; "pow2", powers of two in fp32; "e8m0", the same as torch.float8_e8m0fnu
    transpose     also return data_t [D, R] and scale_t [D, ceil(R / 128)], for R rows. A group is then 128 rows of a
                  column, as the GEMM of the weight gradient requires. Only with granularity "1x128".

    Returns (data, scale), data in x's shape; with transpose followed by (data_t, scale_t); with a residual followed by
    h. All are contiguous. Not differentiable.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or option, RuntimeError for a CPU tensor
    outside Triton's interpreter and for an input that requires a gradient while gradients are recorded.
    """
    no_gradient("rmsnorm_fp8", x=x, weight=weight, residual=residual)
    options = (eps, weight_offset, dtype, granularity, scale_format, transpose)
    if lean(x, weight, residual):
        made = _quantise_plan(x, weight, residual, *options)(x, weight, residual)
    else:
        _check(x, weight, residual, *options)
        no_tangent("rmsnorm_fp8", x, weight, residual)
        e4m3 = dtype == FORMATS[0]
        made = _quantise_op(x, weight, residual, eps, weight_offset, e4m3, granularity, scale_format, transpose)
    return _results(made, dtype, scale_format, 4 if transpose else 2)


def _results(made, dtype, scale_format, codes_and_scales) -> tuple[torch.Tensor, ...]:
    """Views the bytes that the kernels wrote as fp8 data and e8m0 scales. `made` alternates between data and scales,
    followed by h."""
    results = []
    for index, tensor in enumerate(made):
        if index < codes_and_scales and index % 2 == 0:
            tensor = tensor.view(dtype)
        elif index < codes_and_scales and scale_format == "e8m0":
            tensor = tensor.view(torch.float8_e8m0fnu)
        results.append(tensor)
    return tuple(results)


def _check(x, weight, residual, eps, weight_offset, dtype, granularity, scale_format, transpose) -> None:
    _check_tensors(x, weight, residual, eps, weight_offset, "auto")
    if x.shape[-1] > MAX_BLOCK:
        raise ValueError(f"rmsnorm_fp8: x must be [..., D] with D <= {MAX_BLOCK}, got shape {tuple(x.shape)}")
    if dtype not in FORMATS:
        raise TypeError(f"rmsnorm_fp8: dtype must be float8_e4m3fn or float8_e5m2, got {dtype}")
    for name, value, known in (
        ("granularity", granularity, GRANULARITIES),
        ("scale_format", scale_format, SCALE_FORMATS),
    ):
        if value not in known:
            raise ValueError(f"rmsnorm_fp8: {name} must be one of {', '.join(map(repr, known))}, got {value!r}")
    if not isinstance(transpose, bool):
        raise TypeError(f"rmsnorm_fp8: transpose must be a bool, got {type(transpose).__name__}")
    if transpose and granularity != "1x128":
        raise ValueError(f"rmsnorm_fp8: transpose requires granularity '1x128', got {granularity!r}")


def _quantise_plan(x, weight, residual, eps, weight_offset, dtype, granularity, scale_format, transpose):
    """The cached plan for these arguments, built if missing. For plain tensors only: else the key is incomplete."""
    options = (eps, weight_offset, dtype, granularity, scale_format, transpose)
    key = (signature(x), signature(weight), signature(residual), *options)
    plan = _QUANTISE.find(key)
    if plan is None:
        _check(x, weight, residual, *options)
        rest = (dtype == FORMATS[0], granularity, scale_format, transpose)
        plan = _QUANTISE.keep(key, quantise_plan(x, weight, residual, eps, weight_offset, *rest))
    return plan


@torch.library.custom_op(f"{_NAMESPACE}::rmsnorm_fp8", mutates_args=())
def _quantise_op(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    e4m3: bool,
    granularity: str,
    scale_format: str,
    transpose: bool,
) -> list[torch.Tensor]:
    rest = (granularity, scale_format, transpose)
    if lean(x, weight, residual):
        dtype = FORMATS[not e4m3]
        return _quantise_plan(x, weight, residual, eps, weight_offset, dtype, *rest)(x, weight, residual)
    return quantise_plan(x, weight, residual, eps, weight_offset, e4m3, *rest)(x, weight, residual)


@_quantise_op.register_fake
def _(x, weight, residual, eps, weight_offset, e4m3, granularity, scale_format, transpose):
    made = [
        x.new_empty(shape, dtype=scale_dtype(scale_format) if scales else torch.uint8)
        for shape, scales in result_shapes(x.shape, granularity, transpose)
    ]
    return made if residual is None else [*made, x.new_empty(x.shape)]

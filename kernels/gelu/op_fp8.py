"""gelu_fp8, the forward with an fp8 output: argument checks, the fast eager path, registration with torch.library."""

from __future__ import annotations

import torch

from .checks import no_gradient, no_tangent
from .launch import Plans, lean, signature
from .op import _check as _check_tensors
from .plans_fp8 import quantise_plan, result_shapes, scale_dtype

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE_FORMATS = ("fp32", "pow2", "e8m0")

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")
_QUANTISE = Plans()


def gelu_fp8(
    x: torch.Tensor,
    approximate: str = "none",
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale_format: str = "fp32",
    transpose: bool = False,
) -> tuple[torch.Tensor, ...]:
    """gelu with its result y quantised to fp8 in the same pass: the operand of an fp8 GEMM.

        y    = gelu(x, approximate), rounded to x's dtype
        data = y / scale                        scale = amax / largest of 128 elements of a row, 1 where amax is 0

    Bit-identical to `ridgeline.fp8` of that y with granularity "1x128", with its rules for NaN, infinities and zeros.
    y is not written to memory.

    x, approximate   as for gelu; x is [..., D], with at most 2^31 - 512 rows, and as many columns
    dtype         of the data: torch.float8_e4m3fn or torch.float8_e5m2
    scale_format  "fp32"; "pow2", powers of two in fp32; "e8m0", the same values as torch.float8_e8m0fnu
    transpose     also return data_t [D, R] and scale_t [D, ceil(R / 128)], for R rows, with one scale per 128 rows of a
                  column: the operand of the weight gradient. In the same pass where R and D are multiples of 128.

    Returns data [..., D] and scale [..., ceil(D / 128)]; with transpose also data_t and scale_t. All are contiguous.
    Not differentiable.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or option, RuntimeError for a CPU tensor
    outside Triton's interpreter and, where gradients are recorded, for an input that requires one,
    NotImplementedError for forward-mode differentiation.
    """
    no_gradient("gelu_fp8", x=x)
    options = (approximate, dtype, scale_format, transpose)
    if lean(x):
        made = _quantise_plan(x, *options)(x)
    else:
        _check(x, *options)
        no_tangent("gelu_fp8", x)
        made = _quantise_op(x, approximate, dtype == FORMATS[0], scale_format, transpose)
    # Data and scales alternate.
    of_scales = torch.float8_e8m0fnu if scale_format == "e8m0" else torch.float32
    return tuple(tensor.view(of_scales if index % 2 else dtype) for index, tensor in enumerate(made))


def _check(x, approximate, dtype, scale_format, transpose) -> None:
    _check_tensors(x, approximate)
    if x.dim() == 0:
        raise ValueError("gelu_fp8: x must be [..., D], got a tensor without dimensions")
    if dtype not in FORMATS:
        raise TypeError(f"gelu_fp8: dtype must be float8_e4m3fn or float8_e5m2, got {dtype}")
    if scale_format not in SCALE_FORMATS:
        known = ", ".join(map(repr, SCALE_FORMATS))
        raise ValueError(f"gelu_fp8: scale_format must be one of {known}, got {scale_format!r}")
    if not isinstance(transpose, bool):
        raise TypeError(f"gelu_fp8: transpose must be a bool, got {type(transpose).__name__}")


def _quantise_plan(x, approximate, dtype, scale_format, transpose):
    """The cached plan for these arguments. For plain tensors only: the key does not fully describe other tensors."""
    options = (approximate, dtype, scale_format, transpose)
    key = (signature(x), *options)
    plan = _QUANTISE.find(key)
    if plan is None:
        _check(x, *options)
        plan = _QUANTISE.keep(key, quantise_plan(x, approximate, dtype == FORMATS[0], scale_format, transpose))
    return plan


@torch.library.custom_op(f"{_NAMESPACE}::gelu_fp8", mutates_args=())
def _quantise_op(
    x: torch.Tensor,
    approximate: str,
    e4m3: bool,
    scale_format: str,
    transpose: bool,
) -> list[torch.Tensor]:
    if lean(x):
        return _quantise_plan(x, approximate, FORMATS[not e4m3], scale_format, transpose)(x)
    return quantise_plan(x, approximate, e4m3, scale_format, transpose)(x)


@_quantise_op.register_fake
def _(x, approximate, e4m3, scale_format, transpose):
    shape = x.shape
    return [
        x.new_empty(size, dtype=scale_dtype(scale_format) if scales else torch.uint8)
        for size, scales in result_shapes(shape, transpose)
    ]

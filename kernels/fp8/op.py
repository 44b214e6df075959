"""The public functions: argument checks, the fast eager path, registration with torch.library."""

from __future__ import annotations

import torch

from .checks import FLOATS, kind, runnable
from .launch import Plans, lean, signature
from .plans import dequantize_plan, quantize_plan
from .results import GRANULARITIES, allocate, result_names, scale_shape

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
SCALE_FORMATS = ("fp32", "pow2", "e8m0")
SCALE_DTYPES = (torch.float32, torch.float8_e8m0fnu)
SMALLEST_SCALE = 2.0**-126  # the smallest normal fp32 value: it has an inverse, and no GPU flushes it to zero

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")
_QUANTIZE, _DEQUANTIZE = Plans(), Plans()


def fp8(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    granularity: str = "row",
    *,
    scale_format: str = "fp32",
    transpose: bool = False,
    scale: torch.Tensor | None = None,
    mn_major_scales: bool = False,
    return_amax: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Quantises to 8-bit floating point, x ≈ data · scale (`fp8_dequantize`), with one scale per group of elements.

        amax  = max |x| over the finite elements of the group
        scale = max(amax · (1 / largest), 2^-126)      largest = 448 for e4m3, 57344 for e5m2;  1 where amax is 0
        data  = x · (1 / scale), rounded to nearest, ties to even

    1 / largest and 1 / scale are rounded to fp32, and all arithmetic is fp32: every bit of the results is defined. The
    data are multiplied by the scale, which is the convention of DeepGEMM and of torch._scaled_mm. The scale is never 0
    nor inf: a group of zeros has scale 1, a group of subnormal values 2^-126. NaN and infinities do not count in their
    group's scale and become NaN: e4m3 has no infinity, GEMMs would turn infinities into NaN anyway, and an overflow
    must not look like the largest finite value. Finite elements never become NaN: with a given scale they saturate.

    x            [..., D] fp32, fp16 or bf16, any strides: R rows of D. Rows are read without a copy when the leading
                 dimensions flatten to one stride and the last stride is 1; otherwise they are copied first.
    dtype        of the data: torch.float8_e4m3fn or torch.float8_e5m2
    granularity  the group of a scale, and the scale's shape:
                 "tensor"  (), "row"  [..., 1], "column"  [1, ..., 1, D]
                 "1x128"    128 elements of a row             [..., ceil(D / 128)]
                 "128x128"  128 rows (of R) by 128 columns    [ceil(R / 128), ceil(D / 128)]
                 The last block of a row or column may be smaller.
    scale_format "fp32"; "pow2": also fp32, the smallest power of two without overflow; "e8m0": the same values as
                 torch.float8_e8m0fnu
    transpose    also return data_t and scale_t, bit-identical to fp8 of x as [R, D] transposed, contiguous. So data_t
                 is [D, R], and its 1x128 blocks are 128 rows of x by one column. In the same pass over x, except that
                 "row" and "column" need both sets of maxima and hence two passes.
    scale        use this scale and compute none: one read of x for every granularity (delayed scaling). Has the shape
                 above, on x's device, fp32 or float8_e8m0fnu; returned unchanged. Its values must be positive, which is
                 not checked. With transpose, only for "tensor" and "128x128".
    mn_major_scales  for "1x128": scales are stored column by column, each column 16-byte aligned, as DeepGEMM and
                 torch._scaled_mm read them through TMA. Shape and values are unchanged.
    return_amax  for "tensor": also return max |x| over the finite elements, fp32 (), for an amax history

    Returns data (x's shape) and scale; with transpose data_t and scale_t; with return_amax the maximum as the last.
    Not differentiable: a straight-through estimator, if any, belongs to the layer.

    "row" and blocks read x once, "tensor" and "column" twice unless the scale is given. Rows of more than 32768
    elements are read a second time from L2. Deterministic.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or option, RuntimeError for a CPU tensor
    outside Triton's interpreter.

    Sources: the formats are those of Micikevicius et al. 2022 (arXiv:2209.05433), the blocks those of DeepSeek-V3
    (arXiv:2412.19437, section 3.3.2), power-of-two scales those of the OCP Microscaling specification, rounded up.
    """
    options = (granularity, scale_format, transpose, mn_major_scales, return_amax)
    if lean(x, scale) and dtype in LARGEST and (scale is None or scale.dtype in SCALE_DTYPES):
        bits = None if scale is None else _bits(scale)
        made = _quantize_plan(x, bits, dtype, *options)(x, bits)
    else:
        _check(x, dtype, *options)
        if scale is not None:
            _check_scale("fp8", scale, x, granularity)
            _check_transposable(granularity, transpose)
        bits = None if scale is None else _bits(scale)
        made = _quantize_op(x.detach(), bits, dtype == torch.float8_e4m3fn, *options)
    return _results(made, scale, dtype, granularity, scale_format, transpose, return_amax)


def _results(made, scale, dtype, granularity, scale_format, transpose, return_amax) -> tuple[torch.Tensor, ...]:
    """Converts the results of a plan (the tensors of `result_names`, fp8 as uint8) to what `fp8` returns."""
    rest = iter(made)
    data = next(rest).view(dtype)
    if scale is None:
        scale = _scale_of_bits(next(rest), scale_format)
        has_scale_t = granularity != "tensor"
    else:
        has_scale_t = False
    result = [data, scale]
    if transpose:
        # The scale of a tensor or of a 128x128 block is the same for the transpose.
        data_t = next(rest).view(dtype)
        result += [data_t, _scale_of_bits(next(rest), scale_format) if has_scale_t else scale.t()]
    if return_amax:
        result.append(next(rest))
    return tuple(result)


def _scale_of_bits(bits: torch.Tensor, scale_format: str) -> torch.Tensor:
    return bits.view(torch.float8_e8m0fnu) if scale_format == "e8m0" else bits


def _quantize_plan(x, bits, dtype, granularity, scale_format, transpose, mn_major, return_amax):
    """The cached plan for these arguments. For plain tensors only; the dtype of a scale has been checked."""
    options = (granularity, scale_format, transpose, mn_major, return_amax)
    key = (signature(x), signature(bits), dtype, *options)
    plan = _QUANTIZE.find(key)
    if plan is None:
        _check(x, dtype, *options)
        if bits is not None:
            _check_place("fp8", bits, x, granularity)
            _check_transposable(granularity, transpose)
        plan = _QUANTIZE.keep(key, quantize_plan(x, bits, dtype == torch.float8_e4m3fn, *options))
    return plan


def fp8_dequantize(
    data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32, granularity: str = "row"
) -> torch.Tensor:
    """Dequantises the data or data_t of `fp8`.

        y = data · scale, in fp32, rounded to dtype

    data         [..., D] float8_e4m3fn or float8_e5m2, any strides
    scale        of the shape that `fp8` returns for this granularity; fp32 or float8_e8m0fnu
    dtype        of the result: fp32 (exact up to fp32's rounding of the product), fp16 (which may overflow), bf16
    granularity  that of `fp8`

    Returns a tensor of data's shape, contiguous; NaN where data are NaN. Not differentiable. Raises as `fp8`.
    """
    if lean(data, scale) and scale is not None and data.dtype in LARGEST and scale.dtype in SCALE_DTYPES:
        plan = _dequantize_plan(data, scale, dtype, granularity)
        return plan(data.view(torch.uint8), _bits(scale))
    _check_dequantize(data, scale, dtype, granularity)
    e4m3 = data.dtype == torch.float8_e4m3fn
    return _dequantize_op(data.detach().view(torch.uint8), _bits(scale), e4m3, granularity, dtype)


def _dequantize_plan(data, scale, dtype, granularity):
    """The cached plan for these arguments. For plain tensors only (see `lean`)."""
    key = (signature(data), signature(scale), dtype, granularity)
    plan = _DEQUANTIZE.find(key)
    if plan is None:
        _check_dequantize(data, scale, dtype, granularity)
        e4m3 = data.dtype == torch.float8_e4m3fn
        made = dequantize_plan(data.detach().view(torch.uint8), _bits(scale), e4m3, granularity, dtype)
        plan = _DEQUANTIZE.keep(key, made)
    return plan


def _check_dequantize(data, scale, dtype, granularity) -> None:
    if not isinstance(data, torch.Tensor) or data.dtype not in LARGEST:
        raise TypeError(f"fp8_dequantize: data must be a tensor of float8_e4m3fn or float8_e5m2, got {kind(data)}")
    if data.dim() == 0:
        raise ValueError("fp8_dequantize: data must be [..., D], got a tensor without dimensions")
    if dtype not in FLOATS:
        raise TypeError(f"fp8_dequantize: dtype must be float32, float16 or bfloat16, got {dtype}")
    _one_of("fp8_dequantize", "granularity", granularity, GRANULARITIES)
    _check_scale("fp8_dequantize", scale, data, granularity)
    runnable("fp8_dequantize", "data", data)


def fp8_scale(amax: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, scale_format: str = "fp32") -> torch.Tensor:
    """The scale that `fp8` computes for groups with these largest magnitudes, for delayed scaling from an amax history.

        scale = max(amax · (1 / largest), 2^-126)      1 where amax is 0; a power of two, rounded up, unless "fp32"

    amax          any shape, fp32, not negative
    dtype, scale_format   as for `fp8`

    Returns the scales in amax's shape, fp32 or, with "e8m0", float8_e8m0fnu. Plain PyTorch. Raises TypeError for a
    wrong dtype, ValueError for another scale_format.
    """
    if not isinstance(amax, torch.Tensor) or amax.dtype != torch.float32:
        raise TypeError(f"fp8_scale: amax must be a tensor of float32, got {kind(amax)}")
    if dtype not in LARGEST:
        raise TypeError(f"fp8_scale: dtype must be float8_e4m3fn or float8_e5m2, got {dtype}")
    _one_of("fp8_scale", "scale_format", scale_format, SCALE_FORMATS)
    if scale_format == "fp32":
        scale = (amax * (1 / LARGEST[dtype])).clamp(min=SMALLEST_SCALE)
    else:
        # largest = 1.75 · 2^8 or 1.75 · 2^15: a mantissa above 1.75 rounds up to the next power of two.
        bits = (amax.view(torch.int32) + 0x1FFFFF) & 0x7F800000
        scale = (bits - ((8 if dtype == torch.float8_e4m3fn else 15) << 23)).clamp(min=1 << 23).view(torch.float32)
    scale = torch.where(amax > 0, scale, 1.0)
    return scale.to(torch.float8_e8m0fnu) if scale_format == "e8m0" else scale


def _check(
    x: torch.Tensor,
    dtype: torch.dtype,
    granularity: str,
    scale_format: str,
    transpose: bool,
    mn_major_scales: bool,
    return_amax: bool,
) -> None:
    if not isinstance(x, torch.Tensor) or x.dtype not in FLOATS:
        raise TypeError(f"fp8: x must be a tensor of float32, float16 or bfloat16, got {kind(x)}")
    if x.dim() == 0:
        raise ValueError("fp8: x must be [..., D], got a tensor without dimensions")
    if dtype not in LARGEST:
        raise TypeError(f"fp8: dtype must be float8_e4m3fn or float8_e5m2, got {dtype}")
    _one_of("fp8", "granularity", granularity, GRANULARITIES)
    _one_of("fp8", "scale_format", scale_format, SCALE_FORMATS)
    if mn_major_scales and (granularity != "1x128" or scale_format == "e8m0"):
        wrong = f"granularity {granularity!r} and scale_format {scale_format!r}"
        raise ValueError(
            f"fp8: mn_major_scales requires granularity '1x128' and a scale_format other than 'e8m0', got {wrong}"
        )
    if return_amax and granularity != "tensor":
        raise ValueError(f"fp8: return_amax requires granularity 'tensor', got {granularity!r}")
    runnable("fp8", "x", x)


def _check_scale(function: str, scale: torch.Tensor, of: torch.Tensor, granularity: str) -> None:
    if not isinstance(scale, torch.Tensor) or scale.dtype not in SCALE_DTYPES:
        raise TypeError(f"{function}: scale must be a tensor of float32 or float8_e8m0fnu, got {kind(scale)}")
    _check_place(function, scale, of, granularity)


def _check_place(function: str, scale: torch.Tensor, of: torch.Tensor, granularity: str) -> None:
    if scale.shape != scale_shape(of.shape, granularity):
        wanted = f"{list(scale_shape(of.shape, granularity))} for granularity {granularity!r}"
        raise ValueError(f"{function}: scale must be {wanted}, got {list(scale.shape)}")
    if scale.device != of.device:
        raise ValueError(f"{function}: scale must be on the quantised tensor's device {of.device}, got {scale.device}")


def _check_transposable(granularity: str, transpose: bool) -> None:
    if transpose and granularity not in ("tensor", "128x128"):
        raise ValueError(
            f"fp8: scale must be None with transpose=True and granularity {granularity!r}, as x and its transpose have "
            "different scales"
        )


def _one_of(function: str, name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{function}: {name} must be one of {', '.join(map(repr, known))}, got {value!r}")


def _bits(scale: torch.Tensor) -> torch.Tensor:
    """The scale as the kernels read it, UE8M0 as uint8, because Triton has no type for it."""
    return scale.detach().view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale.detach()


@torch.library.custom_op(f"{_NAMESPACE}::fp8_quantize", mutates_args=())
def _quantize_op(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    e4m3: bool,
    granularity: str,
    scale_format: str,
    transpose: bool,
    mn_major: bool,
    return_amax: bool,
) -> list[torch.Tensor]:
    options = (granularity, scale_format, transpose, mn_major, return_amax)
    if lean(x, scale):
        dtype = torch.float8_e4m3fn if e4m3 else torch.float8_e5m2
        return _quantize_plan(x, scale, dtype, *options)(x, scale)
    return quantize_plan(x, scale, e4m3, *options)(x, scale)


@_quantize_op.register_fake
def _(x, scale, e4m3, granularity, scale_format, transpose, mn_major, return_amax):
    names = result_names(granularity, transpose, scale is not None, return_amax)
    return list(allocate(x, names, granularity, scale_format, mn_major).values())


@torch.library.custom_op(f"{_NAMESPACE}::fp8_dequantize", mutates_args=())
def _dequantize_op(
    data: torch.Tensor, scale: torch.Tensor, e4m3: bool, granularity: str, dtype: torch.dtype
) -> torch.Tensor:
    if not lean(data, scale):
        return dequantize_plan(data, scale, e4m3, granularity, dtype)(data, scale)
    of_data = torch.float8_e4m3fn if e4m3 else torch.float8_e5m2
    of_scale = scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale
    return _dequantize_plan(data.view(of_data), of_scale, dtype, granularity)(data, scale)


@_dequantize_op.register_fake
def _(data, scale, e4m3, granularity, dtype):
    return data.new_empty(data.shape, dtype=dtype)

"""The public functions: argument checks, the fast eager path, registration with torch.library."""

from __future__ import annotations

import torch

from .checks import FLOATS, kind, runnable
from .formats import FORMATS
from .launch import Plans, lean, signature
from .plans import BACKENDS, dequantize_plan, quantize_plan, result_shapes

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")
_QUANTIZE, _DEQUANTIZE = Plans(), Plans()


def mxfp(
    x: torch.Tensor,
    format: str = "mxfp8_e4m3",
    *,
    stochastic: bool = False,
    seed: int = 0,
    dim: int = -1,
    tensor_scale: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, ...]:
    """Quantises blocks along one dimension to elements of 8, 6 or 4 bits with a shared scale, x ≈ element · scale
    (`mxfp_dequantize`).

        mxfp*   scale = 2^(floor(log2 amax) - emax), at least 2^-127    amax: largest magnitude of the block of 32,
                                                                        emax: exponent of the format's largest value
        nvfp4   tensor_scale = max(amax(x) · (1 / 2688), 2^-117)        1 where amax(x) is 0; 2688 = 448 · 6
                scale = e4m3(amax / (tensor_scale · 6)), 2^-9 to 448    amax: of the block of 16
        element = x / scale, or x · (1 / (scale · tensor_scale)), rounded to nearest, ties to even, saturating

    Each operation of nvfp4 is rounded to fp32 and the rest is exact, so every bit of the results is defined. A block of
    zeros has the smallest scale. Zeros keep their sign. The specification leaves non-finite values open: here a block
    with a NaN or an infinity has the scale NaN and zero elements, so that all of it is NaN, and amax(x) is taken over
    the finite elements.

    x             [..., D, ...] fp32, fp16 or bf16, any strides. It is read without a copy where its other dimensions
                  flatten to one stride, otherwise copied first.
    format        "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4" or "nvfp4"
    stochastic    round elements up with the probability of the discarded fraction, truncated to 16 bits: unbiased
                  within 2^-16 of a unit in the last place where nothing saturates. Scales are rounded as before.
    seed          of Philox, 0 <= seed < 2^63: a result depends only on the seed and on x
    dim           the dimension that is divided into blocks. The result is that of x.movedim(dim, -1), contiguous.
    tensor_scale  fp32 (), for nvfp4: use this scale and compute none, so that x is read once. Where it is below 2^-117
                  or not finite, which is detected only on the GPU, every scale is NaN and every element zero.
    backend       "triton", "cuda" (CUDA C++, compiled by CuPy, on compute capability 9.0: bf16, rounded to nearest, dim
                  not the contiguous dimension; that one has an even size, other strides are even, and x is 16-byte
                  aligned; nvfp4 with an even number of blocks), or "auto", the faster of those that can run
                  (`configs.pick_backend`). The bits are the same.

    Returns data and scales as uint8 and, for nvfp4, tensor_scale. With B = ceil(D / 32) blocks, or ceil(D / 16):
    data          [..., 32 · B] for 8 bits, [..., 24 · B] for 6, [..., 16 · B] for 4, [..., 8 · B] for nvfp4. The last
                  block is padded with zeros. Two elements of 4 bits are packed in a byte, four of 6 bits in three, the
                  first in the lowest bits. PyTorch's type: data.view(torch.float8_e4m3fn), .float8_e5m2 or
                  .float4_e2m1fn_x2.
    scales        [..., B]: scales.view(torch.float8_e8m0fnu), or .float8_e4m3fn for nvfp4
    Not differentiable: a straight-through estimator, if any, belongs to the layer.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or option, RuntimeError for a CPU tensor
    outside Triton's interpreter and for backend="cuda" where it cannot run.

    Sources: OCP Microscaling Formats specification 1.0, section 6.3; for nvfp4 NVIDIA 2025, arXiv:2509.25149,
    appendix C.
    """
    if lean(x, tensor_scale):
        made = _quantize_plan(x, tensor_scale, format, stochastic, dim, seed, backend)(x, tensor_scale, seed)
    else:
        _check(x, tensor_scale, format, stochastic, dim, seed, backend)
        made = _quantize_op(_plain(x), _plain(tensor_scale), format, stochastic, dim, seed, backend)
    return (*made, tensor_scale) if format == "nvfp4" and tensor_scale is not None else tuple(made)


def mxfp_dequantize(
    data: torch.Tensor,
    scales: torch.Tensor,
    format: str = "mxfp8_e4m3",
    dtype: torch.dtype = torch.float32,
    *,
    tensor_scale: torch.Tensor | None = None,
    size: int | None = None,
) -> torch.Tensor:
    """Dequantises the results of `mxfp`.

        y = element · scale, for nvfp4 · tensor_scale, in fp32, rounded to dtype

    data          uint8 [..., bytes of B blocks], as `mxfp` returns them; any strides
    scales        uint8 [..., B]
    format        that of `mxfp`
    dtype         of the result: fp32, fp16 (which may overflow) or bf16
    tensor_scale  fp32 (), required for nvfp4 and only allowed there
    size          D, where the last block is partial; by default whole blocks are returned

    Returns [..., size], contiguous; NaN where an element or its scale is NaN. Not differentiable. Raises as `mxfp`.
    """
    if lean(data, scales, tensor_scale):
        return _dequantize_plan(data, scales, tensor_scale, format, dtype, size)(data, scales, tensor_scale)
    size = _check_dequantize(data, scales, tensor_scale, format, dtype, size)
    return _dequantize_op(data, scales, _plain(tensor_scale), format, dtype, size)


def _plain(tensor):
    """The tensor, detached only if it requires a gradient, because detaching may unwrap a tensor subclass."""
    return tensor.detach() if tensor is not None and tensor.requires_grad else tensor


def _check(x, tensor_scale, format, stochastic, dim, seed, backend) -> None:
    if not isinstance(x, torch.Tensor) or x.dtype not in FLOATS:
        raise TypeError(f"mxfp: x must be a tensor of float32, float16 or bfloat16, got {kind(x)}")
    if x.dim() == 0:
        raise ValueError("mxfp: x must be [..., D], got a tensor without dimensions")
    _check_format("mxfp", format)
    if not isinstance(stochastic, bool):
        raise TypeError(f"mxfp: stochastic must be True or False, got {kind(stochastic)}")
    if not isinstance(dim, int | torch.SymInt):
        raise TypeError(f"mxfp: dim must be an integer, got {kind(dim)}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"mxfp: dim must be one of the {x.dim()} dimensions of x, got {dim}")
    _check_seed(seed)
    if tensor_scale is not None:
        _check_tensor_scale("mxfp", tensor_scale, x, format)
    if backend not in BACKENDS:
        raise ValueError(f"mxfp: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    runnable("mxfp", "x", x)


def _check_seed(seed) -> None:
    if not isinstance(seed, int | torch.SymInt):
        raise TypeError(f"mxfp: seed must be an integer, got {kind(seed)}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"mxfp: seed must be at least 0 and below 2^63, got {seed}")


def _check_format(function: str, format: str) -> None:
    if format not in FORMATS:
        raise ValueError(f"{function}: format must be one of {', '.join(map(repr, FORMATS))}, got {format!r}")


def _check_tensor_scale(function: str, tensor_scale, of: torch.Tensor, format: str) -> None:
    if format != "nvfp4":
        raise ValueError(f"{function}: tensor_scale requires format 'nvfp4', got {format!r}")
    if not isinstance(tensor_scale, torch.Tensor) or tensor_scale.dtype != torch.float32:
        raise TypeError(f"{function}: tensor_scale must be a tensor of float32, got {kind(tensor_scale)}")
    if tensor_scale.dim():
        raise ValueError(f"{function}: tensor_scale must have no dimensions, got {list(tensor_scale.shape)}")
    if tensor_scale.device != of.device:
        raise ValueError(
            f"{function}: tensor_scale must be on the other tensors' device {of.device}, got {tensor_scale.device}"
        )


def _check_dequantize(data, scales, tensor_scale, format, dtype, size):
    """Checks the arguments of `mxfp_dequantize` and returns the size of the result's rows."""
    function = "mxfp_dequantize"
    _check_format(function, format)
    for name, tensor in (("data", data), ("scales", scales)):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.uint8:
            raise TypeError(f"{function}: {name} must be a tensor of uint8, got {kind(tensor)}")
    if scales.dim() == 0:
        raise ValueError(f"{function}: scales must be [..., blocks], got a tensor without dimensions")
    layout = FORMATS[format]
    wanted = (*scales.shape[:-1], scales.shape[-1] * layout.block_bytes)
    if data.shape != wanted:
        raise ValueError(f"{function}: data must be {list(wanted)} for these scales, got {list(data.shape)}")
    if scales.device != data.device:
        raise ValueError(f"{function}: scales must be on {data.device} like data, got {scales.device}")
    if dtype not in FLOATS:
        raise TypeError(f"{function}: dtype must be float32, float16 or bfloat16, got {dtype}")
    if format == "nvfp4" and tensor_scale is None:
        raise ValueError(f"{function}: tensor_scale must be given with format 'nvfp4', got None")
    if tensor_scale is not None:
        _check_tensor_scale(function, tensor_scale, data, format)
    most = scales.shape[-1] * layout.block
    if size is None:
        size = most
    if not isinstance(size, int | torch.SymInt):
        raise TypeError(f"{function}: size must be an integer, got {kind(size)}")
    if not max(most - layout.block + 1, 0) <= size <= most:
        raise ValueError(
            f"{function}: size must end in the last of the {scales.shape[-1]} blocks of scales, got {size}"
        )
    runnable(function, "data", data)
    return size


def _quantize_plan(x, tensor_scale, format, stochastic, dim, seed, backend):
    """The cached plan for these arguments. For plain tensors only. The seed is not part of its key."""
    key = (signature(x), signature(tensor_scale), format, stochastic, dim, backend)
    plan = _QUANTIZE.find(key)
    if plan is None:
        _check(x, tensor_scale, format, stochastic, dim, seed, backend)
        return _QUANTIZE.keep(key, quantize_plan(x, tensor_scale, format, stochastic, dim, backend))
    if seed != 0 or not isinstance(seed, int):
        _check_seed(seed)
    return plan


def _dequantize_plan(data, scales, tensor_scale, format, dtype, size):
    """The cached plan for these arguments. For plain tensors only (see `lean`)."""
    key = (signature(data), signature(scales), signature(tensor_scale), format, dtype, size)
    plan = _DEQUANTIZE.find(key)
    if plan is None:
        exact = _check_dequantize(data, scales, tensor_scale, format, dtype, size)
        plan = _DEQUANTIZE.keep(key, dequantize_plan(data, scales, tensor_scale, format, dtype, exact))
    return plan


@torch.library.custom_op(f"{_NAMESPACE}::mxfp_quantize", mutates_args=())
def _quantize_op(
    x: torch.Tensor,
    tensor_scale: torch.Tensor | None,
    format: str,
    stochastic: bool,
    dim: int,
    seed: int,
    backend: str,
) -> list[torch.Tensor]:
    if lean(x, tensor_scale):
        return _quantize_plan(x, tensor_scale, format, stochastic, dim, seed, backend)(x, tensor_scale, seed)
    return quantize_plan(x, tensor_scale, format, stochastic, dim, backend)(x, tensor_scale, seed)


@_quantize_op.register_fake
def _(x, tensor_scale, format, stochastic, dim, seed, backend):
    fake = [x.new_empty(shape, dtype=torch.uint8) for shape in result_shapes(x, format, dim)]
    if format == "nvfp4" and tensor_scale is None:
        fake.append(x.new_empty((), dtype=torch.float32))
    return fake


@torch.library.custom_op(f"{_NAMESPACE}::mxfp_dequantize", mutates_args=())
def _dequantize_op(
    data: torch.Tensor,
    scales: torch.Tensor,
    tensor_scale: torch.Tensor | None,
    format: str,
    dtype: torch.dtype,
    size: int,
) -> torch.Tensor:
    make = _dequantize_plan if lean(data, scales, tensor_scale) else dequantize_plan
    return make(data, scales, tensor_scale, format, dtype, size)(data, scales, tensor_scale)


@_dequantize_op.register_fake
def _(data, scales, tensor_scale, format, dtype, size):
    return data.new_empty((*data.shape[:-1], size), dtype=dtype)

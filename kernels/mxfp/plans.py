"""Launch plans of mxfp: everything in a call that does not depend on the tensors' values and addresses."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import triton

from . import configs
from .configs import FLAT
from .dequantize import _mxfp_dequantize_kernel
from .dequantize_pairs import _mxfp_dequantize_pairs_kernel
from .formats import FORMATS, Format
from .kernel import _mxfp_amax_kernel, _mxfp_quantize_kernel
from .launch import Launch
from .pairs import _mxfp_amax_pairs_kernel, _mxfp_quantize_pairs_kernel
from .sm90 import transposed

BACKENDS = ("auto", "triton", "cuda")
Quantize = Callable[[torch.Tensor, "torch.Tensor | None", int], list[torch.Tensor]]
Dequantize = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]


def result_shapes(x: torch.Tensor, format: str, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of data and of scales."""
    layout = FORMATS[format]
    *lead, size = x.movedim(dim, -1).shape
    blocks = layout.blocks(size)
    return (*lead, blocks * layout.block_bytes), (*lead, blocks)


def quantize_plan(
    x: torch.Tensor, tensor_scale: torch.Tensor | None, format: str, stochastic: bool, dim: int, backend: str
) -> Quantize:
    """Returns a function of (x, tensor_scale, seed), for all tensors with these signatures. It returns data, scales
    and, for nvfp4 without a given tensor_scale, tensor_scale. `op` has checked the inputs. Raises RuntimeError where
    `backend` does not support them."""
    layout, device = FORMATS[format], x.device
    data_shape, scale_shape = result_shapes(x, format, dim)
    data_strides, scale_strides = _dense(data_shape), _dense(scale_shape)
    find_scale = format == "nvfp4" and tensor_scale is None
    copied, write = False, None
    if x.numel():
        x2 = _matrix(x, dim)
        copied = x2.data_ptr() != x.data_ptr()
        reason = _no_cuda(x2, layout, stochastic) if backend != "triton" else None
        if backend == "cuda" and reason:
            raise RuntimeError(f'mxfp: backend="cuda" cannot run here: {reason}')
        if configs.pick_backend(backend, possible=reason is None) == "cuda":
            write = _cuda_launches(x2, layout, find_scale)
        else:
            write = _quantize_launches(x2, layout, stochastic, find_scale)

    def run(x: torch.Tensor, tensor_scale: torch.Tensor | None, seed: int) -> list[torch.Tensor]:
        data = torch.empty_strided(data_shape, data_strides, dtype=torch.uint8, device=device)
        scales = torch.empty_strided(scale_shape, scale_strides, dtype=torch.uint8, device=device)
        if find_scale:
            tensor_scale = torch.empty_strided((), (), dtype=torch.float32, device=device)
            if write is None:
                tensor_scale.fill_(1)
        if write is not None:
            write(_matrix(x, dim) if copied else x, data, scales, tensor_scale, seed)
        return [data, scales, tensor_scale] if find_scale and tensor_scale is not None else [data, scales]

    return run


def _no_cuda(x: torch.Tensor, layout: Format, stochastic: bool) -> str | None:
    """Why CUDA C++ cannot quantise x [rows, dim], or None."""
    (rows, dim), (stride_m, stride_n), aligned = x.shape, x.stride(), x.data_ptr() % 16 == 0
    return transposed.unsupported_reason(
        (rows, dim), (stride_m, stride_n), layout.block, stochastic, x.dtype, aligned, _capability(x)
    )


def _cuda_launches(x: torch.Tensor, layout: Format, find_scale: bool) -> Callable[..., None]:
    """As `_quantize_launches`, in CUDA C++."""
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    rows, dim = x.shape
    launch = transposed.launch(x, layout, configs.pick_cuda_config(rows, dim, layout.width, sms))
    find = _amax_launch(_flat(x.t(), 2), layout) if find_scale else None  # x.t() has unit inner stride

    def write(x, data, scales, tensor_scale, seed: int) -> None:
        launch(x, data, scales, tensor_scale, _largest(find, x))

    return write


def _quantize_launches(x: torch.Tensor, layout: Format, stochastic: bool, find_scale: bool) -> Callable[..., None]:
    """Returns a function of (x, data, scales, tensor_scale, seed), x [rows, dim]. With find_scale a launch for the
    largest magnitude comes first."""
    x = _flat(x, layout.block)
    find = _amax_launch(x, layout) if find_scale else None
    words = False
    if config := _pairs_config(x, layout.block):
        x = _in_rows(x, config.block_n)
        (rows, dim), strides = x.shape, x.stride()
        kernel, fixed = _mxfp_quantize_pairs_kernel, (rows, dim, strides[0])
        largest: dict[str, float] = {"LARGEST_CODE": layout.largest_code}
    else:
        (rows, dim), strides = x.shape, x.stride()
        config, words = _plain_config(x, layout), layout.width == 6
        kernel, fixed = _mxfp_quantize_kernel, (rows, dim, layout.blocks(dim) * layout.block, *strides)
        largest = {"LARGEST": layout.largest}
    launch = Launch(
        kernel,
        _grid(config, rows, dim),
        x.device,
        fixed,
        WIDTH=layout.width,
        MANTISSA=layout.mantissa,
        BIAS=layout.bias,
        **largest,
        EMAX=layout.exponent,
        BLOCK=layout.block,
        STOCHASTIC=stochastic,
        **_tile(config, rows, dim),
    )

    def write(x, data, scales, tensor_scale, seed: int) -> None:
        data = data.view(torch.int32) if words else data
        launch(x, data, scales, tensor_scale, _largest(find, x), _signed(seed), _signed(seed >> 32))

    return write


def _amax_launch(x: torch.Tensor, layout: Format) -> Launch:
    """The launch for the largest magnitude, a function of (x, amax), x [rows, dim]."""
    rows, dim = x.shape
    if _pairs_config(x, 2):
        config = configs.pick_amax(rows, dim)
        kernel, fixed = _mxfp_amax_pairs_kernel, (rows, dim, x.stride(0))
    else:
        config = _plain_config(x, layout)
        kernel, fixed = _mxfp_amax_kernel, (rows, dim, *x.stride())
    return Launch(kernel, _grid(config, rows, dim), x.device, fixed, **_tile(config, rows, dim))


def _largest(find: Launch | None, x: torch.Tensor) -> torch.Tensor | None:
    """Computes the largest finite magnitude of x as fp32 bits; None without a launch for it."""
    if find is None:
        return None
    amax = torch.empty_strided((), (), dtype=torch.int32, device=x.device).zero_()
    find(x, amax)
    return amax


def _flat(x: torch.Tensor, block: int) -> torch.Tensor:
    """x as rows of FLAT elements, where the result does not depend on its own rows."""
    return _in_rows(x, FLAT) if x.shape[1] % block == 0 else x


def _in_rows(x: torch.Tensor, length: int) -> torch.Tensor:
    """x as rows of `length` elements, where x is contiguous and divisible."""
    return x.view(-1, length) if x.is_contiguous() and x.numel() % length == 0 else x


def _pairs_config(x: torch.Tensor, block: int) -> configs.Config | None:
    (rows, dim), (stride_m, stride_n) = x.shape, x.stride()
    if x.data_ptr() % 16:
        return None
    return configs.pick_pairs(rows, dim, (stride_m, stride_n), block, x.dtype, _capability(x))


def _plain_config(x: torch.Tensor, layout: Format) -> configs.Config:
    rows, dim = x.shape
    other = x.stride(0) == 1 and x.stride(1) != 1
    return configs.pick_config(rows, dim, layout.width, other, x.dtype, _capability(x))


def _grid(config: configs.Config, rows: int, dim: int) -> tuple[int]:
    return (triton.cdiv(rows, config.block_m) * triton.cdiv(dim, config.block_n),)


def _tile(config: configs.Config, rows: int, dim: int) -> dict[str, int]:
    """The constexprs of a tile. Tiles consist of whole blocks, so that the padding of the last block adds no tile."""
    return {
        "EVEN": rows % config.block_m == 0 and dim % config.block_n == 0,
        "ONE": dim <= config.block_n,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "num_warps": config.num_warps,
    }


def _signed(number: int) -> int:
    """The lower 32 bits of `number` as an int32."""
    return ((number + 0x80000000) & 0xFFFFFFFF) - 0x80000000


def dequantize_plan(
    data: torch.Tensor,
    scales: torch.Tensor,
    tensor_scale: torch.Tensor | None,
    format: str,
    dtype: torch.dtype,
    size: int,
) -> Dequantize:
    """Returns a function of (data, scales, tensor_scale) that returns y [..., size], for all tensors with these
    signatures. `op` has checked the inputs."""
    layout, device = FORMATS[format], data.device
    shape = (*data.shape[:-1], size)
    strides = _dense(shape)
    if math.prod(shape) == 0:
        return lambda data, scales, tensor_scale: torch.empty_strided(shape, strides, dtype=dtype, device=device)
    rows, padded = math.prod(shape[:-1]), scales.shape[-1] * layout.block
    aligned = data.data_ptr() % 16 == 0 or not data.is_contiguous()
    whole = size == padded and aligned
    pairs = configs.pick_dequantize_pairs(rows * padded, whole, layout.width, dtype, _capability(data))
    if pairs:
        launch, words = _dequantize_pairs_launch(rows * padded // 8, layout, pairs, device), False
    else:
        launch, words = _dequantize_launch(rows, size, padded, layout, dtype, data), layout.width == 6
    data_copied, scales_copied = not data.is_contiguous(), not scales.is_contiguous()

    def run(data: torch.Tensor, scales: torch.Tensor, tensor_scale: torch.Tensor | None) -> torch.Tensor:
        y = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        dense = data.contiguous() if data_copied else data
        if words:
            dense = _words(dense)
        launch(dense, scales.contiguous() if scales_copied else scales, tensor_scale, y)
        return y

    return run


def _dequantize_launch(
    rows: int, dim: int, padded: int, layout: Format, dtype: torch.dtype, data: torch.Tensor
) -> Launch:
    """The launch, a function of (data, scales, tensor_scale, y [rows, dim]), all contiguous; 6-bit data are words."""
    if dim == padded and rows * padded % FLAT == 0:
        rows, dim, padded = rows * padded // FLAT, FLAT, FLAT
    config = configs.pick_dequantize_config(rows, dim, layout.width, dtype, _capability(data))
    return Launch(
        _mxfp_dequantize_kernel,
        (triton.cdiv(rows, config.block_m) * triton.cdiv(padded, config.block_n),),
        data.device,
        (rows, dim, padded),
        WIDTH=layout.width,
        MANTISSA=layout.mantissa,
        BIAS=layout.bias,
        BLOCK=layout.block,
        E8M0=layout.block == 32,
        EVEN=rows % config.block_m == 0 and dim % config.block_n == 0,
        ONE=padded <= config.block_n,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
    )


def _dequantize_pairs_launch(units: int, layout: Format, config: configs.UnitsConfig, device: torch.device) -> Launch:
    """As `_dequantize_launch`, for units of eight elements; data are bytes."""
    return Launch(
        _mxfp_dequantize_pairs_kernel,
        (triton.cdiv(units, config.units),),
        device,
        (units,),
        WIDTH=layout.width,
        MANTISSA=layout.mantissa,
        BIAS=layout.bias,
        BLOCK=layout.block,
        EVEN=units % config.units == 0,
        UNITS=config.units,
        num_warps=config.num_warps,
    )


def _words(data: torch.Tensor) -> torch.Tensor:
    """Contiguous bytes as int32, copied where they are not 16-byte aligned, which is part of a plan's key. Flattened
    first, because a dimension of size 1 may have a stride that `view` rejects."""
    flat = data.view(-1)
    return (flat if flat.data_ptr() % 16 == 0 else flat.clone()).view(torch.int32)


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _matrix(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x as [rows, size of dim]: a view where the strides allow it, otherwise a copy."""
    x = x.movedim(dim, -1)
    return x.reshape(-1, x.shape[-1])


def _capability(tensor: torch.Tensor) -> tuple[int, int]:
    """The compute capability; (8, 0) in the interpreter."""
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else (8, 0)

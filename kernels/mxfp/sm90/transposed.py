"""Quantisation along the non-contiguous dimension on Hopper in CUDA C++ (transposed.cu): supported problems, launch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..configs import CudaConfig
from ..formats import Format
from . import cuda_driver
from .cuda_driver import address

STEP, WARP_COLUMNS = 32, 64  # rows of an iteration of the kernel, columns of a warp
_LARGEST_SIZE = 2**31 - 4096  # of a dimension; rounded up to whole tiles it still fits in an int

# Problem of transposed.cu: x, data, scales, tensor_scale, amax; pitch; rows, columns, tiles.
_LAYOUT = "(PPPPPqiii)"


def unsupported_reason(
    shape: tuple[int, int],
    strides: tuple[int, int],
    block: int,
    stochastic: bool,
    dtype: torch.dtype,
    aligned: bool,
    capability: tuple[int, int],
) -> str | None:
    """Why transposed.cu does not support x [rows, dim], whose blocks are along `dim`, or None.

    aligned   whether x begins on a 16-byte boundary
    """
    rows, dim = shape
    if capability != (9, 0):
        return "it needs a GPU of compute capability 9.0 (Hopper)"
    if dtype != torch.bfloat16 or stochastic:
        return "it supports bfloat16, rounded to nearest"
    if strides[0] != 1 or strides[1] == 1 or rows % 2 or strides[1] % 2 or not aligned:
        return "it requires a dim other than the contiguous one, of even size, with even strides and 16-byte alignment"
    if block < STEP and -(-dim // block) % (STEP // block):
        return f"it requires a multiple of {STEP // block} blocks along dim"
    if max(rows, dim) > _LARGEST_SIZE:
        return f"it supports at most {_LARGEST_SIZE} rows and columns"
    return cuda_driver.no_compiler()


def launch(x: torch.Tensor, layout: Format, config: CudaConfig) -> Callable[..., None]:
    """Returns a function of (x, data, scales, tensor_scale, amax) that writes data and scales, for x [rows, dim] for
    which `unsupported_reason` is None. With an amax (bits of the largest magnitude) tensor_scale is written, else
    read."""
    columns, rows = x.shape
    shared = shared_bytes(layout, config)
    with torch.cuda.device_of(x):
        (kernel,) = cuda_driver.kernels(
            x.device.index, "transposed.cu", ("mxfp_quantize_transposed",), defines(layout, config), shared
        )
    tiles = -(-columns // (WARP_COLUMNS * config.warps))
    grid = tiles * -(-rows // (STEP * config.steps))
    start = cuda_driver.Launch(x.device.index, kernel, grid, 32 * config.warps, shared, _LAYOUT)
    sizes = x.stride(1) * x.element_size(), rows, columns, tiles

    def run(
        x: torch.Tensor,
        data: torch.Tensor,
        scales: torch.Tensor,
        tensor_scale: torch.Tensor | None,
        amax: torch.Tensor | None,
    ) -> None:
        start(x.data_ptr(), data.data_ptr(), scales.data_ptr(), address(tensor_scale), address(amax), *sizes)

    return run


def defines(layout: Format, config: CudaConfig) -> tuple[str, ...]:
    return (
        f"WIDTH={layout.width}",
        f"MANTISSA={layout.mantissa}",
        f"BIAS={layout.bias}",
        f"LARGEST_CODE={layout.largest_code}",
        f"EMAX={layout.exponent}",
        f"NVFP4={int(layout.block < STEP)}",
        f"STEPS={config.steps}",
        f"WARPS={config.warps}",
        f"SHARED={shared_bytes(layout, config)}",
    )


def shared_bytes(layout: Format, config: CudaConfig) -> int:
    """Bytes per CTA: data of columns, each an odd number of units of 16 bytes (8 with 6 bits), and their scales."""
    unit = 8 if layout.width == 6 else 16
    units = config.steps * 4 * layout.width // unit | 1
    scales = 8 * -(-config.steps * STEP // layout.block * WARP_COLUMNS // 8)
    return config.warps * (WARP_COLUMNS * units * unit + scales)

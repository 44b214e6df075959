"""The forward for Hopper in CUDA C++ (products.cu): which problems it supports, and its launch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..activation import ACTIVATIONS
from ..configs import CudaConfig
from . import cuda_driver
from .cuda_driver import address, tensor_map

BLOCK_N, BLOCK_M, ROW_BYTES, THREADS = 128, 256, 128, 384  # of products.cu
STAGING = 2 * 32 * (64 * 2 + 16)  # bytes of the staging buffers of the two consumers
HALVES = (torch.float16, torch.bfloat16)

# Parameters of products.cu: two tensor maps, then Problem: y, z, bias, metadata; stride of bias; rows, cols, depth,
# blocks of rows; in 8 bits also scales of x and of the weight, and their strides.
_LAYOUT, _LAYOUT_FP8 = "MM(PPPPqiiii)", "MM(PPPPqiiiiPPqq)"

Optional = torch.Tensor | None


def unsupported_reason(
    x: torch.Tensor, values: torch.Tensor, metadata: torch.Tensor, capability: tuple[int, int]
) -> str | None:
    """Why products.cu does not support x [M, K] with these values and metadata, or None."""
    if capability != (9, 0):
        return "it needs a GPU of compute capability 9.0 (Hopper)"
    if x.dtype not in HALVES:
        return f"it supports float16 and bfloat16, not {x.dtype}"
    if x.shape[1] % 16 or values.shape[0] % 8:
        return "it requires K a multiple of 16 and N a multiple of 8"
    for t in (x, values):
        pitch = t.stride(0)
        if t.shape[0] > 1 and (pitch < t.shape[1] or pitch % 8):
            return "it requires rows of x and of values on 16-byte boundaries, without overlap"
    if any(t.data_ptr() % 16 for t in (x, values, metadata)):
        return "it requires x, values and metadata on 16-byte boundaries"
    return cuda_driver.no_compiler()


def unsupported_reason_fp8(
    values: torch.Tensor, metadata: torch.Tensor, out_dtype: torch.dtype, capability: tuple[int, int]
) -> str | None:
    """Why products.cu does not support these fp8 values and metadata, or None. The caller copies x and values whose
    rows are not on 16-byte boundaries."""
    if capability != (9, 0):
        return "it needs a GPU of compute capability 9.0 (Hopper)"
    if out_dtype not in HALVES:
        return f"with fp8 x it supports out_dtype float16 and bfloat16, not {out_dtype}"
    if values.shape[0] % 8:
        return "it requires N a multiple of 8"
    if metadata.data_ptr() % 16:
        return "it requires metadata on a 16-byte boundary"
    return cuda_driver.no_compiler()


def launch(
    x: torch.Tensor, values: torch.Tensor, bias: Optional, activation: str | None, config: CudaConfig
) -> Callable[..., None]:
    """Returns a function of (x, values, metadata, bias, y, z), with the properties of these, that writes y and, unless
    it is None, z. x [M, K] and values are not empty, and `unsupported_reason` returns None for them. metadata is
    contiguous."""
    (rows, depth), cols = x.shape, values.shape[0]
    defines = "FP8=0", *_defines(x.dtype, activation, config)
    x_map, w_map = _maps(x, values, config)
    start = _start(x, cols, defines, config, _LAYOUT)
    fixed = 0 if bias is None else bias.stride(0), rows, cols, depth, -(-cols // 16)

    def run(
        x: torch.Tensor, values: torch.Tensor, metadata: torch.Tensor, bias: Optional, y: torch.Tensor, z: Optional
    ) -> None:
        start(
            x_map(x.data_ptr()),
            w_map(values.data_ptr()),
            y.data_ptr(),
            address(z),
            address(bias),
            metadata.data_ptr(),
            *fixed,
        )

    return run


def launch_fp8(
    x: torch.Tensor,
    values: torch.Tensor,
    bias: Optional,
    activation: str | None,
    out_dtype: torch.dtype,
    strides: tuple[int, int, int],
    config: CudaConfig,
) -> Callable[..., None]:
    """Returns a function of (x, values, metadata, scale_x, scale_w, bias, y), with the properties of these, that writes
    y. x [M, K] and values are not empty, and their rows are contiguous on 16-byte boundaries; metadata is contiguous.
    `strides` are those of the scales and of the bias, 0 for a scale per tensor."""
    (rows, depth), cols = x.shape, values.shape[0]
    defines = (
        "FP8=1",
        f"X_E4M3={int(x.dtype == torch.float8_e4m3fn)}",
        f"W_E4M3={int(values.dtype == torch.float8_e4m3fn)}",
        f"SCALES={int(strides[:2] != (0, 0))}",
        f"BIAS32={int(bias is not None and bias.dtype == torch.float32)}",
        *_defines(out_dtype, activation, config),
    )
    x_map, w_map = _maps(x.view(torch.uint8), values.view(torch.uint8), config)
    start = _start(x, cols, defines, config, _LAYOUT_FP8)

    def run(
        x: torch.Tensor,
        values: torch.Tensor,
        metadata: torch.Tensor,
        scale_x: torch.Tensor,
        scale_w: torch.Tensor,
        bias: Optional,
        y: torch.Tensor,
    ) -> None:
        start(
            x_map(x.data_ptr()),
            w_map(values.data_ptr()),
            y.data_ptr(),
            0,
            address(bias),
            metadata.data_ptr(),
            *(strides[2], rows, cols, depth, -(-cols // 16)),
            scale_x.data_ptr(),
            scale_w.data_ptr(),
            *strides[:2],
        )

    return run


def _defines(dtype: torch.dtype, activation: str | None, config: CudaConfig) -> tuple[str, ...]:
    """The definitions that 16 and 8 bits share; `dtype` is y's."""
    return (
        f"FP16={int(dtype == torch.float16)}",
        f"ACTIVATION={0 if activation is None else 1 + ACTIVATIONS.index(activation)}",
        f"STAGES={config.stages}",
        f"RASTER={config.raster}",
        f"CLUSTER={config.cluster}",
    )


def _maps(
    x: torch.Tensor, values: torch.Tensor, config: CudaConfig
) -> tuple[cuda_driver.TensorMap, cuda_driver.TensorMap]:
    """The tensor maps of x, with boxes of a CTA's share of the rows, and of values, with half as many columns."""
    columns = ROW_BYTES // x.element_size()
    x_map = tensor_map(x[None, None], x.shape[0], BLOCK_M // config.cluster, columns)
    return x_map, tensor_map(values[None, None], values.shape[0], BLOCK_N, columns // 2)


def _start(x: torch.Tensor, cols: int, defines: tuple[str, ...], config: CudaConfig, layout: str) -> cuda_driver.Launch:
    """The launch of the kernel compiled with these definitions: at most one CTA per SM, in clusters."""
    device, shared = x.device, shared_bytes(config, x.element_size())
    clusters = -(-cols // (BLOCK_N * config.cluster)) * -(-x.shape[0] // BLOCK_M)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    with torch.cuda.device_of(x):
        (kernel,) = cuda_driver.kernels(device.index, "products.cu", ("sparse_matmul_products",), defines, shared)
    grid = config.cluster * min(sms // config.cluster, clusters)
    return cuda_driver.Launch(device.index, kernel, grid, THREADS, shared, layout)


def shared_bytes(config: CudaConfig, size: int = 2) -> int:
    """Bytes per CTA: the pipeline stages (both operands, with elements of `size` bytes, and metadata), the staging
    buffers of the epilogue, and barriers."""
    step = BLOCK_M * ROW_BYTES + BLOCK_N * ROW_BYTES // 2 + ROW_BYTES // size // 64 * BLOCK_N // 16 * 128
    return config.stages * (step + 16) + STAGING

"""The forward for Hopper in CUDA C++ (products.cu): which problems it takes, and its launch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..activation import ACTIVATIONS
from ..configs import CudaConfig
from . import cuda_driver
from .cuda_driver import address, tensor_map

BLOCK_N, BLOCK_M, BLOCK_K, THREADS = 128, 256, 64, 384  # of products.cu
STAGING = 2 * 32 * (64 * 2 + 16)  # bytes that its two consumers transpose in
HALVES = (torch.float16, torch.bfloat16)

# Two tensor maps and products.cu's Problem: y, z, bias, metadata; stride of bias; rows, cols, depth, blocks of rows.
_LAYOUT = "MM(PPPPqiiii)"

Optional = torch.Tensor | None


def unsupported_reason(
    x: torch.Tensor, values: torch.Tensor, metadata: torch.Tensor, capability: tuple[int, int]
) -> str | None:
    """Why it cannot multiply x [M, K] with these values and metadata, or None."""
    if capability != (9, 0):
        return "it needs a GPU of compute capability 9.0 (Hopper)"
    if x.dtype not in HALVES:
        return "it takes float16 and bfloat16"
    if x.shape[1] % 16 or values.shape[0] % 8:
        return "it wants K a multiple of 16 and N of 8"
    for t in (x, values):
        pitch = t.stride(0)
        if t.shape[0] > 1 and (pitch < t.shape[1] or pitch % 8):
            return "it wants rows of x and of values on 16-byte boundaries, and apart"
    if any(t.data_ptr() % 16 for t in (x, values, metadata)):
        return "it wants x, values and metadata on 16-byte boundaries"
    return cuda_driver.no_compiler()


def launch(
    x: torch.Tensor, values: torch.Tensor, bias: Optional, activation: str | None, config: CudaConfig
) -> Callable[..., None]:
    """Writes y and, if it is given, z, given (x, values, metadata, bias, y, z) like these: x [M, K] and values have
    elements, and `unsupported_reason` takes them; metadata is contiguous."""
    (rows, depth), cols = x.shape, values.shape[0]
    defines = (
        f"FP16={int(x.dtype == torch.float16)}",
        f"ACTIVATION={0 if activation is None else 1 + ACTIVATIONS.index(activation)}",
        f"STAGES={config.stages}",
        f"RASTER={config.raster}",
        f"CLUSTER={config.cluster}",
    )
    device, shared = x.device, shared_bytes(config)
    x_map = tensor_map(x[None, None], rows, BLOCK_M // config.cluster, BLOCK_K)
    w_map = tensor_map(values[None, None], cols, BLOCK_N, BLOCK_K // 2)
    clusters = -(-cols // (BLOCK_N * config.cluster)) * -(-rows // BLOCK_M)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    with torch.cuda.device_of(x):
        (kernel,) = cuda_driver.kernels(device.index, "products.cu", ("sparse_matmul_products",), defines, shared)
    grid = config.cluster * min(sms // config.cluster, clusters)
    start = cuda_driver.Launch(device.index, kernel, grid, THREADS, shared, _LAYOUT)
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


def shared_bytes(config: CudaConfig) -> int:
    """Of a CTA: the ring of both operands and metadata, the staging of the epilogue, and barriers."""
    step = BLOCK_M * BLOCK_K * 2 + BLOCK_N * BLOCK_K + BLOCK_N // 16 * 128
    return config.stages * (step + 16) + STAGING

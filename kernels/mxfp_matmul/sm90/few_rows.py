"""The GEMM with few rows for Hopper in CUDA C++ (few_rows.cu): which problems it supports, and its launch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..configs import CudaConfig, ManyConfig
from ..formats import BLOCK, CHUNK, TILE, chunks
from . import cuda_driver
from .cuda_driver import address, tensor_map

HALVES = (torch.float16, torch.bfloat16)
VECTOR = 8  # elements of 16 bytes

# Parameters of few_rows.cu: a tensor map, then Problem: y, w, scales, tensor_scale; rows, columns, chunks.
_LAYOUT = "M(PPPPiii)"


def unsupported_reason(dtype: torch.dtype, columns: int, capability: tuple[int, int]) -> str | None:
    """Why few_rows.cu does not support x of this dtype with this many rows of w, or None."""
    if capability != (9, 0):
        return "it needs a GPU of compute capability 9.0 (Hopper)"
    if dtype not in HALVES:
        return f"it supports float16 and bfloat16, not {dtype}"
    if columns % TILE:
        return f"it requires N a multiple of {TILE}, got {columns}"
    return cuda_driver.no_compiler()


def in_place(x: torch.Tensor) -> bool:
    """Whether TMA can read x [M, K] without a copy: contiguous, 16-byte aligned rows. A single row, whose stride is
    arbitrary, is copied if the stride does not qualify."""
    pitch = x.stride(0)
    return x.stride(1) == 1 and pitch >= x.shape[1] and not pitch % VECTOR and not x.data_ptr() % 16


def dense(x: torch.Tensor) -> torch.Tensor:
    """A copy of x [M, K] that TMA can read."""
    rows, depth = x.shape
    return x.new_empty((rows, -(-depth // VECTOR) * VECTOR))[:, :depth].copy_(x)


def launch(x: torch.Tensor, columns: int, format: str, config: CudaConfig) -> Callable[..., None]:
    """Returns a function of (x, w, scales, tensor_scale, y) that writes y [M, N]; x must be `in_place`."""
    rows, depth = x.shape
    chosen = defines(config, config.splits, format, x.dtype)
    device, shared = x.device, shared_bytes(config, format)
    x_map = tensor_map(x[None, None], rows, config.rows)
    with torch.cuda.device_of(x):
        (kernel,) = cuda_driver.kernels(device.index, "few_rows.cu", ("mxfp_matmul_few_rows",), chosen, shared)
    grid = -(-columns // (64 * config.groups)) * -(-rows // config.rows) * config.splits
    start = cuda_driver.Launch(device.index, kernel, grid, threads(config), shared, _LAYOUT)
    sizes = rows, columns, chunks(depth)

    def run(
        x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, tensor_scale: torch.Tensor | None, y: torch.Tensor
    ) -> None:
        places = y.data_ptr(), w.data_ptr(), scales.data_ptr(), address(tensor_scale)
        start(x_map(x.data_ptr()), *places, *sizes)

    return run


def defines(config: CudaConfig | ManyConfig, cluster: int, format: str, dtype: torch.dtype) -> tuple[str, ...]:
    """The definitions with which few_rows.cu and many_rows.cu are compiled."""
    return (
        f"NVFP4={int(format == 'nvfp4')}",
        f"FP16={int(dtype == torch.float16)}",
        f"COLS={config.rows}",
        f"GROUPS={config.groups}",
        f"STAGES={config.stages}",
        f"CLUSTER={cluster}",
    )


def threads(config: CudaConfig) -> int:
    return 128 * config.groups + 32


def shared_bytes(config: CudaConfig, format: str) -> int:
    """Bytes per CTA: the pipeline stages (x, w and scales) and barriers. In the epilogue the accumulators overwrite the
    stages."""
    ring = config.stages * (chunk_bytes(config.rows, config.groups, format) + 16)
    return max(ring, 4 * config.rows * (64 * config.groups + 4))


def chunk_bytes(rows: int, groups: int, format: str) -> int:
    """Bytes of a chunk of K: of `rows` rows of x, and of 64 `groups` rows of w and their scales."""
    return 2 * rows * CHUNK + 64 * groups * (CHUNK // 2 + CHUNK // BLOCK[format])

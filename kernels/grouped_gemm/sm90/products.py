"""The GEMMs for Hopper in CUDA C++ (products.cu): which problems they support, and their launches."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..configs import CudaConfig, cuda_step_bytes
from . import cuda_driver
from .cuda_driver import TensorMap, address, tensor_map

BLOCK_M, BLOCK_K, THREADS = 128, 64, 384  # of products.cu
HALVES = (torch.float16, torch.bfloat16)
VECTOR = 8  # elements of 16 bytes

# Two tensor maps and products.cu's Problem: table, out, bias; strides of out and bias; groups, rows, cols, depth.
_LAYOUT = "MM(PPPqqqqiiii)"


def rows_unsupported_reason(a: torch.Tensor, b: torch.Tensor, block_m: int, capability: tuple[int, int]) -> str | None:
    """Why products.cu cannot multiply a [rows, depth] by b [groups, cols, depth] in tiles of `block_m` rows, or None if
    it can."""
    if block_m != BLOCK_M:
        return f"its tiles have {BLOCK_M} rows, which requires more than {BLOCK_M // 2} rows per group on average"
    if a.numel() and a.stride(1) != 1:
        return "it requires contiguous rows"
    return _unsupported_reason(capability, a, b)


def weights_unsupported_reason(
    dy: torch.Tensor, x: torch.Tensor, dweights: torch.Tensor, capability: tuple[int, int]
) -> str | None:
    """Why products.cu cannot compute a weights' gradient with the layout of `dweights`, or None if it can."""
    if x.numel() and dy.numel() and (dy.stride(1) != 1 or x.stride(1) != 1):
        return "it requires contiguous rows"
    return _unsupported_reason(capability, dy, x, dweights)


def _unsupported_reason(capability: tuple[int, int], *tensors: torch.Tensor) -> str | None:
    if capability != (9, 0):
        return "it needs a GPU of compute capability 9.0 (Hopper)"
    if tensors[0].dtype not in HALVES:
        return f"it supports float16 and bfloat16, not {tensors[0].dtype}"
    if not all(t.numel() for t in tensors):
        return "it does not support empty tensors"
    for t in tensors:
        # The stride of a dimension of size 1 is arbitrary. TMA does not support a stride of 0, nor one of 1 in a second
        # dimension, as in rows that overlap (`unfold`).
        strides = [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1]
        apart = strides.count(1) == 1 and all(s > 0 and s % VECTOR == 0 for s in strides if s != 1)
        if 1 not in t.stride()[-2:] or not apart or any(size % VECTOR for size in _inner_sizes(t)):
            return "it requires operands with contiguous rows or columns whose sizes are multiples of 16 bytes"
        if t.data_ptr() % 16:
            return "it requires operands on 16-byte boundaries"
    return cuda_driver.no_compiler()


def _inner_sizes(t: torch.Tensor) -> tuple[int, ...]:
    """The sizes that must be whole vectors: the columns of a matrix of rows; both dimensions of weights."""
    return (t.shape[1],) if t.dim() == 2 else tuple(t.shape[1:])


def rows_launch(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, config: CudaConfig) -> Callable[..., None]:
    """Writes out [rows, cols], given (a, weights viewed as b, bias, table, out) like these. Requires that
    `rows_unsupported_reason` is None."""
    (rows, depth), (groups, cols, _) = a.shape, b.shape
    transposed = b.stride(2) != 1
    maps = (
        tensor_map(a[None, None], rows, BLOCK_M),
        tensor_map(b.mT[None], depth, BLOCK_K // (config.cluster if config.turns else 1))
        if transposed
        else tensor_map(b[None], cols, config.block_n // config.cluster),
    )
    strides = cols, 0, *((0, 0) if bias is None else bias.stride())
    most = -(-(rows // BLOCK_M + groups + 1) // config.cluster) * -(-cols // config.block_n)
    start = _start(a, config, transposed, False, most, maps, strides, (groups, rows, cols, depth))

    def run(
        a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, table: torch.Tensor, out: torch.Tensor
    ) -> None:
        start(a, b, bias, table, out)

    return run


def weights_launch(
    dy: torch.Tensor, x: torch.Tensor, dweights: torch.Tensor, config: CudaConfig
) -> Callable[..., None]:
    """Writes dweights, given (dy, x, table, dweights) like these. Requires that `weights_unsupported_reason` is None.
    If dweights [G, N, K] is contiguous along N, its transpose is computed."""
    swapped = dweights.stride(2) != 1
    a, b, out = (x, dy, dweights.mT) if swapped else (dy, x, dweights)
    groups, rows, cols = out.shape
    maps = tensor_map(a[None, None], a.shape[0], BLOCK_K), tensor_map(b[None, None], b.shape[0], BLOCK_K)
    tiles = groups * -(-rows // (config.cluster * BLOCK_M)) * -(-cols // config.block_n)
    strides = out.stride(1), out.stride(0), 0, 0
    start = _start(a, config, True, True, tiles, maps, strides, (groups, rows, cols, 0))

    def run(dy: torch.Tensor, x: torch.Tensor, table: torch.Tensor, dweights: torch.Tensor) -> None:
        start(x if swapped else dy, dy if swapped else x, None, table, dweights)

    return run


def _start(
    a: torch.Tensor,
    config: CudaConfig,
    transposed: bool,
    weights: bool,
    tiles: int,
    maps: tuple[TensorMap, TensorMap],
    strides: tuple[int, ...],
    sizes: tuple[int, ...],
) -> Callable[..., None]:
    """Launches the kernel, given (a, b, bias, table, out). `tiles` is an upper bound on the tiles, counted in
    clusters."""
    chosen = defines(config, weights=weights, transposed=transposed, fp16=a.dtype == torch.float16)
    device, shared = a.device, shared_bytes(config)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    with torch.cuda.device_of(a):
        (kernel,) = cuda_driver.kernels(device.index, "products.cu", ("grouped_gemm_products",), chosen, shared)
    grid = config.cluster * min(sms // config.cluster, tiles)
    launch = cuda_driver.Launch(device.index, kernel, grid, THREADS, shared, _LAYOUT)
    a_map, b_map = maps

    def start(
        a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, table: torch.Tensor, out: torch.Tensor
    ) -> None:
        if table.data_ptr() % 16:  # saved-tensor hooks may have moved the table, which is read in 16-byte vectors
            table = table.clone()
        launch(
            a_map(a.data_ptr()),
            b_map(b.data_ptr()),
            table.data_ptr(),
            out.data_ptr(),
            address(bias),
            *strides,
            *sizes,
        )

    return start


def defines(config: CudaConfig, *, weights: bool, transposed: bool, fp16: bool) -> tuple[str, ...]:
    """The preprocessor defines of products.cu."""
    return (
        f"WEIGHTS={int(weights)}",
        f"FP16={int(fp16)}",
        f"STAGES={config.stages}",
        f"RASTER={config.raster}",
        f"CLUSTER={config.cluster}",
        f"BLOCK_N={config.block_n}",
        f"TURNS={int(config.turns)}",
        f"B_TRANSPOSED={int(transposed)}",
    )


def shared_bytes(config: CudaConfig) -> int:
    """Shared memory of a CTA: the pipeline stages of both operands, and their barriers."""
    return config.stages * cuda_step_bytes(config.block_n)

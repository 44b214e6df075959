"""The grouped GEMMs for Hopper in CUDA C++ (products.cu): which problems they support, and their launches."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..configs import CudaConfig
from . import cuda_driver
from .cuda_driver import tensor_map

BLOCK_M, BLOCK_K, THREADS = 128, 128, 384  # of products.cu
BOX_ROWS, BOX_BYTES = 64, 128  # TMA box in which a gradient is stored
STEP_BYTES = 32  # sizeof(Step) of products.cu

# Parameters of products.cu: three tensor maps, then Problem: table, out, scales; strides of scales; groups, rows, cols,
# depth.
_LAYOUT = "MMM(PPPPqqqqqiiii)"

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def unsupported_reason(a: torch.Tensor, b: torch.Tensor, capability: tuple[int, int]) -> str | None:
    """Why products.cu does not support this GPU, or None if it does."""
    if capability != (9, 0):
        return "it needs a GPU of compute capability 9.0 (Hopper)"
    return cuda_driver.no_compiler()


def rows_launch(
    x: torch.Tensor,
    weights: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    out_dtype: torch.dtype,
    config: CudaConfig,
) -> Write:
    """Returns a function of (x, weights, scale_x, scale_w, table, y), with the properties of these, that writes y. x
    and weights are not empty, and their rows are contiguous on 16-byte boundaries. The table's tiles have BLOCK_M
    rows."""
    (rows, depth), (groups, cols, _) = x.shape, weights.shape
    most = (rows // BLOCK_M + groups + 1) * -(-cols // (config.block_n * config.cluster))
    a_map, b_map = _map(x[None, None], BLOCK_M // config.cluster), _map(weights[None], config.block_n)
    strides = *scale_x.stride(), *scale_w.stride()
    return _start(x, weights, out_dtype, config, 0, most, (a_map, b_map, None), strides, (groups, rows, cols, depth))


def weights_launch(
    dy_t: torch.Tensor,
    x_t: torch.Tensor,
    scale_dy: torch.Tensor,
    scale_x: torch.Tensor,
    groups: int,
    out_dtype: torch.dtype,
    config: CudaConfig,
) -> Write:
    """Returns a function of (dy_t, x_t, scale_dy, scale_x, table, dweights) that writes dweights. Operands are as in
    `rows_launch`."""
    rows, cols = dy_t.shape[0], x_t.shape[0]
    tiles = groups * -(-rows // BLOCK_M) * -(-cols // (config.block_n * config.cluster))
    out = torch.empty((1, groups, rows, cols), dtype=out_dtype, device="meta")
    maps = (
        _map(dy_t[None, None], BLOCK_M // config.cluster),
        _map(x_t[None, None], config.block_n),
        tensor_map(out, rows, BOX_ROWS, BOX_BYTES // out.element_size()),
    )
    strides = *scale_dy.stride(), 0, *scale_x.stride()
    return _start(dy_t, x_t, out_dtype, config, 1, tiles, maps, strides, (groups, rows, cols, 0))


def _map(codes: torch.Tensor, rows: int) -> cuda_driver.TensorMap:
    """The tensor map of a tensor of four dimensions, with boxes of `rows` rows by BLOCK_K bytes."""
    return tensor_map(codes.view(torch.uint8), codes.shape[2], rows, BLOCK_K)


def _start(
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype,
    config: CudaConfig,
    weights: int,
    tiles: int,
    maps: tuple[cuda_driver.TensorMap, cuda_driver.TensorMap, cuda_driver.TensorMap | None],
    strides: tuple[int, ...],
    sizes: tuple[int, ...],
) -> Write:
    """Launches the kernel for at most `tiles` tiles per CTA of a cluster. `maps` are the tensor maps of a, b and, for
    gradients, the result. `strides` are those of a's scales by rows and K-blocks, and of b's by groups, rows and
    K-blocks."""
    defines = (
        f"WEIGHTS={weights}",
        f"A_E4M3={int(a.dtype == torch.float8_e4m3fn)}",
        f"B_E4M3={int(b.dtype == torch.float8_e4m3fn)}",
        f"OUT32={int(out_dtype == torch.float32)}",
        f"FP16={int(out_dtype == torch.float16)}",
        f"BLOCK_N={config.block_n}",
        f"TURNS={int(config.turns)}",
        f"STAGES={config.stages}",
        f"RASTER={config.raster}",
        f"CLUSTER={config.cluster}",
    )
    device, shared = a.device, shared_bytes(config, bool(weights), out_dtype)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    with torch.cuda.device_of(a):
        (kernel,) = cuda_driver.kernels(device.index, "products.cu", ("grouped_gemm_fp8_products",), defines, shared)
    grid = config.cluster * min(sms // config.cluster, tiles)
    launch = cuda_driver.Launch(device.index, kernel, grid, THREADS, shared, _LAYOUT)
    a_map, b_map, out_map = maps

    def run(
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        table: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        of_a = a_map(a.data_ptr())
        launch(
            of_a,
            b_map(b.data_ptr()),
            of_a if out_map is None else out_map(out.data_ptr()),  # a placeholder in the forward, which does not use it
            table.data_ptr(),
            out.data_ptr(),
            scale_a.data_ptr(),
            scale_b.data_ptr(),
            *strides,
            *sizes,
        )

    return run


def shared_bytes(config: CudaConfig, weights: bool, out_dtype: torch.dtype) -> int:
    """Bytes per CTA: the pipeline stages (both operands, their scales, Step), a tile of a gradient, and barriers."""
    operands, scales = (BLOCK_M + config.block_n) * BLOCK_K, 4 * (BLOCK_M + config.block_n)
    tile = BLOCK_M * config.block_n * out_dtype.itemsize if weights else 0
    return config.stages * (operands + scales + STEP_BYTES + 16) + tile + 16

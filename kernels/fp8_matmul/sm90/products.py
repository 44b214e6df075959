"""The GEMM for Hopper in CUDA C++ (products.cu): which problems it supports, and its launch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..configs import CudaConfig
from . import cuda_driver
from .cuda_driver import address, tensor_map

BLOCK_M, BLOCK_K, THREADS = 128, 128, 384  # of products.cu
NUMBERS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}  # BIAS of products.cu

# Parameters of products.cu and few_rows.cu: two tensor maps, then Problem: out, scales, bias; strides of scales and
# bias; rows, cols, depth.
LAYOUT = "MM(PPPPqqqqqiii)"

Optional = torch.Tensor | None


def unsupported_reason(scale_a: torch.Tensor, scale_b: torch.Tensor, capability: tuple[int, int]) -> str | None:
    """Why CUDA C++ does not support these scales or this GPU, or None if it does."""
    if capability != (9, 0):
        return "it needs a GPU of compute capability 9.0 (Hopper)"
    if scale_a.dtype != torch.float32 or scale_b.dtype != torch.float32:
        return "it supports scales in float32"
    return cuda_driver.no_compiler()


def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: Optional,
    out_dtype: torch.dtype,
    scaling: int,
    strides: tuple[int, ...],
    config: CudaConfig,
) -> Callable[..., None]:
    """Returns a function of (a, b, scale_a, scale_b, bias, out), with the properties of these, that writes out. a and b
    are not empty, and their rows are contiguous on 16-byte boundaries. `scaling` is SCALING of products.cu; `strides`
    are those of scale_a and scale_b, by rows and by K-blocks."""
    (rows, depth), cols = a.shape, b.shape[0]
    defines = (
        f"SCALING={scaling}",
        f"A_E4M3={int(a.dtype == torch.float8_e4m3fn)}",
        f"B_E4M3={int(b.dtype == torch.float8_e4m3fn)}",
        f"OUT32={int(out_dtype == torch.float32)}",
        f"FP16={int(out_dtype == torch.float16)}",
        f"BIAS={0 if bias is None else NUMBERS[bias.dtype]}",
        f"BLOCK_N={config.block_n}",
        f"TURNS={int(config.turns)}",
        f"STAGES={config.stages}",
        f"RASTER={config.raster}",
        f"CLUSTER={config.cluster}",
    )
    width, device, shared = config.block_n, a.device, shared_bytes(scaling, config)
    a_map, b_map = operand_map(a, BLOCK_M), operand_map(b, width // config.cluster)
    clusters = -(-rows // (BLOCK_M * config.cluster)) * -(-cols // width)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    with torch.cuda.device_of(a):
        (kernel,) = cuda_driver.kernels(device.index, "products.cu", ("fp8_matmul_products",), defines, shared)
    grid = config.cluster * min(sms // config.cluster, clusters)
    start = cuda_driver.Launch(device.index, kernel, grid, THREADS, shared, LAYOUT)
    fixed = (*strides, 0 if bias is None else bias.stride(0), rows, cols, depth)

    def run(
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        bias: Optional,
        out: torch.Tensor,
    ) -> None:
        start(
            a_map(a.data_ptr()),
            b_map(b.data_ptr()),
            out.data_ptr(),
            scale_a.data_ptr(),
            scale_b.data_ptr(),
            address(bias),
            *fixed,
        )

    return run


def operand_map(codes: torch.Tensor, rows: int) -> cuda_driver.TensorMap:
    """The tensor map of an operand, with boxes of `rows` rows by BLOCK_K bytes."""
    return tensor_map(codes.view(torch.uint8)[None, None], codes.shape[0], rows, BLOCK_K)


def shared_bytes(scaling: int, config: CudaConfig) -> int:
    """Bytes per CTA: the pipeline stages, with both operands and block scales, and the barriers."""
    rows = BLOCK_M + config.block_n  # of both operands
    return config.stages * (rows * BLOCK_K + (4 * rows if scaling >= 2 else 0) + 16) + 16

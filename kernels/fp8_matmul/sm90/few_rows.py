"""The GEMM with few rows for Hopper in CUDA C++ (few_rows.cu): its launch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..configs import FewConfig, few_step_bytes
from . import cuda_driver
from .cuda_driver import address
from .products import LAYOUT, NUMBERS, operand_map

GROUP = 64  # rows of b of a consumer warpgroup

Optional = torch.Tensor | None


def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: Optional,
    out_dtype: torch.dtype,
    scaling: int,
    strides: tuple[int, ...],
    config: FewConfig,
) -> Callable[..., None]:
    """Like `products.launch`, for few_rows.cu, whose SCALING begins at 1."""
    (rows, depth), cols = a.shape, b.shape[0]
    defines = (
        f"SCALING={scaling}",
        f"A_E4M3={int(b.dtype == torch.float8_e4m3fn)}",
        f"B_E4M3={int(a.dtype == torch.float8_e4m3fn)}",
        f"OUT32={int(out_dtype == torch.float32)}",
        f"FP16={int(out_dtype == torch.float16)}",
        f"BIAS={0 if bias is None else NUMBERS[bias.dtype]}",
        f"COLS={config.rows}",
        f"GROUPS={config.groups}",
        f"STAGES={config.stages}",
        f"CLUSTER={config.splits}",
        f"RESIDENT={config.resident}",
    )
    width, device, shared = GROUP * config.groups, a.device, shared_bytes(scaling, config)
    a_map, b_map = operand_map(a, config.rows), operand_map(b, width)
    with torch.cuda.device_of(a):
        (kernel,) = cuda_driver.kernels(device.index, "few_rows.cu", ("fp8_matmul_few_rows",), defines, shared)
    grid = -(-cols // width) * -(-rows // config.rows) * config.splits
    start = cuda_driver.Launch(device.index, kernel, grid, threads(config), shared, LAYOUT)
    fixed = (*strides, 0 if bias is None else bias.stride(0), rows, cols, depth)

    def run(
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        bias: Optional,
        out: torch.Tensor,
    ) -> None:
        places = out.data_ptr(), scale_a.data_ptr(), scale_b.data_ptr(), address(bias)
        start(a_map(a.data_ptr()), b_map(b.data_ptr()), *places, *fixed)

    return run


def threads(config: FewConfig) -> int:
    return 128 * config.groups + 32


def shared_bytes(scaling: int, config: FewConfig) -> int:
    """Bytes per CTA: the pipeline stages, with both operands and block scales, and the barriers. In the epilogue the
    accumulators overwrite the stages."""
    return config.stages * few_step_bytes(config.rows, config.groups, scaling)

"""The GEMM with many rows for Hopper in CUDA C++ (many_rows.cu): its launch. It supports what few_rows.py supports."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..configs import ManyConfig
from ..formats import chunks
from . import cuda_driver
from .cuda_driver import address, tensor_map
from .few_rows import chunk_bytes, defines

THREADS = 384  # two consumer warpgroups and the producer warpgroup

_LAYOUT = "MM(PPPPiii)"


def launch(x: torch.Tensor, columns: int, format: str, config: ManyConfig, sms: int) -> Callable[..., None]:
    """Returns a function of (x, w, scales, tensor_scale, y) that writes y [M, N]; x must be `few_rows.in_place`."""
    rows, depth = x.shape
    chosen = defines(config, config.cluster, format, x.dtype)
    device, shared = x.device, shared_bytes(config, format)
    x_map = tensor_map(x[None, None], rows, config.rows // config.cluster)
    like_y = torch.empty((1, 1, rows, columns), dtype=x.dtype, device="meta")
    y_map = tensor_map(like_y, rows, config.rows)
    with torch.cuda.device_of(x):
        (kernel,) = cuda_driver.kernels(device.index, "many_rows.cu", ("mxfp_matmul_many_rows",), chosen, shared)
    grid = config.cluster * min(sms // config.cluster, config.tiles(rows, columns))
    start = cuda_driver.Launch(device.index, kernel, grid, THREADS, shared, _LAYOUT)
    sizes = rows, columns, chunks(depth)

    def run(
        x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, tensor_scale: torch.Tensor | None, y: torch.Tensor
    ) -> None:
        places = y.data_ptr(), w.data_ptr(), scales.data_ptr(), address(tensor_scale)
        start(x_map(x.data_ptr()), y_map(y.data_ptr()), *places, *sizes)

    return run


def shared_bytes(config: ManyConfig, format: str) -> int:
    """Bytes per CTA: the pipeline stages (x, w and scales) and barriers. The stores of y use the x of one stage."""
    return config.stages * (chunk_bytes(config.rows, config.groups, format) + 16)

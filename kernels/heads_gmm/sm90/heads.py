# A copy of parts/sm90/heads.py, made by `nox -s vendor`: change it there.
"""The forward of heads in CUDA C++ (heads.cuh): which operands it supports, and its launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..activation import ACTIVATIONS
from ..configs.heads_forward import BLOCK, MAX_DIM, MAX_OUT, CudaConfig
from ..heads_backward.operands import device_of
from . import cuda_driver
from .cuda_driver import tensor_map

BLOCK_K, THREADS = 64, 384  # of heads.cuh
W2_BYTES = 4 * BLOCK * MAX_OUT * 2  # of the four pipeline stages of w2
HALVES = (torch.float16, torch.bfloat16)
VECTOR = 8  # elements of 16 bytes
MAX_UNITS = 2**30  # units of work; a unit has at least a tile of rows and a head

# Tensor maps of x and w1, and heads.cuh's Heads: w2 and its strides; rows, heads, hidden, dim_out, heads of a unit.
_LAYOUT = "MM(Pqqqiiiii)"


def unsupported_reason(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> str | None:
    """Why heads.cuh cannot process x [rows, D] and these weights, or None if it can."""
    (rows, dim), (heads, dim_out, _) = x.shape, w2.shape
    if device_of(x)[0] != (9, 0):
        return "it needs a GPU of compute capability 9.0 (Hopper)"
    if x.dtype not in HALVES:
        return f"it supports float16 and bfloat16, not {x.dtype}"
    if dim > MAX_DIM or dim_out > MAX_OUT:
        return f"it supports at most {MAX_DIM} columns of x and {MAX_OUT} of y per head, got {dim} and {dim_out}"
    if not takes(x, w1):
        return "it requires non-empty x and w1 with contiguous rows on 16-byte boundaries"
    if (rows // BLOCK + 1) * heads >= MAX_UNITS:
        return "it requires fewer than 2^37 rows times heads"
    return cuda_driver.no_compiler()


def takes(*tensors: torch.Tensor) -> bool:
    """Whether TMA can read these tensors: they have elements, their rows are contiguous and start on 16-byte
    boundaries, and no dimension is expanded (stride 0)."""
    for t in tensors:
        if not t.numel() or t.data_ptr() % 16 or (t.shape[-1] > 1 and t.stride(-1) != 1):
            return False
        outer = zip(t.shape[:-1], t.stride()[:-1], strict=True)
        if any(size > 1 and (stride <= 0 or stride % VECTOR) for size, stride in outer):
            return False
    return True


def forward_launch(
    source: str,
    kernel: str,
    layout: str,
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    activation: str,
    config: CudaConfig,
) -> Callable[..., None]:
    """The launch of `kernel` in `source`, given (x, w1, w2, *values) like these. The values are the members of the
    kernel's last parameter, a struct with this `layout`."""
    (rows, dim), (heads, hidden, _) = x.shape, w1.shape
    _, sms = device_of(x)
    defines = (
        f"ACTIVATION={ACTIVATIONS.index(activation)}",
        f"FP16={int(x.dtype == torch.float16)}",
        f"STEPS={-(-dim // BLOCK_K)}",
        f"TAIL={tail_of(hidden)}",
        f"STAGES={config.stages}",
        f"CLUSTER={config.cluster}",
    )
    shared = shared_bytes(config)
    with torch.cuda.device_of(x):
        (function,) = cuda_driver.kernels(x.device.index, source, (kernel,), defines, shared)
    units = -(-rows // (BLOCK * config.cluster)) * -(-heads // config.heads)
    grid = config.cluster * min(sms // config.cluster, units)
    launch = cuda_driver.Launch(x.device.index, function, grid, THREADS, shared, f"{_LAYOUT}({layout})")
    x_map, w1_map = tensor_map(x[None, None], rows, BLOCK), tensor_map(w1[None], hidden, BLOCK // config.cluster)
    sizes = rows, heads, hidden, w2.shape[1], config.heads
    stride_g, stride_o, stride_h = w2.stride()

    def run(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, *values: Any) -> None:
        maps = x_map(x.data_ptr()), w1_map(w1.data_ptr())
        launch(*maps, w2.data_ptr(), stride_g, stride_o, stride_h, *sizes, *values)

    return run


def tail_of(hidden: int) -> int:
    """Columns of a head's last block, rounded up to a multiple of 32."""
    return -(-((hidden - 1) % BLOCK + 1) // 32) * 32


def shared_bytes(config: CudaConfig) -> int:
    """Shared memory of a CTA: the pipeline stages of w1 and of w2, and their barriers."""
    return config.stages * (BLOCK * BLOCK_K * 2 + 16) + W2_BYTES + 4 * 16

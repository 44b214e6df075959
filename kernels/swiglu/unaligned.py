"""Rows with any alignment, on Hopper in CUDA C++ (unaligned.cu): supported layouts, and launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from . import cuda_driver
from .activation import ACTIVATIONS
from .configs import WARP, UnalignedConfig, warps_per_row
from .cuda_driver import address
from .layout import Coalesced

MAX_COLS = 2**30  # the kernel's column index has 32 bits
MAX_WARPS = 2**31  # the index of a warp has 32 bits
_TYPES = {torch.bfloat16: 0, torch.float16: 1}  # TYPE in unaligned.cu


def unsupported_reason(layout: Coalesced, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Why unaligned.cu does not support tensors of this layout; None if it does."""
    if capability != (9, 0):
        return "it needs a GPU of compute capability 9.0 (Hopper)"
    if dtype not in _TYPES:
        return f"it supports bfloat16 and float16, not {dtype}"
    if layout.aligned:
        return "it is only for rows that are not aligned: more than one row, and strides that are not multiples of 16"
    if any(column != 1 for _, column in layout.strides):
        return "it requires rows whose elements are contiguous"
    if layout.cols > MAX_COLS or layout.rows * warps_per_row(layout.cols, 1, True) >= MAX_WARPS:
        return f"it supports rows of up to {MAX_COLS} elements, and fewer than {MAX_WARPS} warps in all"
    return cuda_driver.no_compiler()


def unaligned_launch(
    config: UnalignedConfig,
    layout: Coalesced,
    row_strides: Sequence[int],
    like: torch.Tensor,
    activation: str,
    need_dgate: bool = False,
    need_dup: bool = False,
) -> Callable[..., None]:
    """The launch of the forward, a function of (gate, up, y), or of the backward, a function of (dy, gate, up, dgate,
    dup) with None for those not used. `row_strides` are the row strides of these tensors, in elements. `layout` must be
    one for which `unsupported_reason` is None; `like` has their dtype and device."""
    defines = (
        f"THREADS={config.threads}",
        f"SLOTS={config.slots}",
        f"RESIDENT={config.resident}",
        f"TYPE={_TYPES[like.dtype]}",
        f"ACTIVATION={ACTIVATIONS.index(activation)}",
        f"EVICT_LAST={int(config.eviction == 'evict_last')}",
        f"NEED_DGATE={int(need_dgate)}",
        f"NEED_DUP={int(need_dup)}",
    )
    name = "swiglu_unaligned_bwd" if need_dgate or need_dup else "swiglu_unaligned_fwd"
    device = like.device.index
    with torch.cuda.device_of(like):
        (kernel,) = cuda_driver.kernels(device, "unaligned.cu", (name,), defines, 0)
    per_row = warps_per_row(layout.cols, config.slots, need_dgate and need_dup)
    grid, count = -(-layout.rows * per_row // (config.threads // WARP)), len(row_strides)
    # Addresses; rows, columns, warps per row; row strides.
    launch = cuda_driver.Launch(device, kernel, grid, config.threads, 0, f"{'P' * count}qiI{'q' * count}")
    fixed = (layout.rows, layout.cols, per_row, *row_strides)

    def run(*tensors: torch.Tensor | None) -> None:
        launch(*map(address, tensors), *fixed)

    return run

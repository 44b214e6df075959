"""Rows on any boundary, for Hopper in CUDA C++ (unaligned.cu): which walks it takes, and its launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from . import cuda_driver
from .activation import ACTIVATIONS
from .configs import WARP, UnalignedConfig, pieces
from .cuda_driver import address
from .layout import Walk

MAX_COLS = 2**30  # places in a row are 32 bits wide
MAX_PIECES = 2**31  # and so are those of warps
_TYPES = {torch.bfloat16: 0, torch.float16: 1}  # TYPE in unaligned.cu


def unsupported_reason(steps: Walk, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Why these kernels do not take a walk. None if they do."""
    if capability != (9, 0):
        return "it needs a GPU of compute capability 9.0 (Hopper)"
    if dtype not in _TYPES:
        return f"it takes bfloat16 and float16, not {dtype}"
    if steps.aligned:
        return "it takes rows that begin on any boundary, not a single row nor strides that are multiples of 16"
    if any(column != 1 for _, column in steps.strides):
        return "it takes rows whose elements are contiguous"
    if steps.cols > MAX_COLS or steps.rows * pieces(steps.cols, 1, True) >= MAX_PIECES:
        return f"it takes rows of up to {MAX_COLS} elements, and fewer than {MAX_PIECES} pieces of a warp"
    return cuda_driver.no_compiler()


def unaligned_launch(
    config: UnalignedConfig,
    steps: Walk,
    row_strides: Sequence[int],
    like: torch.Tensor,
    activation: str,
    need_dgate: bool = False,
    need_dup: bool = False,
) -> Callable[..., None]:
    """A launch that is given the kernel's tensors: gate, up, y, or with a gradient dy, gate, up, dgate, dup, None for
    those that it does not use. `row_strides` are theirs, in elements, in a walk that `unsupported_reason` takes; `like`
    has their dtype and device."""
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
    each = pieces(steps.cols, config.slots, need_dgate and need_dup)
    grid, count = -(-steps.rows * each // (config.threads // WARP)), len(row_strides)
    # Addresses; rows, columns and pieces of a row; strides.
    launch = cuda_driver.Launch(device, kernel, grid, config.threads, 0, f"{'P' * count}qiI{'q' * count}")
    fixed = (steps.rows, steps.cols, each, *row_strides)

    def run(*tensors: torch.Tensor | None) -> None:
        launch(*map(address, tensors), *fixed)

    return run

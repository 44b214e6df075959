"""Rows on any boundary, for Hopper in CUDA C++ (unaligned.cu): which walks it takes, and its launches."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from . import cuda_driver
from .activation import ACTIVATIONS
from .cuda_driver import launch
from .layout import Walk

if TYPE_CHECKING:
    from .kernel import UnalignedConfig

VECTOR = 8  # elements: 16 bytes
WARP = 32  # lanes
MAX_COLS = 2**30  # places in a row are 32 bits wide
MAX_PIECES = 2**31  # and so are those of warps
_TYPES = {torch.bfloat16: 0, torch.float16: 1}  # TYPE in unaligned.cu


def pieces(cols: int, slots: int, both: bool) -> int:
    """Warps to a row of `cols` elements, a lane of which has `slots` vectors. `both` gradients begin on boundaries of
    their own: there may be a vector before the row, and the last lane of a warp writes nothing."""
    vectors = -(-(cols + VECTOR - 1) // VECTOR) + both  # at worst the first holds one element of the row
    return -(-vectors // ((WARP - both) * slots))


def unaligned_refuses(steps: Walk, capability: tuple[int, int]) -> str | None:
    """Why these kernels do not take a walk whose rows lie on any boundary. None if they do."""
    if capability != (9, 0):
        return "it needs a GPU of compute capability 9.0 (Hopper)"
    if steps.tensors[0].dtype not in _TYPES:
        return f"it takes bfloat16 and float16, not {steps.tensors[0].dtype}"
    if any(column != 1 for _, column in steps.strides):
        return "it wants elements of a row side by side"
    if steps.cols > MAX_COLS or steps.rows * pieces(steps.cols, 1, True) >= MAX_PIECES:
        return f"it takes rows of up to {MAX_COLS} elements, and fewer than {MAX_PIECES} pieces of a warp"
    return cuda_driver.no_compiler()


def unaligned_launch(
    config: UnalignedConfig,
    steps: Walk,
    places: Sequence[int | None],
    activation: str,
    need_dgate: bool = False,
    need_dup: bool = False,
) -> None:
    """Writes the outputs of a walk that `unaligned_refuses` does not, whose device is the current one. `places` says
    which tensors of the walk are the kernel's pointers: gate, up, y, or with a gradient dy, gate, up, dgate, dup."""
    first = steps.tensors[0]
    defines = (
        f"THREADS={config.threads}",
        f"SLOTS={config.slots}",
        f"RESIDENT={config.resident}",
        f"TYPE={_TYPES[first.dtype]}",
        f"ACTIVATION={ACTIVATIONS.index(activation)}",
        f"EVICT_LAST={int(config.eviction == 'evict_last')}",
        f"NEED_DGATE={int(need_dgate)}",
        f"NEED_DUP={int(need_dup)}",
    )
    name = "swiglu_unaligned_bwd" if need_dgate or need_dup else "swiglu_unaligned_fwd"
    (kernel,) = cuda_driver.kernels(first.device.index, "unaligned.cu", (name,), defines, 0)
    each = pieces(steps.cols, config.slots, need_dgate and need_dup)
    arguments = (
        *(cuda_driver.pointer(None if place is None else steps.tensors[place]) for place in places),
        ctypes.c_longlong(steps.rows),
        ctypes.c_int(steps.cols),
        ctypes.c_uint(each),
        *(ctypes.c_longlong(0 if place is None else steps.strides[place][0]) for place in places),
    )
    launch(kernel, -(-steps.rows * each // (config.threads // WARP)), config.threads, 0, arguments)

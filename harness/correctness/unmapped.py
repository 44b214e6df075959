"""Places tensors next to unmapped memory, where an access out of bounds, reads included, is a fault of the GPU.

Elsewhere such a read returns whatever lies there, and is detected only if the value is used. After a fault every CUDA
call of the process fails, and so do all later checks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from . import layouts
from .battery import Subject, examine, may_be_refused

ALIGNMENT = 16  # bytes: lets kernels use vector accesses and TMA
SIDES = ("end", "beginning")


def unmapped(s: Subject, mode: str) -> None:
    """Checks inputs and incoming gradients that end at the end of mapped memory, then ones that begin at its start."""
    for side in SIDES:
        with may_be_refused(s, where := f"memory ends at the {side} of each tensor"):
            examine(s, s.inputs(), mode, partial(place, side=side), where=where, forward_too=True)


def place(name: str, values: torch.Tensor, side: str) -> torch.Tensor:
    """A contiguous copy at that side of its own mapping; less than ALIGNMENT bytes from its end."""
    size, item = values.numel() * values.element_size(), values.element_size()
    memory = torch.as_tensor(Memory(size, values.device), device=values.device)
    memory.fill_(layouts.POISON)
    offset = (memory.numel() - size) // ALIGNMENT * ALIGNMENT if side == "end" else 0
    placed = layouts.view(memory, values.dtype, values.shape, layouts.row_major(values.shape), offset // item)
    return placed.copy_(values.detach())


class Memory:
    """A mapping of at least `size` bytes of a GPU: whole pages with an unmapped one on either side (CUDA Driver API,
    "Virtual Memory Management"). PyTorch and CuPy read `__cuda_array_interface__`. It is unmapped when no tensor uses
    it any more."""

    def __init__(self, size: int, device: torch.device) -> None:
        from cuda.bindings import driver  # installed with PyTorch's CUDA builds

        self._driver = driver
        torch.cuda.synchronize(device)  # also initialises CUDA
        index = torch.cuda.current_device() if device.index is None else device.index
        properties, access = driver.CUmemAllocationProp(), driver.CUmemAccessDesc()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        for location in (properties.location, access.location):
            location.type, location.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, index
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        page = self._call("cuMemGetAllocationGranularity", properties, least)
        self._size = max(1, -(-size // page)) * page
        self._reserved = self._size + 2 * page, int(self._call("cuMemAddressReserve", self._size + 2 * page, 0, 0, 0))
        self._start = self._reserved[1] + page
        handle = self._call("cuMemCreate", self._size, properties, 0)
        self._call("cuMemMap", self._start, self._size, 0, handle, 0)
        self._call("cuMemRelease", handle)  # the mapping stays valid
        self._call("cuMemSetAccess", self._start, self._size, [access], 1)
        self.__cuda_array_interface__ = dict(
            shape=(self._size,), typestr="|u1", data=(self._start, False), version=3, strides=None
        )

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *results = getattr(self._driver, name)(*arguments)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: {error!r}")
        return results[0] if results else None

    def __del__(self) -> None:
        """Errors here come from an earlier fault, which was reported."""
        if hasattr(self, "_start"):
            driver = self._driver
            driver.cuCtxSynchronize()  # kernels that still run may read it
            driver.cuMemUnmap(self._start, self._size)
            driver.cuMemAddressFree(self._reserved[1], self._reserved[0])

"""Tensors beside unmapped memory: where they lie, and that a read outside of them ends the process's use of the GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from harness import registry
from harness.correctness import layouts, unmapped


@triton.jit
def _copy_kernel(x_ptr, y_ptr, first, last, BLOCK: tl.constexpr):
    at = first + tl.arange(0, BLOCK)
    tl.store(y_ptr + at - first, tl.load(x_ptr + at, mask=at < last), mask=at < last)


def read(side: str, first: int, last: int) -> None:
    """Reads elements first ... last - 1 of 1000 that lie at a side of memory. They end at a multiple of 16 bytes."""
    values = torch.arange(1000, device="cuda", dtype=torch.float32)
    x, y = unmapped.place("x", values, side), torch.empty(1024, device="cuda")
    _copy_kernel[(1,)](x, y, first, last, BLOCK=1024)
    torch.cuda.synchronize()
    assert torch.equal(y[: 1000 - first], values[first:])


@pytest.mark.parametrize("count", [0, 1, 7, 8, 100, 2048])
@pytest.mark.parametrize("side", unmapped.SIDES)
def test_where_a_tensor_lies(side, count, monkeypatch):
    """At the beginning, or less than 16 bytes from the end, on an address that vectors may have; poison elsewhere."""
    monkeypatch.setattr(unmapped, "Memory", lambda size, device: torch.zeros(4096, dtype=torch.uint8))
    values = torch.randn(2, count // 2).half() if count % 2 == 0 else torch.randn(count).half()
    placed = unmapped.place("x", values, side)
    assert torch.equal(placed, values) and placed.is_contiguous()
    begin, end = placed.storage_offset() * 2, placed.storage_offset() * 2 + count * 2
    assert begin % 16 == 0 and (begin == 0 if side == "beginning" else 4096 - end < 16)
    memory = torch.empty(0, dtype=torch.uint8).set_(placed.untyped_storage(), 0, (4096,), (1,))
    assert (memory[:begin] == layouts.POISON).all() and (memory[end:] == layouts.POISON).all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("side", "first", "last"),
    [("end", 0, 1000), ("beginning", 0, 1000), ("end", 0, 1001), ("beginning", -1, 1000)],
)
def test_a_read_outside_of_a_tensor_is_a_fault(side, first, last):
    """In a process of its own, of which nothing is left to use afterwards."""
    program = f"from tests.test_unmapped import read; read({side!r}, {first}, {last})"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=registry.ROOT, capture_output=True, text=True, timeout=300
    )
    if first == 0 and last == 1000:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode != 0 and "illegal memory access" in done.stderr


@pytest.mark.gpu
def test_memory_is_given_back():
    """When the last tensor in it goes. Of that the driver then knows nothing."""
    from cuda.bindings import driver

    placed = unmapped.place("x", torch.zeros(100, device="cuda"), "end")
    begin, row = placed.untyped_storage().data_ptr(), placed[50:]
    del placed
    assert driver.cuMemGetAddressRange(begin)[0] == driver.CUresult.CUDA_SUCCESS and row.sum() == 0
    del row
    assert driver.cuMemGetAddressRange(begin)[0] != driver.CUresult.CUDA_SUCCESS

"""Copies and signals between GPUs that use no SM: functions of the CUDA driver, by ctypes."""

from __future__ import annotations

import ctypes
from functools import cache
from math import prod

import torch

UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED: the driver derives the GPU from the address
GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ, in arithmetic modulo 2^32
MAX_PITCH = 2**31 - 1


class _Copy2D(ctypes.Structure):
    """The struct CUDA_MEMCPY2D."""

    _fields_ = (
        *((f"src_{name}", ctypes.c_size_t) for name in "xy"),
        ("src_type", ctypes.c_int),
        *((f"src_{name}", ctypes.c_void_p) for name in ("host", "device", "array")),
        ("src_pitch", ctypes.c_size_t),
        *((f"dst_{name}", ctypes.c_size_t) for name in "xy"),
        ("dst_type", ctypes.c_int),
        *((f"dst_{name}", ctypes.c_void_p) for name in ("host", "device", "array")),
        ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


@cache
def _function(name: str):
    return getattr(ctypes.CDLL("libcuda.so.1"), name)


def _call(name: str, *arguments) -> None:
    if error := _function(name)(*arguments):
        raise RuntimeError(f"ring_attention: {name} failed: CUDA driver error {error}")


def pieces(x: torch.Tensor) -> tuple[int, int, int] | None:
    """Returns (number, bytes of each, pitch in bytes) of the contiguous pieces of which a tensor [B, H, …] consists, at
    most one for each of B·H, evenly spaced. None if it has no such form."""
    outer, inner = x.shape[:2], x.shape[2:]
    expected = 1
    for size, stride in zip(reversed(inner), reversed(x.stride()[2:]), strict=True):
        if size != 1 and stride != expected:
            return None
        expected *= size
    (batch, heads), (far, near) = outer, x.stride()[:2]
    if batch > 1 and heads > 1 and far != heads * near:
        return None
    step = near if heads > 1 else far if batch > 1 else expected
    if step < expected:
        return None
    size = x.element_size()
    if step == expected:
        return 1, prod(x.shape) * size, prod(x.shape) * size
    return batch * heads, expected * size, step * size


def copy(source: torch.Tensor, into: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Copies tensors that have `pieces`, between GPUs by a copy engine. The stream's device must be current."""
    one, other = pieces(source), pieces(into)
    assert one is not None and other is not None and source.shape == into.shape and source.dtype == into.dtype
    width = min(one[1], other[1])
    count = source.numel() * source.element_size() // width
    # Each tensor has B·H pieces, or a single one that may be split.
    steps = [width if found[0] == 1 else found[2] for found in (one, other)]
    if count > 1 and max(steps) <= MAX_PITCH:
        told = _Copy2D(width=width, height=count)
        told.src_type = told.dst_type = UNIFIED
        told.src_device, told.src_pitch = source.data_ptr(), steps[0]
        told.dst_device, told.dst_pitch = into.data_ptr(), steps[1]
        _call("cuMemcpy2DAsync_v2", ctypes.byref(told), ctypes.c_void_p(stream.cuda_stream))
        return
    for i in range(count):
        places = [ctypes.c_uint64(t.data_ptr() + i * step) for t, step in zip((into, source), steps[::-1], strict=True)]
        _call("cuMemcpyAsync", *places, ctypes.c_size_t(width), ctypes.c_void_p(stream.cuda_stream))


def write_value(stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Enqueues a write of 32 bits, after all earlier work of the stream is complete and visible."""
    where, value_ = ctypes.c_uint64(address), ctypes.c_uint32(value % 2**32)
    _call("cuStreamWriteValue32_v2", ctypes.c_void_p(stream.cuda_stream), where, value_, ctypes.c_uint(0))


def wait_value(stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Makes later work of the stream wait until the 32-bit value at the address is at least `value`."""
    where, value_, flags = ctypes.c_uint64(address), ctypes.c_uint32(value % 2**32), ctypes.c_uint(GREATER_OR_EQUAL)
    _call("cuStreamWaitValue32_v2", ctypes.c_void_p(stream.cuda_stream), where, value_, flags)

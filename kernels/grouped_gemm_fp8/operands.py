"""The requirements of the two public functions on their operands, and the test whether an operand is copied first."""

from __future__ import annotations

from typing import Any

import torch

from .checks import FLOATS, kind, runnable

BACKENDS = ("auto", "triton", "cuda")
CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.int32, torch.int64)
FIRST_CAPABILITY = (8, 9)
MAX_SIZE = 2**31 - 512  # row and column indices are 32-bit, including the end of the last tile
BLOCK = 128  # elements that share a scale
VECTOR = 16  # elements of 16 bytes


def blocks(size: int) -> int:
    return (size + BLOCK - 1) // BLOCK


def check_codes(
    op: str, name: str, codes: Any, wanted: str, shape: tuple[int | None, ...], units: tuple[int, ...]
) -> None:
    """Raises TypeError or ValueError unless `codes` is an fp8 tensor of this shape. A size of None means any multiple
    of its unit. `wanted` describes the shape in the message."""
    if not isinstance(codes, torch.Tensor) or codes.dtype not in CODES:
        raise TypeError(f"{op}: {name} must be a tensor of float8_e4m3fn or float8_e5m2, got {kind(codes)}")
    fits = codes.dim() == len(shape) and all(
        size <= MAX_SIZE and (size % unit == 0 if own is None else size == own)
        for size, own, unit in zip(codes.shape, shape, units, strict=True)
    )
    if not fits:
        raise ValueError(f"{op}: {name} must be {wanted}, sizes at most {MAX_SIZE}, got shape {tuple(codes.shape)}")


def check_scale(op: str, name: str, scale: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32:
        raise TypeError(f"{op}: {name} must be a tensor of float32, got {kind(scale)}")
    if scale.shape != shape:
        raise ValueError(f"{op}: {name} must be {list(shape)}, one scale per 128 elements, got {list(scale.shape)}")


def check_offsets(op: str, offsets: Any, groups: int | None) -> None:
    if not isinstance(offsets, torch.Tensor) or offsets.dtype not in INTEGERS:
        raise TypeError(f"{op}: offsets must be a tensor of int32 or int64, got {kind(offsets)}")
    if offsets.dim() != 1 or groups not in (None, offsets.shape[0]):
        wanted = "[G]" if groups is None else f"[{groups}] like weights' groups"
        raise ValueError(f"{op}: offsets must be {wanted}, got {list(offsets.shape)}")


def check_options(
    op: str, out_dtype: Any, backend: Any, name: str, first: torch.Tensor, **others: torch.Tensor
) -> None:
    """Checks devices and options, and that a kernel can run on the device of `first`, the argument called `name`."""
    for other, tensor in others.items():
        if tensor.device != first.device:
            raise ValueError(f"{op}: {other} must be on {name}'s device {first.device}, got {tensor.device}")
    if out_dtype not in FLOATS:
        raise TypeError(f"{op}: out_dtype must be float32, float16 or bfloat16, got {out_dtype}")
    if backend not in BACKENDS:
        raise ValueError(f"{op}: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    runnable(op, name, first)
    if first.is_cuda and device_of(first)[0] < FIRST_CAPABILITY:
        needed, found = ("{}.{}".format(*of) for of in (FIRST_CAPABILITY, device_of(first)[0]))
        raise RuntimeError(f"{op}: {name} must be on a GPU of compute capability {needed} or later, got {found}")


def is_e4m3(codes: torch.Tensor) -> bool:
    return codes.dtype == CODES[0]


def in_place(codes: torch.Tensor) -> bool:
    """Whether rows are contiguous, do not overlap, and start on 16-byte boundaries. The stride of a dimension of size 1
    is arbitrary; if it does not meet this, the tensor is copied too."""
    *pitches, step = codes.stride()
    apart = all(pitch >= codes.shape[-1] and not pitch % VECTOR for pitch in pitches)
    return step == 1 and apart and not codes.data_ptr() % VECTOR


def dense(codes: torch.Tensor) -> torch.Tensor:
    """A contiguous, aligned copy. `contiguous()` would return a contiguous tensor that is not aligned as it is."""
    return codes.clone(memory_format=torch.contiguous_format)


def device_of(tensor: torch.Tensor) -> tuple[tuple[int, int], int]:
    """Compute capability and number of SMs; in the interpreter those of an sm_89 with 2 SMs."""
    if not tensor.is_cuda:
        return FIRST_CAPABILITY, 2
    properties = torch.cuda.get_device_properties(tensor.device)
    return (properties.major, properties.minor), properties.multi_processor_count

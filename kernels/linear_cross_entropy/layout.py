"""How tensors are addressed: operands as cuBLAS reads them, views of them, and offsets in the fp32 buffers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Optional = torch.Tensor | None


@dataclass(frozen=True)
class View:
    """A part of a matrix: its size, strides and offset. If `size` is None it is the whole matrix."""

    size: tuple[int, ...] | None
    stride: tuple[int, ...] = ()
    start: int = 0

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of that part of a tensor."""
        if self.size is None:
            return tensor
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.start)


WHOLE = View(None)


def part_of(
    shape: tuple[int, ...], stride: tuple[int, ...], rows: slice, columns: slice, transposed: bool = False
) -> View:
    """The view matrix[rows, columns]. The matrix, with these strides, is a flattened tensor of this shape."""
    size, start = (
        (rows.stop - rows.start, columns.stop - columns.start),
        rows.start * stride[0] + columns.start * stride[1],
    )
    if transposed:
        return View(size[::-1], stride[::-1], start)
    return WHOLE if size == tuple(shape) else View(size, stride, start)


def operands(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: Optional, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Optional]:
    """hidden [N, H] and weight [V, H] as cuBLAS reads them, target [N] and bias [V] contiguous. Each is a view where
    strides allow it, otherwise a copy. The copy of a target that cannot hold ignore_index, which the kernels give to
    the rows past the last one, is int64."""
    flat = operand(hidden.reshape(-1, hidden.shape[-1]))
    if target.dtype == torch.int32 and not -(2**31) <= ignore_index < 2**31:
        target = target.long()
    return flat, operand(weight), target.reshape(-1).contiguous(), None if bias is None else bias.contiguous()


def operand(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix itself if cuBLAS can read it with a leading dimension, transposed or not; otherwise a copy."""
    for size, (inner, outer) in zip(matrix.shape[::-1], (matrix.stride()[::-1], matrix.stride()), strict=True):
        if inner == 1 and outer >= max(1, size):
            return matrix
    return matrix.contiguous()


def copied(given: tuple[Optional, ...], used: tuple[Optional, ...]) -> bool:
    """Whether any operand in `used` is a copy of the one in `given`."""
    pairs = [(a, b) for a, b in zip(given, used, strict=True) if a is not None and b is not None]
    return any(a.untyped_storage()._cdata != b.untyped_storage()._cdata for a, b in pairs)


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def group(stride: int, *starts: int) -> int:
    """Rows per aligned vector access, 8 or 1. A kernel rounds the number of rows up to a multiple of it.

    Strides and offsets are multiples of it. So the elements accessed past the last row are padding, or columns that are
    written only afterwards.
    """
    return 8 if stride % 8 == 0 and all(start % 8 == 0 for start in starts) else 1


@dataclass(frozen=True)
class Held:
    """Offsets in the buffer `held` of a call (see kernel.py). The lse of a chunk is at twice its first row."""

    loss_at: int
    factor_at: int
    size: int

    @classmethod
    def of(cls, rows: int, returned: bool) -> Held:
        """The offsets for that many rows. `returned`: the losses of the rows are a separate result, not in `held`."""
        loss_at = -(-2 * rows // 16) * 16
        factor_at = loss_at + (0 if returned else rows)
        return cls(loss_at, factor_at, factor_at + 1)


@dataclass(frozen=True)
class Stats:
    """Offsets in the buffer `stats` of a chunk of rows (see kernel.py)."""

    parts: int
    rows: int
    smoothing: bool

    @property
    def offsets(self) -> tuple[int, int, int]:
        """The offsets of the sums of exponentials, the sums of logits and the logits at the targets."""
        plane = -(-self.parts * self.rows // 16) * 16  # keeps vector stores aligned
        return plane, 2 * plane, (3 if self.smoothing else 2) * plane

    @property
    def size(self) -> int:
        return self.offsets[2] + self.rows

# A copy of parts/layout.py, made by `nox -s vendor`: change it there.
"""Coalesces the dimensions of tensors of one shape to rows and columns, in the memory order of the first tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Coalesced:
    """Element (r, c) of a tensor is at r · row stride + c · column stride from its start, 0 <= r < rows, 0 <= c < cols.
    `strides` has (row stride, column stride) of each output, then of each input, in elements. If `copied` is true for
    an input, these are the strides of its copy by `in_order_of`, which the caller must make first."""

    rows: int
    cols: int
    strides: tuple[tuple[int, int], ...]
    copied: tuple[bool, ...]

    @property
    def transposed(self) -> bool:
        """Whether a tensor's row stride is less than its column stride: its columns are contiguous, not its rows."""
        return self.rows > 1 and any(0 < row < col for row, col in self.strides)

    @property
    def aligned(self) -> bool:
        """Whether all rows are aligned like the first: one row, or row strides that are multiples of 16 elements."""
        return self.rows == 1 or all(row % 16 == 0 for row, _ in self.strides)


def coalesce(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Coalesced:
    """Rows and columns of the outputs and inputs, in the memory order of the first output. Only shapes and strides are
    read, so an output may be on the meta device.

    Two adjacent dimensions are coalesced if in every tensor the outer stride is the inner stride times the inner size.
    So dense tensors of equal strides become a single row, whatever the order of their dimensions. If more than two
    dimensions are left, the inputs must be copied into the memory order of the first output. The outputs must have that
    order already, and no more than two dimensions after coalescing.
    """
    first, shape = outputs[0], outputs[0].shape
    strides = [t.stride() for t in (*outputs, *inputs)]
    copied = (False,) * len(inputs)
    remaining = _coalesced(shape, strides)
    if len(remaining) > 2:
        dense = torch.empty_like(first, device="meta").stride()
        copied = tuple(t.stride() != dense for t in inputs)
        remaining = _coalesced(shape, [*(t.stride() for t in outputs), *(dense for _ in inputs)])
    (rows, row_strides), (cols, col_strides) = [(1, (0,) * len(strides))] * (2 - len(remaining)) + remaining
    return Coalesced(rows, cols, tuple(zip(row_strides, col_strides, strict=True)), copied)


def in_order_of(first: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A dense copy of `tensor` in the memory order of `first`, which has the same shape and dtype."""
    return torch.empty_like(first).copy_(tensor)


def _coalesced(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> list[tuple[int, tuple[int, ...]]]:
    """(size, stride of each tensor) of the coalesced dimensions, in descending order of the first tensor's strides."""
    by_dim = list(zip(*strides, strict=True))
    order = sorted((dim for dim, size in enumerate(shape) if size != 1), key=lambda dim: -by_dim[dim][0])
    remaining: list[tuple[int, tuple[int, ...]]] = []
    for dim in order:
        size = shape[dim]
        if remaining and remaining[-1][1] == tuple(size * stride for stride in by_dim[dim]):
            size *= remaining.pop()[0]
        remaining.append((size, by_dim[dim]))
    return remaining or [(1, (1,) * len(strides))]

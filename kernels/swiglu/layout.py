"""How tensors of one shape are walked together: in the memory order of the first, as a single row or as rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Walk:
    """`rows` times `cols` elements; `strides` has (row stride, column stride) of each of `tensors`, in elements."""

    rows: int
    cols: int
    tensors: tuple[torch.Tensor, ...]
    strides: tuple[tuple[int, int], ...]

    @property
    def transposed(self) -> bool:
        """Whether some tensor lies closer together along the rows than along the columns."""
        return self.rows > 1 and any(0 < row < col for row, col in self.strides)

    @property
    def aligned(self) -> bool:
        """Whether every row begins on as good a boundary as the first."""
        return self.rows == 1 or all(row % 16 == 0 for row, _ in self.strides)


def walk(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Walk:
    """The walk of the outputs and then the inputs, in the memory order of the first output.

    Dimensions are merged where every tensor has one stride for both, so that dense tensors of equal strides make a
    single row, whatever the order of their dimensions. Where more than rows and columns would be left, the inputs are
    first copied into the order of the first output. The outputs have its order already, and no more than two strides.
    """
    first, tensors = outputs[0], (*outputs, *inputs)
    if all(t.is_contiguous() for t in tensors):  # by far the most frequent, and the search takes 10 us
        return Walk(1, first.numel(), tensors, ((0, 1),) * len(tensors))
    merged = _merged(tensors)
    if len(merged) > 2:
        dense = torch.empty_like(first)
        copies = (t if t.stride() == dense.stride() else torch.empty_like(first).copy_(t) for t in inputs)
        tensors = (*outputs, *copies)
        merged = _merged(tensors)
    (rows, row_strides), (cols, col_strides) = [(1, (0,) * len(tensors))] * (2 - len(merged)) + merged
    return Walk(rows, cols, tensors, tuple(zip(row_strides, col_strides, strict=True)))


def _merged(tensors: Sequence[torch.Tensor]) -> list[tuple[int, tuple[int, ...]]]:
    """(size, stride of each tensor) of the dimensions that remain, outermost of the first tensor first."""
    shape, strides = tensors[0].shape, list(zip(*(t.stride() for t in tensors), strict=True))
    order = sorted((dim for dim, size in enumerate(shape) if size != 1), key=lambda dim: -strides[dim][0])
    merged: list[tuple[int, tuple[int, ...]]] = []
    for dim in order:
        size = shape[dim]
        if merged and merged[-1][1] == tuple(size * stride for stride in strides[dim]):
            size *= merged.pop()[0]
        merged.append((size, strides[dim]))
    return merged or [(1, (1,) * len(tensors))]

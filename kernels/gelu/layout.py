# A copy of parts/layout.py, made by `nox -s vendor`: change it there.
"""How tensors of one shape are walked together: in the memory order of the first, as a single row or as rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Walk:
    """`rows` times `cols` elements; `strides` has (row stride, column stride) of each output and then of each input, in
    elements. `copied` says which inputs have these strides only once `in_order_of` has copied them."""

    rows: int
    cols: int
    strides: tuple[tuple[int, int], ...]
    copied: tuple[bool, ...]

    @property
    def transposed(self) -> bool:
        """Whether some tensor lies closer together along the rows than along the columns."""
        return self.rows > 1 and any(0 < row < col for row, col in self.strides)

    @property
    def aligned(self) -> bool:
        """Whether every row begins on as good a boundary as the first."""
        return self.rows == 1 or all(row % 16 == 0 for row, _ in self.strides)


def walk(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Walk:
    """The walk of the outputs and then the inputs, in the memory order of the first output. Only shapes and strides are
    read, so an output may be on the meta device.

    Dimensions are merged where every tensor has one stride for both, so that dense tensors of equal strides make a
    single row, whatever the order of their dimensions. Where more than rows and columns would be left, the inputs are
    copied first into the order of the first output. The outputs have its order already, and no more than two strides.
    """
    first, shape = outputs[0], outputs[0].shape
    strides = [t.stride() for t in (*outputs, *inputs)]
    copied = (False,) * len(inputs)
    merged = _merged(shape, strides)
    if len(merged) > 2:
        dense = torch.empty_like(first, device="meta").stride()
        copied = tuple(t.stride() != dense for t in inputs)
        merged = _merged(shape, [*(t.stride() for t in outputs), *(dense for _ in inputs)])
    (rows, row_strides), (cols, col_strides) = [(1, (0,) * len(strides))] * (2 - len(merged)) + merged
    return Walk(rows, cols, tuple(zip(row_strides, col_strides, strict=True)), copied)


def in_order_of(first: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A dense copy of a tensor in the memory order of another one of its shape and dtype."""
    return torch.empty_like(first).copy_(tensor)


def _merged(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> list[tuple[int, tuple[int, ...]]]:
    """(size, stride of each tensor) of the dimensions that remain, outermost of the first tensor first."""
    by_dim = list(zip(*strides, strict=True))
    order = sorted((dim for dim, size in enumerate(shape) if size != 1), key=lambda dim: -by_dim[dim][0])
    merged: list[tuple[int, tuple[int, ...]]] = []
    for dim in order:
        size = shape[dim]
        if merged and merged[-1][1] == tuple(size * stride for stride in by_dim[dim]):
            size *= merged.pop()[0]
        merged.append((size, by_dim[dim]))
    return merged or [(1, (1,) * len(strides))]

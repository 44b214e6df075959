"""Places the same values in memory with different strides, gaps and offsets, surrounded by poison.

A placed tensor is a view of a buffer that is otherwise filled with the byte 0xFF, which is NaN in every floating-point
dtype: a kernel that reads outside the view, or ignores a stride, computes with NaN. `guard.Snapshot` compares the whole
buffer afterwards, so a write outside the view is detected too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

PAD = 1 << 13  # bytes of poison on either side; a multiple of every alignment that CUDA guarantees
POISON = 0xFF
GAP = 3  # elements between the rows of "sliced": odd, so that the rows are not 16-byte aligned either

# contiguous  row-major, aligned
# transposed  the last two dimensions swapped in memory
# sliced      row-major with GAP elements between rows
# strided     every other element: no unit stride
# offset      row-major, one element past an aligned address
# expanded    stride 0 along the first dimension: every row the same
# scalar      stride 0 along every dimension: one value, like the gradient of a sum
LAYOUTS = ("contiguous", "transposed", "sliced", "strided", "offset", "expanded", "scalar")


def place(values: torch.Tensor, layout: str) -> torch.Tensor:
    """A tensor of the same shape in the given layout, a view of a poisoned buffer.

    It holds `values`, except in "expanded" and "scalar", where the first row or element is repeated. If the shape
    cannot have a layout (a transposed vector), the contiguous one is used.
    """
    shape, size = tuple(values.shape), values.element_size()
    strides = _strides(shape, layout)
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if values.numel() else 0
    offset = PAD // size + (1 if layout == "offset" else 0)
    buffer = torch.full((2 * PAD + (extent + 1) * size,), POISON, dtype=torch.uint8, device=values.device)
    placed = view(buffer, values.dtype, shape, strides, offset)
    once = tuple(slice(0, 1) if s == 0 and n > 1 else slice(None) for n, s in zip(shape, strides, strict=True))
    placed[once].copy_(values.detach()[once])
    return placed


def view(
    buffer: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int
) -> torch.Tensor:
    """A tensor on the storage of `buffer` that autograd does not track as a view of it."""
    return torch.empty(0, dtype=dtype, device=buffer.device).set_(buffer.untyped_storage(), offset, shape, strides)


def _strides(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    if layout == "scalar":
        return (0,) * len(shape)
    if layout == "strided":
        return tuple(2 * s for s in row_major(shape))
    if layout == "expanded":
        return (0, *row_major(shape[1:])) if shape else ()
    if layout == "transposed" and len(shape) > 1:
        *rest, last, inner = row_major((*shape[:-2], shape[-1], shape[-2]))
        return (*rest, inner, last)
    if layout == "sliced" and len(shape) > 1:
        return row_major((*shape[:-1], shape[-1] + GAP))
    return row_major(shape)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True)
class Assignment:
    """A layout for each tensor by name; tensors that are not named are contiguous."""

    layouts: Mapping[str, str]

    def __call__(self, name: str, values: torch.Tensor) -> torch.Tensor:
        return place(values, self.layouts.get(name, "contiguous"))

    def __str__(self) -> str:
        return ", ".join(f"{name} {layout}" for name, layout in self.layouts.items())


def rounds(names: Sequence[str]) -> Iterator[Assignment]:
    """Yields as many assignments as there are layouts. Each tensor has each layout once, and neighbours differ, which
    detects a kernel that uses one tensor's strides for another."""
    for shift in range(len(LAYOUTS)):
        yield Assignment({name: LAYOUTS[(shift + i) % len(LAYOUTS)] for i, name in enumerate(names)})

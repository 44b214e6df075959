"""The scaling mode (which elements share a scale), determined by the shapes of the scales."""

from __future__ import annotations

from collections.abc import Sequence

BLOCK = 128  # elements of k, and rows of b, that share a scale

# Named by the elements of b that share a scale. For a they are the tensor, a row and, in the last two, 1x128 elements.
TENSOR, ROW, SQUARE, LINE = "tensor", "row", "128x128", "1x128"
BLOCKED = (SQUARE, LINE)


def blocks(size: int) -> int:
    return (size + BLOCK - 1) // BLOCK


def scaling_of(rows: int, cols: int, depth: int, scale_a: Sequence[int], scale_b: Sequence[int]) -> str | None:
    """The scaling mode of scales with these shapes, or None. If several modes fit, they are equivalent: with a single
    K-block, a scale of 1x128 elements is that of a row."""
    lines = blocks(depth)
    of_a = {
        TENSOR: [()],
        ROW: [(rows,), (rows, 1)],
        SQUARE: [(rows, lines)],
        LINE: [(rows, lines)],
    }
    of_b = {
        TENSOR: [()],
        ROW: [(cols,), (cols, 1)],
        SQUARE: [(blocks(cols), lines)],
        LINE: [(cols, lines)],
    }
    for scaling in (TENSOR, ROW, SQUARE, LINE):
        if tuple(scale_a) in of_a[scaling] and tuple(scale_b) in of_b[scaling]:
            return scaling
    return None


def expected(rows: int, cols: int, depth: int) -> str:
    """The pairs of shapes that `scaling_of` accepts, for an error message."""
    lines = blocks(depth)
    return (
        f"[] and []; [{rows}] or [{rows}, 1] and [{cols}] or [{cols}, 1]; [{rows}, {lines}] and "
        f"[{blocks(cols)}, {lines}]; [{rows}, {lines}] and [{cols}, {lines}]"
    )

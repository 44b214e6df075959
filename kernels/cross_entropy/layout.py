"""How tensors are addressed: strides and alignment of rows, offsets in the workspace."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from .loss import Loss

BOUNDARY = 16  # bytes of the widest load
COUNT_BLOCK, MAX_SHARES = 1024, 64  # of the count kernel: targets of a CTA per iteration; most CTAs


@dataclass(frozen=True)
class Rows:
    """A matrix with unit inner stride, as kernels address it: from a pointer `skip` elements before its first row.
    `aligned`: that pointer is on a 16-byte boundary. `copied`: the tensor must be copied to become such a matrix."""

    stride: int
    skip: int
    aligned: bool
    copied: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's rows, in place where strides allow it."""
        return matrix_of(tensor)[0] if self.copied else tensor

    def pointer(self, matrix: torch.Tensor) -> torch.Tensor:
        """The tensor whose pointer a kernel gets, for the rows of `of(tensor)`."""
        return matrix.as_strided((1,), (1,), matrix.storage_offset() - self.skip) if self.skip else matrix


def rows_of(tensor: torch.Tensor) -> Rows:
    """How the rows of [..., V] are addressed."""
    matrix, copied = matrix_of(tensor)
    skip = int(matrix.storage_offset() % vector(tensor.dtype))
    start = matrix.data_ptr() - skip * tensor.element_size()
    return Rows(matrix.stride(0), skip, start % BOUNDARY == 0, copied)


def fresh_rows(vocab: int) -> Rows:
    """How the rows of a new contiguous [..., V] are addressed."""
    return Rows(vocab, 0, True, False)


def place(tensor: torch.Tensor) -> tuple[int, int]:
    """The part of a cache key that `rows_of` needs besides a tensor's `signature`."""
    return tensor.data_ptr() % BOUNDARY, int(tensor.storage_offset()) % BOUNDARY


def matrix_of(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """([rows, V] with unit inner stride, whether it is a copy)."""
    matrix = tensor.reshape(-1, tensor.shape[-1])
    if matrix.stride(1) != 1 and matrix.shape[1] != 1:
        matrix = matrix.contiguous()
    return matrix, _copied(matrix, tensor)


@dataclass(frozen=True)
class Vector:
    """A tensor flattened to one dimension with stride `stride`. `copied`: the tensor must be copied for that."""

    stride: int
    copied: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor whose pointer a kernel gets: the tensor itself, or a copy."""
        return tensor.reshape(-1) if self.copied else tensor


def vector_of(tensor: torch.Tensor) -> Vector:
    """How the elements of [...] are addressed as one dimension."""
    flat = tensor.reshape(-1)
    return Vector(flat.stride(0), _copied(flat, tensor))


def vector(dtype: torch.dtype) -> int:
    """Elements in 16 bytes."""
    return BOUNDARY // dtype.itemsize


def alignment(rows: int, vocab: int, dtype: torch.dtype, narrow: bool, *matrices: Rows) -> str:
    """The LAYOUT (see `rows.body`) of a kernel that addresses all of these matrices."""
    per_vector = vector(dtype)
    if not all(m.aligned for m in matrices):
        return "any"
    if vocab % per_vector == 0 and all(m.skip == 0 and (rows == 1 or m.stride % per_vector == 0) for m in matrices):
        return "aligned"
    return "any" if narrow else "fringed"


def same_alignment(a: Rows, b: Rows, dtype: torch.dtype) -> bool:
    """Whether each row of `a` and the same row of `b` have the same offset from a 16-byte boundary."""
    return a.aligned and b.aligned and a.skip == b.skip and (a.stride - b.stride) % vector(dtype) == 0


@dataclass(frozen=True)
class Scratch:
    """The layout of a forward's fp32 workspace, one allocation of `size` elements.

    It begins with the statistics that the backward reads: the maxima of the rows, their sums of exponentials, and for a
    mean 1 / Σ weights and 1 / (number of rows that are not ignored). If the forward writes the gradient of a mean, the
    workspace begins instead with the divisors of the mean, [2, shares]: one partial sum per CTA of the count kernel.
    From partial_at on, for a sum or a mean: the partial sums of each program, [4, programs].
    """

    size: int
    partial_at: int
    shares: int

    @classmethod
    def of(cls, rows: int, programs: int, loss: Loss, save: bool, gradient: bool) -> Scratch:
        shares = 0
        if gradient and loss.reduction == "mean":
            shares = min(MAX_SHARES, triton.next_power_of_2(triton.cdiv(rows, COUNT_BLOCK)))
        first = stats_size(rows, loss.reduction) if save else 2 * shares
        if loss.reduction == "none":
            return cls(first, 0, shares)
        partial_at = triton.cdiv(first, 16) * 16  # partial sums are read in vectors
        return cls(partial_at + 4 * programs, partial_at, shares)


def stats_size(rows: int, reduction: str) -> int:
    """The number of elements in the statistics of that many rows."""
    return 2 * rows + 2 if reduction == "mean" else 2 * rows


def _copied(other: torch.Tensor, tensor: torch.Tensor) -> bool:
    return other.untyped_storage()._cdata != tensor.untyped_storage()._cdata

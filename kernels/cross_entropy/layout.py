"""How tensors are addressed: rows at a stride, and where 16-byte boundaries lie in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rows:
    """A matrix with unit inner stride. `pointer` starts `skip` elements before its first row, on a 16-byte boundary
    where `aligned`, so that the compiler may read vectors from there on."""

    pointer: torch.Tensor
    stride: int
    skip: int
    aligned: bool


def rows_of(tensor: torch.Tensor) -> Rows:
    """[..., V] as rows: in place where the strides allow it, otherwise a copy."""
    matrix, _ = matrix_of(tensor)
    skip = int(matrix.storage_offset() % vector(matrix))
    pointer = matrix.as_strided((1,), (1,), matrix.storage_offset() - skip) if skip else matrix
    return Rows(pointer, matrix.stride(0), skip, pointer.data_ptr() % 16 == 0)


def matrix_of(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """[rows, V] with unit inner stride, and whether it is a copy."""
    matrix = tensor.reshape(-1, tensor.shape[-1])
    if matrix.stride(1) != 1 and matrix.shape[1] != 1:
        matrix = matrix.contiguous()
    return matrix, matrix.untyped_storage()._cdata != tensor.untyped_storage()._cdata


def vector_of(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """[...] as one dimension, and its stride: in place where the strides allow it, otherwise a copy."""
    tensor = tensor.reshape(-1)
    return tensor, tensor.stride(0)


def vector(tensor: torch.Tensor) -> int:
    """Elements in 16 bytes."""
    return 16 // tensor.element_size()


def alignment(rows: int, vocab: int, narrow: bool, *matrices: Rows) -> str:
    """The LAYOUT that `forward.body` explains, for kernels that address all of these matrices alike."""
    per_vector = vector(matrices[0].pointer)
    if not all(m.aligned for m in matrices):
        return "any"
    if vocab % per_vector == 0 and all(m.skip == 0 and (rows == 1 or m.stride % per_vector == 0) for m in matrices):
        return "aligned"
    return "any" if narrow else "fringed"


def same_alignment(a: Rows, b: Rows) -> bool:
    """Whether each row of `a` and the same row of `b` lie alike between 16-byte boundaries."""
    return a.aligned and b.aligned and a.skip == b.skip and (a.stride - b.stride) % vector(a.pointer) == 0

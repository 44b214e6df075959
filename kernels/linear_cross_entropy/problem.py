"""The sizes and strides that a plan depends on, and its GEMMs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .layout import Held, Optional, View, copied, operands, part_of
from .loss import Loss


@dataclass(frozen=True)
class Problem:
    """Sizes, and the strides of the matrices as they are read. `aligned`: they begin on 16-byte boundaries. `wide`:
    targets are int64. `bounds`: (vocab, ignore_index) to check targets against, on the CPU only, where reading them
    needs no synchronisation."""

    rows: int
    dim: int
    vocab: int
    dtype: torch.dtype
    device: torch.device
    capability: tuple[int, int]
    hidden: tuple[tuple[int, ...], tuple[int, ...]]
    weight: tuple[tuple[int, ...], tuple[int, ...]]
    biased: bool
    aligned: bool
    wide: bool
    copied: bool
    bounds: tuple[int, int] | None
    loss: Loss

    @classmethod
    def of(
        cls, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: Optional, loss: Loss
    ) -> Problem:
        """The problem of a call. `loss.check` must have accepted the arguments."""
        used = operands(hidden, weight, target, bias, loss.ignore_index)
        moved, (flat, matrix) = copied((hidden, weight, target, bias), used), used[:2]
        return cls(
            flat.shape[0],
            flat.shape[1],
            matrix.shape[0],
            hidden.dtype,
            hidden.device,
            torch.cuda.get_device_capability(hidden.device) if hidden.is_cuda else (8, 0),  # the interpreter's
            (tuple(flat.shape) if moved else tuple(hidden.shape), flat.stride()),
            (tuple(matrix.shape), matrix.stride()),
            bias is not None,
            all(matrix.data_ptr() % 16 == 0 for matrix in (flat, matrix)),
            used[2].dtype == torch.int64,
            moved,
            None if hidden.is_cuda else (matrix.shape[0], loss.ignore_index),
            loss,
        )

    @property
    def held(self) -> Held:
        return Held.of(self.rows, self.loss.reduction == "none")

    def slices(self, size: int) -> Iterator[slice]:
        """Yields the slices of the vocabulary, `size` entries each."""
        for first in range(0, self.vocab, size):
            yield slice(first, min(first + size, self.vocab))


@dataclass(frozen=True)
class Slab:
    """A buffer for logits zᵀ: [vocab, columns], each vocabulary entry aligned to 16 bytes."""

    shape: tuple[int, int]

    @classmethod
    def of(cls, vocab: int, rows: int) -> Slab:
        return cls((vocab, -(-rows // 64) * 64))

    def part(self, entries: slice, rows: slice, transposed: bool = False) -> View:
        return part_of(self.shape, (self.shape[1], 1), entries, rows, transposed)


@dataclass(frozen=True)
class Product:
    """The GEMM that computes zᵀ of some vocabulary entries and rows, rounded once, as the output of a linear layer."""

    weight: View
    bias: View | None
    out: View

    @classmethod
    def of(cls, p: Problem, entries: slice, out: View) -> Product:
        bias = View((entries.stop - entries.start, 1), (1, 1), entries.start) if p.biased else None
        return cls(part_of(*p.weight, entries, slice(0, p.dim)), bias, out)

    def __call__(self, weight: torch.Tensor, hidden_t: torch.Tensor, bias: Optional, z: torch.Tensor) -> None:
        if self.bias is None or bias is None:
            torch.mm(self.weight.of(weight), hidden_t, out=self.out.of(z))
        else:
            torch.addmm(self.bias.of(bias), self.weight.of(weight), hidden_t, out=self.out.of(z))

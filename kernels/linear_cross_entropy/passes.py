"""How products of matrices and kernels follow each other, and where the logits are meanwhile.

The gradient needs the logits twice: for the sum of exponentials of a row, then to be turned into the gradient. And it
needs the gradient twice: along rows for hidden's, along the vocabulary for weight's. For N rows these are V·N numbers,
which is what must not be in memory. So

  1  Rows are taken in chunks of H or fewer. The logits of a chunk zᵀ [V, H] lie *in the memory of the weight's
     gradient* [V, H], which is not written yet. There they become the gradient, and hidden's gradient follows, in one
     product over the whole vocabulary.
  2  The gradient of the last chunk stays there. The vocabulary is walked in slices: into a scratch [slice, N] the
     logits of the other chunks are computed again, that gradient is moved, and the product with hidden, over all rows
     at once, overwrites the slice that it came from.

Of the logits of N rows, N - H are computed twice (fewer, if there is memory for a spare chunk); nothing is added up
outside a product, where sums are fp32. The products that are repeated are the same in shape, so that cuBLAS computes
the same numbers: else a softmax of 1 might come out as e to the difference of two roundings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .kernel import Loss, Stats, count, grad_, move

MIB = 1 << 20
MIN_SLICE = 16
# A slice of this many entries fills the GPU with tiles, and more gained nothing (README, what was tried).
SLICE = 2048
MIN_SPARE = 512


@dataclass(frozen=True)
class Chunk:
    """Rows start to stop. Their logits lie in the weight's gradient or, if `spare`, in a memory of their own. Unless
    they are `kept` until the weight's gradient is formed, they are computed twice."""

    start: int
    stop: int
    spare: bool
    kept: bool

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def count(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Config:
    """`chunk` rows at a time have all their logits in memory, `slice` vocabulary entries of them come from one product.
    `lodged`: in the memory of the weight's gradient, else in a scratch. `spare` rows, a multiple of `unit` unless they
    are all, have a scratch of their own besides."""

    chunk: int
    slice: int
    lodged: bool
    spare: int = 0
    unit: int = 1

    def chunks(self, rows: int) -> Iterator[Chunk]:
        """In the order in which they are computed, which is also that of the rows."""
        if not self.lodged:
            for start in range(0, rows, max(1, self.chunk)):
                yield Chunk(start, min(start + self.chunk, rows), spare=True, kept=True)
        elif rows:
            # The last chunk begins at a multiple of `unit`, so that it is aligned in the scratch as well.
            last = -(-max(0, rows - self.chunk) // self.unit) * self.unit
            spare = max(0, last - self.spare)
            for start in range(0, spare, self.chunk):
                yield Chunk(start, min(start + self.chunk, spare), spare=False, kept=False)
            if spare < last:
                yield Chunk(spare, last, spare=True, kept=True)
            yield Chunk(last, rows, spare=False, kept=True)


def pick_config(
    rows: int, dim: int, vocab: int, dtype: torch.dtype, weight_too: bool, scratch_bytes: int | None = None
) -> Config:
    """How the gradients are computed within `scratch_bytes`. Pure.

    By default the scratch is what the gradients leave of 640 MiB, or a sixteenth of them, whichever is more: where
    memory matters the peak is the result plus 6 %, and where it does not, nothing is computed twice.
    """
    size, columns = dtype.itemsize, _up(rows, 64)
    if scratch_bytes is None:
        results = (vocab * weight_too + rows) * dim * size
        scratch_bytes = max(640 * MIB - results, results // 16, 1024 * columns * size * weight_too)
    if vocab * columns * size <= scratch_bytes:
        return Config(rows, _slice(vocab), lodged=False)
    if not weight_too:
        return Config(min(rows, max(64, _down(scratch_bytes // (vocab * size), 64))), _slice(vocab), lodged=False)
    unit = 64 if dim >= 64 else 8 if dim >= 8 else 1
    chunk = _down(dim, unit)
    excess = _up(max(0, rows - chunk), unit)
    spare = min(excess, _down((scratch_bytes - 1024 * columns * size) // (vocab * size), 64))
    spare = spare if spare >= min(excess, MIN_SPARE) else 0
    return Config(chunk, _slice((scratch_bytes - spare * vocab * size) // (columns * size)), True, spare, unit)


def pick_forward_config(rows: int, vocab: int, dtype: torch.dtype, scratch_bytes: int | None = None) -> Config:
    """How the loss alone is computed: a slice for all rows of a chunk. Pure."""
    chunk = min(max(rows, 1), 8192)
    part = (64 * MIB if scratch_bytes is None else scratch_bytes) // (_up(chunk, 64) * dtype.itemsize)
    return Config(chunk, max(MIN_SLICE, min(vocab, _down(part, 128))), lodged=False)


def _slice(most: int) -> int:
    """A slice of at most so many entries, if MIN_SLICE allows, that tiles of cuBLAS fit into."""
    most = min(most, SLICE)
    return max(MIN_SLICE, _down(most, 128 if most >= 128 else MIN_SLICE))


def _down(n: int, of: int) -> int:
    return n // of * of


def _up(n: int, of: int) -> int:
    return -(-n // of) * of


@dataclass(frozen=True)
class Problem:
    """hidden [N, H], weight [V, H] (both as cuBLAS reads them), target [N] contiguous, bias [V] contiguous or None."""

    hidden: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    bias: torch.Tensor | None
    loss: Loss

    @classmethod
    def of(
        cls, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None, loss: Loss
    ) -> Problem:
        """From the public function's arguments."""
        flat = _operand(hidden.reshape(-1, hidden.shape[-1]))
        bias = None if bias is None else bias.contiguous()
        return cls(flat, _operand(weight), target.reshape(-1).contiguous(), bias, loss)

    def slab(self, vocab: int, rows: int) -> torch.Tensor:
        """Memory for logits of [vocab, rows], each vocabulary entry on a 16-byte boundary."""
        # On a CPU with AMX oneDNN multiplies what lies behind a row of fp16 by 0, and so it must not be NaN.
        create = torch.empty if self.hidden.is_cuda else torch.zeros
        return create(vocab, _up(rows, 64), dtype=self.hidden.dtype, device=self.hidden.device)[:, :rows]

    def slices(self, size: int) -> Iterator[slice]:
        """The vocabulary, `size` entries at a time."""
        vocab = self.weight.shape[0]
        for first in range(0, vocab, size):
            yield slice(first, min(first + size, vocab))

    def logits(self, entries: slice, rows: slice, out: torch.Tensor) -> None:
        """zᵀ [entries, rows], rounded once, so that it is what a linear layer gives."""
        if self.bias is None:
            torch.mm(self.weight[entries], self.hidden[rows].t(), out=out)
        else:
            torch.addmm(self.bias[entries, None], self.weight[entries], self.hidden[rows].t(), out=out)


def _operand(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix itself where cuBLAS can read it by a leading dimension, either way round; otherwise a copy."""
    for size, (inner, outer) in zip(matrix.shape[::-1], (matrix.stride()[::-1], matrix.stride()), strict=True):
        if inner == 1 and outer >= max(1, size):
            return matrix
    return matrix.contiguous()


def loss_alone(p: Problem, scratch_bytes: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss of each row, factor)."""
    (rows, _), vocab = p.hidden.shape, p.weight.shape[0]
    factor = count(p.target, vocab, p.loss)
    losses = torch.empty(rows, dtype=torch.float32, device=p.hidden.device)
    config = pick_forward_config(rows, vocab, p.hidden.dtype, scratch_bytes)
    slab = p.slab(config.slice, config.chunk)
    for chunk in config.chunks(rows):
        stats = Stats(p.target[chunk.rows], vocab, config.slice, p.loss)
        for entries in p.slices(config.slice):
            z = slab[: entries.stop - entries.start, : chunk.count]
            p.logits(entries, chunk.rows, z)
            stats.add(z, entries.start)
        stats.finish(losses[chunk.rows])
    return losses, factor


@dataclass(frozen=True)
class Gradients:
    """Of hidden [N, H], weight [V, H] (both in their dtype) and bias [V] (fp32); None where not wanted."""

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None


def loss_and_gradients(
    p: Problem, dloss: torch.Tensor | None, needs: tuple[bool, bool, bool], scratch_bytes: int | None
) -> tuple[torch.Tensor, torch.Tensor, Gradients]:
    """(loss of each row, factor, gradients). `dloss` [N] is the incoming gradient of each row, None stands for 1."""
    (rows, dim), vocab = p.hidden.shape, p.weight.shape[0]
    config = pick_config(rows, dim, vocab, p.hidden.dtype, needs[1], scratch_bytes)
    factor = count(p.target, vocab, p.loss)
    losses = torch.empty(rows, dtype=torch.float32, device=p.hidden.device)
    grads = Gradients(
        torch.empty(rows, dim, dtype=p.hidden.dtype, device=p.hidden.device) if needs[0] else None,
        torch.empty(vocab, dim, dtype=p.hidden.dtype, device=p.hidden.device) if needs[1] else None,
        torch.zeros(vocab, dtype=torch.float32, device=p.hidden.device) if needs[2] else None,
    )
    # What is still needed for step 2: where the gradient of kept rows lies, and lse of those that are not kept.
    held: list[tuple[Chunk, torch.Tensor]] = []
    for chunk in config.chunks(rows):
        if grads.weight is None or chunk.spare:
            slab = held[0][1] if held and grads.weight is None else p.slab(vocab, max(config.spare, chunk.count))
        else:
            slab = grads.weight
        z = slab[:, : chunk.count]
        lse = _chunk(p, chunk, z, factor, dloss, losses, grads, config)
        held.append((chunk, z if chunk.kept else lse))
    if grads.weight is not None:
        if not rows:
            grads.weight.zero_()
        elif config.lodged:
            _weight_gradient(p, factor, dloss, grads.weight, held, config)
        else:
            torch.mm(held[0][1], p.hidden, out=grads.weight)
    return losses, factor, grads


def _chunk(
    p: Problem,
    chunk: Chunk,
    z: torch.Tensor,
    factor: torch.Tensor,
    dloss: torch.Tensor | None,
    losses: torch.Tensor,
    grads: Gradients,
    config: Config,
) -> torch.Tensor:
    """Step 1 for one chunk, with its logits and then their gradient in z [V, chunk]. Gives its lse."""
    vocab, target = z.shape[0], p.target[chunk.rows]
    stats = Stats(target, vocab, vocab, p.loss)
    for entries in p.slices(config.slice):
        p.logits(entries, chunk.rows, z[entries])
    stats.add(z, 0)
    lse = stats.finish(losses[chunk.rows])
    if chunk.kept or grads.hidden is not None or grads.bias is not None:
        part = None if dloss is None else dloss[chunk.rows]
        grad_(z, 0, vocab, target, lse, factor, part, p.loss, dbias=grads.bias)
    if grads.hidden is not None:
        torch.mm(z.t(), p.weight, out=grads.hidden[chunk.rows])
    return lse


def _weight_gradient(
    p: Problem,
    factor: torch.Tensor,
    dloss: torch.Tensor | None,
    dweight: torch.Tensor,
    held: list[tuple[Chunk, torch.Tensor]],
    config: Config,
) -> None:
    """Step 2. The gradient of the last chunk's logits lies in `dweight`."""
    rows, vocab = p.hidden.shape[0], p.weight.shape[0]
    slab = p.slab(min(config.slice, vocab), rows)
    for entries in p.slices(config.slice):
        g = slab[: entries.stop - entries.start]
        for chunk, kept in held:
            part = g[:, chunk.rows]
            if chunk.kept:
                move(kept[entries], part)
            else:
                p.logits(entries, chunk.rows, part)
                weights = None if dloss is None else dloss[chunk.rows]
                grad_(part, entries.start, vocab, p.target[chunk.rows], kept, factor, weights, p.loss)
        torch.mm(g, p.hidden, out=dweight[entries])

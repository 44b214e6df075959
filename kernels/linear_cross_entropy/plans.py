"""Launch plans of linear_cross_entropy: the sequence of GEMMs and kernels, and where the logits are stored. The cache
key of a call determines the plan; a call only allocates and launches.

The logits zᵀ are needed twice: for the sum of exponentials of a row, then for their gradient, which replaces them. That
gradient is also needed twice: the gradient of hidden sums it over the vocabulary, that of weight over the rows. For N
rows these are V·N elements, more than memory should hold. So there are two passes:

  1  For each chunk of at most H rows: the logits zᵀ [V, H] are computed *in the memory of the weight's gradient*, also
     [V, H] and not written yet, and replaced by their gradient. One GEMM over the whole vocabulary gives hidden's
     gradient.
  2  The logits' gradient of the last chunk is still there. For each slice of the vocabulary: the logits of the other
     chunks are computed again into a workspace [slice, N] and replaced by their gradient. The gradient of the last
     chunk is copied there. Then the GEMM with hidden, over all rows, overwrites this slice of the weight's gradient.

Of N rows, the logits of N - H are computed twice (of fewer, if there is memory for a spare chunk). Each gradient is the
result of one GEMM with fp32 accumulation. Repeated GEMMs have the same shape, so that cuBLAS computes the same values:
otherwise a softmax of 1 could become exp(difference of two roundings).

On Hopper logits.cu computes the logits. In pass 1 its epilogue also computes their statistics; the loss alone needs
nothing else. In pass 2 its epilogue computes their gradient. Its results do not depend on the shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton

from . import configs
from .configs import Chunk, Config
from .launch import Launch
from .launches import count_launch, grad_launch, loss_launch, move_launch, stats_launch, sum_launch
from .layout import WHOLE, Optional, Stats, View, copied, dense_strides, operands, part_of
from .loss import Loss
from .problem import Problem, Product, Slab
from .sm90 import logits

Gradients = tuple[Optional, Optional, Optional]
LossPlan = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Optional], torch.Tensor]
# (hidden, weight, target, bias, gradient of the loss or None for 1) -> loss, gradients of hidden, weight and bias
GradientPlan = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Optional, Optional], tuple[torch.Tensor, Optional, Optional, Optional]
]
# (hidden, weight, bias, target, z, stats): computes the logits of a chunk and writes their statistics to stats
Measure = Callable[..., None]
# (hidden, weight, bias, target, dweight, spare, held, dloss, g): writes the gradient of a slice's logits to g
Fill = Callable[..., None]
FP32 = torch.float32


def _in_cuda(p: Problem) -> bool:
    """Whether logits.cu computes the logits. Raises RuntimeError if it is requested and cannot run."""
    reason = logits.unsupported_reason(p) if p.loss.backend != "triton" else None
    if reason and p.loss.backend == "cuda":
        raise RuntimeError(f'linear_cross_entropy: backend="cuda" cannot run here: {reason}')
    return configs.pick_backend(p.loss.backend, possible=reason is None) == "cuda"


def loss_plan(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: Optional, loss: Loss) -> LossPlan:
    """Returns a function from (hidden, weight, target, bias) like these to the loss."""
    p = Problem.of(hidden, weight, target, bias, loss)
    config = configs.pick_forward_config(p.rows, p.vocab, p.dtype, loss.scratch_bytes)
    in_cuda = _in_cuda(p)
    slab = None if in_cuda else Slab.of(config.slice, config.chunk)
    count, steps = count_launch(p), [_loss_step(p, chunk, config, slab) for chunk in config.chunks(p.rows)]
    result, new_slab = _Result(p, target), None if slab is None else _slab_of(p, slab)

    def run(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: Optional) -> torch.Tensor:
        if p.bounds is not None:
            _check_target(target, *p.bounds)
        if p.copied:
            hidden, weight, target, bias = operands(hidden, weight, target, bias, p.loss.ignore_index)
        held, losses = result.buffers()
        z = None if new_slab is None else new_slab()
        count(target, held)
        for stats_size, measure, add_up in steps:
            stats = torch.empty_strided((stats_size,), (1,), dtype=FP32, device=p.device)
            measure(hidden, weight, bias, target, z, stats)
            add_up(stats, target, held, losses)
        return result.reduced(held, losses)

    return run


def _loss_step(p: Problem, chunk: Chunk, config: Config, slab: Slab | None) -> tuple[int, Measure, Launch]:
    """(size of the stats buffer, function that fills it, loss launch) of a chunk. `slab` holds a slice of its logits;
    None if logits.cu computes them, which stores no logits."""
    if slab is None:
        stats = logits.stats_of(p, chunk)
        return stats.size, logits.stats_launch(p, chunk, stats), loss_launch(p, chunk, stats, stats.parts)
    stats_config = configs.pick_stats_config(chunk.count, p.vocab, FP32, p.capability)
    each = triton.cdiv(config.slice, stats_config.span)
    stats = Stats(triton.cdiv(p.vocab, config.slice) * each, chunk.count, p.loss.label_smoothing != 0)
    parts, filled = [], 0
    for entries in p.slices(config.slice):
        size = entries.stop - entries.start
        product = Product.of(p, entries, slab.part(slice(0, size), slice(0, chunk.count)))
        gather = stats_launch(p, chunk, stats, stats_config, filled, entries.start, size, slab.shape[1])
        parts.append(([product], gather))
        filled += triton.cdiv(size, stats_config.span)
    return stats.size, _measure(_hidden_t(p, chunk), parts), loss_launch(p, chunk, stats, filled)


def _measure(rows: View, parts: list[tuple[list[Product], Launch]]) -> Measure:
    """Returns a function that runs, for each part, the GEMMs of its logits and then the launch that computes their
    statistics. `rows`: the view of hidden."""

    def run(hidden, weight, bias, target, z, stats) -> None:
        hidden_t = rows.of(hidden)
        for products, gather in parts:
            for product in products:
                product(weight, hidden_t, bias, z)
            gather(z, target, stats)

    return run


class _Result:
    """The storage of the losses of the rows, and their reduction."""

    def __init__(self, p: Problem, target: torch.Tensor) -> None:
        self._device, self._size = p.device, p.held.size
        self._shape = tuple(target.shape) if p.loss.reduction == "none" else None
        self._strides = dense_strides(tuple(target.shape))
        self._sum = None
        if self._shape is None:
            self._sum = sum_launch(p)

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(`held`, the buffer for the loss of each row)."""
        held = torch.empty_strided((self._size,), (1,), dtype=FP32, device=self._device)
        if self._shape is None:
            return held, held
        return held, torch.empty_strided(self._shape, self._strides, dtype=FP32, device=self._device)

    def reduced(self, held: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
        """The result of the call: the losses, or their sum or mean."""
        if self._sum is None:
            return losses
        loss = torch.empty_strided((), (), dtype=FP32, device=self._device)
        self._sum(held, loss)
        return loss


@dataclass(frozen=True)
class _Step:
    """Pass 1 of a chunk. The weight's gradient or the spare slab is the memory of its logits, then their gradient."""

    in_gradient: bool
    measure: Measure
    stats_size: int
    loss: Launch
    grad: Launch | None
    sums: tuple[int, ...] | None  # shape of the partial sums of bias's gradient
    z_t: View
    dhidden: View


@dataclass(frozen=True)
class _Slice:
    """Pass 2 of a slice of the vocabulary: for each chunk the gradient of its logits, copied or computed again; then
    the GEMM of weight's gradient."""

    parts: list[Fill]
    gradient: View
    out: View


def gradient_plan(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: Optional,
    dloss: Optional,
    loss: Loss,
    needs: tuple[bool, bool, bool],
) -> GradientPlan:
    """Returns a function from (hidden, weight, target, bias, dloss) like these to the loss and the gradients of hidden
    and weight, in their dtype, and of bias in fp32; None where not needed. `dloss`: the incoming gradient, None for 1.
    """
    p = Problem.of(hidden, weight, target, bias, loss)
    config = configs.pick_config(p.rows, p.dim, p.vocab, p.dtype, needs[1], loss.scratch_bytes)
    chunks = list(config.chunks(p.rows))
    spare = [chunk.count for chunk in chunks if chunk.spare]
    slab = Slab.of(p.vocab, max(config.spare, spare[0])) if spare else None
    dloss_stride, dloss_copied = _incoming(dloss)
    steps = [_step(p, chunk, config, slab, needs, dloss_stride) for chunk in chunks]
    second = Slab.of(min(config.slice, p.vocab), p.rows)
    slices = (
        _second_pass_slices(p, chunks, config, slab, second, dloss_stride)
        if needs[1] and config.in_gradient and chunks
        else None
    )
    whole = part_of(*p.hidden, slice(0, p.rows), slice(0, p.dim))
    z_whole = slab.part(slice(0, p.vocab), slice(0, p.rows)) if slab else WHOLE
    count, result = count_launch(p), _Result(p, target)
    new_slab, new_second = (None if slab is None else _slab_of(p, slab)), _slab_of(p, second)

    def run(
        hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: Optional, dloss: Optional
    ) -> tuple[torch.Tensor, Optional, Optional, Optional]:
        if p.bounds is not None:
            _check_target(target, *p.bounds)
        dhidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs[0] else None
        dweight = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs[1] else None
        dbias = None
        if p.copied:
            hidden, weight, target, bias = operands(hidden, weight, target, bias, p.loss.ignore_index)
        if dloss_copied:
            dloss = dloss.reshape(-1)  # type: ignore[union-attr]
        held, losses = result.buffers()
        spare = None if new_slab is None else new_slab()
        count(target, held)
        for step in steps:
            z = dweight if step.in_gradient else spare
            dbias = _first_pass(step, p, z, hidden, weight, target, bias, dloss, held, losses, dhidden, dbias)
        if dweight is not None:
            if slices is not None:
                _second_pass(slices, new_second(), spare, whole, hidden, weight, target, bias, dloss, held, dweight)
            elif steps:
                torch.mm(z_whole.of(spare), whole.of(hidden), out=dweight)  # type: ignore[arg-type]
            else:
                dweight.zero_()
        if needs[2] and dbias is None:
            dbias = torch.zeros((p.vocab,), dtype=FP32, device=p.device)
        return result.reduced(held, losses), dhidden, dweight, dbias

    return run


def _first_pass(step, p, z, hidden, weight, target, bias, dloss, held, losses, dhidden, dbias) -> Optional:
    """Runs pass 1 for one chunk. Returns the gradient of bias so far."""
    stats = torch.empty_strided((step.stats_size,), (1,), dtype=FP32, device=p.device)
    step.measure(hidden, weight, bias, target, z, stats)
    step.loss(stats, target, held, losses)
    if step.grad is not None:
        sums = None
        if step.sums is not None:
            sums = torch.empty_strided(step.sums, dense_strides(step.sums), dtype=FP32, device=p.device)
        step.grad(z, target, held, dloss, sums)
        if sums is not None:
            sums = sums if sums.dim() == 1 else sums.sum(dim=0)
            dbias = sums if dbias is None else dbias.add_(sums)
    if dhidden is not None:
        torch.mm(step.z_t.of(z), weight, out=step.dhidden.of(dhidden))
    return dbias


def _second_pass(slices, g, spare, whole, hidden, weight, target, bias, dloss, held, dweight) -> None:
    """Runs pass 2. The gradient of the last chunk's logits is in `dweight`."""
    rows = whole.of(hidden)
    for part in slices:
        for fill in part.parts:
            fill(hidden, weight, bias, target, dweight, spare, held, dloss, g)
        torch.mm(part.gradient.of(g), rows, out=part.out.of(dweight))


def _step(
    p: Problem,
    chunk: Chunk,
    config: Config,
    slab: Slab | None,
    needs: tuple[bool, bool, bool],
    dloss_stride: int | None,
) -> _Step:
    z = slab if chunk.spare and slab is not None else Slab((p.vocab, p.dim))
    columns, entries = slice(0, chunk.count), slice(0, p.vocab)
    stats, measure = _measured(p, chunk, config, z)
    grad, sums = None, None
    if chunk.kept or needs[0] or needs[2]:
        grad, tiles = grad_launch(p, chunk, 0, p.vocab, z.shape[1], 0, dloss_stride, needs[2])
        sums = None if not needs[2] else (p.vocab,) if tiles == 1 else (tiles, p.vocab)
    return _Step(
        not chunk.spare,
        measure,
        stats.size,
        loss_launch(p, chunk, stats, stats.parts),
        grad,
        sums,
        z.part(entries, columns, transposed=True),
        part_of(p.hidden[0] if not p.copied else (), (p.dim, 1), chunk.rows, slice(0, p.dim)),
    )


def _measured(p: Problem, chunk: Chunk, config: Config, z: Slab) -> tuple[Stats, Measure]:
    """(offsets of the stats, function that computes all logits of a chunk into z, and their statistics)."""
    if _in_cuda(p):
        stats = logits.stats_of(p, chunk)
        return stats, logits.stats_launch(p, chunk, stats, z.shape[1])
    stats_config = configs.pick_stats_config(chunk.count, p.vocab, FP32, p.capability)
    stats = Stats(triton.cdiv(p.vocab, stats_config.span), chunk.count, p.loss.label_smoothing != 0)
    products = [Product.of(p, part, z.part(part, slice(0, chunk.count))) for part in p.slices(config.slice)]
    gather = stats_launch(p, chunk, stats, stats_config, 0, 0, p.vocab, z.shape[1])
    return stats, _measure(_hidden_t(p, chunk), [(products, gather)])


def _second_pass_slices(
    p: Problem, chunks: list[Chunk], config: Config, slab: Slab | None, second: Slab, dloss_stride: int | None
) -> list[_Slice]:
    slices = []
    for entries in p.slices(config.slice):
        parts = [_fill(p, chunk, entries, slab, second, dloss_stride) for chunk in chunks]
        gradient = second.part(slice(0, entries.stop - entries.start), slice(0, p.rows))
        slices.append(_Slice(parts, gradient, part_of((p.vocab, p.dim), (p.dim, 1), entries, slice(0, p.dim))))
    return slices


def _fill(p: Problem, chunk: Chunk, entries: slice, slab: Slab | None, second: Slab, dloss_stride: int | None) -> Fill:
    size, stride = entries.stop - entries.start, second.shape[1]
    if chunk.kept:
        kept_stride = slab.shape[1] if chunk.spare and slab is not None else p.dim
        move = move_launch(p, chunk, entries, kept_stride, stride)
        in_gradient = not chunk.spare
        return lambda hidden, weight, bias, target, dweight, spare, held, dloss, g: move(
            dweight if in_gradient else spare, g
        )
    if _in_cuda(p):
        again = logits.gradient_launch(p, chunk, entries, stride, chunk.start, dloss_stride)
        return lambda hidden, weight, bias, target, dweight, spare, held, dloss, g: again(
            hidden, weight, bias, target, g, held, dloss
        )
    rows, product = _hidden_t(p, chunk), Product.of(p, entries, second.part(slice(0, size), chunk.rows))
    launch, _ = grad_launch(p, chunk, entries.start, size, stride, chunk.start, dloss_stride, False)

    def fill(hidden, weight, bias, target, dweight, spare, held, dloss, g) -> None:
        product(weight, rows.of(hidden), bias, g)
        launch(g, target, held, dloss, None)

    return fill


def _hidden_t(p: Problem, chunk: Chunk) -> View:
    return part_of(*p.hidden, chunk.rows, slice(0, p.dim), transposed=True)


def _slab_of(p: Problem, slab: Slab) -> Callable[[], torch.Tensor]:
    """Returns a function that allocates the slab. On a CPU with AMX, oneDNN multiplies the padding after a row of fp16
    by 0. The padding must not be NaN, so the slab is zeroed there."""
    shape, dtype, device = slab.shape, p.dtype, p.device
    if device.type != "cuda":
        return lambda: torch.zeros(shape, dtype=dtype, device=device)
    return lambda: torch.empty_strided(shape, (shape[1], 1), dtype=dtype, device=device)


def _incoming(dloss: Optional) -> tuple[int | None, bool]:
    """(stride, copied) of an incoming gradient: the stride between rows, 0 for a scalar, None without a gradient;
    whether it must be copied."""
    if dloss is None:
        return None, False
    if dloss.dim() == 0:
        return 0, False
    flat = dloss.reshape(-1)
    return flat.stride(0), copied((dloss,), (flat,))


def _check_target(target: torch.Tensor, vocab: int, ignore_index: int) -> None:
    wrong = target[(target != ignore_index) & ((target < 0) | (target >= vocab))]
    if wrong.numel():
        expected = f"in [0, {vocab}) or ignore_index = {ignore_index}"
        raise ValueError(f"linear_cross_entropy: target must be {expected}, got {int(wrong[0])}")

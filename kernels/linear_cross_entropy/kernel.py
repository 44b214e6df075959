"""Linear cross entropy: the launchers of the kernels on logits (`logits`), which are memory-bound. The products of
matrices are cuBLAS's; `passes` puts both together.

Logits lie transposed, zᵀ[V, N]: a row of it belongs to one vocabulary entry, as a row of the weight does. So a part of
the vocabulary is contiguous, an odd vocabulary (50257) misaligns nothing, and zᵀ of N <= H rows fits into the memory of
the weight's gradient [V, H], row upon row.

Napkin maths, bf16, n = V·N logits, one NVIDIA H200 that copies 4254 GB/s, 8192 rows of a vocabulary of 128256:
  stats     reads z               2·n bytes   2.1 GB, 0.49 ms
  grad      reads z, writes g     4·n bytes   4.2 GB, 0.99 ms
  move      reads g, writes g     4·n bytes   4.2 GB, 0.99 ms
  scale     reads dW, writes dW, unless its factor is 1
beside 12.3 ms for each product of 8.6 TFLOP at 700 TFLOP/s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from .logits import (
    _linear_cross_entropy_count_kernel,
    _linear_cross_entropy_grad_kernel,
    _linear_cross_entropy_loss_kernel,
    _linear_cross_entropy_move_kernel,
    _linear_cross_entropy_scale_kernel,
    _linear_cross_entropy_stats_kernel,
    _linear_cross_entropy_sum_kernel,
)


@dataclass(frozen=True)
class Loss:
    """What is computed, less the tensors."""

    ignore_index: int
    label_smoothing: float
    softcap: float | None
    z_loss: float
    reduction: str


@dataclass(frozen=True)
class StatsConfig:
    """A CTA walks over `span` vocabulary entries of `block_r` rows, `unroll` · `block_v` entries at a time."""

    block_r: int
    block_v: int
    unroll: int
    span: int
    num_warps: int


@dataclass(frozen=True)
class TileConfig:
    """A CTA for each tile of `block_v` vocabulary entries by `block_r` rows."""

    block_r: int
    block_v: int
    num_warps: int


def pick_stats_config(rows: int, vocab: int, dtype: torch.dtype, capability: tuple[int, int]) -> StatsConfig:
    """Configuration of the stats kernel. Pure."""
    block_r = min(128, max(16, triton.next_power_of_2(rows)))
    return StatsConfig(block_r, block_v=1024 // block_r, unroll=4, span=1024, num_warps=4)


def pick_tile_config(rows: int, vocab: int, dtype: torch.dtype, capability: tuple[int, int]) -> TileConfig:
    """Configuration of the gradient and move kernels. Pure. Of 4096 elements with few rows Triton 3.6 makes spills."""
    block_r = min(128, max(16, triton.next_power_of_2(rows)))
    return TileConfig(block_r, block_v=max(32, 2048 // block_r), num_warps=4)


def count(target: torch.Tensor, vocab: int, loss: Loss) -> torch.Tensor:
    """What each row's loss is multiplied with, fp32 [1]: one over the number of rows with a target for "mean", else 1.

    A target out of range is a ValueError on the CPU and a device-side assertion on a GPU, which waits for nothing.
    """
    factor = torch.empty(1, dtype=torch.float32, device=target.device)
    if not target.is_cuda:
        wrong = target[(target != loss.ignore_index) & ((target < 0) | (target >= vocab))]
        if wrong.numel():
            expected = f"in [0, {vocab}) or ignore_index = {loss.ignore_index}"
            raise ValueError(f"linear_cross_entropy: target must be {expected}, got {int(wrong[0])}")
    with torch.cuda.device_of(target):
        _linear_cross_entropy_count_kernel[(1,)](
            target,
            factor,
            target.numel(),
            vocab,
            loss.ignore_index,
            MEAN=loss.reduction == "mean",
            BLOCK=1024,
            num_warps=4,
            debug=True,  # else Triton leaves the assertion out
        )
    return factor


class Stats:
    """The stats of `rows` rows, gathered over parts of the vocabulary that may come in any order."""

    def __init__(self, target: torch.Tensor, vocab: int, part: int, loss: Loss) -> None:
        rows = target.numel()
        self.target, self.vocab, self.loss = target, vocab, loss
        self.config = pick_stats_config(rows, vocab, torch.float32, _capability(target))
        self.filled = 0

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=target.device)

        parts = triton.cdiv(vocab, part) * triton.cdiv(part, self.config.span)
        self.max, self.sum, self.at_target = empty(parts, rows), empty(parts, rows), empty(rows)
        self.total = empty(parts, rows) if loss.label_smoothing else None

    def add(self, z: torch.Tensor, first: int) -> None:
        """Takes in zᵀ [part, rows], the logits of the vocabulary from `first` on."""
        vocab, rows = z.shape
        config, spans = self.config, triton.cdiv(vocab, self.config.span)
        at = slice(self.filled, self.filled + spans)
        self.filled += spans
        with torch.cuda.device_of(z):
            _linear_cross_entropy_stats_kernel[(spans * triton.cdiv(rows, config.block_r),)](
                z,
                self.target,
                self.max[at],
                self.sum[at],
                None if self.total is None else self.total[at],
                self.at_target,
                first,
                vocab,
                rows,
                z.stride(0),
                self.max.stride(0),
                self.loss.softcap or 0.0,
                HAS_SOFTCAP=self.loss.softcap is not None,
                SMOOTHING=self.total is not None,
                GROUP=_group(z),
                BLOCK_R=config.block_r,
                BLOCK_V=config.block_v,
                UNROLL=config.unroll,
                SPAN=config.span,
                num_warps=config.num_warps,
            )

    def finish(self, losses: torch.Tensor) -> torch.Tensor:
        """Writes the loss of each row. Gives their lse [2, rows] as `grad_` takes it."""
        rows, block_r = losses.numel(), 32
        lse = torch.empty(2, rows, dtype=torch.float32, device=losses.device)
        with torch.cuda.device_of(losses):
            _linear_cross_entropy_loss_kernel[(triton.cdiv(rows, block_r),)](
                self.max,
                self.sum,
                self.total,
                self.at_target,
                self.target,
                lse,
                losses,
                self.filled,
                self.vocab,
                rows,
                self.max.stride(0),
                lse.stride(0),
                self.loss.ignore_index,
                self.loss.label_smoothing,
                self.loss.z_loss,
                SMOOTHING=self.total is not None,
                BLOCK_P=32,
                BLOCK_R=block_r,
                num_warps=4,
            )
        return lse


def sum_rows(losses: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """factor · Σ losses, a scalar."""
    loss = torch.empty((), dtype=torch.float32, device=losses.device)
    with torch.cuda.device_of(losses):
        _linear_cross_entropy_sum_kernel[(1,)](losses, factor, loss, losses.numel(), BLOCK=1024, num_warps=4)
    return loss


def grad_(
    z: torch.Tensor,
    first: int,
    vocab: int,
    target: torch.Tensor,
    lse: torch.Tensor,
    factor: torch.Tensor,
    dloss: torch.Tensor | None,
    loss: Loss,
    dbias: torch.Tensor | None = None,
) -> None:
    """Makes zᵀ [part, rows] its own gradient. `dloss` is that of each row, or None for 1. To `dbias` [part] the sum of
    all rows is added."""
    part, rows = z.shape
    config = pick_tile_config(rows, part, z.dtype, _capability(z))
    tiles = triton.cdiv(rows, config.block_r)
    sums = None if dbias is None else torch.empty(tiles, part, dtype=torch.float32, device=z.device)
    with torch.cuda.device_of(z):
        _linear_cross_entropy_grad_kernel[(tiles * triton.cdiv(part, config.block_v),)](
            z,
            target,
            lse,
            factor,
            dloss,
            sums,
            first,
            part,
            vocab,
            rows,
            z.stride(0),
            lse.stride(0),
            0 if dloss is None else dloss.stride(0),
            loss.ignore_index,
            loss.label_smoothing,
            loss.softcap or 0.0,
            loss.z_loss,
            HAS_SOFTCAP=loss.softcap is not None,
            HAS_DLOSS=dloss is not None,
            HAS_DBIAS=dbias is not None,
            PLAIN=loss.label_smoothing == 0 and loss.z_loss == 0,
            GROUP=_group(z),
            BLOCK_R=config.block_r,
            BLOCK_V=config.block_v,
            num_warps=config.num_warps,
        )
    if dbias is not None and sums is not None:
        dbias += sums.sum(dim=0)


def move(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies [part, rows], neither side contiguous."""
    part, rows = source.shape
    config = pick_tile_config(rows, part, source.dtype, _capability(source))
    with torch.cuda.device_of(source):
        _linear_cross_entropy_move_kernel[(triton.cdiv(rows, config.block_r) * triton.cdiv(part, config.block_v),)](
            source,
            target,
            part,
            rows,
            source.stride(0),
            target.stride(0),
            GROUP=min(_group(source), _group(target)),
            BLOCK_R=config.block_r,
            BLOCK_V=config.block_v,
            num_warps=config.num_warps,
        )


def scale_(x: torch.Tensor, dloss: torch.Tensor) -> None:
    """x *= dloss, in place. `x` is contiguous, `dloss` one number."""
    # Few enough CTAs that starting them for nothing takes microseconds, and enough for the tail not to show.
    block, span = 4096, 65536
    if x.numel():
        with torch.cuda.device_of(x):
            _linear_cross_entropy_scale_kernel[(triton.cdiv(x.numel(), span),)](
                x, dloss, x.numel(), SPAN=span, BLOCK=block, num_warps=4
            )


def _group(z: torch.Tensor) -> int:
    """How many neighbouring rows a kernel may treat as one: their number is rounded up to it.

    Where the stride is a multiple of it and z starts at one, what is touched past the last row is padding, or a column
    that is written only afterwards.
    """
    return 8 if z.stride(0) % 8 == 0 and z.data_ptr() // z.element_size() % 8 == 0 else 1


def _capability(tensor: torch.Tensor) -> tuple[int, int]:
    """Compute capability; the interpreter stands for an sm_80."""
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else (8, 0)

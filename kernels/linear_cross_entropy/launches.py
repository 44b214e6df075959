"""The launches of linear_cross_entropy: grid, sizes, strides and offsets of each kernel."""

from __future__ import annotations

import torch
import triton

from . import configs
from .configs import Chunk
from .kernel import (
    _linear_cross_entropy_count_kernel,
    _linear_cross_entropy_grad_kernel,
    _linear_cross_entropy_loss_kernel,
    _linear_cross_entropy_move_kernel,
    _linear_cross_entropy_scale_kernel,
    _linear_cross_entropy_stats_kernel,
    _linear_cross_entropy_sum_kernel,
)
from .launch import Launch
from .layout import Optional, Stats, group
from .problem import Problem


def count_launch(p: Problem) -> Launch:
    """The launch that writes the factor of the mean, given (target, held). A target out of range fails a device-side
    assertion."""
    return Launch(
        _linear_cross_entropy_count_kernel,
        (1,),
        p.device,
        (p.rows, p.vocab, p.loss.ignore_index, p.held.factor_at),
        MEAN=p.loss.reduction == "mean",
        BLOCK=1024,
        num_warps=4,
        debug=True,  # otherwise Triton omits the assertion
    )


def sum_launch(p: Problem) -> Launch:
    """The launch that writes the sum or the mean of the losses of all rows, given (held, loss)."""
    held = p.held
    return Launch(
        _linear_cross_entropy_sum_kernel,
        (1,),
        p.device,
        (p.rows, held.loss_at, held.factor_at),
        BLOCK=1024,
        num_warps=4,
    )


def stats_launch(
    p: Problem,
    chunk: Chunk,
    stats: Stats,
    config: configs.StatsConfig,
    filled: int,
    first: int,
    size: int,
    stride: int,
) -> Launch:
    """The launch that writes the statistics of `size` vocabulary entries from `first` on, given (z, target, stats).
    `filled`: number of parts that earlier launches have written."""
    start = filled * chunk.count
    sum_at, total_at, hit_at = stats.offsets
    programs = triton.cdiv(size, config.span) * triton.cdiv(chunk.count, config.block_r)
    offsets = (chunk.start, start, sum_at + start, total_at + start, hit_at)
    return Launch(
        _linear_cross_entropy_stats_kernel,
        (programs,),
        p.device,
        (*offsets, first, size, chunk.count, stride, chunk.count, p.loss.softcap or 0.0),
        HAS_SOFTCAP=p.loss.softcap is not None,
        SMOOTHING=stats.smoothing,
        GROUP=group(stride),
        BLOCK_R=config.block_r,
        BLOCK_V=config.block_v,
        UNROLL=config.unroll,
        SPAN=config.span,
        num_warps=config.num_warps,
    )


def loss_launch(p: Problem, chunk: Chunk, stats: Stats, parts: int) -> Launch:
    """The launch that writes lse and loss of a chunk's rows, given (stats, target, held, losses)."""
    # With many parts, tiles have fewer rows: more CTAs, which loop over the parts in fewer iterations.
    block_p, block_r = (32, 32) if parts <= 64 else (64, 16)
    loss_at = (0 if p.loss.reduction == "none" else p.held.loss_at) + chunk.start
    offsets = (chunk.start, *stats.offsets, 2 * chunk.start, loss_at)
    numbers = (p.loss.ignore_index, p.loss.label_smoothing, p.loss.z_loss)
    return Launch(
        _linear_cross_entropy_loss_kernel,
        (triton.cdiv(chunk.count, block_r),),
        p.device,
        (*offsets, parts, p.vocab, chunk.count, chunk.count, *numbers),
        SMOOTHING=stats.smoothing,
        BLOCK_P=block_p,
        BLOCK_R=block_r,
        num_warps=4,
    )


def grad_launch(
    p: Problem, chunk: Chunk, first: int, size: int, stride: int, z_at: int, dloss_stride: int | None, dbias: bool
) -> tuple[Launch, int]:
    """The launch that replaces the logits of `size` vocabulary entries from `first` on by their gradient, given (z,
    target, held, dloss, partial sums of bias's gradient), and the number of these partial sums."""
    config = configs.pick_tile_config(chunk.count, size, p.dtype, p.capability)
    tiles = triton.cdiv(chunk.count, config.block_r)
    offsets = (z_at, chunk.start, 2 * chunk.start, p.held.factor_at)
    loss = p.loss
    numbers = (loss.ignore_index, loss.label_smoothing, loss.softcap or 0.0, loss.z_loss)
    launch = Launch(
        _linear_cross_entropy_grad_kernel,
        (tiles * triton.cdiv(size, config.block_v),),
        p.device,
        (*offsets, first, size, p.vocab, chunk.count, stride, dloss_stride or 0, *numbers),
        HAS_SOFTCAP=loss.softcap is not None,
        HAS_DLOSS=dloss_stride is not None,
        HAS_DBIAS=dbias,
        PLAIN=loss.label_smoothing == 0 and loss.z_loss == 0,
        GROUP=group(stride, z_at),
        BLOCK_R=config.block_r,
        BLOCK_V=config.block_v,
        num_warps=config.num_warps,
    )
    return launch, tiles


def move_launch(p: Problem, chunk: Chunk, entries: slice, stride: int, stride_to: int) -> Launch:
    """The launch that copies the logits' gradient of a chunk and some vocabulary entries, given (from, to)."""
    size, start = entries.stop - entries.start, entries.start * stride
    config = configs.pick_tile_config(chunk.count, size, p.dtype, p.capability)
    return Launch(
        _linear_cross_entropy_move_kernel,
        (triton.cdiv(chunk.count, config.block_r) * triton.cdiv(size, config.block_v),),
        p.device,
        (start, chunk.start, size, chunk.count, stride, stride_to),
        GROUP=min(group(stride, start), group(stride_to, chunk.start)),
        BLOCK_R=config.block_r,
        BLOCK_V=config.block_v,
        num_warps=config.num_warps,
    )


def scale_launch(device: torch.device, *grads: Optional) -> Launch | None:
    """The launch that multiplies gradients like these in place, given (dloss, gradients of hidden, weight, bias). None
    if they are empty."""
    # Few enough CTAs that a launch with dloss = 1 takes microseconds, many enough that the last wave is short.
    block, span = 4096, 65536
    sizes = tuple(0 if grad is None else grad.numel() for grad in grads)
    programs = sum(triton.cdiv(size, span) for size in sizes)
    if not programs:
        return None
    return Launch(_linear_cross_entropy_scale_kernel, (programs,), device, sizes, SPAN=span, BLOCK=block, num_warps=4)

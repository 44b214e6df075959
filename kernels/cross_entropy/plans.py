"""Launch plans of cross_entropy: everything about a call that does not depend on the tensors' contents and addresses.

Estimate, bf16, R rows of V, one NVIDIA H200 that copies 4254 GB/s:
  forward             reads the logits                       2·R·V bytes   16384 x 32000: 1.05 GB, 246 us
  backward            reads them, writes their gradient      4·R·V bytes   16384 x 32000: 2.10 GB, 493 us
  forward + gradient  the same, and no other backward        4·R·V bytes   16384 x 32000: 2.10 GB, 493 us
A row adds 8 bytes of target, 8 of maximum and sum, 4 of loss. The forward executes about 6 fp32 instructions per
element, one of them an exponential; the GPU can issue 13 in the time that it takes to load the element's two bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from . import cluster, configs
from .backward import _cross_entropy_bwd_kernel, _cross_entropy_scale_kernel
from .configs import NARROW, NarrowConfig, NarrowFwdConfig
from .kernel import _cross_entropy_wide_kernel
from .launch import Launch
from .layout import (
    COUNT_BLOCK,
    Rows,
    Scratch,
    Vector,
    alignment,
    fresh_rows,
    matrix_of,
    rows_of,
    same_alignment,
    stats_size,
    vector,
    vector_of,
)
from .loss import Loss
from .narrow import _cross_entropy_narrow_bwd_kernel, _cross_entropy_narrow_kernel
from .sums import _cross_entropy_count_kernel, _cross_entropy_sum_kernel

Optional = torch.Tensor | None
Results = tuple[torch.Tensor, Optional, Optional, Optional, Optional]
Forward = Callable[[torch.Tensor, torch.Tensor, Optional], Results]
Backward = Callable[[Optional, Optional, Optional, torch.Tensor, torch.Tensor, Optional, torch.Tensor], torch.Tensor]
Scale = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

SCALE_BLOCK = 4096


def fwd_plan(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    loss: Loss,
    save: bool,
    gradient: str | None,
    backend: str,
) -> Forward:
    """Returns a function from (logits, target, weight) like these to (loss, z-loss, lse, workspace, gradient), with
    None for those not requested. With `save` the workspace begins with the statistics for the backward. `gradient`, for
    an incoming gradient of 1: None, "new", or "inplace", which overwrites the logits. `loss.check` must have accepted
    the inputs.

    Raises RuntimeError where `backend` does not support them."""
    if _too_narrow(target, loss):
        wide = fwd_plan(logits, target.long(), weight, loss, save, gradient, backend)
        return lambda logits, target, weight: wide(logits, target.long(), weight)
    rows, device = target.numel(), logits.device
    shape = tuple(target.shape) if loss.reduction == "none" else ()
    inplace, new = gradient == "inplace", gradient == "new"
    if rows == 0:
        return _empty_plan(shape, loss, save, gradient)
    at, targets = rows_of(logits), vector_of(target)
    to = fresh_rows(logits.shape[-1]) if new or at.copied else at
    write, scratch, programs = _fwd_launch(logits, target, targets, weight, loss, save, gradient, at, to, backend)
    count = _count_launch(target, targets, weight, loss, logits.shape[-1], scratch.shares) if scratch.shares else None
    add_up = None
    if loss.reduction != "none":
        add_up = _sum_launch(device, rows, programs, weight is not None, loss, save, scratch)
    weight_copied = weight is not None and not weight.is_contiguous()
    plain = not (at.copied or at.skip or targets.copied or weight_copied)
    sum_weights = weight is not None and loss.label_smoothing != 0
    bounds = None if target.is_cuda else (logits.shape[-1], loss.ignore_index)
    strides, dtype, size = _dense_strides(shape), loss.dtype, scratch.size
    lse_shape = tuple(target.shape) if loss.return_lse else None
    lse_strides = _dense_strides(tuple(target.shape))
    return_z = loss.return_z_loss

    def run(logits: torch.Tensor, target: torch.Tensor, weight: Optional) -> Results:
        if bounds is not None:
            _check_target(target, *bounds)
        out = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        z = torch.empty_like(out) if return_z else None
        lse = scratch = None
        if lse_shape is not None:
            lse = torch.empty_strided(lse_shape, lse_strides, dtype=torch.float32, device=device)
        if size:
            scratch = torch.empty_strided((size,), (1,), dtype=torch.float32, device=device)
        grad = torch.empty_like(logits, memory_format=torch.contiguous_format) if new else logits if inplace else None
        given, written = logits, grad
        if not plain:
            target, weight = targets.of(target), None if weight is None else weight.contiguous()
            matrix = at.of(logits.detach())
            given = at.pointer(matrix)
            written = to.pointer(matrix) if inplace else grad
        if count is not None:
            count(target, weight, scratch)
        weight_sum = weight.sum(dtype=torch.float32) if sum_weights else None  # type: ignore[union-attr]
        write(given, target, weight, weight_sum, out, z, lse, scratch, written)
        if add_up is not None:
            add_up(scratch, out, z)
        if inplace and at.copied:
            logits.detach().copy_(matrix.view(logits.shape))
        return out, z, lse, scratch, grad

    return run


def _empty_plan(shape: tuple[int, ...], loss: Loss, save: bool, gradient: str | None) -> Forward:
    """The plan for zero rows: the sum is 0, the mean NaN."""
    value = float("nan") if loss.reduction == "mean" else 0.0

    def run(logits: torch.Tensor, target: torch.Tensor, weight: Optional) -> Results:
        device, fp32 = logits.device, torch.float32
        out = torch.full(shape, value, dtype=loss.dtype, device=device)
        z = torch.full_like(out, value) if loss.return_z_loss else None
        lse = torch.empty(target.shape, dtype=fp32, device=device) if loss.return_lse else None
        scratch = (
            torch.full((stats_size(0, loss.reduction),), float("nan"), dtype=fp32, device=device) if save else None
        )
        new = torch.empty_like(logits, memory_format=torch.contiguous_format) if gradient == "new" else None
        return out, z, lse, scratch, logits if gradient == "inplace" else new

    return run


def _fwd_launch(
    logits: torch.Tensor,
    target: torch.Tensor,
    targets: Vector,
    weight: torch.Tensor | None,
    loss: Loss,
    save: bool,
    gradient: str | None,
    at: Rows,
    to: Rows,
    backend: str,
) -> tuple[Callable[..., None], Scratch, int]:
    """Returns (launch, workspace layout, CTAs). The launch takes (logits, target, weight, sum of weights, loss, z-loss,
    lse, workspace, gradient) and writes the loss of each row, or the partial sums."""
    rows, vocab, dtype = target.numel(), logits.shape[-1], logits.dtype
    weighted, smooth, softcap = weight is not None, loss.label_smoothing != 0, loss.softcap is not None
    capability, sms = _device(logits)
    layout = alignment(rows, vocab, dtype, vocab <= NARROW, at, to)
    if gradient is not None and backend != "triton":
        reason = cluster.unsupported_reason(vocab, dtype, layout, weighted, softcap, capability)
        if reason is None:
            scratch = Scratch.of(rows, rows, loss, save, True)
            split = configs.pick_cluster_config(vocab, dtype, smooth or loss.has_z)
            return cluster.cluster_launch(split, logits, target, targets, at, to, loss, scratch), scratch, rows
        if backend == "cuda":
            raise RuntimeError(f'cross_entropy: backend="cuda" cannot run here: {reason}')
    asked = gradient is not None, weighted and smooth, softcap
    config = configs.pick_fwd_config(vocab, dtype, layout == "aligned", *asked, capability)
    constants: dict[str, Any]
    if isinstance(config, NarrowFwdConfig):
        kernel, constants = _cross_entropy_narrow_kernel, _tile(config, vocab)
        constants["maxnreg"] = config.registers
        programs = _persistent(triton.cdiv(rows, config.block_m), config.programs_per_sm * sms)
    else:
        kernel, programs = _cross_entropy_wide_kernel, rows
        constants = dict(LANES=32 * config.num_warps, UNROLL=config.unroll, EVICTION=config.eviction)
        constants["GRAD_UNROLL"] = config.grad_unroll
        constants["ALIGNED_GRAD"] = gradient is None or same_alignment(at, to, dtype)
    scratch = Scratch.of(rows, programs, loss, save, gradient is not None)
    strides = (at.stride, at.skip, targets.stride, *((to.stride, to.skip) if gradient is not None else (0, 0)))
    launch = Launch(
        kernel,
        (programs,),
        logits.device,
        (rows, vocab, *strides, scratch.partial_at, *_numbers(loss)),
        REDUCTION=loss.reduction,
        **_features(loss, weight, dtype),
        RETURN_Z=loss.return_z_loss,
        RETURN_LSE=loss.return_lse,
        SAVE=save,
        GRAD=gradient is not None,
        COUNTS=scratch.shares,
        LAYOUT=layout,
        VECTOR=vector(dtype),
        **constants,
        num_warps=config.num_warps,
        sanitize_overflow=False,  # debug=True, needed for the device-side assertion, would turn this on too
    )
    return launch, scratch, programs


def _count_launch(
    target: torch.Tensor, targets: Vector, weight: torch.Tensor | None, loss: Loss, vocab: int, shares: int
) -> Launch:
    """The launch that writes the divisors of the mean, given (target, weight, workspace)."""
    return Launch(
        _cross_entropy_count_kernel,
        (shares,),
        target.device,
        (target.numel(), vocab, targets.stride, loss.ignore_index),
        HAS_WEIGHT=weight is not None,
        BLOCK=COUNT_BLOCK,
        num_warps=8,
    )


def _sum_launch(
    device: torch.device, rows: int, programs: int, weighted: bool, loss: Loss, save: bool, scratch: Scratch
) -> Launch:
    """The launch that writes the loss, the z-loss and the divisors for the backward, given (workspace, loss,
    z-loss)."""
    block = min(8192, triton.next_power_of_2(programs))
    return Launch(
        _cross_entropy_sum_kernel,
        (1,),
        device,
        (programs, scratch.partial_at, 2 * rows),
        REDUCTION=loss.reduction,
        HAS_Z=loss.has_z,
        HAS_WEIGHT=weighted,
        RETURN_Z=loss.return_z_loss,
        SAVE=save,
        BLOCK=block,
        num_warps=max(1, min(32, block // 128)),
    )


def bwd_plan(
    g_loss: torch.Tensor | None,
    g_z: torch.Tensor | None,
    g_lse: torch.Tensor | None,
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    loss: Loss,
    inplace: bool,
) -> Backward:
    """Returns a function from (g_loss, g_z, g_lse, logits, target, weight, stats) like these to the gradient of the
    logits. With `inplace` the gradient overwrites the logits. g_loss, g_z and g_lse are the incoming gradients of the
    three outputs, or None."""
    if _too_narrow(target, loss):
        wide = bwd_plan(g_loss, g_z, g_lse, logits, target.long(), weight, loss, inplace)
        return lambda g_loss, g_z, g_lse, logits, target, weight, stats: wide(
            g_loss, g_z, g_lse, logits, target.long(), weight, stats
        )
    rows, vocab, dtype = target.numel(), logits.shape[-1], logits.dtype
    if rows == 0:
        return lambda *given: given[3] if inplace else torch.empty_like(given[3], memory_format=torch.contiguous_format)
    incoming = tuple(_incoming(g) for g in (g_loss, g_z, g_lse))
    at, targets = rows_of(logits), vector_of(target)
    to = at if inplace and not at.copied else fresh_rows(vocab)
    layout = alignment(rows, vocab, dtype, vocab <= NARROW, at, to)
    capability, _ = _device(logits)
    config = configs.pick_bwd_config(vocab, dtype, layout == "aligned", capability)
    constants: dict[str, Any]
    if isinstance(config, NarrowConfig):
        kernel, constants = _cross_entropy_narrow_bwd_kernel, _tile(config, vocab)
        programs = triton.cdiv(rows, config.block_m)
    else:
        kernel, programs = _cross_entropy_bwd_kernel, rows * triton.cdiv(vocab, config.block_n)
        constants = dict(BLOCK_N=config.block_n, EVICTION=config.eviction)
        constants["ALIGNED_GRAD"] = same_alignment(at, to, dtype)
    strides = (at.stride, at.skip, targets.stride, *(g.stride for g in incoming), to.stride, to.skip)
    write = Launch(
        kernel,
        (programs,),
        logits.device,
        (rows, vocab, *strides, *_numbers(loss)),
        REDUCTION=loss.reduction,
        **_features(loss, weight, dtype),
        HAS_G_LOSS=g_loss is not None,
        HAS_G_Z=g_z is not None,
        HAS_G_LSE=g_lse is not None,
        LAYOUT=layout,
        VECTOR=vector(dtype),
        **constants,
        num_warps=config.num_warps,
    )
    weight_copied = weight is not None and not weight.is_contiguous()
    plain = not (at.copied or at.skip or targets.copied or weight_copied or any(g.copied for g in incoming))
    sum_weights = weight is not None and loss.label_smoothing != 0

    def run(
        g_loss: Optional,
        g_z: Optional,
        g_lse: Optional,
        logits: torch.Tensor,
        target: torch.Tensor,
        weight: Optional,
        stats: torch.Tensor,
    ) -> torch.Tensor:
        grad = logits if inplace else torch.empty_like(logits, memory_format=torch.contiguous_format)
        given, written = logits, grad
        if not plain:
            target, weight = targets.of(target), None if weight is None else weight.contiguous()
            g_loss, g_z, g_lse = (
                None if g is None else how.of(g) for g, how in zip((g_loss, g_z, g_lse), incoming, strict=True)
            )
            matrix = at.of(logits.detach())
            given = at.pointer(matrix)
            written = to.pointer(matrix) if inplace else grad
        weight_sum = weight.sum(dtype=torch.float32) if sum_weights else None  # type: ignore[union-attr]
        write(given, target, weight, weight_sum, stats, g_loss, g_z, g_lse, written)
        if inplace and at.copied:
            logits.detach().copy_(matrix.view(logits.shape))
        return grad

    return run


def scale_plan(
    grad: torch.Tensor, g_loss: torch.Tensor, target: torch.Tensor, ignore_index: int, inplace: bool
) -> Scale:
    """Returns a function from (grad, g_loss, target) like these to g_loss · grad, 0 in ignored rows. g_loss is a scalar
    or has one factor per row. In place, rows whose factor is 1 are neither read nor written."""
    if grad.numel() == 0:
        return lambda grad, g_loss, target: grad
    matrix, copied = matrix_of(grad)
    factors, targets = _incoming(g_loss), vector_of(target)
    rows, vocab = matrix.shape
    tiles_n = triton.cdiv(vocab, SCALE_BLOCK)
    strides = matrix.stride(0), factors.stride, targets.stride, matrix.stride(0) if inplace else vocab
    _, sms = _device(grad)
    scale = Launch(
        _cross_entropy_scale_kernel,
        (min(rows * tiles_n, 8 * sms),),
        grad.device,
        (rows, vocab, tiles_n, *strides, ignore_index),
        IN_PLACE=inplace,
        BLOCK_N=SCALE_BLOCK,
        num_warps=8,
    )

    def run(grad: torch.Tensor, g_loss: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        given = matrix_of(grad)[0] if copied else grad
        out = given if inplace else torch.empty_like(grad, memory_format=torch.contiguous_format)
        scale(given, factors.of(g_loss), targets.of(target), out)
        if inplace and copied:
            grad.copy_(given.view(grad.shape))
        return grad if inplace else out

    return run


def _too_narrow(target: torch.Tensor, loss: Loss) -> bool:
    """Whether the targets cannot hold ignore_index: the kernels give it to the rows past the last one, in their
    dtype."""
    return target.dtype == torch.int32 and not -(2**31) <= loss.ignore_index < 2**31


def _features(loss: Loss, weight: torch.Tensor | None, dtype: torch.dtype) -> dict[str, bool]:
    """The constexprs that compile the optional terms in or out, common to all kernels."""
    return dict(
        HAS_WEIGHT=weight is not None,
        SMOOTH=loss.label_smoothing != 0,
        HAS_Z=loss.has_z,
        HAS_SOFTCAP=loss.softcap is not None,
        EXACT=dtype == torch.float32,
    )


def _numbers(loss: Loss) -> tuple[int, float, float, float]:
    return loss.ignore_index, loss.label_smoothing, loss.z_loss, 1.0 if loss.softcap is None else loss.softcap


def _tile(config: NarrowConfig, vocab: int) -> dict[str, Any]:
    """The tile's constexprs of the narrow kernels."""
    block_n = triton.next_power_of_2(vocab)
    width = config.lanes * config.vector
    return dict(BLOCK_M=config.block_m, BLOCK_N=block_n, WIDTH=width, FULL=vocab == block_n)


def _persistent(tiles: int, resident: int) -> int:
    """The number of CTAs of a persistent kernel, so bounded that the index of a tile past the last one fits 32 bits."""
    return min(tiles, resident, max(1, 2**31 - tiles))


def _incoming(gradient: torch.Tensor | None) -> Vector:
    """How an incoming gradient is addressed by row: with stride 0 if it is a scalar or None."""
    return Vector(0, False) if gradient is None or gradient.dim() == 0 else vector_of(gradient)


def _dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _check_target(target: torch.Tensor, vocab: int, ignore_index: int) -> None:
    """Raises ValueError for a target out of range. For CPU tensors only: on a GPU, reading the targets would
    synchronise, so the kernel asserts it."""
    wrong = target[(target != ignore_index) & ((target < 0) | (target >= vocab))]
    if wrong.numel():
        raise ValueError(
            f"cross_entropy: target must be ignore_index ({ignore_index}) or in [0, {vocab}), got {wrong[0].item()}"
        )


def _device(tensor: torch.Tensor) -> tuple[tuple[int, int], int]:
    """(compute capability, number of SMs). In the interpreter, those of an sm_80 GPU with two SMs."""
    if not tensor.is_cuda:
        return (8, 0), 2
    properties = torch.cuda.get_device_properties(tensor.device)
    return (properties.major, properties.minor), properties.multi_processor_count

"""Cross entropy: configurations and launchers. The kernels are in `forward`, `backward` and `sums`.

Napkin maths, bf16, R rows of V, one NVIDIA H200 that copies 4254 GB/s:
  forward             reads the logits                       2·R·V bytes   16384 x 32000: 1.05 GB, 246 us
  backward            reads them, writes their gradient      4·R·V bytes   16384 x 32000: 2.10 GB, 493 us
  forward + gradient  the same, and no other backward        4·R·V bytes   16384 x 32000: 2.10 GB, 493 us
What else there is goes by rows: 8 bytes of target, 8 of maximum and sum, 4 of loss. An element costs about 6 fp32
instructions forward, one of them an exponential, where the chip has 13 in the time that its two bytes take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from . import cluster
from .backward import _cross_entropy_bwd_kernel, _cross_entropy_scale_kernel
from .configs import (
    NARROW,
    ClusterConfig,
    NarrowConfig,
    NarrowFwdConfig,
    WideFwdConfig,
    pick_bwd_config,
    pick_cluster_config,
    pick_fwd_config,
)
from .forward import _cross_entropy_wide_kernel
from .layout import alignment, matrix_of, rows_of, same_alignment, vector, vector_of
from .narrow import _cross_entropy_narrow_bwd_kernel, _cross_entropy_narrow_kernel
from .sums import _cross_entropy_count_kernel, _cross_entropy_sum_kernel

REDUCTIONS = ("none", "sum", "mean")
SCALE_BLOCK = 4096


@dataclass(frozen=True)
class Loss:
    """What is computed, and what of it is handed out."""

    ignore_index: int
    label_smoothing: float
    reduction: str
    z_loss: float
    softcap: float | None
    dtype: torch.dtype
    return_z_loss: bool
    return_lse: bool

    @property
    def has_z(self) -> bool:
        return self.z_loss != 0 or self.return_z_loss


def cross_entropy_fwd(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, loss: Loss, save: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """loss, z-loss, lse, and for the backward: stats [2, rows], the maximum and the sum of exponentials of each row,
    and scale [2], 1 / Σ weights and 1 / rows that are not ignored. What was not asked for is empty."""
    return _forward(logits, target, weight, loss, save, None)


def cross_entropy_fwd_grad(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, loss: Loss, in_place: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """loss, z-loss, lse, and the gradient of loss's sum with respect to the logits; with `in_place` in their memory."""
    if not in_place:
        grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        return *_forward(logits, target, weight, loss, False, grad)[:3], grad
    if logits.numel() == 0:
        return *_forward(logits, target, weight, loss, False, None)[:3], logits
    matrix, copied = matrix_of(logits)
    found = _forward(matrix, target, weight, loss, False, matrix)
    return *found[:3], logits.copy_(matrix.view(logits.shape)) if copied else logits


def _forward(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    loss: Loss,
    save: bool,
    grad: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, vocab, device = target.numel(), logits.shape[-1], logits.device
    none, mean = loss.reduction == "none", loss.reduction == "mean"
    out = torch.empty(target.shape if none else (), dtype=loss.dtype, device=device)
    z = torch.empty(out.shape if loss.return_z_loss else 0, dtype=loss.dtype, device=device)
    lse = torch.empty(target.shape if loss.return_lse else 0, dtype=torch.float32, device=device)
    stats = torch.empty((2, rows) if save else 0, dtype=torch.float32, device=device)
    scale = torch.empty(2 if save and mean else 0, dtype=torch.float32, device=device)
    if rows == 0:
        for empty in () if none else (out, z):
            empty.fill_(float("nan") if mean else 0.0)
        return out, z, lse, stats, scale.fill_(float("nan"))
    _check_target(target, vocab, loss.ignore_index)
    with torch.cuda.device_of(logits):
        target, stride_target = vector_of(target)
        matrix, grads = rows_of(logits), None if grad is None else rows_of(grad)
        layout = alignment(rows, vocab, vocab <= NARROW, matrix, grads or matrix)
        weighted, smooth, softcap = weight is not None, loss.label_smoothing != 0, loss.softcap is not None
        config: ClusterConfig | NarrowFwdConfig | WideFwdConfig
        capability = _capability(logits)
        given = (vocab, logits.dtype, layout, weighted, softcap, capability)
        if grads is not None and cluster.cluster_refuses(*given) is None:
            config = pick_cluster_config(vocab, logits.dtype, smooth or loss.has_z)
        else:
            asked = (grads is not None, weighted and smooth, softcap)
            config = pick_fwd_config(vocab, logits.dtype, layout == "aligned", *asked, capability)
        programs = rows
        constants: dict[str, Any] = {}
        if isinstance(config, NarrowFwdConfig):
            kernel, constants = _cross_entropy_narrow_kernel, _tile(config, vocab)
            constants["maxnreg"] = config.registers
            programs = _staying(triton.cdiv(rows, config.block_m), config.programs_per_sm, logits)
        elif isinstance(config, WideFwdConfig):
            kernel = _cross_entropy_wide_kernel
            constants = dict(LANES=32 * config.num_warps, UNROLL=config.unroll, EVICTION=config.eviction)
            constants["GRAD_UNROLL"] = config.grad_unroll
            constants["ALIGNED_GRAD"] = grads is None or same_alignment(matrix, grads)
        partial = None if none else torch.empty(4, programs, dtype=torch.float32, device=device)
        weight = None if weight is None else weight.contiguous()
        counts = _counts(target, stride_target, weight, vocab, loss) if mean and grad is not None else None
        if isinstance(config, ClusterConfig):
            assert grads is not None
            results = (out, z, lse, partial, grads)
            cluster.cluster_fwd_grad(config, matrix, target, stride_target, counts, *results, vocab, loss)
        else:
            kernel[(programs,)](
                matrix.pointer,
                target,
                weight,
                _weight_sum(weight, loss),
                counts,
                out,
                z,
                lse,
                stats,
                partial,
                None if grads is None else grads.pointer,
                rows,
                vocab,
                matrix.stride,
                matrix.skip,
                stride_target,
                0 if grads is None else grads.stride,
                0 if grads is None else grads.skip,
                loss.ignore_index,
                loss.label_smoothing,
                loss.z_loss,
                1.0 if loss.softcap is None else loss.softcap,
                REDUCTION=loss.reduction,
                **_what(loss, weight, logits.dtype),
                RETURN_Z=loss.return_z_loss,
                RETURN_LSE=loss.return_lse,
                SAVE=save,
                GRAD=grad is not None,
                COUNTS=0 if counts is None else counts.shape[1],
                LAYOUT=layout,
                VECTOR=vector(logits),
                **constants,
                num_warps=config.num_warps,
                sanitize_overflow=False,  # which debug=True would turn on together with the check of the target
            )
        if not none:
            block = min(8192, triton.next_power_of_2(programs))
            _cross_entropy_sum_kernel[(1,)](
                partial,
                out,
                z,
                scale,
                programs,
                REDUCTION=loss.reduction,
                HAS_Z=loss.has_z,
                HAS_WEIGHT=weight is not None,
                RETURN_Z=loss.return_z_loss,
                SAVE=save,
                BLOCK=block,
                num_warps=max(1, min(32, block // 128)),
            )
    return out, z, lse, stats, scale


def cross_entropy_bwd(
    g_loss: torch.Tensor | None,
    g_z: torch.Tensor | None,
    g_lse: torch.Tensor | None,
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    stats: torch.Tensor,
    scale: torch.Tensor,
    loss: Loss,
    in_place: bool,
) -> torch.Tensor:
    """The gradient with respect to the logits; with `in_place` in their memory. g_loss, g_z and g_lse are the gradients
    of the three outputs, or None."""
    rows, vocab = target.numel(), logits.shape[-1]
    given, copied = matrix_of(logits) if in_place and rows else (logits, False)
    grad = given if in_place else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if rows == 0:
        return grad
    with torch.cuda.device_of(logits):
        target, stride_target = vector_of(target)
        (g_loss, stride_g_loss), (g_z, stride_g_z), (g_lse, stride_g_lse) = map(_gradient, (g_loss, g_z, g_lse))
        matrix, grads = rows_of(given), rows_of(grad)
        layout = alignment(rows, vocab, vocab <= NARROW, matrix, grads)
        config = pick_bwd_config(vocab, logits.dtype, layout == "aligned", _capability(logits))
        weight = None if weight is None else weight.contiguous()
        constants: dict[str, Any]
        if isinstance(config, NarrowConfig):
            kernel, constants = _cross_entropy_narrow_bwd_kernel, _tile(config, vocab)
            programs = triton.cdiv(rows, config.block_m)
        else:
            kernel, programs = _cross_entropy_bwd_kernel, rows * triton.cdiv(vocab, config.block_n)
            constants = dict(BLOCK_N=config.block_n, EVICTION=config.eviction)
            constants["ALIGNED_GRAD"] = same_alignment(matrix, grads)
        kernel[(programs,)](
            matrix.pointer,
            target,
            weight,
            _weight_sum(weight, loss),
            stats,
            scale,
            g_loss,
            g_z,
            g_lse,
            grads.pointer,
            rows,
            vocab,
            matrix.stride,
            matrix.skip,
            stride_target,
            stride_g_loss,
            stride_g_z,
            stride_g_lse,
            grads.stride,
            grads.skip,
            loss.ignore_index,
            loss.label_smoothing,
            loss.z_loss,
            1.0 if loss.softcap is None else loss.softcap,
            REDUCTION=loss.reduction,
            **_what(loss, weight, logits.dtype),
            HAS_G_LOSS=g_loss is not None,
            HAS_G_Z=g_z is not None,
            HAS_G_LSE=g_lse is not None,
            LAYOUT=layout,
            VECTOR=vector(logits),
            **constants,
            num_warps=config.num_warps,
        )
    if copied:
        logits.copy_(given.view(logits.shape))
    return logits if in_place else grad


def cross_entropy_scale(grad: torch.Tensor, g_loss: torch.Tensor, in_place: bool) -> torch.Tensor:
    """g_loss · grad, one factor for all rows or one for each. In place the rows whose factor is 1 are not touched."""
    if grad.numel() == 0:
        return grad
    given, copied = matrix_of(grad)
    out = given if in_place else torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    with torch.cuda.device_of(grad):
        g_loss, stride_g_loss = _gradient(g_loss)
        rows, vocab = given.shape
        tiles_n = triton.cdiv(vocab, SCALE_BLOCK)
        _cross_entropy_scale_kernel[(min(rows * tiles_n, 8 * _multiprocessors(grad)),)](
            given,
            g_loss,
            out,
            rows,
            vocab,
            tiles_n,
            given.stride(0),
            stride_g_loss,
            given.stride(0) if in_place else vocab,
            IN_PLACE=in_place,
            BLOCK_N=SCALE_BLOCK,
            num_warps=8,
        )
    if in_place and copied:
        grad.copy_(given.view(grad.shape))
    return grad if in_place else out


def _counts(
    target: torch.Tensor, stride_target: int, weight: torch.Tensor | None, vocab: int, loss: Loss
) -> torch.Tensor:
    """[2, programs]: what the mean divides by, in as many shares as there were programs."""
    rows = target.numel()
    programs = min(64, triton.next_power_of_2(triton.cdiv(rows, 1024)))
    counts = torch.empty(2, programs, dtype=torch.float32, device=target.device)
    _cross_entropy_count_kernel[(programs,)](
        target,
        weight,
        counts,
        rows,
        vocab,
        stride_target,
        loss.ignore_index,
        HAS_WEIGHT=weight is not None,
        BLOCK=1024,
        num_warps=8,
    )
    return counts


def _what(loss: Loss, weight: torch.Tensor | None, dtype: torch.dtype) -> dict[str, bool]:
    """The constants by which all kernels leave out what is not asked for."""
    return dict(
        HAS_WEIGHT=weight is not None,
        SMOOTH=loss.label_smoothing != 0,
        HAS_Z=loss.has_z,
        HAS_SOFTCAP=loss.softcap is not None,
        EXACT=dtype == torch.float32,
    )


def _tile(config: NarrowConfig, vocab: int) -> dict[str, Any]:
    """The constants of the narrow kernels."""
    block_n = triton.next_power_of_2(vocab)
    width = config.lanes * config.vector
    return dict(BLOCK_M=config.block_m, BLOCK_N=block_n, WIDTH=width, FULL=vocab == block_n)


def _staying(tiles: int, per_sm: int, tensor: torch.Tensor) -> int:
    """How many programs share the tiles; so few that the number of a tile past the last one fits into 32 bits."""
    return min(tiles, per_sm * _multiprocessors(tensor), max(1, 2**31 - tiles))


def _weight_sum(weight: torch.Tensor | None, loss: Loss) -> torch.Tensor | None:
    return None if weight is None or not loss.label_smoothing else weight.sum(dtype=torch.float32)


def _gradient(gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, int]:
    """An incoming gradient and its stride by rows: 0 where there is one for all."""
    if gradient is None or gradient.dim() == 0:
        return gradient, 0
    return vector_of(gradient)


def _check_target(target: torch.Tensor, vocab: int, ignore_index: int) -> None:
    """On a CPU, where looking costs nothing. On a GPU the kernel asserts it: the host cannot know without waiting."""
    if target.is_cuda:
        return
    wrong = target[(target != ignore_index) & ((target < 0) | (target >= vocab))]
    if wrong.numel():
        raise ValueError(
            f"cross_entropy: target must be ignore_index ({ignore_index}) or in [0, {vocab}), got {wrong[0].item()}"
        )


def _capability(tensor: torch.Tensor) -> tuple[int, int]:
    """The interpreter stands for an sm_80."""
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else (8, 0)


def _multiprocessors(tensor: torch.Tensor) -> int:
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 2

"""Reductions over the batch, in a fixed order: Σ loss, Σ z-loss, and the divisors of the mean.

The partial sums are [4, n] in fp32, with one column per CTA of the forward: sum of the cross entropy, sum of the
z-loss, number of rows that are not ignored, sum of their weights. Rows that are not needed are not written.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _cross_entropy_sum_kernel(
    scratch_ptr,
    loss_ptr,
    z_ptr,
    n,
    partial_at,
    scale_at,
    REDUCTION: tl.constexpr,
    HAS_Z: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    RETURN_Z: tl.constexpr,
    SAVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the loss and z-loss and, for the backward of a mean, 1 / Σ weights and 1 / (number of rows that are not
    ignored). One CTA."""
    lanes = tl.arange(0, BLOCK)
    losses = tl.zeros([BLOCK], tl.float32)
    zs = tl.zeros([BLOCK], tl.float32)
    counts = tl.zeros([BLOCK], tl.float32)
    weights = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        at, mask = scratch_ptr + partial_at + start + lanes, start + lanes < n
        losses += tl.load(at, mask=mask, other=0.0)
        if HAS_Z:
            zs += tl.load(at + n, mask=mask, other=0.0)
        if REDUCTION == "mean":
            counts += tl.load(at + 2 * n, mask=mask, other=0.0)
            if HAS_WEIGHT:
                weights += tl.load(at + 3 * n, mask=mask, other=0.0)
    loss, z = tl.sum(losses, 0), tl.sum(zs, 0)
    if REDUCTION == "mean":
        count = tl.sum(counts, 0)
        weight = tl.sum(weights, 0) if HAS_WEIGHT else count
        loss, z = loss / weight, z / count
        if SAVE:
            tl.store(scratch_ptr + scale_at, 1 / weight)
            tl.store(scratch_ptr + scale_at + 1, 1 / count)
    tl.store(loss_ptr, (loss + z).to(loss_ptr.dtype.element_ty) if HAS_Z else loss.to(loss_ptr.dtype.element_ty))
    if RETURN_Z:
        tl.store(z_ptr, z.to(z_ptr.dtype.element_ty))


@triton.jit
def _cross_entropy_count_kernel(
    target_ptr,
    weight_ptr,
    count_ptr,
    rows,
    vocab,
    stride_target,
    ignore_index,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes each CTA's partial Σ weights and partial number of rows that are not ignored to [2, CTAs]. Their sums are
    the divisors of a mean. A forward that also writes the gradient needs them before the loss."""
    programs = tl.num_programs(0)
    counts = tl.zeros([BLOCK], tl.float32)
    weights = tl.zeros([BLOCK], tl.float32)
    for start in range(tl.program_id(0) * BLOCK, rows, programs * BLOCK):
        row = start + tl.arange(0, BLOCK)
        target = tl.load(target_ptr + row.to(tl.int64) * stride_target, mask=row < rows, other=ignore_index)
        live = target != ignore_index
        counts += tl.where(live, 1.0, 0.0)
        if HAS_WEIGHT:
            # A target out of range must not be used as an index here; the forward asserts the range.
            known = live & (target >= 0) & (target < vocab)
            weights += tl.load(weight_ptr + target, mask=known, other=0.0).to(tl.float32)
    count = tl.sum(counts, 0)
    tl.store(count_ptr + tl.program_id(0), tl.sum(weights, 0) if HAS_WEIGHT else count)
    tl.store(count_ptr + programs + tl.program_id(0), count)


@triton.jit
def inverse_counts(count_ptr, COUNTS: tl.constexpr):
    """(1 / Σ weights, 1 / number of rows that are not ignored), from the output of `_cross_entropy_count_kernel`."""
    lanes = tl.arange(0, COUNTS)
    return 1 / tl.sum(tl.load(count_ptr + lanes), 0), 1 / tl.sum(tl.load(count_ptr + COUNTS + lanes), 0)

"""The Triton kernels of linear_cross_entropy, all memory-bound. cuBLAS computes the GEMMs.

Logits are stored transposed, zᵀ[V, N]: each row of zᵀ belongs to one vocabulary entry, as a row of the weight does. So
a slice of the vocabulary is contiguous, an odd vocabulary (50257) misaligns nothing, and zᵀ of N <= H rows fits the
memory of the weight's gradient [V, H], row by row.

Estimate, bf16, n = V·N logits, one NVIDIA H200 that copies 4254 GB/s, 8192 rows of a vocabulary of 128256:
  stats     reads z               2·n bytes   2.1 GB, 0.49 ms
  grad      reads z, writes g     4·n bytes   4.2 GB, 0.99 ms
  move      reads g, writes g     4·n bytes   4.2 GB, 0.99 ms
  scale     reads dW, writes dW, unless its factor is 1
compared with 12.3 ms for each GEMM of 8.6 TFLOP at 700 TFLOP/s.

Two fp32 buffers connect the kernels, with offsets (`x_at`) that the plan fixes:
  stats  of a chunk of rows: partial maxima and partial sums of exponentials, [parts, rows] each; with label smoothing
         partial sums of logits [parts, rows]; the logit at the target [rows]. A part is the result of one CTA
  held   of a call: for each chunk the lse as two rows (maximum, 1 / sum of exponentials); the losses of all rows,
         unless they are returned; the factor of the mean
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
# Not above any logit except -inf. A maximum that starts here is finite even in rows of -inf, and exp2(-inf - LOWEST) is
# 0.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def _tanh(x):
    """tanh in fp32. Near 0 it is a polynomial (Cephes, tanhf.c), as 1 - 2 / (1 + e^2x) would cancel there."""
    square = x * x
    near = square * -5.70498872745e-3 + 2.06390887954e-2
    near = near * square - 5.37397155531e-2
    near = near * square + 1.33314422036e-1
    near = near * square - 3.33332819422e-1
    near = near * square * x + x
    far = 1 - 2 / (1 + _exp(2 * x))
    return tl.where(tl.abs(x) < 0.625, near, far)


@triton.jit
def _linear_cross_entropy_count_kernel(
    target_ptr, held_ptr, rows, vocab, ignore_index, factor_at, MEAN: tl.constexpr, BLOCK: tl.constexpr
):
    """factor = 1 / (number of rows that are not ignored), or 1. A target out of range fails an assertion here, before
    any kernel uses it as an index."""
    counts = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        target = tl.load(target_ptr + row, mask=row < rows, other=ignore_index)
        counted = target != ignore_index
        tl.device_assert((target >= 0) & (target < vocab) | (counted == 0), "linear_cross_entropy: target out of range")
        counts += counted.to(tl.float32)
    tl.store(held_ptr + factor_at, 1 / tl.sum(counts) if MEAN else 1.0)


@triton.jit
def _linear_cross_entropy_stats_kernel(
    z_ptr,
    target_ptr,
    stats_ptr,
    row_at,
    max_at,
    sum_at,
    total_at,
    hit_at,
    first,
    vocab,
    rows,
    stride_zv,
    stride_p,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    SMOOTHING: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    UNROLL: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Writes, over SPAN vocabulary entries, each row's maximum, sum of exp(logit - maximum), sum of logits, and the
    logit of the target if it is one of them. Each thread keeps its own maxima and sums, which are reduced once, at the
    end."""
    across = tl.cdiv(rows, BLOCK_R)
    r = tl.program_id(0) % across * BLOCK_R + tl.arange(0, BLOCK_R)
    span = tl.program_id(0) // across
    end = min(span * SPAN + SPAN, vocab)
    # The mask is constant within vectors of GROUP rows. The last vector may read past the last row, into padding.
    in_row = (r // GROUP * GROUP < rows)[None, :]
    peak = tl.full([BLOCK_V, BLOCK_R], LOWEST, dtype=tl.float32)
    sums = tl.zeros([BLOCK_V, BLOCK_R], dtype=tl.float32)
    if SMOOTHING:
        totals = tl.zeros([BLOCK_V, BLOCK_R], dtype=tl.float32)
    for start in range(span * SPAN, end, UNROLL * BLOCK_V):
        # A tuple of tiles, not a three-dimensional tensor, so that a thread holds the same elements of all tiles.
        tiles = ()
        higher = peak
        for i in tl.static_range(UNROLL):
            v = (start + i * BLOCK_V + tl.arange(0, BLOCK_V))[:, None]
            z_ptrs = z_ptr + v.to(tl.int64) * stride_zv + r[None, :]
            z = tl.load(z_ptrs, mask=(v < end) & in_row, other=float("-inf")).to(tl.float32)
            if HAS_SOFTCAP:
                z = tl.where(v < end, softcap * _tanh(z / softcap), float("-inf"))
            if SMOOTHING:
                totals += tl.where(v < end, z, 0.0)
            higher = tl.maximum(higher, z)
            tiles += (z,)
        sums *= _exp(peak - higher)
        for i in tl.static_range(UNROLL):
            sums += _exp(tiles[i] - higher)
        peak = higher
    highest = tl.max(peak, axis=0)
    to = span.to(tl.int64) * stride_p + r
    tl.store(stats_ptr + max_at + to, highest, mask=r < rows)
    tl.store(stats_ptr + sum_at + to, tl.sum(sums * _exp(peak - highest[None, :]), axis=0), mask=r < rows)
    if SMOOTHING:
        tl.store(stats_ptr + total_at + to, tl.sum(totals, axis=0), mask=r < rows)
    target = tl.load(target_ptr + row_at + r, mask=r < rows, other=-1) - first
    here = (target >= span * SPAN) & (target < end) & (r < rows)
    z = tl.load(z_ptr + target.to(tl.int64) * stride_zv + r, mask=here, other=0.0).to(tl.float32)
    if HAS_SOFTCAP:
        z = softcap * _tanh(z / softcap)
    tl.store(stats_ptr + hit_at + r, z, mask=here)


@triton.jit
def _linear_cross_entropy_loss_kernel(
    stats_ptr,
    target_ptr,
    held_ptr,
    loss_ptr,
    row_at,
    sum_at,
    total_at,
    hit_at,
    lse_at,
    loss_at,
    parts,
    vocab,
    rows,
    stride_p,
    ignore_index,
    label_smoothing,
    z_loss,
    SMOOTHING: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Combines the parts to the loss of each row and its lse. lse is stored as two values, the maximum and
    1 / Σ exp(logit - maximum): a single one would lose digits if the maximum is large and the sum is close to 1.
    """
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    peak = tl.full([BLOCK_P, BLOCK_R], LOWEST, dtype=tl.float32)
    sums = tl.zeros([BLOCK_P, BLOCK_R], dtype=tl.float32)
    totals = tl.zeros([BLOCK_P, BLOCK_R], dtype=tl.float32)
    for start in range(0, parts, BLOCK_P):
        part = (start + tl.arange(0, BLOCK_P))[:, None]
        at = part.to(tl.int64) * stride_p + r[None, :]
        mask = (part < parts) & (r < rows)[None, :]
        other = tl.load(stats_ptr + at, mask=mask, other=LOWEST)
        higher = tl.maximum(peak, other)
        more = tl.load(stats_ptr + sum_at + at, mask=mask, other=0.0)
        sums = sums * _exp(peak - higher) + more * _exp(other - higher)
        peak = higher
        if SMOOTHING:
            totals += tl.load(stats_ptr + total_at + at, mask=mask, other=0.0)
    highest = tl.max(peak, axis=0)
    total = tl.sum(sums * _exp(peak - highest[None, :]), axis=0)
    log_sum = tl.log2(total) * LN2
    target = tl.load(target_ptr + row_at + r, mask=r < rows, other=ignore_index)
    below = highest - tl.load(stats_ptr + hit_at + r, mask=target != ignore_index, other=0.0)
    if SMOOTHING:
        below = (1 - label_smoothing) * below + label_smoothing * (highest - tl.sum(totals, axis=0) / vocab)
    lse = highest + log_sum
    loss = below + log_sum + z_loss * lse * lse
    lse_ptr = held_ptr + lse_at
    tl.store(lse_ptr + r, highest, mask=r < rows)
    # Correctly rounded: with equal logits every probability has the same error, and their sum must be 1.
    tl.store(lse_ptr + rows + r, tl.div_rn(tl.full([BLOCK_R], 1.0, dtype=tl.float32), total), mask=r < rows)
    tl.store(loss_ptr + loss_at + r, tl.where(target == ignore_index, 0.0, loss), mask=r < rows)


@triton.jit
def _linear_cross_entropy_sum_kernel(held_ptr, loss_ptr, rows, loss_at, factor_at, BLOCK: tl.constexpr):
    """Sums the losses of all rows, in a fixed order."""
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        sums += tl.load(held_ptr + loss_at + row, mask=row < rows, other=0.0)
    # If all rows are ignored, this is 0 · inf = nan, as in PyTorch.
    tl.store(loss_ptr, tl.sum(sums) * tl.load(held_ptr + factor_at))


@triton.jit
def _linear_cross_entropy_grad_kernel(
    z_ptr,
    target_ptr,
    held_ptr,
    dloss_ptr,
    dbias_ptr,
    z_at,
    row_at,
    lse_at,
    factor_at,
    first,
    vocab,
    all_vocab,
    rows,
    stride_zv,
    stride_d,
    ignore_index,
    label_smoothing,
    softcap,
    z_loss,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DLOSS: tl.constexpr,
    HAS_DBIAS: tl.constexpr,
    PLAIN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Replaces z by its gradient in place: (softmax · (1 + 2 · z_loss · lse) − target distribution) · factor · dloss.

    dbias [tiles of rows, vocab] receives the sum over each tile's rows, before rounding.
    """
    across = tl.cdiv(rows, BLOCK_R)
    r = tl.program_id(0) % across * BLOCK_R + tl.arange(0, BLOCK_R)
    v = tl.program_id(0) // across * BLOCK_V + tl.arange(0, BLOCK_V)
    target = tl.load(target_ptr + row_at + r, mask=r < rows, other=ignore_index)
    counts = target != ignore_index  # other rows have a gradient of 0, even if their logits are NaN or inf
    highest = tl.where(counts, tl.load(held_ptr + lse_at + r, mask=r < rows, other=0.0), 0.0)
    scale = tl.where(counts, tl.load(held_ptr + lse_at + rows + r, mask=r < rows, other=1.0), 1.0)
    weight = tl.load(held_ptr + factor_at)
    if HAS_DLOSS:
        weight = weight * tl.load(dloss_ptr + (row_at + r.to(tl.int64)) * stride_d, mask=r < rows, other=0.0).to(
            tl.float32
        )
    weight = tl.where(counts, weight, 0.0)
    hit = (target - first).to(tl.int32)

    # The division lets the compiler infer that the offset is a multiple of GROUP, for vector accesses.
    ptrs = z_ptr + z_at // GROUP * GROUP + v.to(tl.int64)[:, None] * stride_zv + r[None, :]
    mask = (v < vocab)[:, None] & (r // GROUP * GROUP < rows)[None, :]
    z = tl.where(counts[None, :], tl.load(ptrs, mask=mask, other=0.0).to(tl.float32), 0.0)
    if HAS_SOFTCAP:
        capped = _tanh(z / softcap)
        z = softcap * capped
    g = _exp(z - highest[None, :])
    is_target = v[:, None] == hit[None, :]
    if PLAIN:
        g *= (weight * scale)[None, :]
        g = tl.where(is_target, g - weight[None, :], g)
    else:
        softmax = g * scale[None, :]
        g = softmax - label_smoothing / all_vocab
        g = tl.where(is_target, g - (1 - label_smoothing), g)
        g += softmax * (2 * z_loss * (highest - tl.log2(scale) * LN2))[None, :]
        g *= weight[None, :]
    if HAS_SOFTCAP:
        g *= 1 - capped * capped
    tl.store(ptrs, g.to(z_ptr.dtype.element_ty), mask=mask)
    if HAS_DBIAS:
        over_rows = tl.sum(tl.where((r < rows)[None, :], g, 0.0), axis=1)
        tl.store(dbias_ptr + tl.program_id(0).to(tl.int64) % across * vocab + v, over_rows, mask=v < vocab)


@triton.jit
def _linear_cross_entropy_move_kernel(
    from_ptr,
    to_ptr,
    from_at,
    to_at,
    vocab,
    rows,
    stride_from,
    stride_to,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Copies the gradient of some rows. Neither side is contiguous, so PyTorch's copy would not use vector loads."""
    across = tl.cdiv(rows, BLOCK_R)
    r = (tl.program_id(0) % across * BLOCK_R + tl.arange(0, BLOCK_R))[None, :]
    v = (tl.program_id(0) // across * BLOCK_V + tl.arange(0, BLOCK_V))[:, None]
    mask = (v < vocab) & (r // GROUP * GROUP < rows)
    values = tl.load(from_ptr + from_at // GROUP * GROUP + v.to(tl.int64) * stride_from + r, mask=mask)
    tl.store(to_ptr + to_at // GROUP * GROUP + v.to(tl.int64) * stride_to + r, values, mask=mask)


@triton.jit
def _linear_cross_entropy_scale_kernel(
    dloss_ptr,
    dhidden_ptr,
    dweight_ptr,
    dbias_ptr,
    hidden_size,
    weight_size,
    bias_size,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiplies three gradients by dloss in place. If dloss is 1, as after loss.backward(), it reads nothing else.

    The first CTAs process spans of dhidden, the next spans of dweight, the last spans of dbias."""
    dloss = tl.load(dloss_ptr).to(tl.float32)
    if dloss != 1:
        span = tl.program_id(0)
        of_hidden, of_weight = tl.cdiv(hidden_size, SPAN), tl.cdiv(weight_size, SPAN)
        if span < of_hidden:
            if dhidden_ptr is not None:
                scale_span(dhidden_ptr, dloss, span, hidden_size, SPAN, BLOCK)
        elif span < of_hidden + of_weight:
            if dweight_ptr is not None:
                scale_span(dweight_ptr, dloss, span - of_hidden, weight_size, SPAN, BLOCK)
        elif dbias_ptr is not None:
            scale_span(dbias_ptr, dloss, span - of_hidden - of_weight, bias_size, SPAN, BLOCK)


@triton.jit
def scale_span(x_ptr, factor, span, size, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    first = span.to(tl.int64) * SPAN
    for start in range(0, SPAN, BLOCK):
        at = first + start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < size)
        tl.store(x_ptr + at, (x.to(tl.float32) * factor).to(x_ptr.dtype.element_ty), mask=at < size)

"""Two kernels of the backward. For rows of more than 4096 columns: the gradient from the logits and the saved maximum
and sum. For rows of any width: the scaling of a gradient that the forward wrote."""

from __future__ import annotations

import triton
import triton.language as tl

from .rows import body, fringe, load_weights
from .terms import logit_gradient, row_coefficients, softcapped


@triton.jit
def _cross_entropy_bwd_kernel(
    logits_ptr,
    target_ptr,
    weight_ptr,
    weight_sum_ptr,
    stats_ptr,
    g_loss_ptr,
    g_z_ptr,
    g_lse_ptr,
    grad_ptr,
    rows,
    vocab,
    stride_row,
    skip,
    stride_target,
    stride_g_loss,
    stride_g_z,
    stride_g_lse,
    stride_grad,
    skip_grad,
    ignore_index,
    smoothing,
    z_loss,
    softcap,
    REDUCTION: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    SMOOTH: tl.constexpr,
    HAS_Z: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EXACT: tl.constexpr,
    HAS_G_LOSS: tl.constexpr,
    HAS_G_Z: tl.constexpr,
    HAS_G_LSE: tl.constexpr,
    LAYOUT: tl.constexpr,
    ALIGNED_GRAD: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """One CTA per tile of BLOCK_N columns of one row.

    stride_g_loss and stride_g_z are 0 for a sum or a mean, which has one incoming gradient for all rows.
    """
    REST: tl.constexpr = SMOOTH or HAS_Z or HAS_G_LSE
    tiles_n = (vocab + BLOCK_N - 1) // BLOCK_N
    row = tl.program_id(0) // tiles_n
    start = tl.program_id(0) % tiles_n * BLOCK_N
    wide_row = row.to(tl.int64)
    target = tl.load(target_ptr + wide_row * stride_target)
    live = target != ignore_index
    column = tl.where(live, target, 0).to(tl.int32)
    g_loss, g_z, g_lse = 0.0, 0.0, 0.0
    if HAS_G_LOSS:
        g_loss = tl.load(g_loss_ptr + wide_row * stride_g_loss).to(tl.float32)
        g_z = g_loss
    if HAS_G_Z:
        g_z += tl.load(g_z_ptr + wide_row * stride_g_z).to(tl.float32)
    if HAS_G_LSE:
        g_lse = tl.load(g_lse_ptr + wide_row * stride_g_lse).to(tl.float32)
    if REDUCTION == "mean":
        g_loss *= tl.load(stats_ptr + rows + rows)
        g_z *= tl.load(stats_ptr + rows + rows + 1)
    w_target, w_sum = 1.0, vocab * 1.0
    if HAS_WEIGHT:
        w_target = tl.load(weight_ptr + column, mask=live, other=0.0).to(tl.float32)
        if SMOOTH:
            w_sum = tl.load(weight_sum_ptr)
    # Rows without a gradient are not read.
    read = live | (g_lse != 0) if HAS_G_LSE else live
    m = tl.load(stats_ptr + row, mask=read, other=0.0)
    s = tl.load(stats_ptr + rows + row, mask=read, other=1.0)
    inverse_s, at_target, rest, each = row_coefficients(
        m, s, live, w_target, w_sum, g_loss, g_z, g_lse, vocab, smoothing, z_loss, SMOOTH, HAS_Z, HAS_G_LSE
    )

    base = skip + wide_row * stride_row
    base_grad = skip_grad + wide_row * stride_grad
    first, head, length = body(base, vocab, LAYOUT, VECTOR)
    first_grad = base_grad + head
    if ALIGNED_GRAD and LAYOUT != "any":
        first_grad = first_grad // VECTOR * VECTOR
    at = start + tl.arange(0, BLOCK_N)
    columns, inside = head + at, at < length
    x = tl.load(logits_ptr + first + at, mask=inside & read, other=0.0, eviction_policy=EVICTION)
    w = load_weights(weight_ptr, columns, inside & live, SMOOTH and HAS_WEIGHT)
    d = logit_gradient(
        softcapped(x.to(tl.float32), softcap, HAS_SOFTCAP, EXACT),
        columns,
        m,
        inverse_s,
        column,
        at_target,
        rest,
        each,
        w,
        softcap,
        SMOOTH,
        REST,
        HAS_SOFTCAP,
    )
    tl.store(grad_ptr + first_grad + at, d.to(grad_ptr.dtype.element_ty), mask=inside)
    if LAYOUT == "fringed":  # noqa: SIM102 — this condition is evaluated at compile time, the next one at run time
        if start == 0:
            beyond = fringe(head, length, vocab, VECTOR)
            outside = beyond < vocab
            x_fringe = tl.load(logits_ptr + base + beyond, mask=outside & read, other=0.0).to(tl.float32)
            w_fringe = load_weights(weight_ptr, beyond, outside & live, SMOOTH and HAS_WEIGHT)
            y_fringe = softcapped(x_fringe, softcap, HAS_SOFTCAP, EXACT)
            d_fringe = logit_gradient(
                y_fringe,
                beyond,
                m,
                inverse_s,
                column,
                at_target,
                rest,
                each,
                w_fringe,
                softcap,
                SMOOTH,
                REST,
                HAS_SOFTCAP,
            )
            tl.store(grad_ptr + base_grad + beyond, d_fringe.to(grad_ptr.dtype.element_ty), mask=outside)


@triton.jit
def _cross_entropy_scale_kernel(
    grad_ptr,
    g_loss_ptr,
    target_ptr,
    out_ptr,
    rows,
    vocab,
    tiles_n,
    stride_grad,
    stride_g_loss,
    stride_target,
    stride_out,
    ignore_index,
    IN_PLACE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out = g_loss · grad. In place, a row whose factor is 1 is neither read nor written. The kernel is persistent, so
    that a launch in which all factors are 1 is short. The gradient of an ignored row stays 0: 0 · inf would be NaN."""
    for tile in tl.range(tl.program_id(0), rows * tiles_n, tl.num_programs(0)):
        row = (tile // tiles_n).to(tl.int64)
        g = tl.load(g_loss_ptr + row * stride_g_loss).to(tl.float32)
        if (g != 1.0) | (not IN_PLACE):
            g = tl.where(tl.load(target_ptr + row * stride_target) == ignore_index, 1.0, g)
            at = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
            mask = at < vocab
            d = tl.load(grad_ptr + row * stride_grad + at, mask=mask).to(tl.float32) * g
            tl.store(out_ptr + row * stride_out + at, d.to(out_ptr.dtype.element_ty), mask=mask)

"""The forward kernel of rows of more than 4096 columns. With GRAD it also writes the gradient, for an incoming gradient
of 1; for a mean, the workspace then begins with the divisors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rows import body, fringe, load_target, load_weights, store_rows, store_sums
from .sums import inverse_counts
from .terms import LOG2_E, anchor, finite_or_zero, logit_gradient, row_coefficients, row_terms, softcapped


@triton.jit
def lane_statistics(
    logits_ptr,
    weight_ptr,
    head,
    length,
    to_read,
    y_target,
    softcap,
    HAS_WEIGHT: tl.constexpr,
    SMOOTH: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EXACT: tl.constexpr,
    VECTOR: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """(maximum, Σ exp(y − maximum), weighted sum of y − anchor) over each thread's columns of the row's body, [LANES]
    each. logits_ptr points to the body.

    Each thread rescales its sum once per chunk of UNROLL · LANES · VECTOR columns.
    """
    CHUNK: tl.constexpr = UNROLL * LANES * VECTOR
    positions = tl.arange(0, CHUNK)
    m = tl.full([LANES], float("-inf"), tl.float32)
    s = tl.zeros([LANES], tl.float32)
    y_sum = tl.zeros([LANES], tl.float32)
    for start in range(0, to_read, CHUNK):
        at = start + positions
        mask = at < length
        x = tl.load(logits_ptr + at, mask=mask, other=float("-inf"), eviction_policy=EVICTION).to(tl.float32)
        y = softcapped(x, softcap, HAS_SOFTCAP, EXACT)
        if HAS_SOFTCAP:
            y = tl.where(mask, y, float("-inf"))
        if SMOOTH:
            w = load_weights(weight_ptr, head + at, mask, HAS_WEIGHT)
            y_sum += by_lane_sum(tl.where(mask, w * (y - anchor(y_target)), 0.0), UNROLL, LANES, VECTOR)
        y = tl.reshape(y, [UNROLL, LANES, VECTOR])
        new = tl.maximum(m, tl.max(tl.max(y, 2), 0))
        safe = finite_or_zero(new)
        e = tl.exp2((y - safe[None, :, None]) * LOG2_E)
        s = s * tl.exp2((m - safe) * LOG2_E) + tl.sum(tl.sum(e, 2), 0)
        m = new
    return m, s, y_sum


@triton.jit
def by_lane_sum(values, UNROLL: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """[UNROLL · LANES · VECTOR] summed over the elements of each thread."""
    return tl.sum(tl.sum(tl.reshape(values, [UNROLL, LANES, VECTOR]), 2), 0)


@triton.jit
def store_gradient(
    logits_ptr,
    grad_ptr,
    weight_ptr,
    head,
    length,
    live,
    m,
    inverse_s,
    column,
    target,
    rest,
    each,
    softcap,
    HAS_WEIGHT: tl.constexpr,
    SMOOTH: tl.constexpr,
    HAS_Z: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EXACT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The second pass over the body of a row: reads the logits again and writes their gradient.

    The pass runs from the end to the beginning, because the columns that were read last are still in L2. The index is
    computed in a loop with a positive step: with a negative step the compiler would not see that chunks are aligned,
    and would load single elements.
    """
    chunks = (length + CHUNK - 1) // CHUNK
    for chunk in range(chunks):
        at = (chunks - 1 - chunk) * CHUNK + tl.arange(0, CHUNK)
        mask = at < length
        x = tl.load(logits_ptr + at, mask=mask & live, other=0.0, eviction_policy="evict_first")
        y = softcapped(x.to(tl.float32), softcap, HAS_SOFTCAP, EXACT)
        w = load_weights(weight_ptr, head + at, mask & live, SMOOTH and HAS_WEIGHT)
        d = logit_gradient(
            y,
            head + at,
            m,
            inverse_s,
            column,
            target,
            rest,
            each,
            w,
            softcap,
            SMOOTH,
            SMOOTH or HAS_Z,
            HAS_SOFTCAP,
        )
        # evict_first: the gradient is not read again, and should not evict rows that are still to be read again.
        tl.store(grad_ptr + at, d.to(grad_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit(debug=True)
def _cross_entropy_wide_kernel(
    logits_ptr,
    target_ptr,
    weight_ptr,
    weight_sum_ptr,
    loss_ptr,
    z_ptr,
    lse_ptr,
    scratch_ptr,
    grad_ptr,
    rows,
    vocab,
    stride_row,
    skip,
    stride_target,
    stride_grad,
    skip_grad,
    partial_at,
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
    RETURN_Z: tl.constexpr,
    RETURN_LSE: tl.constexpr,
    SAVE: tl.constexpr,
    GRAD: tl.constexpr,
    COUNTS: tl.constexpr,
    LAYOUT: tl.constexpr,
    ALIGNED_GRAD: tl.constexpr,
    VECTOR: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
    GRAD_UNROLL: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """One CTA per row, in chunks of UNROLL · LANES · VECTOR columns. LANES is the number of threads.

    Each thread keeps its own maximum and sum (online softmax) and rescales the sum once per chunk. A row is thus read
    once, with one reduction over the threads at its end. A row need not begin on a 16-byte boundary: its body, from the
    first boundary to the last, is read in vectors; its fringe, fewer than VECTOR columns at either end, by elements.
    """
    row = tl.program_id(0)
    column, live = load_target(target_ptr, row, stride_target, vocab, ignore_index)
    base = skip + row.to(tl.int64) * stride_row
    first, head, length = body(base, vocab, LAYOUT, VECTOR)
    read = tl.full([], True, tl.int1) if RETURN_LSE else live
    # Ignored rows are not read.
    to_read = tl.where(read, length, 0)
    y_target = tl.load(logits_ptr + base + column, mask=read, other=0.0).to(tl.float32)
    y_target = softcapped(y_target, softcap, HAS_SOFTCAP, EXACT)
    m, s, y_sum = lane_statistics(
        logits_ptr + first,
        weight_ptr,
        head,
        length,
        to_read,
        y_target,
        softcap,
        HAS_WEIGHT,
        SMOOTH,
        HAS_SOFTCAP,
        EXACT,
        VECTOR,
        LANES,
        UNROLL,
        EVICTION,
    )
    m_row = tl.max(m, 0)
    if LAYOUT == "fringed":
        beyond = fringe(head, length, vocab, VECTOR)
        outside = read & (beyond < vocab)
        x_fringe = tl.load(logits_ptr + base + beyond, mask=outside, other=0.0).to(tl.float32)
        y_fringe = tl.where(outside, softcapped(x_fringe, softcap, HAS_SOFTCAP, EXACT), float("-inf"))
        m_row = tl.maximum(m_row, tl.max(y_fringe, 0))
    safe_row = finite_or_zero(m_row)
    s_row = tl.sum(s * tl.exp2((m - safe_row) * LOG2_E), 0)
    y_total = tl.sum(y_sum, 0)
    if LAYOUT == "fringed":
        s_row += tl.sum(tl.exp2((y_fringe - safe_row) * LOG2_E), 0)
        if SMOOTH:
            w_fringe = load_weights(weight_ptr, beyond, outside, HAS_WEIGHT)
            y_total += tl.sum(tl.where(outside, w_fringe * (y_fringe - anchor(y_target)), 0.0), 0)

    w_target, w_sum = tl.where(live, 1.0, 0.0), vocab * 1.0
    if HAS_WEIGHT:
        w_target = tl.load(weight_ptr + column).to(tl.float32)
        if SMOOTH:
            w_sum = tl.load(weight_sum_ptr)
    loss, z, lse = row_terms(
        m_row, s_row, y_target, live, w_target, w_sum, y_total, vocab, smoothing, z_loss, SMOOTH, HAS_Z
    )
    results = (loss_ptr, z_ptr, lse_ptr, scratch_ptr)
    store_rows(row, rows, True, loss, z, lse, m_row, s_row, results, REDUCTION, RETURN_Z, RETURN_LSE, SAVE)
    if REDUCTION != "none":
        weight, count = tl.where(live, w_target, 0.0), tl.where(live, 1.0, 0.0)
        store_sums(loss, z, count, weight, scratch_ptr + partial_at, REDUCTION, HAS_Z, HAS_WEIGHT)
    if GRAD:
        g_loss, g_z = 1.0, 1.0
        if REDUCTION == "mean":
            g_loss, g_z = inverse_counts(scratch_ptr, COUNTS)
        m_row, s_row = tl.where(live, m_row, 0.0), tl.where(live, s_row, 1.0)
        inverse_s, target, rest, each = row_coefficients(
            m_row, s_row, live, w_target, w_sum, g_loss, g_z, 0.0, vocab, smoothing, z_loss, SMOOTH, HAS_Z, False
        )
        base_grad = skip_grad + row.to(tl.int64) * stride_grad
        first_grad = base_grad + head
        if ALIGNED_GRAD:
            first_grad = first_grad // VECTOR * VECTOR
        store_gradient(
            logits_ptr + first,
            grad_ptr + first_grad,
            weight_ptr,
            head,
            length,
            live,
            m_row,
            inverse_s,
            column,
            target,
            rest,
            each,
            softcap,
            HAS_WEIGHT,
            SMOOTH,
            HAS_Z,
            HAS_SOFTCAP,
            EXACT,
            GRAD_UNROLL * LANES * VECTOR,
        )
        if LAYOUT == "fringed":
            y_fringe = tl.where(live, y_fringe, 0.0)
            w_beyond = load_weights(weight_ptr, beyond, (beyond < vocab) & live, SMOOTH and HAS_WEIGHT)
            d_fringe = logit_gradient(
                y_fringe,
                beyond,
                m_row,
                inverse_s,
                column,
                target,
                rest,
                each,
                w_beyond,
                softcap,
                SMOOTH,
                SMOOTH or HAS_Z,
                HAS_SOFTCAP,
            )
            tl.store(grad_ptr + base_grad + beyond, d_fringe.to(grad_ptr.dtype.element_ty), mask=beyond < vocab)

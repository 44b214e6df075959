"""heads_gmm: the forward in Triton (the heads' GEMMs with the density in their epilogue), the loss, and the gradients
of the mixture's parameters.

Estimate, bf16, R rows of D = 512, K = 10 heads of H = 1365, one NVIDIA H200 at 790 TFLOP/s and 4254 GB/s:
  heads      x · w1ᵀ               2·R·K·H·D FLOPs   205000 rows: 2.87 TFLOP, 3.6 ms; x: 210 MB, 49 us
  density    some 40 instructions a row and head, held by four threads: 3 % of an SM's issue slots
  statistics 16 bytes a row and group of heads, written and read once   205000 rows, two groups: 6.6 MB, 3 us
The three results of a head, 25 MB of fp32 for 205000 rows, never leave the registers.

A CTA keeps four running statistics per row over the heads that it has processed, as in online softmax (Milakov and
Gimelshein 2018, arXiv:1805.02867), in powers of 2 relative to the largest logit:

    top = max_k logits_k                 weights = Σ_k 2^(a_k),   a_k = log2(e) · (logits_k − top)
    m   = max_k j_k                      density = Σ_k 2^(j_k − m), j_k = a_k − log2(e) · (log_sigma_k + ½ z_k²)

    log p = ln 2 · (m + log2(density / weights)) − ½ ln 2π
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import _activation
from .heads_backward.dhidden import rows_times_weight
from .mixture import LN_2, LOG2_E, _inverse_sigma, gradients, mixture

HALF_LOG_2PI = tl.constexpr(0.9189385332046727)
STATISTICS = tl.constexpr(4)

# Arguments that change from call to call come first, then integers, then constexprs: see `Launch`.


@triton.jit
def _or_zero(x):
    """x, with −inf replaced by 0: differences to it would otherwise be −inf − −inf = NaN."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def _add_component(top, weights, m, density, logit, mu, log_sigma, y, RESIDUAL: tl.constexpr):
    """Updates the running statistics of each row by one component."""
    before, top = top, tl.maximum(top, logit)
    a = (logit - _or_zero(top)) * LOG2_E
    # Before the first component there is nothing to rescale: weights is 0, and m −inf.
    shift = tl.where(before == float("-inf"), 0.0, (before - _or_zero(top)) * LOG2_E)
    z = (y - mu) * _inverse_sigma(log_sigma, RESIDUAL)
    joint = tl.fma(z * (-0.5 * LOG2_E), z, tl.fma(log_sigma, -LOG2_E, a))
    before = m + shift
    m = tl.maximum(before, joint)
    weights = weights * tl.exp2(shift) + tl.exp2(a)
    density = density * tl.exp2(before - _or_zero(m)) + tl.exp2(joint - _or_zero(m))
    return top, weights, m, density


@triton.jit
def _column(tile, out_col, INDEX: tl.constexpr):
    """Column INDEX of a tile [BLOCK_M, BLOCK_O]."""
    return tl.sum(tl.where(out_col[None, :] == INDEX, tile, 0.0), 1)


@triton.jit(do_not_specialize=["start"])
def _heads_gmm_fwd_kernel(
    x_ptr,
    w1_ptr,
    w2_ptr,
    bias_ptr,
    y_ptr,
    statistics_ptr,
    parameters_ptr,
    start,
    rows,
    dim,
    heads,
    hidden,
    heads_per_cta,
    stride_xm,
    stride_xk,
    stride_1g,
    stride_1h,
    stride_1k,
    stride_2g,
    stride_2o,
    stride_2h,
    stride_bg,
    stride_bo,
    stride_y,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_O: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Writes, for BLOCK_M of the `rows` rows from `start` on and `heads_per_cta` heads, the parameters of the mixture,

        (logit, mu, log_sigma)[r, g] = w2[g] · act(w1[g] · x[r]) + bias[g]     [rows, heads, 3] in fp32

    and their statistics [groups, rows, 4]: top, weights, m and density. Writes those whose pointer is not None.
    """
    groups = tl.cdiv(heads, heads_per_cta)
    tile, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    first_head = group * heads_per_cta
    row, out_col = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_O)
    inside, out_mask = row < rows, (out_col < 3)[None, :]
    wide = (start + row).to(tl.int64)
    from_x = x_ptr + wide[:, None] * stride_xm
    if statistics_ptr is not None:
        y = tl.load(y_ptr + wide * stride_y, mask=inside, other=0.0).to(tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        weights = tl.zeros([BLOCK_M], dtype=tl.float32)
        density = tl.zeros([BLOCK_M], dtype=tl.float32)
    for index in tl.range(0, tl.minimum(heads_per_cta, heads - first_head)):
        head = (first_head + index).to(tl.int64)
        w1, w2 = w1_ptr + head * stride_1g, w2_ptr + head * stride_2g
        acc = tl.zeros([BLOCK_M, BLOCK_O], dtype=tl.float32)
        for first in tl.range(0, hidden, BLOCK_H):
            col = first + tl.arange(0, BLOCK_H)
            from_w1, col_mask = w1 + col.to(tl.int64)[None, :] * stride_1h, (col < hidden)[None, :]
            pre = rows_times_weight(
                from_x,
                from_w1,
                dim,
                stride_xk,
                stride_1k,
                inside[:, None],
                col_mask,
                BLOCK_M,
                BLOCK_H,
                BLOCK_K,
                EVEN_K,
            )
            from_w2 = w2 + col.to(tl.int64)[:, None] * stride_2h + out_col.to(tl.int64)[None, :] * stride_2o
            b = tl.load(from_w2, mask=(col < hidden)[:, None] & out_mask, other=0.0)
            if first + BLOCK_H > hidden:
                pre = tl.where(col_mask, pre, 0.0)  # past the last column it is NaN if x is not finite: inf · 0
            # Past the last column w2 and act(0) are 0.
            acc = tl.dot(_activation(pre, ACTIVATION).to(b.dtype), b, acc, input_precision="ieee")
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + head * stride_bg + out_col.to(tl.int64) * stride_bo, mask=out_col < 3, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        if parameters_ptr is not None:
            to = parameters_ptr + (row.to(tl.int64)[:, None] * heads + head) * 3 + out_col[None, :]
            tl.store(to, acc, mask=inside[:, None] & out_mask)
        if statistics_ptr is not None:
            logit, mu, log_sigma = _column(acc, out_col, 0), _column(acc, out_col, 1), _column(acc, out_col, 2)
            top, weights, m, density = _add_component(top, weights, m, density, logit, mu, log_sigma, y, RESIDUAL)
    if statistics_ptr is not None:
        to = statistics_ptr + (group.to(tl.int64) * rows + row) * STATISTICS
        tl.store(to, top, mask=inside)
        tl.store(to + 1, weights, mask=inside)
        tl.store(to + 2, m, mask=inside)
        tl.store(to + 3, density, mask=inside)


@triton.jit
def _heads_gmm_loss_kernel(
    statistics_ptr,
    out_ptr,
    rows,
    groups,
    REDUCTION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """−log p of BLOCK rows from their statistics [groups, rows, 4], which are combined in the order of groups.
    REDUCTION "sum": each CTA writes the sum of its rows. "mean": there is one CTA, which divides the sum by the number
    of rows."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    m = tl.full([BLOCK], float("-inf"), tl.float32)
    weights = tl.zeros([BLOCK], dtype=tl.float32)
    density = tl.zeros([BLOCK], dtype=tl.float32)
    for group in tl.range(0, groups, loop_unroll_factor=4):  # unrolled to keep loads in flight
        at = statistics_ptr + (tl.cast(group, tl.int64) * rows + row) * STATISTICS
        its_top = tl.load(at, mask=inside, other=0.0)
        its_weights = tl.load(at + 1, mask=inside, other=1.0)
        its_m = tl.load(at + 2, mask=inside, other=0.0)
        its_density = tl.load(at + 3, mask=inside, other=1.0)
        before, top = top, tl.maximum(top, its_top)
        shift = tl.where(before == float("-inf"), 0.0, (before - _or_zero(top)) * LOG2_E)
        its_shift = tl.where(its_top == float("-inf"), 0.0, (its_top - _or_zero(top)) * LOG2_E)
        weights = weights * tl.exp2(shift) + its_weights * tl.exp2(its_shift)
        before, its_m = m + shift, its_m + its_shift
        m = tl.maximum(before, its_m)
        density = density * tl.exp2(before - _or_zero(m)) + its_density * tl.exp2(its_m - _or_zero(m))
    loss = HALF_LOG_2PI - (_or_zero(m) + tl.log2(density / weights)) * LN_2
    if REDUCTION == "none":
        tl.store(out_ptr + row, loss, mask=inside)
    else:
        total = tl.sum(tl.where(inside, loss, 0.0), 0)
        if REDUCTION == "mean":
            total = total / rows
        tl.store(out_ptr + tl.program_id(0), total)


@triton.jit
def _heads_gmm_total_kernel(
    parts_ptr,
    out_ptr,
    parts,
    rows,
    REDUCTION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of the CTAs' partial losses in a fixed order or, for "mean", that sum divided by the number of rows."""
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for first in tl.range(0, parts, BLOCK):
        at = first + tl.arange(0, BLOCK)
        acc += tl.load(parts_ptr + at, mask=at < parts, other=0.0)
    total = tl.sum(acc, 0)
    if REDUCTION == "mean":
        total = total / rows
    tl.store(out_ptr, total)


@triton.jit(do_not_specialize=["start", "first_part"])
def _heads_gmm_incoming_kernel(
    dloss_ptr,
    parameters_ptr,
    y_ptr,
    dparameters_ptr,
    dy_ptr,
    dbias_ptr,
    start,
    first_part,
    rows,
    all_rows,
    heads,
    stride_dloss,
    stride_y,
    REDUCTION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Writes the gradients of the parameters, [rows, heads, 3], of `rows` rows, the first of which is row `start` of
    dloss, y and dy. Also writes dy and the bias's gradient, unless None. The latter has one part per CTA, [parts,
    heads, 3] in fp32, numbered from `first_part` on. BLOCK_G >= heads."""
    row, head = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_G)
    inside, wide = row < rows, (start + row).to(tl.int64)
    mask = inside[:, None] & (head < heads)[None, :]
    y = tl.load(y_ptr + wide * stride_y, mask=inside, other=0.0).to(tl.float32)[:, None]
    at = (row.to(tl.int64)[:, None] * heads + head[None, :]) * 3
    # Heads out of bounds are components of weight 0: their logit is −inf. Rows out of bounds have logits of 0, because
    # a row whose logits are all −inf is NaN.
    logits = tl.load(parameters_ptr + at, mask=mask, other=float("-inf"))
    logits = tl.where(inside[:, None], logits, 0.0)
    mu = tl.load(parameters_ptr + at + 1, mask=mask, other=0.0)
    log_sigma = tl.load(parameters_ptr + at + 2, mask=mask, other=0.0)
    if REDUCTION == "none":
        grad = tl.load(dloss_ptr + wide * stride_dloss, mask=inside, other=0.0).to(tl.float32)
    else:
        grad = tl.load(dloss_ptr).to(tl.float32)
        if REDUCTION == "mean":
            grad = grad / all_rows
        grad = tl.where(inside, grad, 0.0)
    parts = mixture((logits,), (mu,), (log_sigma,), y, 1, RESIDUAL)
    d_logits, d_mu, d_log_sigma, d_y = gradients(parts, -grad, 1)
    if dy_ptr is not None:
        tl.store(dy_ptr + wide, d_y.to(dy_ptr.dtype.element_ty), mask=inside)
    dtype = dparameters_ptr.dtype.element_ty
    tl.store(dparameters_ptr + at, d_logits[0].to(dtype), mask=mask)
    tl.store(dparameters_ptr + at + 1, d_mu[0].to(dtype), mask=mask)
    tl.store(dparameters_ptr + at + 2, d_log_sigma[0].to(dtype), mask=mask)
    if dbias_ptr is not None:
        to = dbias_ptr + ((first_part + tl.program_id(0)).to(tl.int64) * heads + head) * 3
        valid = head < heads
        tl.store(to, tl.sum(tl.where(mask, d_logits[0], 0.0), 0), mask=valid)
        tl.store(to + 1, tl.sum(tl.where(mask, d_mu[0], 0.0), 0), mask=valid)
        tl.store(to + 2, tl.sum(tl.where(mask, d_log_sigma[0], 0.0), 0), mask=valid)

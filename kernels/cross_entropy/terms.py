"""The arithmetic of a row: softcap, loss terms, gradient. All functions are elementwise, in fp32, and shared by the
Triton kernels.

With y = softcap · tanh(x / softcap), or y = x, a row of logits x has

    m = max y,  s = Σ exp(y − m),  lse = m + log s

m and s are stored separately, and every exponent is y − m, not y − lse: for large logits, lse is rounded too coarsely
for that difference.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def softcapped(x, softcap, HAS_SOFTCAP: tl.constexpr, EXACT: tl.constexpr):
    """softcap · tanh(x / softcap), or x. With EXACT the error is two units in the last place. Otherwise the absolute
    error is 2e-7 · softcap, in six instructions: negligible compared to the rounding of 16-bit logits."""
    y = x
    if HAS_SOFTCAP:
        u = x / softcap if EXACT else x * (1 / softcap)
        # 1 / (1 + e) as rsqrt squared: rsqrt is one instruction, a division is eight.
        root = tl.rsqrt(1 + tl.exp2((tl.abs(u) if EXACT else u) * (2 * LOG2_E)))
        t = 1 - 2 * root * root
        if EXACT:
            # The subtraction above cancels near 0. There, tanh(u) / u is a polynomial in u², fitted to a relative 5e-8.
            v = u * u
            small = u + u * v * (-0.33332885 + v * (0.13319334 + v * (-0.05258304 + v * 0.01626852)))
            t = tl.where(v < 0.3, small, tl.where(u < 0, -t, t))
        y = softcap * t
    return y


@triton.jit
def finite_or_zero(m):
    """m, or 0 for −inf: the value to subtract if all logits so far are −inf, so that −inf − m is −inf and not NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def anchor(y_target):
    """An offset subtracted from the logits before they are summed for label smoothing, to avoid cancellation."""
    return tl.where(tl.abs(y_target) < float("inf"), y_target, 0.0)


@triton.jit
def row_terms(
    m, s, y_target, live, w_target, w_sum, y_sum, vocab, smoothing, z_loss, SMOOTH: tl.constexpr, HAS_Z: tl.constexpr
):
    """(cross entropy, z-loss, lse). y_sum is Σ w_c (y_c − anchor), w_sum is Σ w_c. In rows that are not live, the cross
    entropy and the z-loss are 0."""
    log_s = tl.log(s)
    # The select between the softcap's multiplication and this subtraction prevents an fma. An fma would not round
    # y_target as m is rounded, and the difference of equal logits would not be 0.
    loss = w_target * ((m - tl.where(live, y_target, 0.0)) + log_s)
    if SMOOTH:
        spread = w_sum * ((m - anchor(y_target)) + log_s) - y_sum
        loss = (1 - smoothing) * loss + smoothing / vocab * spread
    # In a row that contains +inf, s is NaN. The loss is then NaN, as in PyTorch, but lse is +inf.
    lse = tl.where(m == float("inf"), m, m + log_s)
    z = z_loss * lse * lse if HAS_Z else 0.0
    return tl.where(live, loss, 0.0), tl.where(live, z, 0.0), lse


@triton.jit
def row_coefficients(
    m,
    s,
    live,
    w_target,
    w_sum,
    g_loss,
    g_z,
    g_lse,
    vocab,
    smoothing,
    z_loss,
    SMOOTH: tl.constexpr,
    HAS_Z: tl.constexpr,
    HAS_G_LSE: tl.constexpr,
):
    """(1 / s, target, rest, each): the coefficients with which `logit_gradient` computes d loss / d y of a row. g_loss,
    g_z and g_lse are the incoming gradients of the row's cross entropy, z-loss and lse. In a row without a gradient,
    target, rest and each are 0. If the caller passes m = 0 and s = 1 for such a row, its logits need not be read."""
    target = g_loss * w_target
    rest, each = 0.0, 0.0
    if SMOOTH:
        each = g_loss * smoothing / vocab
        target = target * (1 - smoothing)
        rest = each * w_sum
    if HAS_Z:
        rest += g_z * 2 * z_loss * (m + tl.log(s))
    target, rest, each = tl.where(live, target, 0.0), tl.where(live, rest, 0.0), tl.where(live, each, 0.0)
    if HAS_G_LSE:
        rest += g_lse
    return 1 / s, target, rest, each


@triton.jit
def logit_gradient(
    y,
    columns,
    m,
    inverse_s,
    column,
    target,
    rest,
    each,
    w,
    softcap,
    SMOOTH: tl.constexpr,
    REST: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """d loss / d x = ((p − [column is the target's]) · target + p · rest − w · each) · dy/dx with p = exp(y − m) / s.

    `rest` is not added to `target` first: if p is nearly 1, the first term is small and would lose its digits.
    """
    p = tl.exp2((y - m) * LOG2_E) * inverse_s
    d = tl.where(columns == column, p - 1, p) * target
    if REST:
        d += p * rest
    if SMOOTH:
        d -= w * each
    if HAS_SOFTCAP:
        t = y / softcap
        d *= 1 - t * t
    return d

"""The AdamW kernels. They read the addresses of their tensors from a table (`tables`).

Estimate, one NVIDIA H200 that copies 4254 GB/s, fp32 states, bytes per element:
  fp32 parameters                 reads p g m v (16), writes p m v (12)       28 bytes    268 M: 7.5 GB, 1.77 ms
  bf16 parameters, fp32 master    reads w g m v (14), writes w m v p (14)     28 bytes
  bf16 parameters alone           reads p g m v (12), writes p m v (10)       22 bytes
and about 15 FLOPs, where an H200 could do a hundred in that time. So the kernel is memory-bound. Each byte is moved
once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tables import (
    COLUMNS,
    EXP_AVG,
    EXP_AVG_SQ,
    FIRST,
    FROM_MASTER,
    GRAD,
    KIND,
    MASTER,
    NUMEL,
    PARAM,
    SEQUENCE,
    STEP,
    STOCHASTIC,
)


@triton.jit
def _bias_correction(step, log_beta):
    """1 − beta^step = 1 − exp(step · log_beta). In fp32, 1 − 0.999 has only five correct digits. So the host computes
    log_beta in fp64, and if the exponent is near 0, a series of exp(x) − 1 replaces the difference."""
    x = step * log_beta
    near = tl.abs(x) < 1.0
    small = tl.where(near, x, 0.0)
    series = small * (1.0 / 12) + 1.0
    for k in tl.static_range(11, 1, -1):
        series = series * small * (1.0 / k) + 1.0
    return tl.where(near, -small * series, 1.0 - tl.exp(x))


@triton.jit
def _random_bits(element, tensor, step, seed, BLOCK: tl.constexpr):
    """16 random bits for each of BLOCK elements from index `element` on: Philox 4x32-10 (Salmon et al. 2011) with the
    counter (element / 4, tensor, step). One evaluation yields the bits of a thread's four elements."""
    group = element // 4 + tl.arange(0, BLOCK // 4)
    low, high = (group & 0xFFFFFFFF).to(tl.uint32), (group >> 32).to(tl.uint32)
    zero = low * 0
    r0, r1, r2, r3 = tl.philox(seed, low, zero + tensor.to(tl.uint32), zero + tl.cast(step, tl.uint32), high)
    return tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3)) >> 16


@triton.jit
def _round_stochastically(x, bits):
    """fp32 x rounded to one of its two neighbours in bf16, with probabilities such that the expected value is x."""
    raised = (x.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000
    # Without the select, the addition would turn a nan whose mantissa is all ones into -0.
    return tl.where(x == x, raised.to(tl.float32, bitcast=True), x).to(tl.bfloat16)


@triton.jit
def _adamw_block(
    row_ptr,
    first,
    limit,
    step,
    lr,
    decay,
    beta1,
    beta2,
    one_minus_beta1,
    one_minus_beta2,
    log_beta1,
    log_beta2,
    eps,
    scale,
    seed,
    P_TYPE: tl.constexpr,
    G_TYPE: tl.constexpr,
    ROUNDING: tl.constexpr,
    DECAY: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    SCALED: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """Updates the elements first … first + min(limit, BLOCK) − 1 of one parameter, a row of the table. ALIGNED: every
    address is a multiple of 16 bytes and `limit` of 8 elements, so that accesses are vectorised, 16 bytes for fp32."""
    p_ptr = tl.load(row_ptr + PARAM).to(tl.pointer_type(P_TYPE))
    g_ptr = tl.load(row_ptr + GRAD).to(tl.pointer_type(G_TYPE))
    m_ptr = tl.load(row_ptr + EXP_AVG).to(tl.pointer_type(tl.float32))
    v_ptr = tl.load(row_ptr + EXP_AVG_SQ).to(tl.pointer_type(tl.float32))
    w_ptr = p_ptr
    if ROUNDING == FROM_MASTER:
        w_ptr = tl.load(row_ptr + MASTER).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        p_ptr, g_ptr, w_ptr = tl.multiple_of(p_ptr, 16), tl.multiple_of(g_ptr, 16), tl.multiple_of(w_ptr, 16)
        m_ptr, v_ptr = tl.multiple_of(m_ptr, 16), tl.multiple_of(v_ptr, 16)
    left = tl.minimum(limit, BLOCK)
    mask = tl.arange(0, BLOCK) < (tl.multiple_of(left, 8) if ALIGNED else left)
    at = first + tl.arange(0, BLOCK)
    g = tl.load(g_ptr + at, mask=mask, eviction_policy=EVICTION).to(tl.float32)
    w = tl.load(w_ptr + at, mask=mask, eviction_policy=EVICTION).to(tl.float32)
    m = tl.load(m_ptr + at, mask=mask, eviction_policy=EVICTION)
    v = tl.load(v_ptr + at, mask=mask, eviction_policy=EVICTION)
    if SCALED:
        g = g / scale
    if MAXIMIZE:
        g = -g
    if DECAY:  # without it, 0 times an infinite parameter would be nan
        w -= decay * w
    m = beta1 * m + one_minus_beta1 * g
    v = beta2 * v + one_minus_beta2 * g * g
    step_size = lr / _bias_correction(step, log_beta1)
    root = 1.0 / tl.sqrt_rn(_bias_correction(step, log_beta2))
    w -= step_size * m / (tl.sqrt(v) * root + eps)
    tl.store(m_ptr + at, m, mask=mask)
    tl.store(v_ptr + at, v, mask=mask)
    if ROUNDING == STOCHASTIC:
        bits = _random_bits(first, tl.load(row_ptr + SEQUENCE), step, seed, BLOCK)
        tl.store(p_ptr + at, _round_stochastically(w, bits), mask=mask)
    else:
        tl.store(p_ptr + at, w.to(P_TYPE), mask=mask)
    if ROUNDING == FROM_MASTER:
        tl.store(w_ptr + at, w, mask=mask)


@triton.jit(do_not_specialize=["seed"])
def _adamw_kernel(
    rows_ptr,
    cta_rows_ptr,
    lr,
    step,
    grad_scale_ptr,
    found_inf_ptr,
    beta1,
    beta2,
    one_minus_beta1,
    one_minus_beta2,
    log_beta1,
    log_beta2,
    eps,
    weight_decay,
    seed: tl.int64,  # typed, as Triton would otherwise compile the kernel again for a seed above 2^31
    KINDS: tl.constexpr,
    LR_IN_MEMORY: tl.constexpr,
    STEP_IN_TABLE: tl.constexpr,
    DECAY: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SMALL: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """One CTA per BLOCK elements of a parameter; cta_rows_ptr holds its row of the table. KINDS are the combinations
    (dtype of the parameter, dtype of the gradient, rounding) that occur; a CTA branches to the code of its own kind.
    The host computes 1 − beta in fp64."""
    found = 0.0
    if found_inf_ptr is not None:
        found = tl.load(found_inf_ptr)
    if found != 0:
        return
    block = tl.program_id(0)
    row_ptr = rows_ptr + tl.load(cta_rows_ptr + block) * COLUMNS
    first = (block - tl.load(row_ptr + FIRST)) * BLOCK  # 64 bits wide, like the table
    addresses = tl.load(row_ptr + PARAM) | tl.load(row_ptr + GRAD) | tl.load(row_ptr + MASTER)
    addresses |= tl.load(row_ptr + EXP_AVG) | tl.load(row_ptr + EXP_AVG_SQ)
    limit = tl.minimum(tl.load(row_ptr + NUMEL) - first, BLOCK).to(tl.int32)
    aligned = (addresses % 16 == 0) & (limit % 8 == 0)
    kind = tl.load(row_ptr + KIND)
    if LR_IN_MEMORY:
        lr = tl.load(lr).to(tl.float32)
    if STEP_IN_TABLE:
        step = tl.load(tl.load(row_ptr + STEP).to(tl.pointer_type(tl.float32)))
    scale = 1.0
    if grad_scale_ptr is not None:
        scale = tl.load(grad_scale_ptr).to(tl.float32)
    for i in tl.static_range(len(KINDS)):
        if kind == i:
            if aligned:
                _adamw_block(
                    row_ptr, first, limit, step, lr, lr * weight_decay, beta1, beta2, one_minus_beta1, one_minus_beta2,
                    log_beta1, log_beta2, eps, scale, seed, KINDS[i][0], KINDS[i][1], KINDS[i][2], DECAY, MAXIMIZE,
                    grad_scale_ptr is not None, True, BLOCK, EVICTION,
                )  # fmt: skip
            else:
                # By single elements, in a loop over blocks of SMALL, so that the registers of this path do not limit
                # the occupancy of the aligned path.
                for start in range(0, limit, SMALL):
                    _adamw_block(
                        row_ptr, first + start, limit - start, step, lr, lr * weight_decay, beta1, beta2,
                        one_minus_beta1, one_minus_beta2, log_beta1, log_beta2, eps, scale, seed,
                        KINDS[i][0], KINDS[i][1], KINDS[i][2], DECAY, MAXIMIZE,
                        grad_scale_ptr is not None, False, SMALL, EVICTION,
                    )  # fmt: skip


@triton.jit
def _adamw_step_kernel(rows_ptr, found_inf_ptr, tensors, BLOCK: tl.constexpr):
    """Adds 1 to the step of every parameter, unless found_inf is set, which means that gradients overflowed."""
    found = 0.0
    if found_inf_ptr is not None:
        found = tl.load(found_inf_ptr)
    if found != 0:
        return
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < tensors
    step_ptr = tl.load(rows_ptr + row * COLUMNS + STEP, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    tl.store(step_ptr, tl.load(step_ptr, mask=mask) + 1.0, mask=mask)

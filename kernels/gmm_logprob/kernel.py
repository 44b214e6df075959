"""The forward and the backward kernel of the Gaussian mixture log-density.

Estimate, fp32, K = 10, R rows, one NVIDIA H200 that copies 4254 GB/s:
  forward   reads logits, mu, log_sigma, y             (3K + 1) · 4 = 124 bytes a row    8.4 M rows: 1.04 GB, 245 us
  backward  reads those again, writes their gradients  2 · 124 = 248 bytes a row         8.4 M rows: 2.08 GB, 490 us
In 245 us an H200 can issue about 860 thread instructions per row (132 SMs x 4 schedulers x 32 lanes at 1.755 GHz).
K = 10 in a tile of 16 columns, with idle lanes and shuffles between the lanes of a row, needs over 1000; one thread per
row needs 281, two threads 428 (table in EXPERIMENTS.md).

Only the inputs are saved for the backward. The two maxima and two sums of a row would cost 16 bytes to write and 16 to
read, an eighth of the forward's traffic, and the backward computes them from values that it needs anyway.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arrival import arrive
from .mixture import LN_2, gradients, mixture
from .tiles import load_columns, store_columns

HALF_LOG_2PI = tl.constexpr(0.9189385332046727)


@triton.jit
def _gmm_logprob_fwd_kernel(
    logits_ptr,
    mu_ptr,
    log_sigma_ptr,
    y_ptr,
    out_ptr,
    words_ptr,
    scale,
    unit,
    rows,
    STRIDE_LOGITS: tl.constexpr,
    STRIDE_MU: tl.constexpr,
    STRIDE_LOG_SIGMA: tl.constexpr,
    STRIDE_Y: tl.constexpr,
    SKIP_LOGITS: tl.constexpr,
    SKIP_MU: tl.constexpr,
    SKIP_LOG_SIGMA: tl.constexpr,
    REDUCTION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LOAD: tl.constexpr,
    HOLD: tl.constexpr,
    LOOP: tl.constexpr,
):
    COUNT: tl.constexpr = (K + HOLD - 1) // HOLD
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    # Without LOOP the bounds are the constants 0 and 1, so that the compiler removes the loop.
    tiles = (rows - 1) // BLOCK_M + 1  # tl.cdiv(rows, BLOCK_M) overflows 32 bits just below 2^31
    start, stop, step = (tl.program_id(0), tiles, tl.num_programs(0)) if LOOP else (0, 1, 1)
    for tile in tl.range(start, stop, step):
        # The offset of a tile is 64 bits wide, offsets within a tile 32.
        first = tl.cast(tile if LOOP else tl.program_id(0), tl.int64) * BLOCK_M
        lanes = tl.arange(0, BLOCK_M)
        valid = lanes < rows - first
        if LOOP:
            r, in_range = lanes, valid
        else:
            # Lanes past the last row read the last row, without a mask. A masked load would have to zero its registers
            # first, and ptxas would then issue a third of the loads only after the others have completed.
            r, in_range = tl.minimum(lanes, tl.minimum(rows - 1 - first, BLOCK_M - 1).to(tl.int32)), None
        y = tl.load(y_ptr + first * STRIDE_Y + r * STRIDE_Y, mask=in_range).to(tl.float32)[:, None]
        start_ptr = logits_ptr + SKIP_LOGITS + first * STRIDE_LOGITS
        logits = load_columns(start_ptr, r, in_range, STRIDE_LOGITS, float("-inf"), K, LOAD, HOLD, BLOCK_M)
        start_ptr = mu_ptr + SKIP_MU + first * STRIDE_MU
        mu = load_columns(start_ptr, r, in_range, STRIDE_MU, 0.0, K, LOAD, HOLD, BLOCK_M)
        start_ptr = log_sigma_ptr + SKIP_LOG_SIGMA + first * STRIDE_LOG_SIGMA
        log_sigma = load_columns(start_ptr, r, in_range, STRIDE_LOG_SIGMA, 0.0, K, LOAD, HOLD, BLOCK_M)
        _, _, _, _, m, weight_sum, density_sum = mixture(logits, mu, log_sigma, y, COUNT, RESIDUAL)
        log_p = (m + tl.log2(density_sum / weight_sum)) * LN_2 - HALF_LOG_2PI
        if REDUCTION == "none":
            tl.store(out_ptr + first + lanes, log_p.to(out_ptr.dtype.element_ty), mask=valid)
        else:
            total += tl.where(valid, log_p, 0.0)
    if REDUCTION != "none":
        result = tl.sum(total, 0)
        last = True
        if words_ptr is not None:
            last, result = arrive(words_ptr, result, scale, unit)
        if last:
            if REDUCTION == "mean":
                result = result / rows
            tl.store(out_ptr, result.to(out_ptr.dtype.element_ty))


@triton.jit
def _gmm_logprob_bwd_kernel(
    grad_ptr,
    logits_ptr,
    mu_ptr,
    log_sigma_ptr,
    y_ptr,
    d_logits_ptr,
    d_mu_ptr,
    d_log_sigma_ptr,
    d_y_ptr,
    rows,
    STRIDE_GRAD: tl.constexpr,
    STRIDE_LOGITS: tl.constexpr,
    STRIDE_MU: tl.constexpr,
    STRIDE_LOG_SIGMA: tl.constexpr,
    STRIDE_Y: tl.constexpr,
    SKIP_LOGITS: tl.constexpr,
    SKIP_MU: tl.constexpr,
    SKIP_LOG_SIGMA: tl.constexpr,
    REDUCTION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    NEED_LOGITS: tl.constexpr,
    NEED_MU: tl.constexpr,
    NEED_LOG_SIGMA: tl.constexpr,
    NEED_Y: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LOAD: tl.constexpr,
    HOLD: tl.constexpr,
    STORE: tl.constexpr,
):
    COUNT: tl.constexpr = (K + HOLD - 1) // HOLD
    r = tl.arange(0, BLOCK_M)
    tiles = (rows - 1) // BLOCK_M + 1  # as in the forward
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        first = tl.cast(tile, tl.int64) * BLOCK_M
        valid = r < rows - first
        y = tl.load(y_ptr + first * STRIDE_Y + r * STRIDE_Y, mask=valid).to(tl.float32)[:, None]
        start_ptr = logits_ptr + SKIP_LOGITS + first * STRIDE_LOGITS
        logits = load_columns(start_ptr, r, valid, STRIDE_LOGITS, float("-inf"), K, LOAD, HOLD, BLOCK_M)
        start_ptr = mu_ptr + SKIP_MU + first * STRIDE_MU
        mu = load_columns(start_ptr, r, valid, STRIDE_MU, 0.0, K, LOAD, HOLD, BLOCK_M)
        start_ptr = log_sigma_ptr + SKIP_LOG_SIGMA + first * STRIDE_LOG_SIGMA
        log_sigma = load_columns(start_ptr, r, valid, STRIDE_LOG_SIGMA, 0.0, K, LOAD, HOLD, BLOCK_M)
        if REDUCTION == "none":
            grad = tl.load(grad_ptr + first * STRIDE_GRAD + r * STRIDE_GRAD, mask=valid).to(tl.float32)
        else:
            grad = tl.load(grad_ptr).to(tl.float32)
            if REDUCTION == "mean":
                grad = grad / rows
        parts = mixture(logits, mu, log_sigma, y, COUNT, RESIDUAL)
        d_logits, d_mu, d_log_sigma, d_y = gradients(parts, grad, COUNT)
        if NEED_LOGITS:
            store_columns(d_logits_ptr + first * K, d_logits, r, valid, K, STORE, HOLD, BLOCK_M)
        if NEED_MU:
            store_columns(d_mu_ptr + first * K, d_mu, r, valid, K, STORE, HOLD, BLOCK_M)
        if NEED_LOG_SIGMA:
            store_columns(d_log_sigma_ptr + first * K, d_log_sigma, r, valid, K, STORE, HOLD, BLOCK_M)
        if NEED_Y:
            tl.store(d_y_ptr + first + r, d_y.to(d_y_ptr.dtype.element_ty), mask=valid)

"""RMSNorm for rows too wide for the registers of a CTA: one row at a time, in chunks, in two passes.

A row of 65536 bf16 is 128 KiB. The second pass finds it in L2 (132 CTAs hold 17 MiB of rows in flight, the cache of an
H200 is 50 MiB), so device memory still sees each tensor once. The parameters are those of the kernels in `kernel.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rmsnorm_wide_fwd_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    h_ptr,
    rstd_ptr,
    rows,
    dim,
    stride_xm,
    stride_rm,
    eps,
    weight_offset,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    SAVE_RSTD: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVICTION: tl.constexpr,
):
    tl.static_assert(BLOCK_M == 1)
    cols = tl.arange(0, BLOCK_N)
    row = tl.program_id(0)
    wide_row = tl.cast(row, tl.int64)
    squares = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, dim, BLOCK_N):
        mask = None if EVEN_N else start + cols < dim
        other = None if EVEN_N else 0.0
        x_ptrs = x_ptr + wide_row * stride_xm + start + cols
        h = tl.load(x_ptrs, mask=mask, other=other, eviction_policy=EVICTION)
        if HAS_RESIDUAL:
            residual_ptrs = residual_ptr + wide_row * stride_rm + start + cols
            residual = tl.load(residual_ptrs, mask=mask, other=other, eviction_policy=EVICTION)
            h = (h.to(tl.float32) + residual.to(tl.float32)).to(h.dtype)
            tl.store(h_ptr + wide_row * dim + start + cols, h, mask=mask)
        squares += h.to(tl.float32) * h.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(squares) / dim + eps)
    if SAVE_RSTD:
        tl.store(rstd_ptr + row, rstd)
    for start in range(0, dim, BLOCK_N):
        mask = None if EVEN_N else start + cols < dim
        other = None if EVEN_N else 0.0
        # The sum is formed again rather than read back: h was written by this CTA without a barrier since.
        x_ptrs = x_ptr + wide_row * stride_xm + start + cols
        h = tl.load(x_ptrs, mask=mask, other=other, eviction_policy="evict_first")
        if HAS_RESIDUAL:
            residual_ptrs = residual_ptr + wide_row * stride_rm + start + cols
            residual = tl.load(residual_ptrs, mask=mask, other=other, eviction_policy="evict_first")
            h = (h.to(tl.float32) + residual.to(tl.float32)).to(h.dtype)
        y = h.to(tl.float32) * rstd
        if HAS_WEIGHT:
            y *= tl.load(weight_ptr + start + cols, mask=mask, other=other).to(tl.float32) + weight_offset
        tl.store(y_ptr + wide_row * dim + start + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rmsnorm_wide_bwd_kernel(
    dy_ptr,
    h_ptr,
    rstd_ptr,
    weight_ptr,
    dh_ptr,
    dx_ptr,
    dw_ptr,
    rows,
    dim,
    stride_dym,
    stride_hm,
    stride_dhm,
    weight_offset,
    HAS_WEIGHT: tl.constexpr,
    HAS_DH: tl.constexpr,
    NEED_DX: tl.constexpr,
    NEED_DW: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    tl.static_assert(BLOCK_M == 1)
    cols = tl.arange(0, BLOCK_N)
    first = tl.program_id(0)
    # dW of a wide row does not fit in registers: each CTA adds into its own row of partials, which stays in L2.
    partial_ptr = dw_ptr + first.to(tl.int64) * dim if NEED_DW else dw_ptr
    for row in tl.range(first, rows, tl.num_programs(0)):
        wide_row = tl.cast(row, tl.int64)
        rstd = tl.load(rstd_ptr + row)
        products = tl.zeros([BLOCK_N], dtype=tl.float32)
        if NEED_DX:
            for start in tl.range(0, dim, BLOCK_N, num_stages=STAGES):
                mask = None if EVEN_N else start + cols < dim
                other = None if EVEN_N else 0.0
                h = tl.load(h_ptr + wide_row * stride_hm + start + cols, mask=mask, other=other).to(tl.float32)
                g = tl.load(dy_ptr + wide_row * stride_dym + start + cols, mask=mask, other=other).to(tl.float32)
                if HAS_WEIGHT:
                    g *= tl.load(weight_ptr + start + cols, mask=mask, other=other).to(tl.float32) + weight_offset
                products += g * (h * rstd)
        mean = tl.sum(products) / dim
        for start in tl.range(0, dim, BLOCK_N, num_stages=STAGES):
            mask = None if EVEN_N else start + cols < dim
            other = None if EVEN_N else 0.0
            h = tl.load(h_ptr + wide_row * stride_hm + start + cols, mask=mask, other=other).to(tl.float32)
            g = tl.load(dy_ptr + wide_row * stride_dym + start + cols, mask=mask, other=other).to(tl.float32)
            x_hat = h * rstd
            if NEED_DW:
                dw = g * x_hat
                if row != first:
                    dw += tl.load(partial_ptr + start + cols, mask=mask, other=other)
                tl.store(partial_ptr + start + cols, dw, mask=mask)
            if NEED_DX:
                if HAS_WEIGHT:
                    g *= tl.load(weight_ptr + start + cols, mask=mask, other=other).to(tl.float32) + weight_offset
                dx = (g - x_hat * mean) * rstd
                if HAS_DH:
                    dx += tl.load(dh_ptr + wide_row * stride_dhm + start + cols, mask=mask, other=other).to(tl.float32)
                tl.store(dx_ptr + wide_row * dim + start + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.debug_barrier()  # the partials written for this row are read for the next one

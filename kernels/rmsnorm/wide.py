"""RMSNorm for rows too wide for the registers of a CTA. The parameters are those of the kernels in `kernel.py`.

forward   For rows that `cluster.py` does not support. One CTA per row, in chunks, in two passes. A row of 65536 bf16
          is 128 KiB. The second pass reads it from L2 (132 CTAs have 17 MiB of rows in flight, the L2 of an H200 has
          50 MiB), so x is read from device memory once.
backward  A kernel here computes the mean of each row; that of `kernel.py` then runs on slices of the columns. A CTA
          accumulates dW of its slice in registers over many rows; dW of an entire row would not fit. h and dy are read
          twice, in 16 bits 10·R·D bytes rather than 6, but no partial sums of dW go through L2 for each row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernel import _inverse_root


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
        if residual_ptr is not None:
            residual_ptrs = residual_ptr + wide_row * stride_rm + start + cols
            residual = tl.load(residual_ptrs, mask=mask, other=other, eviction_policy=EVICTION)
            h = (h.to(tl.float32) + residual.to(tl.float32)).to(h.dtype)
            tl.store(h_ptr + wide_row * dim + start + cols, h, mask=mask)
        squares += h.to(tl.float32) * h.to(tl.float32)
    rstd = _inverse_root(tl.sum(squares) / dim + eps)
    if SAVE_RSTD:
        tl.store(rstd_ptr + row, rstd)
    for start in range(0, dim, BLOCK_N):
        mask = None if EVEN_N else start + cols < dim
        other = None if EVEN_N else 0.0
        # x + residual is computed again and not read back from h: other threads of this CTA may have written it, and no
        # barrier orders their stores before a load here.
        x_ptrs = x_ptr + wide_row * stride_xm + start + cols
        h = tl.load(x_ptrs, mask=mask, other=other, eviction_policy="evict_first")
        if residual_ptr is not None:
            residual_ptrs = residual_ptr + wide_row * stride_rm + start + cols
            residual = tl.load(residual_ptrs, mask=mask, other=other, eviction_policy="evict_first")
            h = (h.to(tl.float32) + residual.to(tl.float32)).to(h.dtype)
        y = h.to(tl.float32) * rstd
        if weight_ptr is not None:
            y *= tl.load(weight_ptr + start + cols, mask=mask, other=other).to(tl.float32) + weight_offset
        tl.store(y_ptr + wide_row * dim + start + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rmsnorm_wide_mean_kernel(
    dy_ptr,
    h_ptr,
    rstd_ptr,
    weight_ptr,
    mean_ptr,
    dim,
    stride_dym,
    stride_hm,
    weight_offset,
    EVEN_N: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Writes mean(g · x̂) of one row, in chunks of BLOCK_N columns. One CTA per row."""
    cols = tl.arange(0, BLOCK_N)
    row = tl.program_id(0)
    wide_row = tl.cast(row, tl.int64)
    products = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, dim, BLOCK_N):
        mask = None if EVEN_N else start + cols < dim
        other = None if EVEN_N else 0.0
        h = tl.load(h_ptr + wide_row * stride_hm + start + cols, mask=mask, other=other).to(tl.float32)
        g = tl.load(dy_ptr + wide_row * stride_dym + start + cols, mask=mask, other=other).to(tl.float32)
        if weight_ptr is not None:
            g *= tl.load(weight_ptr + start + cols, mask=mask, other=other).to(tl.float32) + weight_offset
        products += g * h
    tl.store(mean_ptr + row, tl.sum(products) * tl.load(rstd_ptr + row) / dim)

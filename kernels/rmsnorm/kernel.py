"""The RMSNorm kernels for rows that fit in the registers of a CTA.

Estimate, bf16, R rows of D, one NVIDIA H200 that copies 4254 GB/s:
  forward   reads x, writes y             4·R·D bytes   32768 x 8192: 1.07 GB, 252 us
  backward  reads x and dy, writes dx     6·R·D bytes   32768 x 8192: 1.61 GB, 379 us
The weight, rstd (4 bytes per row), dW and the FLOPs (about 4 and 9 per element) are negligible compared to that.
So each tensor is read or written once: a row stays in registers between its reduction and the store of its output.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load_h(
    x_ptr, residual_ptr, h_ptr, row, cols, rows, dim, stride_xm, stride_rm, EVEN: tl.constexpr, EVICTION: tl.constexpr
):
    """A tile of x, or of x + residual, which is also stored to h. The result has x's dtype."""
    wide_row = row.to(tl.int64)[:, None]
    # Without a mask, each load and store needs no predicate and one register less.
    mask = None if EVEN else (row < rows)[:, None] & (cols < dim)[None, :]
    other = None if EVEN else 0.0
    h = tl.load(x_ptr + wide_row * stride_xm + cols[None, :], mask=mask, other=other, eviction_policy=EVICTION)
    if residual_ptr is not None:
        residual_ptrs = residual_ptr + wide_row * stride_rm + cols[None, :]
        residual = tl.load(residual_ptrs, mask=mask, other=other, eviction_policy=EVICTION)
        # y is computed from h as rounded for the store, so that the backward, which reads h, has the same values.
        h = (h.to(tl.float32) + residual.to(tl.float32)).to(h.dtype)
        tl.store(h_ptr + wide_row * dim + cols[None, :], h, mask=mask)
    return h


@triton.jit
def _load_weight(weight_ptr, cols, dim, weight_offset, EVEN: tl.constexpr):
    weight = tl.load(weight_ptr + cols, mask=None if EVEN else cols < dim, other=None if EVEN else 0.0)
    return weight.to(tl.float32) + weight_offset


@triton.jit
def _store_y(y_ptr, y, row, cols, rows, dim, EVEN: tl.constexpr):
    mask = None if EVEN else (row < rows)[:, None] & (cols < dim)[None, :]
    tl.store(y_ptr + row.to(tl.int64)[:, None] * dim + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _inverse_root(square):
    """1 / sqrt(square). A GPU's rsqrt takes subnormal numbers for 0, for which it returns inf: such are the squares of
    x = 1e-20, which eps = 0 leaves as they are."""
    small = square < 2.0**-126
    return tl.rsqrt(tl.where(small, square * 2.0**64, square)) * tl.where(small, 2.0**32, 1.0)


@triton.jit
def _rmsnorm_fwd_kernel(
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
    TAIL: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """Writes y, rstd and, with a residual, h of one tile of BLOCK_M rows. TAIL > 0: a row is split in two pieces, as
    5120 = BLOCK_N 4096 + TAIL 1024. EVEN_N: BLOCK_N + TAIL is dim, so that columns need no mask."""
    EVEN: tl.constexpr = EVEN_N and BLOCK_M == 1
    EVEN_HEAD: tl.constexpr = BLOCK_M == 1 and (EVEN_N or TAIL > 0)
    cols = tl.arange(0, BLOCK_N)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    if weight_ptr is not None and WEIGHT_FIRST:
        weight = _load_weight(weight_ptr, cols, dim, weight_offset, EVEN_N)
    h = _load_h(x_ptr, residual_ptr, h_ptr, row, cols, rows, dim, stride_xm, stride_rm, EVEN_HEAD, EVICTION)
    if TAIL:
        tail_cols = BLOCK_N + tl.arange(0, TAIL)
        tail = _load_h(x_ptr, residual_ptr, h_ptr, row, tail_cols, rows, dim, stride_xm, stride_rm, EVEN, EVICTION)
    # All loads are issued before the first reduction, which contains a barrier of the CTA.
    h = h.to(tl.float32)
    squares = tl.sum(h * h, axis=1)
    if TAIL:
        tail = tail.to(tl.float32)
        squares += tl.sum(tail * tail, axis=1)
    rstd = _inverse_root(squares / dim + eps)
    y = h * rstd[:, None]
    if weight_ptr is not None:
        if not WEIGHT_FIRST:
            weight = _load_weight(weight_ptr, cols, dim, weight_offset, EVEN_N or TAIL > 0)
        y *= weight[None, :]
    _store_y(y_ptr, y, row, cols, rows, dim, EVEN_HEAD)
    if TAIL:
        y = tail * rstd[:, None]
        if weight_ptr is not None:
            y *= _load_weight(weight_ptr, tail_cols, dim, weight_offset, EVEN_N)[None, :]
        _store_y(y_ptr, y, row, tail_cols, rows, dim, EVEN)
    if SAVE_RSTD:
        tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit
def _rmsnorm_bwd_kernel(
    dy_ptr,
    h_ptr,
    rstd_ptr,
    mean_ptr,
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
    NEED_DX: tl.constexpr,
    NEED_DW: tl.constexpr,
    SLICED: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dx = rstd · (g − x̂ · mean(g · x̂)) + dh with g = dy · (w + offset), x̂ = h · rstd; dw = Σ_rows dy · x̂.

    The grid is (persistent CTAs, slices of columns). With SLICED, mean_ptr holds mean(g · x̂) of each row; otherwise a
    tile has entire rows and this kernel computes the mean. Each CTA writes one row of partial sums to dw_ptr.
    """
    cols = tl.arange(0, BLOCK_N)
    if SLICED:
        cols += tl.program_id(1) * BLOCK_N
    in_row = (cols < dim)[None, :]
    if weight_ptr is not None and NEED_DX:
        weight = tl.load(weight_ptr + cols, mask=cols < dim, other=0.0).to(tl.float32) + weight_offset
    if NEED_DW:
        dw = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    tiles = tl.cdiv(rows, BLOCK_M)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        wide_row = row.to(tl.int64)[:, None]
        mask = None if EVEN_N and BLOCK_M == 1 else (row < rows)[:, None] & in_row
        other = None if EVEN_N and BLOCK_M == 1 else 0.0
        h = tl.load(h_ptr + wide_row * stride_hm + cols[None, :], mask=mask, other=other)
        dy = tl.load(dy_ptr + wide_row * stride_dym + cols[None, :], mask=mask, other=other)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        x_hat = h.to(tl.float32) * rstd[:, None]
        g = dy.to(tl.float32)
        if NEED_DW:
            dw += g * x_hat
        if NEED_DX:
            if weight_ptr is not None:
                g = g * weight[None, :]
            if SLICED:
                mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
            else:
                mean = tl.sum(g * x_hat, axis=1) / dim
            dx = (g - x_hat * mean[:, None]) * rstd[:, None]
            if dh_ptr is not None:
                dh = tl.load(dh_ptr + wide_row * stride_dhm + cols[None, :], mask=mask, other=other)
                dx += dh.to(tl.float32)
            tl.store(dx_ptr + wide_row * dim + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEED_DW:
        # One row of partial sums per CTA, which the next kernel adds in a fixed order. There are no atomics, so the
        # result is deterministic. With one CTA per slice, dw_ptr is dw itself and there is no next kernel.
        partial_ptr = dw_ptr + tl.program_id(0).to(tl.int64) * dim + cols
        tl.store(partial_ptr, tl.sum(dw, axis=0).to(dw_ptr.dtype.element_ty), mask=cols < dim)


@triton.jit
def _rmsnorm_dw_kernel(partial_ptr, dw_ptr, partials, dim, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """dw = Σ over `partials` rows of partial sums, in fp32. One CTA per BLOCK_N columns."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, partials, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        mask = (row < partials)[:, None] & (cols < dim)[None, :]
        acc += tl.load(partial_ptr + row[:, None].to(tl.int64) * dim + cols[None, :], mask=mask, other=0.0)
    tl.store(dw_ptr + cols, tl.sum(acc, axis=0).to(dw_ptr.dtype.element_ty), mask=cols < dim)

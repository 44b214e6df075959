"""The RMSNorm kernels with an fp8 output: y is quantised while its row is in registers.

Estimate, bf16, R rows of D, one NVIDIA H200 that copies 4254 GB/s:
  by rows, or 1x128      reads x, writes data                  3·R·D bytes   32768 x 8192: 805 MB, 189 us
  … quantised separately also writes and reads y               7·R·D bytes                        442 us
  with a transposed copy reads x twice, writes data, data_t    6·R·D bytes                        379 us
  … quantised separately x, data, data_t; writes and reads y   8·R·D bytes                        505 us
A group of the transposed copy is 128 rows of a column. rstd of all 128 rows must be known first: hence the second read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .fp8_output import encode, finite_or_nan, inverse, scale_of, store_scale
from .kernel import _inverse_root, _load_h, _load_weight


@triton.jit
def _finished(h, rstd, weight_ptr, cols, dim, weight_offset, Y: tl.constexpr, EVEN_N: tl.constexpr):
    """y, rounded to dtype Y as rmsnorm stores it, then converted to fp32, with NaN in place of infinities."""
    y = h.to(tl.float32) * rstd[:, None]
    if weight_ptr is not None:
        y *= _load_weight(weight_ptr, cols, dim, weight_offset, EVEN_N)[None, :]
    return finite_or_nan(y.to(Y))


@triton.jit
def _magnitude(y):
    """|y|, and 0 where y is NaN, as NaN does not affect a scale."""
    return tl.where(y == y, tl.abs(y), 0.0)


@triton.jit
def _rmsnorm_fp8_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    data_ptr,
    scale_ptr,
    h_ptr,
    rstd_ptr,
    rows,
    dim,
    stride_xm,
    stride_rm,
    eps,
    weight_offset,
    GROUP: tl.constexpr,
    SAVE_RSTD: tl.constexpr,
    E4M3: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """Writes data, rstd, one scale per GROUP columns and, with a residual, h of BLOCK_M entire rows."""
    EVEN: tl.constexpr = EVEN_N and BLOCK_M == 1
    cols = tl.arange(0, BLOCK_N)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    h = _load_h(x_ptr, residual_ptr, h_ptr, row, cols, rows, dim, stride_xm, stride_rm, EVEN, EVICTION)
    wide = h.to(tl.float32)
    rstd = _inverse_root(tl.sum(wide * wide, axis=1) / dim + eps)
    y = _finished(h, rstd, weight_ptr, cols, dim, weight_offset, h.dtype, EVEN_N)
    GROUPS: tl.constexpr = BLOCK_N // GROUP
    y = tl.reshape(y, [BLOCK_M, GROUPS, GROUP])
    scale = scale_of(tl.max(_magnitude(y), axis=2), E4M3, POW2)
    codes = tl.reshape(encode(y * inverse(scale, POW2)[:, :, None], E4M3, NATIVE), [BLOCK_M, BLOCK_N])
    wide_row = row.to(tl.int64)[:, None]
    mask = None if EVEN else (row < rows)[:, None] & (cols < dim)[None, :]
    tl.store(data_ptr + wide_row * dim + cols[None, :], codes, mask=mask)
    group, groups = tl.arange(0, GROUPS), tl.cdiv(dim, GROUP)
    there = (row < rows)[:, None] & (group < groups)[None, :]
    store_scale(scale_ptr + wide_row * groups + group[None, :], scale, there)
    if SAVE_RSTD:
        tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit
def _rmsnorm_fp8_transposed_kernel(
    h_ptr,
    rstd_ptr,
    weight_ptr,
    data_t_ptr,
    scale_t_ptr,
    rows,
    dim,
    stride_hm,
    weight_offset,
    E4M3: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Writes data_t [dim, rows] and its scales [dim, ceil(rows / BLOCK)] of a tile of BLOCK rows by BLOCK_N columns."""
    tiles_n = tl.cdiv(dim, BLOCK_N)
    tile_m = tl.program_id(0) // tiles_n
    row = tile_m * BLOCK + tl.arange(0, BLOCK)
    col = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = None if EVEN else (row < rows)[:, None] & (col < dim)[None, :]
    h = tl.load(h_ptr + row.to(tl.int64)[:, None] * stride_hm + col[None, :], mask=mask, other=None if EVEN else 0.0)
    rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
    y = _finished(h, rstd, weight_ptr, col, dim, weight_offset, h.dtype, EVEN)
    if not EVEN:
        y = tl.where(mask, y, 0.0)  # a weight that is not finite makes masked rows NaN
    scale = scale_of(tl.max(_magnitude(y), axis=0), E4M3, POW2)
    codes = tl.trans(encode(y * inverse(scale, POW2)[None, :], E4M3, NATIVE))
    wide_col = col.to(tl.int64)
    tl.store(data_t_ptr + wide_col[:, None] * rows + row[None, :], codes, mask=None if EVEN else tl.trans(mask))
    store_scale(scale_t_ptr + wide_col * tl.cdiv(rows, BLOCK) + tile_m, scale, col < dim)

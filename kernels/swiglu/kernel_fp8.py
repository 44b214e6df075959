"""Gated linear units with an fp8 output: y is quantised in registers, per row or in blocks of 1x128.

Estimate, bf16, n elements of output, one NVIDIA H200 that copies 4254 GB/s:
  row, or 1x128           reads gate and up, writes data            5·n bytes   16384 x 11008: 902 MB, 212 us
  … then quantised        y written and read beside that            9·n bytes                        381 us
  with a transposed copy  reads gate and up, writes data, data_t    6·n bytes                        254 us
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import _activation
from .fp8_output import encode, finite_or_nan, inverse, scale_of, store_scale


@triton.jit
def _gated(gate_ptr, up_ptr, row, col, rows, cols, stride_gm, stride_um, ACTIVATION: tl.constexpr, EVEN: tl.constexpr):
    """y of a tile in the dtype of gate. It is 0 out of bounds, because the masked loads give up = 0."""
    wide_row = row.to(tl.int64)[:, None]
    mask = None if EVEN else (row < rows)[:, None] & (col < cols)[None, :]
    other = None if EVEN else 0.0
    gate = tl.load(gate_ptr + wide_row * stride_gm + col[None, :], mask=mask, other=other)
    up = tl.load(up_ptr + wide_row * stride_um + col[None, :], mask=mask, other=other)
    y = _activation(gate.to(tl.float32), ACTIVATION, gate.dtype == tl.float32) * up.to(tl.float32)
    return y.to(gate.dtype)


@triton.jit
def _magnitude(y):
    """|y|, but 0 where y is NaN, so that NaN does not count in a scale."""
    return tl.where(y == y, tl.abs(y), 0.0)


@triton.jit
def _store_quantised(
    y,
    row,
    col,
    rows,
    cols,
    data_ptr,
    scale_ptr,
    data_t_ptr,
    scale_t_ptr,
    DATA: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    E4M3: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Quantises and stores a tile of y. DATA: stores data, with one scale per row of a tile of 128 columns. TRANSPOSE:
    stores data_t [cols, rows], with one scale per column of a tile of 128 rows. Elements that are not finite become NaN
    and do not count in a scale; out of bounds y is 0 and does not either."""
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    y = finite_or_nan(y)
    magnitude = _magnitude(y)
    wide_row, wide_col = row.to(tl.int64), col.to(tl.int64)
    mask = None if EVEN else inside
    if DATA:
        scale = scale_of(tl.max(magnitude, axis=1), E4M3, POW2)
        codes = encode(y * inverse(scale, POW2)[:, None], E4M3, NATIVE)
        tl.store(data_ptr + wide_row[:, None] * cols + col[None, :], codes, mask=mask)
        store_scale(scale_ptr + wide_row * tl.cdiv(cols, 128) + tl.min(col, axis=0) // 128, scale, row < rows)
    if TRANSPOSE:
        scale = scale_of(tl.max(magnitude, axis=0), E4M3, POW2)
        codes = tl.trans(encode(y * inverse(scale, POW2)[None, :], E4M3, NATIVE))
        mask = None if EVEN else tl.trans(inside)
        tl.store(data_t_ptr + wide_col[:, None] * rows + row[None, :], codes, mask=mask)
        store_scale(scale_t_ptr + wide_col * tl.cdiv(rows, 128) + tl.min(row, axis=0) // 128, scale, col < cols)


@triton.jit
def _swiglu_fp8_kernel(
    gate_ptr,
    up_ptr,
    data_ptr,
    scale_ptr,
    data_t_ptr,
    scale_t_ptr,
    rows,
    cols,
    stride_gm,
    stride_um,
    ACTIVATION: tl.constexpr,
    DATA: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    E4M3: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One CTA per tile. DATA requires BLOCK_N = 128, TRANSPOSE requires BLOCK_M = 128."""
    tiles_n = tl.cdiv(cols, BLOCK_N)
    row = tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    y = _gated(gate_ptr, up_ptr, row, col, rows, cols, stride_gm, stride_um, ACTIVATION, EVEN)
    _store_quantised(
        y, row, col, rows, cols, data_ptr, scale_ptr, data_t_ptr, scale_t_ptr,
        DATA, TRANSPOSE, E4M3, POW2, NATIVE, EVEN,
    )  # fmt: skip


@triton.jit
def _store_codes(data_ptr, y, factor, row, col, rows, cols, E4M3: tl.constexpr, NATIVE: tl.constexpr):
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    codes = encode(y * factor[:, None], E4M3, NATIVE)
    tl.store(data_ptr + row.to(tl.int64)[:, None] * cols + col[None, :], codes, mask=mask)


@triton.jit
def _swiglu_fp8_rows_kernel(
    gate_ptr,
    up_ptr,
    data_ptr,
    scale_ptr,
    rows,
    cols,
    stride_gm,
    stride_um,
    ACTIVATION: tl.constexpr,
    E4M3: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Stores data and one scale for each of BLOCK_M whole rows. Rows are kept in registers in two parts, of BLOCK_N
    columns and, unless TAIL is 0, of TAIL columns."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_N)
    y = _gated(gate_ptr, up_ptr, row, col, rows, cols, stride_gm, stride_um, ACTIVATION, False)
    if TAIL:
        # Loaded before the first reduction: the compiler moves no load across its barrier.
        tail_col = BLOCK_N + tl.arange(0, TAIL)
        tail = _gated(gate_ptr, up_ptr, row, tail_col, rows, cols, stride_gm, stride_um, ACTIVATION, False)
    y = finite_or_nan(y)
    amax = tl.max(_magnitude(y), axis=1)
    if TAIL:
        tail = finite_or_nan(tail)
        amax = tl.maximum(amax, tl.max(_magnitude(tail), axis=1))
    scale = scale_of(amax, E4M3, POW2)
    factor = inverse(scale, POW2)
    _store_codes(data_ptr, y, factor, row, col, rows, cols, E4M3, NATIVE)
    if TAIL:
        _store_codes(data_ptr, tail, factor, row, tail_col, rows, cols, E4M3, NATIVE)
    store_scale(scale_ptr + row, scale, row < rows)

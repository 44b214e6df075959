"""Gated linear units: the kernels in Triton.

Estimate, bf16, n elements of output, one NVIDIA H200 that copies 4254 GB/s:
  forward   reads gate and up, writes y                      6·n bytes   16384 x 11008: 1.08 GB, 254 us
  backward  reads dy, gate and up, writes dgate and dup     10·n bytes   16384 x 11008: 1.80 GB, 424 us
At that bandwidth the SMs can issue 42 instructions per thread for each element of the forward and 70 of the backward.
The formulas in `activation` need about a third of that. Rows with any alignment have their own kernels on Hopper
(unaligned.cu).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import _activation, _activation_and_derivative


@triton.jit
def _tile_start(rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """First row and first column of this CTA's tile, in 64 bits. The grid is one-dimensional, because its y and z
    dimensions are limited to 65535."""
    tile = tl.program_id(0)
    tile_m, tile_n = tile * 0, tile
    if rows != 1:  # Triton specialises for the value 1: a single row needs no division
        tiles_n = ((cols - 1) // BLOCK_N + 1).to(tl.int32)  # tl.cdiv(cols, BLOCK_N) overflows 32 bits just below 2^31
        tile_m, tile_n = tile // tiles_n, tile % tiles_n
    return tile_m.to(tl.int64) * BLOCK_M, tile_n.to(tl.int64) * BLOCK_N


@triton.jit
def _swiglu_fwd_tile(
    gate_ptr,
    up_ptr,
    y_ptr,
    m,
    n,
    mask,
    stride_gm,
    stride_gn,
    stride_um,
    stride_un,
    stride_ym,
    stride_yn,
    ACTIVATION: tl.constexpr,
    EVICTION: tl.constexpr,
):
    gate = tl.load(gate_ptr + (m * stride_gm + n * stride_gn), mask=mask, eviction_policy=EVICTION)
    up = tl.load(up_ptr + (m * stride_um + n * stride_un), mask=mask, eviction_policy=EVICTION)
    is_fp32: tl.constexpr = gate.dtype == tl.float32
    y = _activation(gate.to(tl.float32), ACTIVATION, is_fp32) * up.to(tl.float32)
    tl.store(y_ptr + (m * stride_ym + n * stride_yn), y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_bwd_tile(
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    m,
    n,
    mask,
    stride_dym,
    stride_dyn,
    stride_gm,
    stride_gn,
    stride_um,
    stride_un,
    stride_dgm,
    stride_dgn,
    stride_dum,
    stride_dun,
    ACTIVATION: tl.constexpr,
    NEED_DGATE: tl.constexpr,
    NEED_DUP: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """dgate = dy · up · act'(gate), dup = dy · act(gate)."""
    gate = tl.load(gate_ptr + (m * stride_gm + n * stride_gn), mask=mask, eviction_policy=EVICTION)
    dy = tl.load(dy_ptr + (m * stride_dym + n * stride_dyn), mask=mask, eviction_policy=EVICTION)
    if NEED_DGATE:
        up = tl.load(up_ptr + (m * stride_um + n * stride_un), mask=mask, eviction_policy=EVICTION)
    is_fp32: tl.constexpr = gate.dtype == tl.float32
    value, derivative = _activation_and_derivative(gate.to(tl.float32), ACTIVATION, is_fp32)
    dy = dy.to(tl.float32)
    if NEED_DGATE:
        dgate = dy * up.to(tl.float32) * derivative
        if ACTIVATION == "relu":
            dgate = tl.where(derivative == 0.0, 0.0, dgate)  # also where dy or up is inf or NaN
        tl.store(dgate_ptr + (m * stride_dgm + n * stride_dgn), dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    if NEED_DUP:
        dup = dy * value
        tl.store(dup_ptr + (m * stride_dum + n * stride_dun), dup.to(dup_ptr.dtype.element_ty), mask=mask)


# Only boundary tiles are masked. With SPLIT (rows are aligned) such a tile is computed in two parts. The first ends at
# a multiple of 16 columns, so that each 16-byte access is masked as a whole and remains one instruction. The second has
# the last cols % 16 columns, which are accessed element by element.


@triton.jit
def _swiglu_fwd_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    rows,
    cols,
    stride_gm,
    stride_gn,
    stride_um,
    stride_un,
    stride_ym,
    stride_yn,
    ACTIVATION: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVICTION: tl.constexpr,
):
    first_m, first_n = _tile_start(rows, cols, BLOCK_M, BLOCK_N)
    gate_ptr += first_m * stride_gm + first_n * stride_gn
    up_ptr += first_m * stride_um + first_n * stride_un
    y_ptr += first_m * stride_ym + first_n * stride_yn
    m = tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
    n = tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
    strides = (stride_gm, stride_gn, stride_um, stride_un, stride_ym, stride_yn)
    if (first_m + BLOCK_M <= rows) & (first_n + BLOCK_N <= cols):
        _swiglu_fwd_tile(gate_ptr, up_ptr, y_ptr, m, n, None, *strides, ACTIVATION, EVICTION)
    else:
        limit = (cols // 16 * 16 if SPLIT else cols) - first_n
        mask = (m < rows - first_m) & (n < limit)
        _swiglu_fwd_tile(gate_ptr, up_ptr, y_ptr, m, n, mask, *strides, ACTIVATION, EVICTION)
        if SPLIT and limit < tl.minimum(cols - first_n, BLOCK_N):
            tail_n = limit + tl.arange(0, 16).to(tl.int64)[None, :]
            in_row = (m < rows - first_m) & (tail_n < cols - first_n)
            _swiglu_fwd_tile(gate_ptr, up_ptr, y_ptr, m, tail_n, in_row, *strides, ACTIVATION, EVICTION)


@triton.jit
def _swiglu_bwd_kernel(
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    rows,
    cols,
    stride_dym,
    stride_dyn,
    stride_gm,
    stride_gn,
    stride_um,
    stride_un,
    stride_dgm,
    stride_dgn,
    stride_dum,
    stride_dun,
    ACTIVATION: tl.constexpr,
    NEED_DGATE: tl.constexpr,
    NEED_DUP: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVICTION: tl.constexpr,
):
    first_m, first_n = _tile_start(rows, cols, BLOCK_M, BLOCK_N)
    dy_ptr += first_m * stride_dym + first_n * stride_dyn
    gate_ptr += first_m * stride_gm + first_n * stride_gn
    if NEED_DGATE:
        up_ptr += first_m * stride_um + first_n * stride_un
        dgate_ptr += first_m * stride_dgm + first_n * stride_dgn
    if NEED_DUP:
        dup_ptr += first_m * stride_dum + first_n * stride_dun
    m = tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
    n = tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
    ptrs = (dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr)
    strides = (stride_dym, stride_dyn, stride_gm, stride_gn, stride_um, stride_un)
    strides += (stride_dgm, stride_dgn, stride_dum, stride_dun)
    if (first_m + BLOCK_M <= rows) & (first_n + BLOCK_N <= cols):
        _swiglu_bwd_tile(*ptrs, m, n, None, *strides, ACTIVATION, NEED_DGATE, NEED_DUP, EVICTION)
    else:
        limit = (cols // 16 * 16 if SPLIT else cols) - first_n
        mask = (m < rows - first_m) & (n < limit)
        _swiglu_bwd_tile(*ptrs, m, n, mask, *strides, ACTIVATION, NEED_DGATE, NEED_DUP, EVICTION)
        if SPLIT and limit < tl.minimum(cols - first_n, BLOCK_N):
            tail_n = limit + tl.arange(0, 16).to(tl.int64)[None, :]
            in_row = (m < rows - first_m) & (tail_n < cols - first_n)
            _swiglu_bwd_tile(*ptrs, m, tail_n, in_row, *strides, ACTIVATION, NEED_DGATE, NEED_DUP, EVICTION)

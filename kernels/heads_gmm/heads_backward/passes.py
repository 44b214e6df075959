# A copy of parts/heads_backward/passes.py, made by `nox -s vendor`: change it there.
"""The gradient of the hidden as a pass over what cuBLAS has multiplied, for few columns of y.

Napkin maths, a chunk of 8192 rows of 10 heads of 1376 columns in bf16: 225 MB are read and as many written, 106 us at
4254 GB/s. With three columns of y an element takes some 30 operations: 27 us of the SMs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..activation import _activation_and_gradient


@triton.jit
def _column(ptr, stride, mask):
    """One column of dy, or row of w2, in fp32."""
    return tl.load(ptr + stride, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["first_part"])
def _heads_pass_kernel(
    dy_ptr,
    w2_ptr,
    pre_ptr,
    dw2_ptr,
    first_part,
    rows,
    part,
    heads,
    hidden,
    pitch,
    stride_dym,
    stride_dyg,
    stride_dyo,
    stride_2g,
    stride_2o,
    stride_2h,
    ACTIVATION: tl.constexpr,
    DIM_OUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """As _heads_dhidden_kernel, of DIM_OUT columns of y, at most 4, with pre in [rows, heads, pitch], which
    becomes dpre. A CTA keeps the terms of dw2 of each place of its tiles, and adds them over the rows at the end."""
    tiles = tl.cdiv(pitch, BLOCK_H)
    split, place = tl.program_id(0) // (heads * tiles), tl.program_id(0) % (heads * tiles)
    head, col = (place // tiles).to(tl.int64), place % tiles * BLOCK_H + tl.arange(0, BLOCK_H)
    there = (col < hidden)[None, :]
    # A row of w2 is loaded once for each row of a tile, so that it is laid out as the tiles of pre are: as one row, it
    # would be laid out as itself, and dh go through shared memory in each step.
    every = tl.zeros([BLOCK_M, 1], dtype=tl.int64)
    from_w2 = w2_ptr + head * stride_2g + col.to(tl.int64)[None, :] * stride_2h + every
    w_a = _column(from_w2, 0, there)
    w_b = _column(from_w2, 1 * stride_2o, there & (DIM_OUT > 1))
    w_c = _column(from_w2, 2 * stride_2o, there & (DIM_OUT > 2))
    w_d = _column(from_w2, 3 * stride_2o, there & (DIM_OUT > 3))
    sum_a = tl.zeros([BLOCK_M, BLOCK_H], dtype=tl.float32)
    sum_b = sum_a
    sum_c = sum_a
    sum_d = sum_a
    for first in tl.range(split * part, tl.minimum((split + 1) * part, rows), BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        inside = row < rows
        from_dy = dy_ptr + row.to(tl.int64) * stride_dym + head * stride_dyg
        at = pre_ptr + (row.to(tl.int64)[:, None] * heads + head) * pitch + col[None, :]
        mask = inside[:, None] & (col < pitch)[None, :]
        pre = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        dy_a = _column(from_dy, 0, inside)[:, None]
        dh = dy_a * w_a
        if DIM_OUT > 1:
            dy_b = _column(from_dy, 1 * stride_dyo, inside)[:, None]
            dh += dy_b * w_b
        if DIM_OUT > 2:
            dy_c = _column(from_dy, 2 * stride_dyo, inside)[:, None]
            dh += dy_c * w_c
        if DIM_OUT > 3:
            dy_d = _column(from_dy, 3 * stride_dyo, inside)[:, None]
            dh += dy_d * w_d
        h, dpre = _activation_and_gradient(pre, dh, ACTIVATION)
        dpre = tl.where(there, dpre, 0.0)  # where dy is inf, it is NaN beyond the end
        tl.store(at, dpre.to(pre_ptr.dtype.element_ty), mask=mask)
        if dw2_ptr is not None:
            sum_a += h * dy_a
            if DIM_OUT > 1:
                sum_b += h * dy_b
            if DIM_OUT > 2:
                sum_c += h * dy_c
            if DIM_OUT > 3:
                sum_d += h * dy_d
    if dw2_ptr is not None:
        to = dw2_ptr + ((first_part + split) * heads + head) * DIM_OUT * hidden + col
        tl.store(to, tl.sum(sum_a, 0).to(dw2_ptr.dtype.element_ty), mask=col < hidden)
        if DIM_OUT > 1:
            tl.store(to + hidden, tl.sum(sum_b, 0).to(dw2_ptr.dtype.element_ty), mask=col < hidden)
        if DIM_OUT > 2:
            tl.store(to + 2 * hidden, tl.sum(sum_c, 0).to(dw2_ptr.dtype.element_ty), mask=col < hidden)
        if DIM_OUT > 3:
            tl.store(to + 3 * hidden, tl.sum(sum_d, 0).to(dw2_ptr.dtype.element_ty), mask=col < hidden)

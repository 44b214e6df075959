"""heads_mlp: the forward, and the gradient of the hidden, in Triton.

Napkin maths, bf16, R rows of D = 512, K = 10 heads of H = 1365, O = 3, one NVIDIA H200 at 790 TFLOP/s and 4254 GB/s:
  forward    x · w1ᵀ                   2·R·K·H·D FLOPs   205000 rows: 2.87 TFLOP, 3.6 ms; x, y: 222 MB, 52 us
  backward   x · w1ᵀ again, dx, dw1    6·R·K·H·D FLOPs   205000 rows: 8.6 TFLOP, 10.9 ms
The second product is 6·H FLOPs a row and head, 0.6 % of the first. The hidden would be 5.6 GB, 1.3 ms to write and as
much to read; here it is in registers. Weights are 14 MB and stay in L2, from which each tile of rows reads them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import _activation, _activation_and_gradient

# What changes from call to call comes first, then integers, then constexprs: see `Launch`.


@triton.jit
def _rows_times_weight(
    from_a,
    from_b,
    depth,
    stride_ak,
    stride_bk,
    row_mask,
    col_mask,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Σ_k a · b in fp32. from_a [BLOCK_M, 1] and from_b [1, BLOCK_N] point to k = 0."""
    k = tl.arange(0, BLOCK_K)
    from_a += k.to(tl.int64)[None, :] * stride_ak
    from_b += k.to(tl.int64)[:, None] * stride_bk
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first in tl.range(0, depth, BLOCK_K):
        a_mask, b_mask = row_mask, col_mask
        if not EVEN_K:
            a_mask, b_mask = row_mask & (k < depth - first)[None, :], col_mask & (k < depth - first)[:, None]
        a = tl.load(from_a, mask=a_mask, other=0.0)
        b = tl.load(from_b, mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        from_a += BLOCK_K * stride_ak
        from_b += BLOCK_K * stride_bk
    return acc


@triton.jit
def _heads_mlp_fwd_kernel(
    x_ptr,
    w1_ptr,
    w2_ptr,
    y_ptr,
    rows,
    dim,
    heads,
    hidden,
    dim_out,
    heads_per_cta,
    stride_xm,
    stride_xk,
    stride_1g,
    stride_1h,
    stride_1k,
    stride_2g,
    stride_2o,
    stride_2h,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_O: tl.constexpr,
    EVEN_K: tl.constexpr,
    RESIDENT: tl.constexpr,
):
    """y[r, g] = w2[g] · act(w1[g] · x[r]) for BLOCK_M rows and `heads_per_cta` heads; [rows, heads, dim_out].

    RESIDENT: BLOCK_K columns hold a row of x, which is loaded once for all heads. Otherwise x is read again, from L2,
    for each BLOCK_H columns of the hidden.
    """
    groups = tl.cdiv(heads, heads_per_cta)
    tile, first_head = tl.program_id(0) // groups, tl.program_id(0) % groups * heads_per_cta
    row, out_col, k = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_K)
    row_mask, out_mask = (row < rows)[:, None], (out_col < dim_out)[None, :]
    from_x = x_ptr + row.to(tl.int64)[:, None] * stride_xm
    if RESIDENT:
        x = tl.load(from_x + k.to(tl.int64)[None, :] * stride_xk, mask=row_mask & (k < dim)[None, :], other=0.0)
    for index in tl.range(0, tl.minimum(heads_per_cta, heads - first_head)):
        head = (first_head + index).to(tl.int64)
        w1, w2 = w1_ptr + head * stride_1g, w2_ptr + head * stride_2g
        acc = tl.zeros([BLOCK_M, BLOCK_O], dtype=tl.float32)
        for first in tl.range(0, hidden, BLOCK_H):
            col = first + tl.arange(0, BLOCK_H)
            from_w1, col_mask = w1 + col.to(tl.int64)[None, :] * stride_1h, (col < hidden)[None, :]
            if RESIDENT:
                b_mask = col_mask & (k < dim)[:, None]
                b = tl.load(from_w1 + k.to(tl.int64)[:, None] * stride_1k, mask=b_mask, other=0.0)
                pre = tl.dot(x, b, input_precision="ieee")
            else:
                pre = _rows_times_weight(
                    from_x, from_w1, dim, stride_xk, stride_1k, row_mask, col_mask, BLOCK_M, BLOCK_H, BLOCK_K, EVEN_K
                )
            from_w2 = w2 + col.to(tl.int64)[:, None] * stride_2h + out_col.to(tl.int64)[None, :] * stride_2o
            b2 = tl.load(from_w2, mask=(col < hidden)[:, None] & out_mask, other=0.0)
            # Beyond the hidden's end pre is 0, and so are act(0) and w2.
            acc = tl.dot(_activation(pre, ACTIVATION).to(b2.dtype), b2, acc, input_precision="ieee")
        to = y_ptr + (row.to(tl.int64)[:, None] * heads + head) * dim_out + out_col[None, :]
        tl.store(to, acc.to(y_ptr.dtype.element_ty), mask=row_mask & out_mask)


@triton.jit(do_not_specialize=["start", "first_part"])
def _heads_mlp_dhidden_kernel(
    dy_ptr,
    x_ptr,
    w1_ptr,
    w2_ptr,
    dpre_ptr,
    dw2_ptr,
    start,
    first_part,
    rows,
    part,
    dim,
    heads,
    hidden,
    pitch,
    dim_out,
    stride_dym,
    stride_dyg,
    stride_dyo,
    stride_xm,
    stride_xk,
    stride_1g,
    stride_1h,
    stride_1k,
    stride_2g,
    stride_2o,
    stride_2h,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_O: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """For the `rows` rows from `start` on, both unless None:

        dpre[r, g, h] = act'(pre) · Σ_o dy[r, g, o] · w2[g, o, h], pre = w1[g] · x[r]   [rows, heads, pitch], 0 for
                                                                                        h >= hidden
        dw2[s, g, o, h] = Σ over the rows r of part s of dy[r, g, o] · act(pre)         [parts, heads, dim_out, hidden]

    A CTA takes BLOCK_H columns of a head and the rows of a part: `part` rows, in their order. Parts are numbered from
    `first_part` on.
    """
    tiles = tl.cdiv(pitch, BLOCK_H)
    split, place = tl.program_id(0) // (heads * tiles), tl.program_id(0) % (heads * tiles)
    head = (place // tiles).to(tl.int64)
    col, out_col = place % tiles * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_O)
    col_mask, out_mask = (col < hidden)[None, :], out_col < dim_out
    from_w1 = w1_ptr + head * stride_1g + col.to(tl.int64)[None, :] * stride_1h
    from_w2 = w2_ptr + head * stride_2g + out_col.to(tl.int64)[:, None] * stride_2o
    w2 = tl.load(from_w2 + col.to(tl.int64)[None, :] * stride_2h, mask=out_mask[:, None] & col_mask, other=0.0)
    acc = tl.zeros([BLOCK_H, BLOCK_O], dtype=tl.float32)
    for first in tl.range(split * part, tl.minimum((split + 1) * part, rows), BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        row_mask, wide_row = (row < rows)[:, None], (start + row).to(tl.int64)[:, None]
        from_x = x_ptr + wide_row * stride_xm
        pre = _rows_times_weight(
            from_x, from_w1, dim, stride_xk, stride_1k, row_mask, col_mask, BLOCK_M, BLOCK_H, BLOCK_K, EVEN_K
        )
        from_dy = dy_ptr + wide_row * stride_dym + head * stride_dyg + out_col.to(tl.int64)[None, :] * stride_dyo
        dy = tl.load(from_dy, mask=row_mask & out_mask[None, :], other=0.0)
        dh = tl.dot(dy, w2, input_precision="ieee")
        h, dpre = _activation_and_gradient(pre, dh, ACTIVATION)
        if dpre_ptr is not None:
            dpre = tl.where(col_mask, dpre, 0.0)  # where dy is inf, it is NaN beyond the end
            to = dpre_ptr + (row.to(tl.int64)[:, None] * heads + head) * pitch + col[None, :]
            tl.store(to, dpre.to(dpre_ptr.dtype.element_ty), mask=row_mask & (col < pitch)[None, :])
        if dw2_ptr is not None:
            acc = tl.dot(tl.trans(h.to(dy.dtype)), dy, acc, input_precision="ieee")
    if dw2_ptr is not None:
        to = dw2_ptr + (((first_part + split) * heads + head) * dim_out + out_col[None, :]) * hidden + col[:, None]
        tl.store(to, acc.to(dw2_ptr.dtype.element_ty), mask=(col < hidden)[:, None] & out_mask[None, :])

"""The gradient of the hidden of K feed-forward layers of one input, in Triton, and the GEMM main loop that it shares
with the forward."""

from __future__ import annotations

import triton
import triton.language as tl

from ..activation import _activation_and_gradient

# Arguments that change from call to call come first, then integers, then constexprs: see `Launch`.


@triton.jit
def rows_times_weight(
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
    # In int64: a transposed operand's stride times BLOCK_K may exceed 2^31.
    step_a, step_b = BLOCK_K * tl.cast(stride_ak, tl.int64), BLOCK_K * tl.cast(stride_bk, tl.int64)
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
        from_a += step_a
        from_b += step_b
    return acc


@triton.jit(do_not_specialize=["start", "first_part"])
def _heads_dhidden_kernel(
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
    """Computes, for the `rows` rows of x from `start` on and the first `rows` rows of dy, those that are not None:

        dpre[r, g, h] = act'(pre) · Σ_o dy[r, g, o] · w2[g, o, h], pre = w1[g] · x[r]   [rows, heads, pitch], 0 for
                                                                                        h >= hidden
        dw2[s, g, o, h] = Σ over the rows r of part s of dy[r, g, o] · act(pre)         [parts, heads, dim_out, hidden]

    A CTA processes BLOCK_H columns of a head and the rows of a split-K partition, `part` rows, in order. Partitions are
    numbered from `first_part` on.
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
        row_mask = (row < rows)[:, None]
        from_x = x_ptr + (start + row).to(tl.int64)[:, None] * stride_xm
        pre = rows_times_weight(
            from_x, from_w1, dim, stride_xk, stride_1k, row_mask, col_mask, BLOCK_M, BLOCK_H, BLOCK_K, EVEN_K
        )
        from_dy = (
            dy_ptr
            + row.to(tl.int64)[:, None] * stride_dym
            + head * stride_dyg
            + out_col.to(tl.int64)[None, :] * stride_dyo
        )
        dy = tl.load(from_dy, mask=row_mask & out_mask[None, :], other=0.0)
        dh = tl.dot(dy, w2, input_precision="ieee")
        h, dpre = _activation_and_gradient(pre, dh, ACTIVATION)
        if dpre_ptr is not None:
            dpre = tl.where(col_mask, dpre, 0.0)  # past the last column it is NaN if dy is inf: inf · 0
            to = dpre_ptr + (row.to(tl.int64)[:, None] * heads + head) * pitch + col[None, :]
            tl.store(to, dpre.to(dpre_ptr.dtype.element_ty), mask=row_mask & (col < pitch)[None, :])
        if dw2_ptr is not None:
            h = tl.where(row_mask, h, 0.0)  # past the last row it is NaN if w1 is not finite: inf · 0
            acc = tl.dot(tl.trans(h.to(dy.dtype)), dy, acc, input_precision="ieee")
    if dw2_ptr is not None:
        to = dw2_ptr + (((first_part + split) * heads + head) * dim_out + out_col[None, :]) * hidden + col[:, None]
        tl.store(to, acc.to(dw2_ptr.dtype.element_ty), mask=(col < hidden)[:, None] & out_mask[None, :])

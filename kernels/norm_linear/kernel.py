"""norm_linear: RMSNorm in the loop of a product, and its gradient in the epilogue of the next.

For few rows a kernel takes the time of its launch, some 3 us, whatever it computes: fewer kernels are what counts.

Forward. 1 / rms is a factor of a row, so the tensor cores are given h · g, and the sums are multiplied by it in the
epilogue: the squares are summed in the same pass over h. Each CTA computes the statistics of its rows again.

Backward. With n = h · rstd · g, y = n Wᵀ and dn = dy W, the norm's gradient takes mean(dn · g · h · rstd) of each row,
the mean of dn · n. That sum over the columns of n is one over the columns of y:

    Σ_k dn_k n_k = Σ_k Σ_j dy_j W_jk n_k = Σ_j dy_j y_j

So it comes from dy and y, which was saved, as the product reads dy: no CTA needs whole rows of dn, and the rest of the
gradient is elementwise in the epilogue. y is rounded to its dtype, as dn is between the kernels of PyTorch; of D
columns that is 1 / sqrt(D) of the error there, but where D is 1 or 2, dx is what cancels.

Napkin maths, bf16, 564 rows, 512 -> 1536, one NVIDIA H200: 0.9 GFLOP, 1.1 us at 790 TFLOP/s, and 3.9 MB, 0.9 us at
4254 GB/s, but L2 holds them. A CTA of 64 x 128 sums reads 64 KB of x, as much of the residual, and 128 KB of W: 2.3 us
at 64 bytes a clock. 108 CTAs are one wave.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import _activation, _activation_and_gradient

# What changes from call to call comes first, then integers, then constexprs: see `Launch`.


@triton.jit
def _load_h(x_ptr, residual_ptr, offset_x, offset_r, mask):
    """A tile of x, or of x + residual as it is stored: rounded to x's dtype."""
    h = tl.load(x_ptr + offset_x, mask=mask, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + offset_r, mask=mask, other=0.0)
        h = (h.to(tl.float32) + residual.to(tl.float32)).to(h.dtype)
    return h


@triton.jit
def _store_rows(h, rstd, gain_ptr, h_ptr, normed_ptr, wide_row, col, depth, mask):
    """h and n of these columns, those that are not None."""
    at = wide_row * depth + col[None, :]
    if h_ptr is not None:
        tl.store(h_ptr + at, h, mask=mask)
    if normed_ptr is not None:
        gain = tl.load(gain_ptr + col, mask=col < depth, other=0.0).to(tl.float32)
        normed = h.to(tl.float32) * rstd[:, None] * gain[None, :]
        tl.store(normed_ptr + at, normed.to(normed_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_linear_fwd_kernel(
    x_ptr,
    residual_ptr,
    gain_ptr,
    w_ptr,
    y_ptr,
    act_ptr,
    h_ptr,
    normed_ptr,
    rstd_ptr,
    rows,
    cols,
    depth,
    stride_xm,
    stride_rm,
    stride_wn,
    stride_wk,
    eps,
    ACTIVATION: tl.constexpr,
    STATS_FIRST: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y = n · Wᵀ, act(y), h, n and rstd, those that are not None.

    STATS_FIRST: a pass over h before the product gives rstd, and the tensor cores are given n: in fp16 h · g may
    overflow where n does not. Of h and n, the CTAs of a row of tiles write BLOCK_K columns each in turn."""
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(cols, BLOCK_N)
    tile_m, tile_n = tl.program_id(0) % tiles_m, tl.program_id(0) // tiles_m
    row, col = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    wide_row, wide_k = row.to(tl.int64)[:, None], k.to(tl.int64)
    in_rows, in_cols = (row < rows)[:, None], (col < cols)[None, :]
    offset_x, offset_r = wide_row * stride_xm + k[None, :], wide_row * stride_rm + k[None, :]
    from_w = w_ptr + col.to(tl.int64)[None, :] * stride_wn + wide_k[:, None] * stride_wk
    WRITES: tl.constexpr = h_ptr is not None or normed_ptr is not None
    if WRITES:
        # Loaded before the product, so that nobody waits for it after.
        own = tile_n * BLOCK_K
        own_mask = in_rows & (k < depth - own)[None, :]
        own_h = _load_h(x_ptr, residual_ptr, offset_x + own, offset_r + own, own_mask)
    squares = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.float32)
    rstd = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
    if STATS_FIRST:
        for first in range(0, depth, BLOCK_K):
            mask = in_rows & (k < depth - first)[None, :]
            h = _load_h(x_ptr, residual_ptr, offset_x + first, offset_r + first, mask).to(tl.float32)
            squares += h * h
        rstd = tl.rsqrt(tl.sum(squares, axis=1) / depth + eps)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first in range(0, depth, BLOCK_K):
        mask, w_mask, in_depth = in_rows, in_cols, None
        if not EVEN_K:
            in_depth = k < depth - first
            mask, w_mask = in_rows & in_depth[None, :], in_cols & in_depth[:, None]
        h = _load_h(x_ptr, residual_ptr, offset_x + first, offset_r + first, mask)
        gain = tl.load(gain_ptr + first + k, mask=in_depth, other=None if EVEN_K else 0.0).to(tl.float32)
        w = tl.load(from_w, mask=w_mask, other=0.0)
        wide_h = h.to(tl.float32)
        if STATS_FIRST:
            scaled = wide_h * rstd[:, None] * gain[None, :]
        else:
            squares += wide_h * wide_h
            scaled = wide_h * gain[None, :]
        acc = tl.dot(scaled.to(h.dtype), w, acc, input_precision="ieee")
        from_w += tl.cast(BLOCK_K, tl.int64) * stride_wk
    if not STATS_FIRST:
        rstd = tl.rsqrt(tl.sum(squares, axis=1) / depth + eps)
        acc *= rstd[:, None]
    to = row.to(tl.int64)[:, None] * cols + col[None, :]
    if y_ptr is not None:
        tl.store(y_ptr + to, acc.to(y_ptr.dtype.element_ty), mask=in_rows & in_cols)
    if act_ptr is not None:
        # Of y as it is saved, so that the backward sees the same numbers.
        pre = acc.to(act_ptr.dtype.element_ty).to(tl.float32)
        act = _activation(pre, ACTIVATION)
        tl.store(act_ptr + to, act.to(act_ptr.dtype.element_ty), mask=in_rows & in_cols)
    if rstd_ptr is not None and tile_n == 0:
        tl.store(rstd_ptr + row, rstd, mask=row < rows)
    if WRITES:
        _store_rows(own_h, rstd, gain_ptr, h_ptr, normed_ptr, wide_row, own + k, depth, own_mask)
        for first in range(own + tiles_n * BLOCK_K, depth, tiles_n * BLOCK_K):
            mask = in_rows & (k < depth - first)[None, :]
            h = _load_h(x_ptr, residual_ptr, offset_x + first, offset_r + first, mask)
            _store_rows(h, rstd, gain_ptr, h_ptr, normed_ptr, wide_row, first + k, depth, mask)


@triton.jit
def _norm_linear_bwd_kernel(
    dy_ptr,
    y_ptr,
    dot_ptr,
    w_ptr,
    h_ptr,
    rstd_ptr,
    gain_ptr,
    dh_ptr,
    dx_ptr,
    dgain_ptr,
    rows,
    depth,
    cols,
    parts,
    stride_dym,
    stride_wk,
    stride_wn,
    stride_hm,
    stride_dhm,
    WHOLE: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """dn = dy · W, of which dx = rstd · (g · dn − x̂ · mean) + dh with x̂ = h · rstd and mean = Σ dy · y / cols, and a
    row of partial sums of dgain = Σ dn · x̂ for each tile of rows. Here `depth` is y's columns and `cols` x's.

    dot_ptr, where it is given, has Σ dy · y of each row in `parts` parts [parts, rows]; else it is summed as dy is
    read. WHOLE: a tile has whole rows, so that their sums are of dn itself: in a few columns most of dx cancels, and y
    is rounded. MOST_PARTS is a power of two."""
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tile_m, tile_n = tl.program_id(0) % tiles_m, tl.program_id(0) // tiles_m
    row, col = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    wide_row, in_rows, in_cols = row.to(tl.int64)[:, None], (row < rows)[:, None], (col < cols)[None, :]
    from_dy, from_y = dy_ptr + wide_row * stride_dym + k[None, :], wide_row * depth + k[None, :]
    from_w = w_ptr + k.to(tl.int64)[:, None] * stride_wk + col.to(tl.int64)[None, :] * stride_wn
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    SUMMED: tl.constexpr = dx_ptr is not None and dot_ptr is None and not WHOLE
    # Of what tensor cores read the loads are pipelined: so they multiply y too, of which the diagonal is wanted. A load
    # beside them would be waited for in each step.
    TENSOR_CORES: tl.constexpr = dy_ptr.dtype.element_ty != tl.float32
    products = tl.zeros([BLOCK_M, BLOCK_M if TENSOR_CORES else BLOCK_K], dtype=tl.float32)
    if dx_ptr is not None and dot_ptr is not None and not WHOLE:
        part = tl.arange(0, MOST_PARTS)
        from_dot = dot_ptr + part.to(tl.int64)[:, None] * rows + row[None, :]
        dots = tl.load(from_dot, mask=(part < parts)[:, None] & (row < rows)[None, :], other=0.0)
        dot = tl.sum(dots, axis=0)
    for first in range(0, depth, BLOCK_K):
        mask, w_mask = in_rows, in_cols
        if not EVEN_K:
            in_depth = k < depth - first
            mask, w_mask = in_rows & in_depth[None, :], in_cols & in_depth[:, None]
        dy = tl.load(from_dy + first, mask=mask, other=0.0)
        acc = tl.dot(dy, tl.load(from_w, mask=w_mask, other=0.0), acc, input_precision="ieee")
        if SUMMED:
            y = tl.load(y_ptr + from_y + first, mask=mask, other=0.0)
            if TENSOR_CORES:
                products = tl.dot(dy, tl.trans(y), products)
            else:
                products += dy * y
        from_w += tl.cast(BLOCK_K, tl.int64) * stride_wk
    inside = in_rows & in_cols
    rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
    x_hat = tl.load(h_ptr + wide_row * stride_hm + col[None, :], mask=inside, other=0.0).to(tl.float32) * rstd
    if dgain_ptr is not None:
        partial_ptr = dgain_ptr + tile_m.to(tl.int64) * cols + col
        # Beyond the last row a weight that is not finite has NaN.
        partial = tl.sum(tl.where(in_rows, acc * x_hat, 0.0), axis=0)
        tl.store(partial_ptr, partial, mask=col < cols)
    if dx_ptr is not None:
        gain = tl.load(gain_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
        g = acc * gain[None, :]
        if WHOLE:
            dot = tl.sum(tl.where(in_cols, g * x_hat, 0.0), axis=1)
        elif SUMMED:
            if TENSOR_CORES:
                i = tl.arange(0, BLOCK_M)
                products = tl.where(i[:, None] == i[None, :], products, 0.0)
            dot = tl.sum(products, axis=1)
        dx = (g - x_hat * (dot / cols)[:, None]) * rstd
        if dh_ptr is not None:
            dh = tl.load(dh_ptr + wide_row * stride_dhm + col[None, :], mask=inside, other=0.0)
            dx += dh.to(tl.float32)
        tl.store(dx_ptr + wide_row * cols + col[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _norm_linear_dact_kernel(
    dy_ptr,
    pre_ptr,
    dpre_ptr,
    dot_ptr,
    cols,
    stride_dym,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dpre = dy · act'(pre), and Σ dpre · pre of each row. One CTA a row."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for first in range(0, cols, BLOCK_N):
        col = first + tl.arange(0, BLOCK_N)
        dy = tl.load(dy_ptr + row * stride_dym + col, mask=col < cols, other=0.0).to(tl.float32)
        pre = tl.load(pre_ptr + row * cols + col, mask=col < cols, other=0.0).to(tl.float32)
        _, dpre = _activation_and_gradient(pre, dy, ACTIVATION)
        dpre = dpre.to(dpre_ptr.dtype.element_ty)
        tl.store(dpre_ptr + row * cols + col, dpre, mask=col < cols)
        total += dpre.to(tl.float32) * pre  # of what the product reads
    tl.store(dot_ptr + row, tl.sum(total))


@triton.jit
def _norm_linear_dpre_kernel(
    dz_ptr,
    v_ptr,
    pre_ptr,
    dpre_ptr,
    dot_ptr,
    rows,
    depth,
    cols,
    stride_dzm,
    stride_vk,
    stride_vn,
    ACTIVATION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """dpre = (dz · V) · act'(pre), and for each tile of columns, of which dot_ptr has a row, Σ dpre · pre of each
    row."""
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tile_m, tile_n = tl.program_id(0) % tiles_m, tl.program_id(0) // tiles_m
    row, col = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    wide_row, in_rows, in_cols = row.to(tl.int64)[:, None], (row < rows)[:, None], (col < cols)[None, :]
    from_dz = dz_ptr + wide_row * stride_dzm + k[None, :]
    from_v = v_ptr + k.to(tl.int64)[:, None] * stride_vk + col.to(tl.int64)[None, :] * stride_vn
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first in range(0, depth, BLOCK_K):
        mask, v_mask = in_rows, in_cols
        if not EVEN_K:
            in_depth = k < depth - first
            mask, v_mask = in_rows & in_depth[None, :], in_cols & in_depth[:, None]
        dz = tl.load(from_dz + first, mask=mask, other=0.0)
        acc = tl.dot(dz, tl.load(from_v, mask=v_mask, other=0.0), acc, input_precision="ieee")
        from_v += tl.cast(BLOCK_K, tl.int64) * stride_vk
    at, inside = wide_row * cols + col[None, :], in_rows & in_cols
    pre = tl.load(pre_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        _, acc = _activation_and_gradient(pre, acc, ACTIVATION)
    dpre = acc.to(dpre_ptr.dtype.element_ty)
    tl.store(dpre_ptr + at, dpre, mask=inside)
    # Of what the next product reads. Beyond the last row or column a value that is not finite has NaN.
    dot = tl.sum(tl.where(inside, dpre.to(tl.float32) * pre, 0.0), axis=1)
    tl.store(dot_ptr + tile_n.to(tl.int64) * rows + row, dot, mask=row < rows)

# A copy of parts/heads_backward/sums.py, made by `nox -s vendor`: change it there.
"""The GEMMs that use the gradient of the hidden, and the sums of partial results, in Triton.

The gradient of the hidden is in memory for a chunk of rows at a time: 232 MB for 8448 rows of 10 heads of 1376 columns.
It is written once and read twice. That takes 164 us a chunk, overlapped with 450 us of GEMMs.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["start"])
def _heads_dx_kernel(
    dpre_ptr,
    w1_ptr,
    dx_ptr,
    start,
    rows,
    dim,
    heads,
    hidden,
    pitch,
    stride_1g,
    stride_1h,
    stride_1k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
):
    """dx[start + r, d] = Σ_g Σ_h dpre[r, g, h] · w1[g, h, d] for `rows` rows: one accumulator over all heads, in order.
    Consecutive CTAs read the same rows of dpre."""
    tiles = tl.cdiv(dim, BLOCK_N)
    row = tl.program_id(0) // tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    col, k = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    row_mask, col_mask = (row < rows)[:, None], (col < dim)[None, :]
    from_dpre = dpre_ptr + row.to(tl.int64)[:, None] * heads * pitch
    from_w1 = w1_ptr + col.to(tl.int64)[None, :] * stride_1k
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    steps = tl.cdiv(hidden, BLOCK_K)
    for step in tl.range(0, heads * steps):
        head, h = (step // steps).to(tl.int64), step % steps * BLOCK_K + k
        a = tl.load(from_dpre + head * pitch + h[None, :], mask=row_mask & (h < pitch)[None, :], other=0.0)
        b_mask = (h < hidden)[:, None]
        if not EVEN_N:
            b_mask = b_mask & col_mask
        b = tl.load(from_w1 + head * stride_1g + h.to(tl.int64)[:, None] * stride_1h, mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    to = dx_ptr + (start + row).to(tl.int64)[:, None] * dim + col[None, :]
    tl.store(to, acc.to(dx_ptr.dtype.element_ty), mask=row_mask & col_mask)


@triton.jit(do_not_specialize=["start"])
def _heads_dw1_kernel(
    dpre_ptr,
    x_ptr,
    before_ptr,
    out_ptr,
    start,
    rows,
    dim,
    heads,
    hidden,
    pitch,
    stride_xm,
    stride_xk,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    EVEN_N: tl.constexpr,
):
    """out[g, h, d] = before[g, h, d] + Σ_r dpre[r, g, h] · x[start + r, d] over `rows` rows, in order, in fp32;
    [heads, hidden, dim]. before is the fp32 sum over the chunks before, None for the first; out may alias it."""
    tiles_n, tiles_h = tl.cdiv(dim, BLOCK_N), tl.cdiv(hidden, BLOCK_H)
    tile_n, place = tl.program_id(0) % tiles_n, tl.program_id(0) // tiles_n
    head, h = (place // tiles_h).to(tl.int64), place % tiles_h * BLOCK_H + tl.arange(0, BLOCK_H)
    col, row = tile_n * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)[:, None]
    from_dpre = dpre_ptr + head * pitch + h[None, :] + row.to(tl.int64) * heads * pitch
    from_x = x_ptr + (start + row).to(tl.int64) * stride_xm + col.to(tl.int64)[None, :] * stride_xk
    inside = (h < hidden)[:, None] & (col < dim)[None, :]
    at = (head * hidden + h[:, None]) * dim + col[None, :]
    if before_ptr is None:
        acc = tl.zeros([BLOCK_H, BLOCK_N], dtype=tl.float32)
    else:
        acc = tl.load(before_ptr + at, mask=inside, other=0.0)
    # In int64: the row stride of x times BLOCK_R may exceed 2^31.
    step_dpre, step_x = BLOCK_R * tl.cast(heads, tl.int64) * pitch, BLOCK_R * tl.cast(stride_xm, tl.int64)
    for first in tl.range(0, rows, BLOCK_R):
        a_mask, b_mask = row < rows - first, row < rows - first
        if not EVEN_N:
            b_mask = b_mask & (col < dim)[None, :]
        a = tl.load(from_dpre, mask=a_mask & (h < pitch)[None, :], other=0.0)
        b = tl.load(from_x, mask=b_mask, other=0.0)
        acc = tl.dot(tl.trans(a), b, acc, input_precision="ieee")
        from_dpre += step_dpre
        from_x += step_x
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_up(parts_ptr, out_ptr, elements, parts, place, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr):
    at = place.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    if AT_ONCE == 1:
        from_part = parts_ptr + at
        acc = tl.zeros([BLOCK], dtype=tl.float32)
        for _ in tl.range(0, parts, loop_unroll_factor=4):  # unrolled to keep loads in flight
            acc += tl.load(from_part, mask=inside, other=0.0)
            from_part += elements
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)
    else:  # for few elements and many parts, such as a bias: sequential loads would each wait for the memory's latency
        part = tl.arange(0, AT_ONCE)[:, None]
        tile = tl.zeros([AT_ONCE, BLOCK], dtype=tl.float32)
        for first in tl.range(0, parts, AT_ONCE):
            from_parts = parts_ptr + (first + part).to(tl.int64) * elements + at[None, :]
            tile += tl.load(from_parts, mask=(first + part < parts) & inside[None, :], other=0.0)
        tl.store(out_ptr + at, tl.sum(tile, 0).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _heads_sum_kernel(
    parts_ptr,
    out_ptr,
    more_parts_ptr,
    more_out_ptr,
    elements,
    parts,
    more_elements,
    more_parts,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    MORE_AT_ONCE: tl.constexpr,
):
    """out[i] = Σ_s parts[s, i] in fp32. The order is that of the parts or, with AT_ONCE > 1, every AT_ONCE-th part
    first and then these sums. Likewise for a second tensor, unless None."""
    place = tl.program_id(0)
    if more_parts_ptr is None:
        _add_up(parts_ptr, out_ptr, elements, parts, place, BLOCK, AT_ONCE)
    else:
        blocks = tl.cdiv(elements, BLOCK)
        if place < blocks:
            _add_up(parts_ptr, out_ptr, elements, parts, place, BLOCK, AT_ONCE)
        else:
            _add_up(more_parts_ptr, more_out_ptr, more_elements, more_parts, place - blocks, BLOCK, MORE_AT_ONCE)

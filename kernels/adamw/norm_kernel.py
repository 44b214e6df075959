"""Two kernels for the norm of many gradients and the scale that clips them. They read the gradients' addresses from a
table (`tables`).

Each gradient is read once: 2 bytes per element in bf16, compared to the 28 that AdamW's step moves (`kernel`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tables import COLUMNS, FIRST, GRAD, KIND, NUMEL


@triton.jit
def _squares(row_ptr, first, limit, G_TYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """g² in fp32 of the elements first … first + min(limit, BLOCK) − 1 of a gradient, a row of the table, and 0 past
    them. ALIGNED: its address is a multiple of 16 bytes and `limit` of 8 elements."""
    # The pointer is loaded here, because an alignment hint on an argument is lost when the function is inlined.
    g_ptr = tl.load(row_ptr + GRAD).to(tl.pointer_type(G_TYPE))
    if ALIGNED:
        g_ptr = tl.multiple_of(g_ptr, 16)
    left = tl.minimum(limit, BLOCK)
    mask = tl.arange(0, BLOCK) < (tl.multiple_of(left, 8) if ALIGNED else left)
    g = tl.load(g_ptr + first + tl.arange(0, BLOCK), mask=mask, other=0.0).to(tl.float32)
    return g * g


@triton.jit
def _adamw_norm_kernel(rows_ptr, cta_rows_ptr, sums_ptr, KINDS: tl.constexpr, BLOCK: tl.constexpr, SMALL: tl.constexpr):
    """Writes Σ g² of at most BLOCK elements of a gradient per CTA; cta_rows_ptr holds its row of the table. KINDS are
    those of the table; the second entry of each is the gradient's dtype."""
    block = tl.program_id(0)
    row_ptr = rows_ptr + tl.load(cta_rows_ptr + block) * COLUMNS
    first = (block - tl.load(row_ptr + FIRST)) * BLOCK  # 64 bits wide, like the table
    limit = tl.minimum(tl.load(row_ptr + NUMEL) - first, BLOCK).to(tl.int32)
    aligned = (tl.load(row_ptr + GRAD) % 16 == 0) & (limit % 8 == 0)
    kind = tl.load(row_ptr + KIND)
    for i in tl.static_range(len(KINDS)):
        if kind == i:
            if aligned:
                tl.store(sums_ptr + block, tl.sum(_squares(row_ptr, first, limit, KINDS[i][1], True, BLOCK), 0))
            else:
                squares = tl.zeros([SMALL], tl.float32)
                for start in range(0, limit, SMALL):
                    squares += _squares(row_ptr, first + start, limit - start, KINDS[i][1], False, SMALL)
                tl.store(sums_ptr + block, tl.sum(squares, 0))


@triton.jit
def _adamw_clip_kernel(sums_ptr, grad_scale_ptr, norm_ptr, scale_ptr, max_norm, count, BLOCK: tl.constexpr):
    """Writes the norm, from `count` sums in a fixed order, and the scale. One CTA."""
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        squares += tl.load(sums_ptr + at, mask=at < count, other=0.0)
    given = 1.0
    if grad_scale_ptr is not None:
        given = tl.load(grad_scale_ptr)
    norm = tl.sqrt_rn(tl.sum(squares, 0)) / given
    excess = tl.where(max_norm == float("inf"), 0.0, (norm + 1e-6) / max_norm)  # inf / inf would be nan
    tl.store(norm_ptr, norm)
    tl.store(scale_ptr, tl.where(excess < 1.0, 1.0, excess) * given)  # if the norm is nan, so is the scale (PyTorch)

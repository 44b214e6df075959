"""data and its transposed copy in one pass over x: one CTA per tile of 128 by 128.

Four adjacent rows of a column are four adjacent bytes of data_t. So a tile is read as four tiles of every fourth row,
whose elements are packed to 32-bit words of data_t. The transposition through shared memory moves words instead of
bytes, with a quarter of the accesses, and stores lines of 128 bytes.

Estimate, bf16, 16384 x 8192, one NVIDIA H200 that copies 4254 GB/s: 2 bytes per element read and twice 1 written, 537
MB and the scales, 128 us. Shared memory: 16 KB of words written and read, 256 of some 3800 cycles available per tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .formats import encode, encode_four, finite_or_nan, inverse, store_scale
from .tiles import group_scale, inside, raise_to, rectangle, tile_of

ROWS = tl.constexpr(4)  # per word


# Specialising for the strides of scales would compile more kernels without a gain.
@triton.jit(do_not_specialize=["stride_rm", "stride_rn", "stride_cn", "stride_cm"])
def _fp8_transposed_kernel(
    x_ptr,
    data_ptr,
    data_t_ptr,
    row_scale_ptr,
    col_scale_ptr,
    row_amax_ptr,
    col_amax_ptr,
    rows,
    dim,
    stride_xm,
    stride_rm,
    stride_rn,
    stride_cn,
    stride_cm,
    GROUPS: tl.constexpr,
    SOURCE: tl.constexpr,
    RAISE_AMAX: tl.constexpr,
    E4M3: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """Writes data and data_t, and scales unless they are given. GROUPS and SOURCE as in tiles.py. With GROUPS "rows",
    data has one scale per row of the tile and data_t one per column; with "columns" the reverse. WORDS: rows of data_t
    are aligned to 4 bytes.

    The scale of a row is at row · stride_rm + tile_n · stride_rn of row_scale_ptr, that of a column at
    col · stride_cn + tile_m · stride_cm of col_scale_ptr; of a tile, at tile_m · stride_rm + tile_n · stride_rn and,
    for data_t, at tile_n · stride_cn + tile_m · stride_cm.
    """
    SMALL: tl.constexpr = POW2 and SOURCE != "given"  # the scale is a power of two with an inverse in fp32
    tile, tile_m, tile_n = tile_of(dim, BLOCK_N, SOURCE)
    row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
    word_m, n = tl.arange(0, BLOCK_M // ROWS), tl.arange(0, BLOCK_N)
    m = word_m * ROWS
    height, width = tl.minimum(rows - row, BLOCK_M).to(tl.int32), tl.minimum(dim - col, BLOCK_N).to(tl.int32)
    parts, magnitudes = (), ()
    for i in tl.static_range(ROWS):
        x_ptrs = rectangle(x_ptr + row * stride_xm + col, m + i, n, stride_xm)
        mask = None if EVEN else inside(m + i, n, height, width)
        x = finite_or_nan(tl.load(x_ptrs, mask=mask, other=None if EVEN else 0.0, eviction_policy=EVICTION))
        parts += (x,)
        # The maximum of a value and NaN is the value on the GPU, but NaN in the interpreter.
        magnitudes += (tl.abs(x) if NATIVE else tl.where(x == x, tl.abs(x), -1.0),)
    largest = tl.maximum(tl.maximum(magnitudes[0], magnitudes[1]), tl.maximum(magnitudes[2], magnitudes[3]))
    if RAISE_AMAX:
        raise_to(row_amax_ptr, tl.max(largest))
    if GROUPS == "tile":
        at = row_scale_ptr + tile_m * stride_rm + tile_n * stride_rn
        scale = group_scale(largest, None, row_amax_ptr, 0, at, tile >= 0, tile == 0, SOURCE, E4M3, POW2)
        if SOURCE == "tile":
            store_scale(col_scale_ptr + tile_n * stride_cn + tile_m * stride_cm, scale, tile >= 0)
        by_column = inverse(scale, SMALL)
    else:
        at = col_scale_ptr + (col + n) * stride_cn + tile_m * stride_cm
        scale = group_scale(largest, 0, col_amax_ptr, col + n, at, n < width, tile_m == 0, SOURCE, E4M3, POW2)
        by_column = inverse(scale, SMALL)[None, :]
    for_columns = ()
    for i in tl.static_range(ROWS):
        x, by_row = parts[i], by_column
        if GROUPS != "tile":
            at = row_scale_ptr + (row + m + i) * stride_rm + tile_n * stride_rn
            there, first = m + i < height, tile_n == 0
            scale = group_scale(magnitudes[i], 1, row_amax_ptr, row + m + i, at, there, first, SOURCE, E4M3, POW2)
            by_row = inverse(scale, SMALL)[:, None]
        y = x * by_column if GROUPS == "columns" else x * by_row
        mask = None if EVEN else inside(m + i, n, height, width)
        tl.store(rectangle(data_ptr + row * dim + col, m + i, n, dim), encode(y, E4M3, NATIVE), mask=mask)
        for_columns += (x * by_row if GROUPS == "columns" else x * by_column,)
    word = encode_four(for_columns[0], for_columns[1], for_columns[2], for_columns[3], E4M3, NATIVE)
    corner = data_t_ptr + col * rows + row
    if WORDS:
        words = rectangle(corner.to(tl.pointer_type(tl.int32)), n, word_m, rows // ROWS)
        tl.store(words, tl.trans(word), mask=None if EVEN else inside(n, m, width, height))
    else:
        for i in tl.static_range(ROWS):
            byte = ((word >> 8 * i) & 0xFF).to(tl.uint8)
            tl.store(rectangle(corner, n, m + i, rows), tl.trans(byte), mask=inside(n, m + i, width, height))

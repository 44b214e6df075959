"""Rotary position embedding: the kernel.

Estimate, bf16, N elements in q and k together, one NVIDIA H200 that copies 4254 GB/s:
  forward   reads q and k, writes both rotated     4·N bytes   8 x 8192 x (32 + 32) x 128: 2.15 GB, 505 us
  backward  the same with their gradients          4·N bytes
The tables are also read: 1 MB each at 8192 positions (R / 2 columns), which fit in L2. 3 FLOPs per element are
negligible, so the lower bound is the time of a copy. Every layout reads and writes each element once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rope_tile(
    x_ptr,
    x_strides,
    y_ptr,
    y_strides,
    cos_ptr,
    sin_ptr,
    table_strides,
    position_ptr,
    position_strides,
    sign,
    b,
    first_s,
    first_h,
    seq,
    heads,
    table,
    HAS_POSITION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ALIGN: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """Rotates one tile of ROWS / BLOCK_H tokens by BLOCK_H heads by sign · angle. EVEN: no token or head of a tile is
    out of bounds. ALIGN divides all row offsets, which the compiler needs to know for vector accesses."""
    BLOCK: tl.constexpr = triton.next_power_of_2(HALF)
    row = tl.arange(0, ROWS)
    s = first_s + row // BLOCK_H
    h = first_h + row % BLOCK_H
    in_rows = (s < seq) & (h < heads)
    x_row = b * x_strides[0] + s.to(tl.int64) * x_strides[1] + h.to(tl.int64) * x_strides[2]
    y_row = b * y_strides[0] + s.to(tl.int64) * y_strides[1] + h.to(tl.int64) * y_strides[2]
    x_rows = x_ptr + tl.multiple_of(x_row, ALIGN)[:, None]
    y_rows = y_ptr + tl.multiple_of(y_row, ALIGN)[:, None]

    # The tables have no head dimension, but each row of the tile loads them again, from L1 for all but the first head
    # of a token. So a thread loads only the columns that it needs for its 16 bytes of x. Loaded once per token, they
    # would be redistributed among threads through shared memory. max_contiguous limits the width of these loads to the
    # pairs in 16 bytes of x.
    CONTIGUOUS: tl.constexpr = (64 if INTERLEAVED else 128) // x_ptr.dtype.element_ty.primitive_bitwidth
    col = tl.max_contiguous(tl.arange(0, BLOCK), CONTIGUOUS)[None, :].to(tl.int64)
    in_table = in_rows[:, None] & (col < HALF)
    if HAS_POSITION:
        position_ptrs = position_ptr + b * position_strides[0] + s.to(tl.int64) * position_strides[1]
        p = tl.load(position_ptrs, mask=in_rows, other=-1).to(tl.int64)
        in_table = in_table & ((p >= 0) & (p < table))[:, None]
    else:
        p = s.to(tl.int64)
    table_row = b * table_strides[0] + p * table_strides[1]
    table_offsets = tl.multiple_of(table_row, ALIGN)[:, None] + col * table_strides[2]
    UNMASKED: tl.constexpr = EVEN and BLOCK == HALF
    table_mask = None if UNMASKED and not HAS_POSITION else in_table
    outside = None if UNMASKED and not HAS_POSITION else float("nan")
    cos = tl.load(cos_ptr + table_offsets, mask=table_mask, other=outside).to(tl.float32)
    sin = tl.load(sin_ptr + table_offsets, mask=table_mask, other=outside).to(tl.float32) * sign

    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK)[None, :].to(tl.int64)
        mask = None if UNMASKED else in_rows[:, None] & (cols < 2 * HALF)
        x = tl.load(x_rows + cols * x_strides[3], mask=mask, eviction_policy=EVICTION)
        first, second = tl.split(tl.reshape(x, (ROWS, BLOCK, 2)).to(tl.float32))
        y = tl.join(first * cos - second * sin, second * cos + first * sin).to(y_ptr.dtype.element_ty)
        tl.store(y_rows + cols * y_strides[3], tl.reshape(y, (ROWS, 2 * BLOCK)), mask=mask)
    else:
        mask = None if UNMASKED else in_rows[:, None] & (col < HALF)
        first = tl.load(x_rows + col * x_strides[3], mask=mask, eviction_policy=EVICTION).to(tl.float32)
        second = tl.load(x_rows + (HALF + col) * x_strides[3], mask=mask, eviction_policy=EVICTION).to(tl.float32)
        y_first, y_second = first * cos - second * sin, second * cos + first * sin
        tl.store(y_rows + col * y_strides[3], y_first.to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(y_rows + (HALF + col) * y_strides[3], y_second.to(y_ptr.dtype.element_ty), mask=mask)

    if REST > 0:
        BLOCK_REST: tl.constexpr = triton.next_power_of_2(REST)
        cols = tl.arange(0, BLOCK_REST)[None, :].to(tl.int64)
        mask = None if EVEN and BLOCK_REST == REST else in_rows[:, None] & (cols < REST)
        rest = tl.load(x_rows + (2 * HALF + cols) * x_strides[3], mask=mask, eviction_policy=EVICTION)
        tl.store(y_rows + (2 * HALF + cols) * y_strides[3], rest, mask=mask)


@triton.jit(do_not_specialize=["seq", "table", "q_heads", "k_heads"])
def _rope_kernel(
    q_ptr,
    q_out_ptr,
    k_ptr,
    k_out_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    q_strides,
    q_out_strides,
    k_strides,
    k_out_strides,
    table_strides,
    position_strides,
    sign,
    seq,
    table,
    q_heads,
    k_heads,
    HAS_K: tl.constexpr,
    HAS_POSITION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    EVEN_Q: tl.constexpr,
    EVEN_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_HQ: tl.constexpr,
    BLOCK_HK: tl.constexpr,
    ALIGN: tl.constexpr,
    EVICTION: tl.constexpr,
):
    TOKENS: tl.constexpr = ROWS // (min(BLOCK_HQ, BLOCK_HK) if HAS_K else BLOCK_HQ)  # per group of tiles
    q_head_tiles = tl.cdiv(q_heads, BLOCK_HQ)
    q_tiles = q_head_tiles * (TOKENS * BLOCK_HQ // ROWS)
    tiles = q_tiles
    if HAS_K:
        k_head_tiles = tl.cdiv(k_heads, BLOCK_HK)
        tiles += k_head_tiles * (TOKENS * BLOCK_HK // ROWS)
    # A group consists of all tiles of q, then of k, for the same TOKENS tokens. Their CTAs have consecutive indices, so
    # that all but the first read the rows of the tables from a cache.
    tile = tl.program_id(0) % tiles
    group = tl.program_id(0) // tiles
    groups = (seq - 1) // TOKENS + 1  # tl.cdiv(seq, TOKENS) overflows 32 bits just below 2^31
    b = (group // groups).to(tl.int64)
    token = group % groups * TOKENS
    if tile < q_tiles or not HAS_K:
        _rope_tile(
            q_ptr,
            q_strides,
            q_out_ptr,
            q_out_strides,
            cos_ptr,
            sin_ptr,
            table_strides,
            position_ptr,
            position_strides,
            sign,
            b,
            token + tile // q_head_tiles * (ROWS // BLOCK_HQ),
            tile % q_head_tiles * BLOCK_HQ,
            seq,
            q_heads,
            table,
            HAS_POSITION,
            INTERLEAVED,
            HALF,
            REST,
            EVEN_Q,
            ROWS,
            BLOCK_HQ,
            ALIGN,
            EVICTION,
        )
    else:
        tile -= q_tiles
        _rope_tile(
            k_ptr,
            k_strides,
            k_out_ptr,
            k_out_strides,
            cos_ptr,
            sin_ptr,
            table_strides,
            position_ptr,
            position_strides,
            sign,
            b,
            token + tile // k_head_tiles * (ROWS // BLOCK_HK),
            tile % k_head_tiles * BLOCK_HK,
            seq,
            k_heads,
            table,
            HAS_POSITION,
            INTERLEAVED,
            HALF,
            REST,
            EVEN_K,
            ROWS,
            BLOCK_HK,
            ALIGN,
            EVICTION,
        )

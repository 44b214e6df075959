"""Rotary position embedding: the kernel, its configuration and its launcher.

Napkin maths, bf16, N elements in q and k together, one NVIDIA H200 that copies 4254 GB/s:
  forward   reads q and k, writes both rotated     4·N bytes   8 x 8192 x (32 + 32) x 128: 2.15 GB, 505 us
  backward  the same with their gradients          4·N bytes
The tables are read too: 2 MB each at 8192 positions, which L2 holds. 3 FLOPs an element are nothing beside that, so the
floor is that of a copy, and an element crosses the bus once each way in every layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

EVICT_LAST_BYTES = 100e6  # twice the L2 of an H100 or H200


@dataclass(frozen=True)
class Config:
    """A CTA for each tile of `rows` rows (a row is one head of one token): of q, `q_heads` heads of rows / q_heads
    tokens; of k, `k_heads` of rows / k_heads. `eviction` is the L2 policy of the loads of q and k."""

    rows: int
    q_heads: int
    k_heads: int
    num_warps: int
    eviction: str


def pick_config(
    batch: int,
    seq: int,
    heads: tuple[int, int],
    heads_outer: tuple[bool, bool],
    dims: tuple[int, int],
    dtype: torch.dtype,
    capability: tuple[int, int],
) -> Config:
    """Configuration for heads of q and of k (0: no k), which are `heads_outer` if they lie further apart in memory than
    the tokens. `dims` are the columns of a head that are rotated and those that are copied. Pure.

    From one run on one NVIDIA H200, GB/s, at 8 x 8192 tokens of 32 + 32 heads of 128, bf16 (a copy: 4247): evict_last,
    which lets the writes leave L2 early and in order, 4218; no hint 4036; evict_first 3825. With an earlier order of
    the tiles and no hint: 32 rows for 8 warps 3948, 64 3839; for 4 warps 16 rows 4038, 32 3916. Rows half as wide,
    205000 tokens of 8 + 8 heads of 64: 64 rows 4212, 32 3712.
    """
    # Both halves of a row are in flight at once, 16 elements a thread; a copied column needs half the registers.
    width = triton.next_power_of_2(dims[0]) + (triton.next_power_of_2(dims[1]) // 2 if dims[1] else 0)
    rows = min(128, 1 << ((4096 // width).bit_length() - 1))
    # Heads first, 4 x 4096 tokens of 32 + 32 heads: 4 heads by 8 tokens 3855, 1 by 32 3756, 32 by 1 less than 2200.
    # A tile has no more tokens than there are, or else most CTAs of the other tensor would find none.
    most, least = (4 if outer else rows for outer in heads_outer), rows // min(rows, triton.next_power_of_2(seq))
    q_heads, k_heads = (max(least, min(_tile_heads(n, rows), m)) for n, m in zip(heads, most, strict=True))
    eviction = "evict_last" if batch * seq * sum(heads) * sum(dims) * dtype.itemsize > EVICT_LAST_BYTES else ""
    return Config(rows, q_heads, k_heads, 8, eviction)


def _tile_heads(heads: int, rows: int) -> int:
    """The most heads, a power of two, in tiles of which at most an eighth of the rows is padding."""
    blocks = (1 << n for n in range(rows.bit_length() - 1, 0, -1))
    return next((block for block in blocks if 8 * (-heads % block) <= heads), 1)


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
    """ROWS / BLOCK_H tokens by BLOCK_H heads: y = x rotated by sign · angle."""
    BLOCK: tl.constexpr = triton.next_power_of_2(HALF)
    row = tl.arange(0, ROWS)
    s = first_s + row // BLOCK_H
    h = first_h + row % BLOCK_H
    in_rows = (s < seq) & (h < heads)
    x_row = b * x_strides[0] + s.to(tl.int64) * x_strides[1] + h.to(tl.int64) * x_strides[2]
    y_row = b * y_strides[0] + s.to(tl.int64) * y_strides[1] + h.to(tl.int64) * y_strides[2]
    x_rows = x_ptr + tl.multiple_of(x_row, ALIGN)[:, None]
    y_rows = y_ptr + tl.multiple_of(y_row, ALIGN)[:, None]

    # The tables have no dimension of heads, but are loaded in the shape of the rows: all but the first head of a token
    # find them in L1, and a thread gets the columns that it needs for the 16 bytes that it loads of x, neither more nor
    # less. Otherwise the compiler would bring the two together through shared memory.
    TOGETHER: tl.constexpr = (64 if INTERLEAVED else 128) // x_ptr.dtype.element_ty.primitive_bitwidth
    col = tl.max_contiguous(tl.arange(0, BLOCK), TOGETHER)[None, :].to(tl.int64)
    in_table = in_rows[:, None] & (col < HALF)
    if HAS_POSITION:
        position_ptrs = position_ptr + b * position_strides[0] + s.to(tl.int64) * position_strides[1]
        p = tl.load(position_ptrs, mask=in_rows, other=-1).to(tl.int64)
        in_table = in_table & ((p >= 0) & (p < table))[:, None]
    else:
        p = s.to(tl.int64)
    table_row = b * table_strides[0] + p * table_strides[1]
    table_offsets = tl.multiple_of(table_row, ALIGN)[:, None] + col * table_strides[2]
    WHOLE: tl.constexpr = EVEN and BLOCK == HALF
    table_mask = None if WHOLE and not HAS_POSITION else in_table
    outside = None if WHOLE and not HAS_POSITION else float("nan")
    cos = tl.load(cos_ptr + table_offsets, mask=table_mask, other=outside).to(tl.float32)
    sin = tl.load(sin_ptr + table_offsets, mask=table_mask, other=outside).to(tl.float32) * sign

    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK)[None, :].to(tl.int64)
        mask = None if WHOLE else in_rows[:, None] & (cols < 2 * HALF)
        x = tl.load(x_rows + cols * x_strides[3], mask=mask, eviction_policy=EVICTION)
        first, second = tl.split(tl.reshape(x, (ROWS, BLOCK, 2)).to(tl.float32))
        y = tl.join(first * cos - second * sin, second * cos + first * sin).to(y_ptr.dtype.element_ty)
        tl.store(y_rows + cols * y_strides[3], tl.reshape(y, (ROWS, 2 * BLOCK)), mask=mask)
    else:
        mask = None if WHOLE else in_rows[:, None] & (col < HALF)
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
    q_strides,
    q_out_ptr,
    q_out_strides,
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
    TOKENS: tl.constexpr = ROWS // (min(BLOCK_HQ, BLOCK_HK) if HAS_K else BLOCK_HQ)  # of a group of CTAs
    q_across = tl.cdiv(q_heads, BLOCK_HQ)
    q_tiles = q_across * (TOKENS * BLOCK_HQ // ROWS)
    tiles = q_tiles
    if HAS_K:
        k_across = tl.cdiv(k_heads, BLOCK_HK)
        tiles += k_across * (TOKENS * BLOCK_HK // ROWS)
    # The tiles of q and k of the same few tokens follow one another: all but the first find their tables in the cache.
    tile = tl.program_id(0) % tiles
    block = tl.program_id(0) // tiles
    blocks = tl.cdiv(seq, TOKENS)
    b = (block // blocks).to(tl.int64)
    token = block % blocks * TOKENS
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
            token + tile // q_across * (ROWS // BLOCK_HQ),
            tile % q_across * BLOCK_HQ,
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
            token + tile // k_across * (ROWS // BLOCK_HK),
            tile % k_across * BLOCK_HK,
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


def rope_into(
    q: torch.Tensor,
    q_out: torch.Tensor,
    k: torch.Tensor | None,
    k_out: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    interleaved: bool,
    inverse: bool,
) -> None:
    """Writes q and k rotated, by the negative angle if `inverse`, to q_out and k_out, which may be q and k themselves.

    q, k [B, S, heads, D], cos, sin [P, R / 2] or [B, S, R / 2], position_ids [S] or [B, S], as `op` has checked them.
    """
    batch, seq, heads, dim = q.shape
    half = cos.shape[-1]
    k_heads = 0 if k is None else k.shape[2]
    if not batch * seq * dim * (heads + k_heads):
        return
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    # Triton itself sees multiples of 16 alone, which those of a head dimension of 40, 72 or 80 are not.
    align = math.gcd(8, *(n for t in (q, q_out, k, k_out, cos) if t is not None for n in t.stride()[:-1]))
    rest = 0 if q_out is q else dim - 2 * half  # in place, what is not rotated is where it belongs
    heads_outer = (q.stride(2) > q.stride(1), k is not None and k.stride(2) > k.stride(1))
    with torch.cuda.device_of(q):
        # The interpreter stands for an sm_80.
        capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (8, 0)
        config = pick_config(batch, seq, (heads, k_heads), heads_outer, (2 * half, rest), q.dtype, capability)
        # A group of CTAs has the tokens of that of the two tiles which has more.
        tokens = config.rows // (config.q_heads if k is None else min(config.q_heads, config.k_heads))
        padded = sum(-(-n // block) * block for n, block in ((heads, config.q_heads), (k_heads, config.k_heads)))
        tiles = padded * tokens // config.rows
        _rope_kernel[(tiles * batch * triton.cdiv(seq, tokens),)](
            q,
            q.stride(),
            q_out,
            q_out.stride(),
            k,
            None if k is None else k.stride(),
            k_out,
            None if k_out is None else k_out.stride(),
            cos,
            sin,
            _with_batch(cos, 3),
            position_ids,
            None if position_ids is None else _with_batch(position_ids, 2),
            -1.0 if inverse else 1.0,
            seq,
            cos.shape[-2],
            heads,
            k_heads,
            HAS_K=k is not None,
            HAS_POSITION=position_ids is not None,
            INTERLEAVED=interleaved,
            HALF=half,
            REST=rest,
            EVEN_Q=seq % tokens == 0 and heads % config.q_heads == 0,
            EVEN_K=seq % tokens == 0 and k_heads % config.k_heads == 0,
            ROWS=config.rows,
            BLOCK_HQ=config.q_heads,
            BLOCK_HK=config.k_heads,
            ALIGN=align,
            EVICTION=config.eviction,
            num_warps=config.num_warps,
        )


def _with_batch(tensor: torch.Tensor, dims: int) -> tuple[int, ...]:
    """The strides, with 0 for a dimension of the batch that is missing or 1."""
    strides = tensor.stride()
    if tensor.dim() < dims:
        return (0, *strides)
    return (0, *strides[1:]) if tensor.shape[0] == 1 else strides

"""One scale per row: a row remains in registers between the reduction and the store, so x is read once.

Estimate, bf16, R rows of D, one NVIDIA H200 that copies 4254 GB/s: 2 bytes per element read, 1 written.
65536 x 4096: 805 MB, 189 us. An element needs about five instructions (unpack, 0·x + x, max, multiplication, half a
conversion), and four bytes per element would leave time for twenty.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .formats import encode, finite_or_nan, inverse, scale_of, store_scale


@triton.jit(do_not_specialize=["rows"])
def _fp8_row_kernel(
    x_ptr,
    data_ptr,
    scale_ptr,
    rows,
    dim,
    stride_xm,
    E4M3: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVICTION: tl.constexpr,
):
    cols = tl.arange(0, BLOCK_N)
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    # Without a mask the loads and stores need no predicates and fewer registers.
    mask = None if EVEN else (row < rows)[:, None] & (cols < dim)[None, :]
    other = None if EVEN else 0.0
    x = tl.load(x_ptr + row[:, None] * stride_xm + cols[None, :], mask=mask, other=other, eviction_policy=EVICTION)
    x = finite_or_nan(x)
    scale = scale_of(tl.max(tl.abs(x), axis=1), E4M3, POW2)
    bits = encode(x * inverse(scale, POW2)[:, None], E4M3, NATIVE)
    tl.store(data_ptr + row[:, None] * dim + cols[None, :], bits, mask=mask)
    store_scale(scale_ptr + row, scale, row < rows)


@triton.jit
def _fp8_odd_row_kernel(
    x_ptr,
    data_ptr,
    scale_ptr,
    dim,
    E4M3: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """One CTA per row, for contiguous rows that are not aligned to 16 elements. Between the row's first and last
    boundary x and data are accessed as vectors; up to 15 elements before and after are accessed one by one."""
    begin = tl.program_id(0).to(tl.int64) * dim
    end = begin + dim
    first, last = (begin + 15) // 16 * 16, end // 16 * 16
    cols, side = tl.arange(0, BLOCK_N), tl.arange(0, 32)
    inner = cols < (last - first).to(tl.int32)
    at = tl.where(side < 16, first, last) - 16 + side
    outer = (at >= begin) & (at < end) & ((side < 16) | (at >= first))
    x = finite_or_nan(tl.load(x_ptr + first + cols, mask=inner, other=0.0, eviction_policy=EVICTION))
    y = finite_or_nan(tl.load(x_ptr + at, mask=outer, other=0.0, eviction_policy=EVICTION))
    amax, amax_outer = tl.max(tl.abs(x)), tl.max(tl.abs(y))
    amax = tl.where(amax >= amax_outer, amax, tl.where(amax_outer >= 0, amax_outer, amax))  # either may be NaN
    scale = scale_of(amax, E4M3, POW2)
    inv = inverse(scale, POW2)
    tl.store(data_ptr + first + cols, encode(x * inv, E4M3, NATIVE), mask=inner)
    tl.store(data_ptr + at, encode(y * inv, E4M3, NATIVE), mask=outer)
    store_scale(scale_ptr + tl.program_id(0), scale, None)


@triton.jit(do_not_specialize=["rows"])
def _fp8_wide_row_kernel(
    x_ptr,
    data_ptr,
    scale_ptr,
    rows,
    dim,
    stride_xm,
    E4M3: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """For rows too wide for registers: a row is read in chunks, twice, the second time from L2."""
    tl.static_assert(BLOCK_M == 1)
    row = tl.program_id(0).to(tl.int64)
    # Columns are counted from -BLOCK_N to dim - BLOCK_N: just below 2^31 the end of the last chunk exceeds 32 bits.
    stop = dim - BLOCK_N
    x_ptr += row * stride_xm + BLOCK_N
    data_ptr += row * dim + BLOCK_N
    largest = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(-BLOCK_N, stop, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = None if EVEN else cols < stop
        other = None if EVEN else 0.0
        x = tl.load(x_ptr + cols, mask=mask, other=other, eviction_policy=EVICTION)
        largest = tl.maximum(largest, tl.abs(finite_or_nan(x)))
    scale = scale_of(tl.max(largest), E4M3, POW2)
    inv = inverse(scale, POW2)
    for start in range(-BLOCK_N, stop, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = None if EVEN else cols < stop
        other = None if EVEN else 0.0
        x = tl.load(x_ptr + cols, mask=mask, other=other, eviction_policy="evict_first")
        tl.store(data_ptr + cols, encode(finite_or_nan(x) * inv, E4M3, NATIVE), mask=mask)
    store_scale(scale_ptr + row, scale, row < rows)

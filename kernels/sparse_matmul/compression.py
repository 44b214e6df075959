"""Compression of a weight with 2:4 sparsity and decompression, in Triton.

Back-of-the-envelope estimate, [8192, 8192] in bf16: 134 MB are read, 67 MB of values and 8.4 MB of metadata written,
49 us on an H200 (4254 GB/s). One pass; a CTA writes whole blocks of metadata, so that a cache line is written by one
CTA.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernel import _codes, _kept, _places, _weight_tile, _word_of_columns, _word_of_row


def _table() -> int:
    """4 bits for each pattern of non-zeros in a chunk (bit p: element p): the positions of the first two, completed by
    the lowest other positions."""
    table = 0
    for pattern in range(16):
        order = sorted(range(4), key=lambda p: (not pattern >> p & 1, p))
        i, j = sorted(order[:2])
        table |= (i | j << 2) << 4 * pattern
    return table


CODES = tl.constexpr(_table())


@triton.jit
def _not_zero(x):
    """Whether elements differ from zero. A byte is an fp8 value, whose highest bit is the sign."""
    if x.dtype == tl.uint8:
        x = x & 0x7F
    return x != 0


@triton.jit
def _sparse_matmul_compress_kernel(
    w_ptr, values_ptr, metadata_ptr, n_size, depth, stride_wn, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Compresses w to values [N, K / 2] and metadata; fp8 is uint8. Metadata out of bounds has the code of zeros."""
    tiles_k = tl.cdiv(depth, BLOCK_K)
    n = tl.program_id(0) // tiles_k * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(0) % tiles_k * BLOCK_K
    k = first + tl.arange(0, BLOCK_K)
    row = n.to(tl.int64)[:, None]
    w = tl.load(w_ptr + row * stride_wn + k[None, :], mask=(n < n_size)[:, None] & (k < depth)[None, :], other=0.0)
    w0, w1, w2, w3 = _places(w, BLOCK_N, BLOCK_K)
    pattern = _not_zero(w0).to(tl.int64) + _not_zero(w1) * 2 + _not_zero(w2) * 4 + _not_zero(w3) * 8
    code = ((tl.full([BLOCK_N, BLOCK_K // 4], CODES, tl.int64) >> (pattern * 4)) & 15).to(tl.int32)
    half = first // 2 + tl.arange(0, BLOCK_K // 2)
    mask = (n < n_size)[:, None] & (half < depth // 2)[None, :]
    tl.store(values_ptr + row * (depth // 2) + half[None, :], _kept(w, code, BLOCK_N, BLOCK_K), mask=mask)
    codes = tl.reshape(code, [BLOCK_N, BLOCK_K // 16, 4]) << (tl.arange(0, 4) * 4)[None, None, :]
    words = tl.sum(codes, 2)
    sixteenth = first // 16 + tl.arange(0, BLOCK_K // 16)
    block = (sixteenth // 4).to(tl.int64)[None, :] * tl.cdiv(n_size, 16) + (n // 16)[:, None]
    EIGHT: tl.constexpr = w_ptr.dtype.element_ty == tl.uint8
    word = _word_of_row(n, EIGHT)[:, None] + _word_of_columns(sixteenth % 4, EIGHT)[None, :]
    there = (n < tl.cdiv(n_size, 16) * 16)[:, None] & (sixteenth < tl.cdiv(depth, 64) * 4)[None, :]
    tl.store(metadata_ptr + block * 64 + word, words.to(tl.int16), mask=there)


@triton.jit
def _sparse_matmul_prune_kernel(
    w_ptr, out_ptr, mask_ptr, size, SIGN_OFF: tl.constexpr, NAN: tl.constexpr, BLOCK: tl.constexpr
):
    """Keeps the two largest magnitudes of each chunk of 4 of `size` elements, and writes the mask. Elements are loaded
    as integers: without the sign bit they are ordered as the magnitudes, and every NaN is replaced by NAN. Reads and
    writes 2 · itemsize + 1 bytes per element."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(w_ptr + at, mask=at < size, other=0)
    even, odd = tl.split(tl.reshape(tl.minimum(x & SIGN_OFF, NAN), [BLOCK // 4, 2, 2]))
    m0, m2 = tl.split(even)
    m1, m3 = tl.split(odd)
    # Counts the elements that precede each one: larger, or equal at a lower position.
    ahead0 = (m1 > m0).to(tl.int32) + (m2 > m0).to(tl.int32) + (m3 > m0).to(tl.int32)
    ahead1 = (m0 >= m1).to(tl.int32) + (m2 > m1).to(tl.int32) + (m3 > m1).to(tl.int32)
    ahead2 = (m0 >= m2).to(tl.int32) + (m1 >= m2).to(tl.int32) + (m3 > m2).to(tl.int32)
    ahead3 = (m0 >= m3).to(tl.int32) + (m1 >= m3).to(tl.int32) + (m2 >= m3).to(tl.int32)
    kept = tl.reshape(tl.join(tl.join(ahead0, ahead2), tl.join(ahead1, ahead3)), [BLOCK]) < 2
    tl.store(out_ptr + at, tl.where(kept, x, tl.zeros_like(x)), mask=at < size)
    tl.store(mask_ptr + at, kept.to(tl.uint8), mask=at < size)


@triton.jit
def _sparse_matmul_gather_kernel(
    dense_ptr, metadata_ptr, values_ptr, n_size, depth, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """values [N, K / 2]: the elements of a dense [N, K] at the kept positions."""
    tiles_k = tl.cdiv(depth, BLOCK_K)
    n = tl.program_id(0) // tiles_k * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(0) % tiles_k * BLOCK_K
    k, row = first + tl.arange(0, BLOCK_K), n.to(tl.int64)[:, None]
    inside = (n < n_size)[:, None] & (k < depth)[None, :]
    dense = tl.load(dense_ptr + row * depth + k[None, :], mask=inside, other=0.0)
    code = _codes(metadata_ptr, n, first // 4 + tl.arange(0, BLOCK_K // 4), n_size, depth // 4)
    half = first // 2 + tl.arange(0, BLOCK_K // 2)
    mask = (n < n_size)[:, None] & (half < depth // 2)[None, :]
    tl.store(values_ptr + row * (depth // 2) + half[None, :], _kept(dense, code, BLOCK_N, BLOCK_K), mask=mask)


@triton.jit
def _sparse_matmul_decompress_kernel(
    values_ptr, metadata_ptr, w_ptr, n_size, depth, stride_vn, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Decompresses values and metadata to the weight [N, K]."""
    tiles_k = tl.cdiv(depth, BLOCK_K)
    n = tl.program_id(0) // tiles_k * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(0) % tiles_k * BLOCK_K
    k = first + tl.arange(0, BLOCK_K)
    w = _weight_tile(values_ptr, metadata_ptr, n, first, n_size, depth, stride_vn, BLOCK_N, BLOCK_K)
    at = n.to(tl.int64)[:, None] * depth + k[None, :]
    tl.store(w_ptr + at, w, mask=(n < n_size)[:, None] & (k < depth)[None, :])

"""x [M, K] times 4-bit w [N, K], transposed. w is unpacked in registers.

Back-of-the-envelope estimate, bf16, N = K = 8192, one NVIDIA H200 (4254 GB/s, 790 TFLOP/s by a measured GEMM):

    M       bytes of w and scales   of x and y   reading   computing
    1              35.7 MB            32 KB       8.4 us
    16             35.7 MB            0.5 MB      8.5 us     2.7 us
    64             35.7 MB            2.1 MB      8.9 us      11 us
    1024           35.7 MB            34 MB        16 us     174 us

nvfp4 has two bytes more per 32 elements: 37.7 MB. With few rows this kernel is bound by the unpacking; sm90/ has CUDA
C++ for them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pair(q, NUMBER: tl.constexpr):
    """Moves one of the four pairs of weights of each word to the bit positions that `decode` reads."""
    if NUMBER == 0:
        return q
    if NUMBER == 1:
        return q << 6
    if NUMBER == 2:
        return (q << 3) ^ (q << 5)
    return (q >> 6) ^ (q << 4)


@triton.jit
def decode(pairs, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Converts pairs [ROWS, BLOCK_K / 2] to fp32 [ROWS, BLOCK_K]. As fp32 bits the values are too small by 2^126."""
    bits = tl.join(pairs << 16, pairs) & -0x7E400000  # keeps bits 31 and 24 to 22
    return tl.reshape(bits.to(tl.float32, bitcast=True) * (2.0**126), [ROWS, BLOCK_K])


@triton.jit
def decode_scale(code, E8M0: tl.constexpr):
    """Converts the byte of a scale, in an int32, to fp32."""
    if E8M0:
        bits = tl.where(code == 0, 1 << 22, tl.where(code == 255, 0x7FC00000, code << 23))  # 2^-127, NaN
    else:
        bits = tl.where(code == 255, 0x7FC00000, (code << 20) + (105 << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def scaled(pairs, scale, E8M0: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Decodes pairs and applies their scales: fp32 [ROWS, BLOCK_K]. `scale` has one byte per block of a row."""
    SCALES: tl.constexpr = scale.shape[1]
    blocks = tl.reshape(decode(pairs, ROWS, BLOCK_K), [ROWS, SCALES, BLOCK_K // SCALES])
    return tl.reshape(blocks * decode_scale(scale, E8M0)[:, :, None], [ROWS, BLOCK_K])


@triton.jit
def words_of(chunk, tiles, half_row, at, BLOCK_K: tl.constexpr):
    """The offsets of an iteration's words. They contain rows 16 (half_row // 8) + half_row % 8 and the rows 8 further,
    and columns 16 i to 16 i + 15 of the chunk, at // 8 <= i < (at + BLOCK_K) // 8."""
    word = tl.arange(0, BLOCK_K // 2)
    i = at // 8 + word // 4
    row = ((chunk * tiles + half_row // 8) * 256 + half_row % 8 * 16)[:, None]
    return row + (i // 4 * 128 + word % 4 * 4 + i % 4)[None, :]


@triton.jit
def columns_of(chunk, at, BLOCK_K: tl.constexpr):
    """The indices along K of the first two pairs of an iteration's words; those of the other two are 8 larger."""
    e = tl.arange(0, BLOCK_K)
    return chunk * 128 + at * 2 + e // 8 * 16 + e % 8


@triton.jit
def tile_of(rows, columns, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The row and column of this CTA's tile, in grouped tile order: GROUP_M vertically adjacent tiles, then the next
    column."""
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    tile = tl.program_id(0)
    first = tile // (GROUP_M * tiles_n) * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    inside = tile % (GROUP_M * tiles_n)
    return first + inside % height, inside // height


@triton.jit(do_not_specialize=["rows"])
def _mxfp_matmul_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    tensor_scale_ptr,
    y_ptr,
    rows,
    columns,
    chunks,
    stride_xm,
    E8M0: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y [rows, columns] in its dtype, from x padded to whole chunks. With SPLITS > 1 y is an fp32 workspace [SPLITS,
    rows, columns], which another kernel reduces and scales.

    An iteration processes 2 BLOCK_K elements of a chunk: BLOCK_K in two pairs of each word and BLOCK_K in the other
    two. In each two, one pair belongs to the lower and one to the upper 8 rows of a tile of 16."""
    STEPS: tl.constexpr = 64 // BLOCK_K  # iterations per chunk
    SCALES: tl.constexpr = BLOCK_K * 2 // BLOCK
    ROWS: tl.constexpr = BLOCK_N // 2
    tile_m, tile_n = tile_of(rows, columns, GROUP_M, BLOCK_M, BLOCK_N)
    split = tl.program_id(1)
    tiles = tl.cdiv(columns, 16)
    each = tl.cdiv(chunks, SPLITS)
    first = split * each
    last = tl.minimum(first + each, chunks)
    m, half_row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), (tile_n * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    n, s = half_row // 8 * 16 + half_row % 8, tl.arange(0, SCALES)
    there_m, there, there_up = (m < rows)[:, None], (n < columns)[:, None], (n + 8 < columns)[:, None]
    x_row = x_ptr + m.to(tl.int64)[:, None] * stride_xm
    words = w_ptr.to(tl.pointer_type(tl.int32))
    acc = tl.zeros([BLOCK_M, ROWS], dtype=tl.float32)
    acc_up = tl.zeros([BLOCK_M, ROWS], dtype=tl.float32)
    for step in range(first * STEPS, last * STEPS):
        chunk, at = step // STEPS, step % STEPS * BLOCK_K
        k = columns_of(chunk, at, BLOCK_K)
        q = tl.load(words + words_of(chunk, tiles, half_row, at, BLOCK_K), mask=there, other=0)
        scales = scale_ptr + (chunk * columns + n)[:, None] * (128 // BLOCK) + at * 2 // BLOCK + s[None, :]
        scale = tl.load(scales, mask=there, other=0).to(tl.int32)
        scale_up = tl.load(scales + 8 * (128 // BLOCK), mask=there_up, other=0).to(tl.int32)
        x = tl.load(x_row + k[None, :], mask=there_m, other=0.0)
        x_2 = tl.load(x_row + k[None, :] + 8, mask=there_m, other=0.0)
        weights = scaled(pair(q, 0), scale, E8M0, ROWS, BLOCK_K).to(x.dtype)
        acc = tl.dot(x, tl.trans(weights), acc, input_precision="ieee")
        weights = scaled(pair(q, 1), scale_up, E8M0, ROWS, BLOCK_K).to(x.dtype)
        acc_up = tl.dot(x, tl.trans(weights), acc_up, input_precision="ieee")
        weights = scaled(pair(q, 2), scale, E8M0, ROWS, BLOCK_K).to(x.dtype)
        acc = tl.dot(x_2, tl.trans(weights), acc, input_precision="ieee")
        weights = scaled(pair(q, 3), scale_up, E8M0, ROWS, BLOCK_K).to(x.dtype)
        acc_up = tl.dot(x_2, tl.trans(weights), acc_up, input_precision="ieee")
    if tensor_scale_ptr is not None and SPLITS == 1:
        acc *= tl.load(tensor_scale_ptr)
        acc_up *= tl.load(tensor_scale_ptr)
    to = y_ptr + (split.to(tl.int64) * rows + m)[:, None] * columns + n[None, :]
    tl.store(to, acc.to(y_ptr.dtype.element_ty), mask=there_m & (n < columns)[None, :])
    tl.store(to + 8, acc_up.to(y_ptr.dtype.element_ty), mask=there_m & (n + 8 < columns)[None, :])


@triton.jit
def _mxfp_matmul_sum_kernel(partial_ptr, tensor_scale_ptr, y_ptr, count, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Reduces fp32 split-K partitions [SPLITS, count], in order, to y [count], and applies the tensor scale."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial_ptr + split * count + at, mask=at < count, other=0.0)
    if tensor_scale_ptr is not None:
        total *= tl.load(tensor_scale_ptr)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=at < count)


@triton.jit
def _mxfp_matmul_dense_kernel(
    w_ptr, scale_ptr, out_ptr, columns, depth, E8M0: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Unpacks the weights to [columns, depth] in the dtype of `out`, without the tensor scale. A CTA processes BLOCK_N
    rows of a chunk."""
    ROWS: tl.constexpr = BLOCK_N // 2
    blocks, tiles = tl.cdiv(columns, BLOCK_N), tl.cdiv(columns, 16)
    chunk = (tl.program_id(0) // blocks).to(tl.int64)
    half_row = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    n, s = half_row // 8 * 16 + half_row % 8, tl.arange(0, 128 // BLOCK)
    words = w_ptr.to(tl.pointer_type(tl.int32)) + words_of(chunk, tiles, half_row, 0, 64)
    q = tl.load(words, mask=(n < columns)[:, None], other=0)
    k = columns_of(chunk, 0, 64)[None, :]
    for up in tl.static_range(2):
        row = n + 8 * up
        there = (row < columns)[:, None]
        scales = scale_ptr + (chunk * columns + row)[:, None] * (128 // BLOCK) + s[None, :]
        scale = tl.load(scales, mask=there, other=0).to(tl.int32)
        to = out_ptr + row.to(tl.int64)[:, None] * depth + k
        weights = scaled(pair(q, up), scale, E8M0, ROWS, 64)
        tl.store(to, weights.to(out_ptr.dtype.element_ty), mask=there & (k < depth))
        weights = scaled(pair(q, 2 + up), scale, E8M0, ROWS, 64)
        tl.store(to + 8, weights.to(out_ptr.dtype.element_ty), mask=there & (k + 8 < depth))

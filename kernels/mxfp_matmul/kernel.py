"""x [M, K] times w [N, K] transposed, w of 4 bits and unpacked in registers.

Napkin maths, bf16, N = K = 8192, one NVIDIA H200 (4254 GB/s, 790 TFLOP/s of a measured product):

    M       bytes of w and scales   of x and y   reading   computing
    1              35.7 MB            32 KB       8.4 us
    16             35.7 MB            0.5 MB      8.5 us     2.7 us
    64             35.7 MB            2.1 MB      8.9 us      11 us
    1024           35.7 MB            34 MB        16 us     174 us

nvfp4 has two bytes more for each 32 elements: 37.7 MB. Unpacking is about seven instructions an element: at M = 1 it is
what the time is made of, for reading leaves time for three.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode(code):
    """fp32 of e2m1 in the lowest bits of an int32. As the bits of fp32 it is too small by 2^126 alone."""
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * (2.0**126)


@triton.jit
def decode_scale(code, E8M0: tl.constexpr):
    """fp32 of the byte of a scale in an int32."""
    if E8M0:
        bits = tl.where(code == 0, 1 << 22, tl.where(code == 255, 0x7FC00000, code << 23))  # 2^-127, NaN
        return bits.to(tl.float32, bitcast=True)
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    value = bits.to(tl.float32, bitcast=True) * (2.0**120)
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def scaled(codes, scale, E8M0: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """BLOCK_N rows of BLOCK_K elements, transposed: fp32. `scale` has as many bytes a row as their elements share."""
    SCALES: tl.constexpr = scale.shape[1]
    blocks = tl.reshape(decode(codes), [BLOCK_N, SCALES, BLOCK_K // SCALES])
    return tl.trans(tl.reshape(blocks * decode_scale(scale, E8M0)[:, :, None], [BLOCK_N, BLOCK_K]))


@triton.jit
def tile_of(rows, columns, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """This CTA's row and column of tiles: GROUP_M tiles of rows for one column, then those for the next."""
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
    depth,
    stride_xm,
    E8M0: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y [rows, columns] in its dtype; with SPLITS > 1 y is fp32 [SPLITS, rows, columns], to be summed and scaled.
    A step is BLOCK_K elements of the lower half of a chunk and as many of the upper."""
    HALF: tl.constexpr = 64
    STEPS: tl.constexpr = HALF // BLOCK_K  # of a chunk
    SCALES: tl.constexpr = 1 if BLOCK_K < BLOCK else BLOCK_K // BLOCK
    tile_m, tile_n = tile_of(rows, columns, GROUP_M, BLOCK_M, BLOCK_N)
    split = tl.program_id(1)
    chunks = tl.cdiv(depth, 2 * HALF)
    each = tl.cdiv(chunks, SPLITS)
    first = split * each
    last = tl.minimum(first + each, chunks)
    m, n = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k, s = tl.arange(0, BLOCK_K), tl.arange(0, SCALES)
    there_m, there_n = (m < rows)[:, None], (n < columns)[:, None]
    x_row = x_ptr + m.to(tl.int64)[:, None] * stride_xm
    n_wide = n.to(tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for step in range(first * STEPS, last * STEPS):
        chunk, at = step // STEPS, step % STEPS * BLOCK_K
        row = (chunk * columns + n_wide)[:, None]
        low_k = chunk * (2 * HALF) + at + k
        high_k = low_k + HALF
        low_mask = there_m if EVEN_K else there_m & (low_k < depth)[None, :]
        high_mask = there_m if EVEN_K else there_m & (high_k < depth)[None, :]
        packed = tl.load(w_ptr + row * HALF + at + k[None, :], mask=there_n, other=0).to(tl.int32)
        scales = scale_ptr + row * (2 * HALF // BLOCK) + at // BLOCK + s[None, :]
        low_scale = tl.load(scales, mask=there_n, other=0).to(tl.int32)
        high_scale = tl.load(scales + HALF // BLOCK, mask=there_n, other=0).to(tl.int32)
        low = tl.load(x_row + low_k[None, :], mask=low_mask, other=0.0)
        high = tl.load(x_row + high_k[None, :], mask=high_mask, other=0.0)
        w_low = scaled(packed & 0xF, low_scale, E8M0, BLOCK_N, BLOCK_K).to(low.dtype)
        acc = tl.dot(low, w_low, acc, input_precision="ieee")
        w_high = scaled(packed >> 4, high_scale, E8M0, BLOCK_N, BLOCK_K).to(high.dtype)
        acc = tl.dot(high, w_high, acc, input_precision="ieee")
    if tensor_scale_ptr is not None and SPLITS == 1:
        acc *= tl.load(tensor_scale_ptr)
    at = y_ptr + (split.to(tl.int64) * rows + m)[:, None] * columns + n[None, :]
    tl.store(at, acc.to(y_ptr.dtype.element_ty), mask=there_m & (n < columns)[None, :])


@triton.jit
def _mxfp_matmul_sum_kernel(partial_ptr, tensor_scale_ptr, y_ptr, count, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the parts, in their order, times the tensor's scale. [SPLITS, count] in fp32 to [count]."""
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
    """The weights [columns, depth] in the dtype of `out`, without the tensor's scale. A CTA takes BLOCK_N rows of a
    chunk."""
    HALF: tl.constexpr = 64
    tiles = tl.cdiv(columns, BLOCK_N)
    chunk = (tl.program_id(0) // tiles).to(tl.int64)
    n = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    k, s, there = tl.arange(0, HALF), tl.arange(0, HALF // BLOCK), (n < columns)[:, None]
    row = (chunk * columns + n)[:, None]
    packed = tl.load(w_ptr + row * HALF + k[None, :], mask=there, other=0).to(tl.int32)
    scales = scale_ptr + row * (2 * HALF // BLOCK) + s[None, :]
    low_scale = tl.load(scales, mask=there, other=0).to(tl.int32)
    high_scale = tl.load(scales + HALF // BLOCK, mask=there, other=0).to(tl.int32)
    low = tl.trans(scaled(packed & 0xF, low_scale, E8M0, BLOCK_N, HALF))
    high = tl.trans(scaled(packed >> 4, high_scale, E8M0, BLOCK_N, HALF))
    at = chunk * (2 * HALF) + k[None, :]
    to = out_ptr + n.to(tl.int64)[:, None] * depth + at
    tl.store(to, low.to(out_ptr.dtype.element_ty), mask=there & (at < depth))
    tl.store(to + HALF, high.to(out_ptr.dtype.element_ty), mask=there & (at + HALF < depth))

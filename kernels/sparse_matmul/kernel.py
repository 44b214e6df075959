"""x [M, K] times a weight [N, K] of 2:4 sparsity, transposed: the GEMMs in Triton.

Back-of-the-envelope estimate, bf16, one NVIDIA H200 (4254 GB/s; 790 TFLOP/s by a measured dense GEMM, with sparsity at
most twice that):

  M x K x N              FLOPs, dense   bytes (w: 9/16)   reading   computing, dense   sparse
  4096 x 4096 x 4096     137 GFLOP         86 MB           20 us        174 us          87 us
  8192 x 8192 x 8192     1.10 TFLOP       344 MB           81 us       1392 us         696 us
  4096 x 4096 x 11008    369 GFLOP        174 MB           41 us        467 us         234 us

Here the weight is decompressed in registers for a dense GEMM, which saves bytes of the weight but no FLOPs. In the
backward no operand is sparse along the summed dimension, so both GEMMs are dense.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import _activation, _activation_and_gradient

# The order of parameters is tensors, then integers, then constexprs, as `Launch` requires.


@triton.jit
def _tile_of(tiles_m, tiles_n, GROUP: tl.constexpr):
    """The row and column of this CTA's tile. Grouped tile order, for L2: GROUP vertically adjacent tiles, then the next
    column."""
    band = GROUP * tiles_n
    first = tl.program_id(0) // band * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    inside = tl.program_id(0) % band
    return first + inside % height, inside // height


@triton.jit
def _word_of_row(n, EIGHT: tl.constexpr):
    """The first word in a block with codes of rows n, in the order of formats.py. EIGHT: values have 8 bits."""
    if EIGHT:
        word = n % 8 * 8 + n % 16 // 8 * 2
    else:
        word = n % 8 * 8 + n % 16 // 8
    return word


@triton.jit
def _word_of_columns(sixteenth, EIGHT: tl.constexpr):
    """The offset from the first word of a row to the word of each 16 of the block's 64 of K, numbered 0 to 3."""
    if EIGHT:
        word = sixteenth // 2 * 4 + sixteenth % 2
    else:
        word = sixteenth * 2
    return word


@triton.jit
def _codes(metadata_ptr, n, chunk, rows, chunks, EIGHT: tl.constexpr = False):
    """Loads the codes of these chunks of rows n of the weight, 0 out of bounds. EIGHT: values have 8 bits."""
    block = (chunk // 16).to(tl.int64)[None, :] * tl.cdiv(rows, 16) + (n // 16)[:, None]
    word = _word_of_row(n, EIGHT)[:, None] + _word_of_columns(chunk % 16 // 4, EIGHT)[None, :]
    inside = (n < rows)[:, None] & (chunk < chunks)[None, :]
    words = tl.load(metadata_ptr + block * 64 + word, mask=inside, other=0).to(tl.int32)
    return (words >> (chunk % 4 * 4)[None, :]) & 15


@triton.jit
def _weight_tile(
    values_ptr, metadata_ptr, n, first, rows, depth, stride_vn, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Loads and decompresses a tile of the weight [BLOCK_N, BLOCK_K], rows n and columns from `first` on, with zeros
    out of bounds. fp8 values are bytes, and so is their tile."""
    EIGHT: tl.constexpr = values_ptr.dtype.element_ty == tl.uint8
    half = first // 2 + tl.arange(0, BLOCK_K // 2)
    inside = (n < rows)[:, None] & (half < depth // 2)[None, :]
    values = tl.load(values_ptr + n.to(tl.int64)[:, None] * stride_vn + half[None, :], mask=inside, other=0.0)
    a, b = tl.split(tl.reshape(values, [BLOCK_N, BLOCK_K // 4, 2]))
    code = _codes(metadata_ptr, n, first // 4 + tl.arange(0, BLOCK_K // 4), rows, depth // 4, EIGHT)
    zero = tl.zeros([BLOCK_N, BLOCK_K], values.dtype)
    # The selection is on the whole tile. If a reshape (of four joined parts) came last and wgmma read the tile from
    # shared memory, Triton 3.6's compiler would fail ("PassManager::run failed").
    place = (tl.arange(0, BLOCK_K) % 4)[None, :]
    second = tl.where(_four_times(code >> 2) == place, _four_times(b), zero)
    return tl.where(_four_times(code & 3) == place, _four_times(a), second)


@triton.jit
def _four_times(x):
    """Repeats each element four times: [N, C] to [N, 4 * C]."""
    wide = tl.broadcast_to(x[:, :, None], [x.shape[0], x.shape[1], 4])
    return tl.reshape(wide, [x.shape[0], 4 * x.shape[1]])


@triton.jit
def _places(x, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The elements at positions 0 to 3 of each chunk of x, [BLOCK_N, BLOCK_K / 4] each."""
    even, odd = tl.split(tl.reshape(x, [BLOCK_N, BLOCK_K // 4, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _kept(x, code, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The two elements of each chunk of x that its code selects, [BLOCK_N, BLOCK_K / 2]."""
    x0, x1, x2, x3 = _places(x, BLOCK_N, BLOCK_K)
    i, j = code & 3, code >> 2
    a = tl.where(i == 0, x0, tl.where(i == 1, x1, x2))
    b = tl.where(j == 1, x1, tl.where(j == 2, x2, x3))
    return tl.reshape(tl.join(a, b), [BLOCK_N, BLOCK_K // 2])


@triton.jit
def _sparse_matmul_fwd_kernel(
    x_ptr,
    values_ptr,
    metadata_ptr,
    bias_ptr,
    y_ptr,
    z_ptr,
    m_size,
    n_size,
    depth,
    stride_xm,
    stride_vn,
    stride_bias,
    ACTIVATION: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y [M, N] = act(z), z = x · wᵀ + bias. z is also stored unless z_ptr is None."""
    tile_m, tile_n = _tile_of(tl.cdiv(m_size, BLOCK_M), tl.cdiv(n_size, BLOCK_N), GROUP)
    m, n, k = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    x_row = x_ptr + m.to(tl.int64)[None, :] * stride_xm
    # The weight is the A operand, which wgmma can read from registers, where it is decompressed.
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for first in tl.range(0, depth, BLOCK_K):
        inside = (first + k < depth)[:, None] & (m < m_size)[None, :]
        x = tl.load(x_row + (first + k)[:, None], mask=inside, other=0.0)
        w = _weight_tile(values_ptr, metadata_ptr, n, first, n_size, depth, stride_vn, BLOCK_N, BLOCK_K)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    acc = tl.trans(acc)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + n.to(tl.int64) * stride_bias, mask=n < n_size, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    at = m.to(tl.int64)[:, None] * n_size + n[None, :]
    stored = (m < m_size)[:, None] & (n < n_size)[None, :]
    if z_ptr is not None:
        tl.store(z_ptr + at, acc.to(z_ptr.dtype.element_ty), mask=stored)
    if ACTIVATION is not None:
        acc = _activation(acc, ACTIVATION)
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _sparse_matmul_activation_kernel(z_ptr, y_ptr, count, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """y = act(z) for `count` elements; y may be z."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(z_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, _activation(z, ACTIVATION).to(y_ptr.dtype.element_ty), mask=at < count)


@triton.jit
def _sparse_matmul_dz_kernel(
    dy_ptr, z_ptr, dz_ptr, count, n_size, stride_dy, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    """dz = dy · act'(z), contiguous [M, N] with `count` elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    dy = tl.load(dy_ptr + at // n_size * stride_dy + at % n_size, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + at, mask=inside, other=0.0).to(tl.float32)
    _, dz = _activation_and_gradient(z, dy, ACTIVATION)
    tl.store(dz_ptr + at, dz.to(dz_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sparse_matmul_dx_kernel(
    dz_ptr,
    values_ptr,
    metadata_ptr,
    dx_ptr,
    m_size,
    n_size,
    depth,
    stride_dz,
    stride_vn,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """dx [M, K] = dz · w."""
    tile_m, tile_k = _tile_of(tl.cdiv(m_size, BLOCK_M), tl.cdiv(depth, BLOCK_K), GROUP)
    m, k = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    dz_row = dz_ptr + m.to(tl.int64)[:, None] * stride_dz
    acc = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.float32)
    for first in tl.range(0, n_size, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        dz = tl.load(dz_row + n[None, :], mask=(m < m_size)[:, None] & (n < n_size)[None, :], other=0.0)
        w = _weight_tile(values_ptr, metadata_ptr, n, tile_k * BLOCK_K, n_size, depth, stride_vn, BLOCK_N, BLOCK_K)
        acc = tl.dot(dz, w, acc, input_precision="ieee")
    at = m.to(tl.int64)[:, None] * depth + k[None, :]
    tl.store(dx_ptr + at, acc.to(dx_ptr.dtype.element_ty), mask=(m < m_size)[:, None] & (k < depth)[None, :])


@triton.jit
def _sparse_matmul_dvalues_kernel(
    dz_ptr,
    x_ptr,
    metadata_ptr,
    dvalues_ptr,
    m_size,
    n_size,
    depth,
    stride_dz,
    stride_xm,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """dvalues [N, K / 2]: the elements of dzᵀ · x at the kept positions, summed over rows in order."""
    tile_n, tile_k = _tile_of(tl.cdiv(n_size, BLOCK_N), tl.cdiv(depth, BLOCK_K), GROUP)
    n, k = tile_n * BLOCK_N + tl.arange(0, BLOCK_N), tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for first in tl.range(0, m_size, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        row, inside = m.to(tl.int64)[:, None], (m < m_size)[:, None]
        dz = tl.load(dz_ptr + row * stride_dz + n[None, :], mask=inside & (n < n_size)[None, :], other=0.0)
        x = tl.load(x_ptr + row * stride_xm + k[None, :], mask=inside & (k < depth)[None, :], other=0.0)
        acc = tl.dot(tl.trans(dz), x, acc, input_precision="ieee")
    code = _codes(metadata_ptr, n, tile_k * (BLOCK_K // 4) + tl.arange(0, BLOCK_K // 4), n_size, depth // 4)
    values = _kept(acc, code, BLOCK_N, BLOCK_K)
    half = tile_k * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
    at = n.to(tl.int64)[:, None] * (depth // 2) + half[None, :]
    mask = (n < n_size)[:, None] & (half < depth // 2)[None, :]
    tl.store(dvalues_ptr + at, values.to(dvalues_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sparse_matmul_dbias_kernel(
    dz_ptr, dbias_ptr, m_size, n_size, stride_dz, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """dbias [N]: the sum of dz over rows, in a fixed order, in fp32."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first in tl.range(0, m_size, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        inside = (m < m_size)[:, None] & (n < n_size)[None, :]
        acc += tl.load(dz_ptr + m.to(tl.int64)[:, None] * stride_dz + n[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(dbias_ptr + n, tl.sum(acc, 0).to(dbias_ptr.dtype.element_ty), mask=n < n_size)

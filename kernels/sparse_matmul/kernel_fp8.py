"""x [M, K] times a weight [N, K] of 2:4 sparsity in fp8, with scales: the GEMM in Triton.

Back-of-the-envelope estimate, one NVIDIA H200 (4254 GB/s; 1500 TFLOP/s by a measured dense GEMM in fp8, with sparsity
at most twice that), y in bf16:

  M x K x N              FLOPs, dense   bytes (w: 5/8)    reading and writing   computing, dense   sparse
  4096 x 4096 x 4096     137 GFLOP         61 MB                 14 us               92 us          46 us
  8192 x 8192 x 8192     1.10 TFLOP       243 MB                 57 us              733 us         367 us
  4096 x 4096 x 11008    369 GFLOP        135 MB                 32 us              246 us         123 us

As in `kernel.py` the weight is decompressed for a dense GEMM: bytes are selected, and reinterpreted as fp8 without an
instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import _activation
from .kernel import _tile_of, _weight_tile


@triton.jit
def _numbers(code, E4M3: tl.constexpr, DECODE: tl.constexpr):
    """Converts bytes to float8 or, with DECODE, to fp16, which can represent all fp8 values. DECODE is only for
    Triton's interpreter, whose own conversions of float8 are wrong. float8 input is unchanged."""
    if code.dtype != tl.uint8:
        x = code
    elif not DECODE:
        x = code.to(tl.float8e4nv if E4M3 else tl.float8e5, bitcast=True)
    elif E4M3:  # the exponent bias of fp16 is larger by 8
        wide = code.to(tl.uint16)
        x = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        x = tl.where((wide & 0x7F) == 0x7F, float("nan"), x.to(tl.float32) * 256.0).to(tl.float16)
    else:  # e5m2 is the upper half of fp16
        x = (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    return x


# The order of parameters is tensors, then integers, then constexprs, as `Launch` requires.
@triton.jit(do_not_specialize=["m_size", "stride_sx", "stride_sw", "stride_bias"])
def _sparse_matmul_fp8_kernel(
    x_ptr,
    values_ptr,
    metadata_ptr,
    scale_x_ptr,
    scale_w_ptr,
    bias_ptr,
    y_ptr,
    m_size,
    n_size,
    depth,
    stride_xm,
    stride_vn,
    stride_sx,
    stride_sw,
    stride_bias,
    ACTIVATION: tl.constexpr,
    X_E4M3: tl.constexpr,
    W_E4M3: tl.constexpr,
    DECODE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y [M, N] = act(scale_x · scale_w · (x · wᵀ) + bias). Values are bytes, with DECODE also x. The stride of a scale
    per tensor is 0. `depth` is a multiple of BLOCK_K."""
    tile_m, tile_n = _tile_of(tl.cdiv(m_size, BLOCK_M), tl.cdiv(n_size, BLOCK_N), GROUP)
    m, n, k = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    inside_m, inside_n = m < m_size, n < n_size
    x_row = x_ptr + m.to(tl.int64)[None, :] * stride_xm
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for first in tl.range(0, depth, BLOCK_K):
        x = tl.load(x_row + (first + k)[:, None], mask=inside_m[None, :], other=0.0)
        w = _weight_tile(values_ptr, metadata_ptr, n, first, n_size, depth, stride_vn, BLOCK_N, BLOCK_K)
        acc = tl.dot(_numbers(w, W_E4M3, DECODE), _numbers(x, X_E4M3, DECODE), acc)
    scale_x = tl.load(scale_x_ptr + m.to(tl.int64) * stride_sx, mask=inside_m, other=0.0)
    scale_w = tl.load(scale_w_ptr + n.to(tl.int64) * stride_sw, mask=inside_n, other=0.0)
    acc = tl.trans(acc) * (scale_x[:, None] * scale_w[None, :])
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + n.to(tl.int64) * stride_bias, mask=inside_n, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    if ACTIVATION is not None:
        acc = _activation(acc, ACTIVATION)
    at = m.to(tl.int64)[:, None] * n_size + n[None, :]
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=inside_m[:, None] & inside_n[None, :])

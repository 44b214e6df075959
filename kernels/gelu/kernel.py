"""GELU: the kernels.

Estimate, bf16, n elements, one NVIDIA H200 that copies 4254 GB/s:
  forward   reads x, writes y           4·n bytes   65536 x 4096: 1.07 GB, 252 us
  backward  reads x and dy, writes dx   6·n bytes   65536 x 4096: 1.61 GB, 379 us
At that bandwidth the SMs can issue 28 instructions per thread for each element of the forward (4 bytes). CUDA's erff
has 28 and its tanhf 20. The formulas below have fewer: one exponential and one reciprocal per element.
"""

from __future__ import annotations

import triton
import triton.language as tl

# tanh form, with σ the logistic function: (1 + tanh(u)) / 2 = σ(2u), 2u = SLOPE · (x + CUBIC · x³).
LOG2_E = tl.constexpr(1.4426950408889634)
SLOPE = tl.constexpr(1.5957691216057308)  # 2 · sqrt(2 / π)
CUBIC = tl.constexpr(0.044715)
# For a larger x², σ(2u) is 0 or 1 in fp32. Without this bound the derivative at a large finite x would be 0 · inf.
MAX_SQUARE = tl.constexpr(1024.0)

INV_SQRT_2PI = tl.constexpr(0.3989422804014327)


@triton.jit
def _reciprocal(d, IS_FP32: tl.constexpr):
    """1 / d for d >= 1. A division has eight instructions, the square of 1 / sqrt(d) two, with relative error 3e-7."""
    if IS_FP32:
        return 1.0 / d
    root = tl.rsqrt(d)
    return root * root


@triton.jit
def _logistic(x, square, IS_FP32: tl.constexpr):
    """s = σ(SLOPE · (x + CUBIC · x³)) and 1 − s; `square` is x². Both keep their relative accuracy close to 0."""
    power = x * (-LOG2_E * SLOPE - LOG2_E * SLOPE * CUBIC * square)
    exponential = tl.exp2(power)
    s = _reciprocal(1.0 + exponential, IS_FP32)
    # Where s is close to 1, 1 - s consists of the rounding error of s, which is not accurate enough in fp32. For x < 0
    # the difference is exact.
    return s, tl.where(x > 0, exponential * s, 1.0 - s) if IS_FP32 else 1.0 - s


@triton.jit
def _gaussian_cdf(x, IS_FP32: tl.constexpr):
    """exp(−x²/2) and Φ(x). Keeps its relative accuracy where Φ is close to 0.

    Φ(−z) = exp(−z²/2) · P(t), t = 1 / (1 + p · z), for z >= 0. P minimises the relative error over 0 <= z <= 13.3,
    where Φ(−z) underflows in fp32: 1.5e-5 for 16-bit dtypes (degree 5), 5.7e-8 for fp32 (degree 8). For 16-bit dtypes P
    is exact at z = 0.75179, the zero of the derivative Φ(x) + x · φ(x): so that too keeps its relative accuracy there.
    """
    power = x * (x * (-0.5 * LOG2_E))
    if IS_FP32:
        # ex2 flushes subnormal results to 0, where PyTorch's derivative is not yet 0.
        low = power < -126.0
        exponential = tl.exp2(tl.where(low, power + 64.0, power)) * tl.where(low, 2.0**-64, 1.0)
    else:
        exponential = tl.exp2(power)
    z = tl.abs(x)
    if IS_FP32:
        t = _reciprocal(1.0 + 0.3 * z, IS_FP32)
        p = t * 0.0383114613 - 0.168840937
        p = p * t + 0.227987539
        p = p * t - 0.0757362122
        p = p * t + 0.142002639
        p = p * t + 0.0949109415
        p = p * t + 0.121862026
        p = p * t + 0.119495885
        p = p * t + 6.68634549e-06
    else:
        t = _reciprocal(1.0 + 0.36 * z, IS_FP32)
        p = t * -0.0992293074 + 0.255988448
        p = p * t + 0.0338312376
        p = p * t + 0.169156352
        p = p * t + 0.140050482
        p = p * t + 0.000195486907
    tail = p * exponential
    return exponential, tl.where(x > 0, 1.0 - tail, tail)


@triton.jit
def _tile_start(rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """First row and first column of this CTA's tile, in 64 bits. The grid is one-dimensional, because its y and z
    dimensions are limited to 65535."""
    tile = tl.program_id(0)
    tile_m, tile_n = tile * 0, tile
    if rows != 1:  # Triton specialises for the value 1: a single row needs no division
        tiles_n = ((cols - 1) // BLOCK_N + 1).to(tl.int32)  # tl.cdiv(cols, BLOCK_N) overflows 32 bits just below 2^31
        tile_m, tile_n = tile // tiles_n, tile % tiles_n
    return tile_m.to(tl.int64) * BLOCK_M, tile_n.to(tl.int64) * BLOCK_N


@triton.jit
def _gelu_fwd_tile(
    x_ptr, y_ptr, m, n, mask, stride_xm, stride_xn, stride_ym, stride_yn, TANH: tl.constexpr, EVICTION: tl.constexpr
):
    x = tl.load(x_ptr + (m * stride_xm + n * stride_xn), mask=mask, eviction_policy=EVICTION)
    is_fp32: tl.constexpr = x.dtype == tl.float32
    x = x.to(tl.float32)
    if TANH:
        s, _ = _logistic(x, x * x, is_fp32)
        y = x * s
    else:
        _, cdf = _gaussian_cdf(x, is_fp32)
        y = x * cdf
    tl.store(y_ptr + (m * stride_ym + n * stride_yn), y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gelu_bwd_tile(
    dy_ptr,
    x_ptr,
    dx_ptr,
    m,
    n,
    mask,
    stride_dym,
    stride_dyn,
    stride_xm,
    stride_xn,
    stride_dxm,
    stride_dxn,
    TANH: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """dx = dy · (Φ(x) + x · φ(x)), or the derivative of the tanh form."""
    x = tl.load(x_ptr + (m * stride_xm + n * stride_xn), mask=mask, eviction_policy=EVICTION)
    dy = tl.load(dy_ptr + (m * stride_dym + n * stride_dyn), mask=mask, eviction_policy=EVICTION)
    is_fp32: tl.constexpr = x.dtype == tl.float32
    x = x.to(tl.float32)
    if TANH:
        square = tl.minimum(x * x, MAX_SQUARE)
        s, one_minus_s = _logistic(x, square, is_fp32)
        derivative = s + (x * s) * (one_minus_s * (SLOPE + 3.0 * SLOPE * CUBIC * square))
    else:
        exponential, cdf = _gaussian_cdf(x, is_fp32)
        derivative = cdf + x * (exponential * INV_SQRT_2PI)
    dx = dy.to(tl.float32) * derivative
    tl.store(dx_ptr + (m * stride_dxm + n * stride_dxn), dx.to(dx_ptr.dtype.element_ty), mask=mask)


# Only boundary tiles are masked. With SPLIT (rows are aligned) such a tile is computed in two parts. The first ends at
# a multiple of 16 columns, so that each 16-byte access is masked as a whole and remains one instruction. The second has
# the last cols % 16 columns, which are accessed element by element.


@triton.jit
def _gelu_fwd_kernel(
    x_ptr,
    y_ptr,
    rows,
    cols,
    stride_xm,
    stride_xn,
    stride_ym,
    stride_yn,
    TANH: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVICTION: tl.constexpr,
):
    first_m, first_n = _tile_start(rows, cols, BLOCK_M, BLOCK_N)
    x_ptr += first_m * stride_xm + first_n * stride_xn
    y_ptr += first_m * stride_ym + first_n * stride_yn
    m = tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
    n = tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
    strides = (stride_xm, stride_xn, stride_ym, stride_yn)
    if (first_m + BLOCK_M <= rows) & (first_n + BLOCK_N <= cols):
        _gelu_fwd_tile(x_ptr, y_ptr, m, n, None, *strides, TANH, EVICTION)
    else:
        limit = (cols // 16 * 16 if SPLIT else cols) - first_n
        mask = (m < rows - first_m) & (n < limit)
        _gelu_fwd_tile(x_ptr, y_ptr, m, n, mask, *strides, TANH, EVICTION)
        if SPLIT and limit < tl.minimum(cols - first_n, BLOCK_N):
            tail_n = limit + tl.arange(0, 16).to(tl.int64)[None, :]
            in_row = (m < rows - first_m) & (tail_n < cols - first_n)
            _gelu_fwd_tile(x_ptr, y_ptr, m, tail_n, in_row, *strides, TANH, EVICTION)


@triton.jit
def _gelu_bwd_kernel(
    dy_ptr,
    x_ptr,
    dx_ptr,
    rows,
    cols,
    stride_dym,
    stride_dyn,
    stride_xm,
    stride_xn,
    stride_dxm,
    stride_dxn,
    TANH: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVICTION: tl.constexpr,
):
    first_m, first_n = _tile_start(rows, cols, BLOCK_M, BLOCK_N)
    dy_ptr += first_m * stride_dym + first_n * stride_dyn
    x_ptr += first_m * stride_xm + first_n * stride_xn
    dx_ptr += first_m * stride_dxm + first_n * stride_dxn
    m = tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
    n = tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
    strides = (stride_dym, stride_dyn, stride_xm, stride_xn, stride_dxm, stride_dxn)
    if (first_m + BLOCK_M <= rows) & (first_n + BLOCK_N <= cols):
        _gelu_bwd_tile(dy_ptr, x_ptr, dx_ptr, m, n, None, *strides, TANH, EVICTION)
    else:
        limit = (cols // 16 * 16 if SPLIT else cols) - first_n
        mask = (m < rows - first_m) & (n < limit)
        _gelu_bwd_tile(dy_ptr, x_ptr, dx_ptr, m, n, mask, *strides, TANH, EVICTION)
        if SPLIT and limit < tl.minimum(cols - first_n, BLOCK_N):
            tail_n = limit + tl.arange(0, 16).to(tl.int64)[None, :]
            in_row = (m < rows - first_m) & (tail_n < cols - first_n)
            _gelu_bwd_tile(dy_ptr, x_ptr, dx_ptr, m, tail_n, in_row, *strides, TANH, EVICTION)

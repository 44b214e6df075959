"""fp8_matmul: the GEMM in Triton.

Back-of-the-envelope estimate, one NVIDIA H200 (1979 TFLOP/s of fp8 by the data sheet, about 1500 by a measured GEMM,
4254 GB/s):

  M x K x N               FLOPs         bytes, bf16 out   computing   reading and writing
  8192 x 8192 x 8192      1.10 TFLOP        268 MB         733 us          63 us
  4096 x 7168 x 2112      124 GFLOP          62 MB          83 us          15 us
  8192 x 4096 x 11008     739 GFLOP         259 MB         492 us          61 us

So the tensor cores are the bound. On Hopper they accumulate fp8 products with some 14 bits, aligned to the largest
product. So their accumulators are promoted: added to fp32 registers after each K-block (`PROMOTE`).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _half_of(code, E4M3: tl.constexpr):
    """Converts fp8 bytes to fp16, exactly. Only for Triton's interpreter, whose own conversions of fp8 are wrong."""
    wide = code.to(tl.uint16)
    if not E4M3:  # e5m2 is the upper byte of fp16
        return (wide << 8).to(tl.float16, bitcast=True)
    # The exponent bias of fp16 is 8 more than that of e4m3: a factor of 2^8.
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)


@triton.jit
def _load_scale(ptr):
    """Loads scales as fp32, from fp32 or from UE8M0, whose byte is the exponent of an fp32 number."""
    scale = tl.load(ptr)
    if scale.dtype == tl.uint8:
        bits = scale.to(tl.int32) << 23
        bits = tl.where(scale == 0, 1 << 22, tl.where(scale == 255, 0x7FC00000, bits))  # 2^-127, NaN
        scale = bits.to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _tile_of(rows, cols, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """This CTA's tile (m, n) in grouped tile order: GROUP_M row tiles of a column, then the next column, so that loads
    of b hit L2."""
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(cols, BLOCK_N)
    band = GROUP_M * tiles_n
    first = tl.program_id(0) // band * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    inside = tl.program_id(0) % band
    return first + inside % height, inside // height


# Arguments that change from call to call come first, then integers, then constexprs: see `Launch`.
@triton.jit(do_not_specialize=["rows", "stride_sam", "stride_sak", "stride_sbn", "stride_sbk", "stride_bias"])
def _fp8_matmul_kernel(
    a_ptr,
    b_ptr,
    scale_a_ptr,
    scale_b_ptr,
    bias_ptr,
    y_ptr,
    rows,
    cols,
    depth,
    stride_am,
    stride_bn,
    stride_sam,
    stride_sak,
    stride_sbn,
    stride_sbk,
    stride_bias,
    SCALING: tl.constexpr,
    PROMOTE: tl.constexpr,
    A_E4M3: tl.constexpr,
    B_E4M3: tl.constexpr,
    DECODE: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y [rows, cols] = a · bᵀ, scaled, plus bias. One CTA per tile.

    SCALING  "outer": scales of tensors or rows, by their strides, applied in the epilogue. "128x128" and "1x128": the
             blocks of b's scales, applied after each K-block. BLOCK_K is then 128 or all of K, and BLOCK_N divides 128.
    DECODE   operands are bytes, which the kernel converts to fp16; the rest is the same code.

    Rows and columns out of bounds are clamped to the last one, and not stored.
    """
    tile_m, tile_n = _tile_of(rows, cols, GROUP_M, BLOCK_M, BLOCK_N)
    m, n, k = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    row, col = tl.minimum(m, rows - 1).to(tl.int64), tl.minimum(n, cols - 1).to(tl.int64)
    a_ptr += row[:, None] * stride_am + k[None, :]
    b_ptr += col[None, :] * stride_bn + k[:, None]
    scale_a_ptr += row * stride_sam
    scale_b_ptr += (tile_n * BLOCK_N // 128).to(tl.int64) * stride_sbn if SCALING == "128x128" else col * stride_sbn
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for step in tl.range(0, tl.cdiv(depth, BLOCK_K)):
        if EVEN_K:
            a, b = tl.load(a_ptr), tl.load(b_ptr)
        else:
            left = depth - step * BLOCK_K
            a = tl.load(a_ptr, mask=k[None, :] < left, other=0.0)
            b = tl.load(b_ptr, mask=k[:, None] < left, other=0.0)
        if DECODE:
            a, b = _half_of(a, A_E4M3), _half_of(b, B_E4M3)
        if SCALING == "outer":
            acc = tl.dot(a, b, acc, max_num_imprecise_acc=BLOCK_K if PROMOTE else None)
        else:
            block = tl.cast(step, tl.int64)
            scale_a = _load_scale(scale_a_ptr + block * stride_sak)
            scale_b = _load_scale(scale_b_ptr + block * stride_sbk)
            if SCALING == "128x128":
                acc += tl.dot(a, b) * (scale_a * scale_b)[:, None]
            else:
                acc += tl.dot(a, b) * (scale_a[:, None] * scale_b[None, :])
        a_ptr += BLOCK_K
        b_ptr += BLOCK_K
    if SCALING == "outer":
        acc *= _load_scale(scale_a_ptr)[:, None] * _load_scale(scale_b_ptr)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + col * stride_bias).to(tl.float32)[None, :]
    y = y_ptr + m.to(tl.int64)[:, None] * cols + n[None, :]
    tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < cols)[None, :])

"""Converts q, k and v to e4m3 for the FP8 forward: one Triton launch that reads each from device memory once.

        q [B, Hq, Sq, D]   ->  q8 [B, Hq, Sq, W],       a scale for 64 rows
        k [B, Hkv, Sk, D]  ->  k8 [B, Hkv, N, W],       a scale for `block_n` rows
        v [B, Hkv, Sk, D]  ->  v8 [B, Hkv, W, N padded], a scale for a section of `section` blocks of block_n rows

N is the number of valid keys (`num_context`). W is D padded with zeros to 64 or 128. v is transposed, and its keys
are permuted to the order in which the forward's threads hold probabilities: column 4 t + 2 h + e of each 16 holds key
8 h + 2 t + e. Columns are padded with zeros to a multiple of 128: a probability of 0 times uninitialised memory might
be NaN.

x = x8 · scale. A scale is the smallest power of two with which the largest finite magnitude of its block is at most
448; 1 where all are zero. Powers of two cost no accuracy, as e4m3 is a floating-point format, and a tensor that was
e4m3 times a power of two is reproduced exactly. NaN stays NaN; ±inf, which e4m3 cannot represent, becomes NaN.

Estimate, B1 H16 S16384 D128, bf16: 201 MB are read and 101 MB written, 71 us at 4.25 TB/s; 2.2 TFLOP of attention
at 900 TFLOP/s take 2443 us. A section of v is read twice, first for its scale and then, from L2, to be converted: 1024
rows of 256 bytes for each CTA.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

Q_ROWS = 64  # queries with one scale: those of a warp group
CHUNK = 128  # keys of v that are transposed at once
WARPS = 4

# Converts four elements at a time, in place of y.to(float8), for which ptxas 12.8 unpacks and packs pairs again. If the
# result is stored in two layouts, that code may even read some of it before it is written.
_FOUR = tl.constexpr("""{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}""")


@dataclasses.dataclass(frozen=True)
class Operands:
    """The result of `quantise`. It may also be built from e4m3 tensors: data as uint8 or float8_e4m3fn, rows of q and k
    of W = 64 or 128 elements with stride 1, other strides multiples of 16; scales fp32, contiguous, above 0."""

    q: torch.Tensor  # [B, Hq, Sq, W]
    k: torch.Tensor  # [B, Hkv, num_keys, W]
    v: torch.Tensor  # [B, Hkv, W, num_keys padded to 128], keys permuted as in the module's docstring
    q_scale: torch.Tensor  # [B, Hq, ceil(Sq / 64)]
    k_scale: torch.Tensor  # [B, Hkv, ceil(num_keys / block_n)]
    v_scale: torch.Tensor  # [B, Hkv, ceil(num_keys / (block_n · section))]
    num_keys: int
    block_n: int
    section: int


@triton.jit
def _encode(y, NATIVE: tl.constexpr):
    """Returns the bits of fp32 y in e4m3, rounded to nearest even and saturated to ±448; NaN is 0x7F."""
    if NATIVE:
        return tl.inline_asm_elementwise(_FOUR, "=r,r,r,r,r", [y], dtype=tl.uint8, is_pure=True, pack=4)
    # The same bits by integer arithmetic: the conversion of Triton's interpreter rounds wrongly.
    sign = (y.to(tl.uint32, bitcast=True) >> 24) & 0x80
    a = tl.minimum(tl.abs(y), 448.0)
    bits = a.to(tl.uint32, bitcast=True)
    normal = ((bits + ((bits >> 20) & 1) + 0x7FFFF) >> 20) - (120 << 3)
    tiny = (a + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    result = tl.where(a < 0.015625, tiny, normal) | sign
    return tl.where(y == y, result, 0x7F).to(tl.uint8)


@triton.jit
def _largest(x):
    """Returns the largest finite magnitude of an fp32 tile."""
    return tl.max(tl.where(x * 0.0 == 0.0, tl.abs(x), 0.0))


@triton.jit
def _scale_of(amax):
    """Returns the scale. As 448 is 1.75 · 2^8, its exponent is that of amax less 8, plus 1 if the mantissa of amax is
    over 1.75."""
    bits = ((amax.to(tl.int32, bitcast=True) + 0x1FFFFF) & 0x7F800000) - (8 << 23)
    return tl.where(amax > 0, tl.maximum(bits, 1 << 23), 127 << 23).to(tl.float32, bitcast=True)


@triton.jit
def _inverse(scale):
    """Returns 1 / scale, exact, as scale is a power of two from 2^-126 to 2^120."""
    return ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _load(x_ptr, rows, stride, num_rows, dim, WIDTH: tl.constexpr):
    """Loads rows of x in fp32, with zeros outside and NaN in place of ±inf (0 · inf is NaN)."""
    n = tl.arange(0, WIDTH)
    mask = (rows < num_rows)[:, None] & (n < dim)[None, :]
    x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * stride + n[None, :], mask=mask, other=0.0).to(tl.float32)
    return x * 0.0 + x


@triton.jit
def _quantise_rows(
    x_ptr, y_ptr, scale_ptr, block, stride, num_rows, dim,
    ROWS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Quantises ROWS rows with one scale. TILE is ROWS rounded up to a power of two."""
    m, n = tl.arange(0, TILE), tl.arange(0, WIDTH)
    rows = block * ROWS + m
    limit = tl.minimum(num_rows, (block + 1) * ROWS)
    x = _load(x_ptr, rows, stride, limit, dim, WIDTH)
    scale = _scale_of(_largest(x))
    tl.store(scale_ptr + block, scale)
    y_ptrs = y_ptr + rows.to(tl.int64)[:, None] * WIDTH + n[None, :]
    tl.store(y_ptrs, _encode(x * _inverse(scale), NATIVE), mask=(rows < limit)[:, None])


@triton.jit
def _quantise_section(
    v_ptr, y_ptr, scale_ptr, section, stride, num_keys, dim, padded,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Quantises a section of values: one pass computes the scale, and a second, from L2, converts and transposes."""
    p, n = tl.arange(0, CHUNK), tl.arange(0, WIDTH)
    first = section * ROWS
    limit = tl.minimum(num_keys, first + ROWS)
    amax = tl.zeros((), tl.float32)
    for start in range(first, limit, CHUNK):
        amax = tl.maximum(amax, _largest(_load(v_ptr, start + p, stride, limit, dim, WIDTH)))
    scale = _scale_of(amax)
    tl.store(scale_ptr + section, scale)
    key = p // 16 * 16 + p // 2 % 2 * 8 + p // 4 % 4 * 2 + p % 2  # the key in column p
    for start in range(first, tl.minimum(padded, first + ROWS), CHUNK):
        x = _load(v_ptr, start + key, stride, limit, dim, WIDTH)
        bits = tl.trans(_encode(x * _inverse(scale), NATIVE))
        columns = start + p
        y_ptrs = y_ptr + n.to(tl.int64)[:, None] * padded + columns[None, :]
        tl.store(y_ptrs, bits, mask=(columns < tl.minimum(padded, first + ROWS))[None, :])


_COUNTS = ["q_heads", "kv_heads", "num_q", "num_keys", "q_blocks", "k_blocks", "sections", "v_programs", "k_programs"]


@triton.jit(do_not_specialize=_COUNTS)
def _attention_fp8_quantise_kernel(
    q_ptr, k_ptr, v_ptr, q8_ptr, k8_ptr, v8_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr,
    q_heads, kv_heads, num_q, num_keys, padded, dim, q_blocks, k_blocks, sections, v_programs, k_programs,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    Q_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, TILE_N: tl.constexpr, SECTION_ROWS: tl.constexpr, CHUNK: tl.constexpr,
    WIDTH: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One CTA per section of v, then one per block of k and of q. Those of v come first, as they take longest."""
    index = tl.program_id(0)
    if index < v_programs:
        head, section = index // sections, index % sections
        at = (head // kv_heads).to(tl.int64) * stride_vb + (head % kv_heads).to(tl.int64) * stride_vh
        _quantise_section(
            v_ptr + at, v8_ptr + head.to(tl.int64) * WIDTH * padded, v_scale_ptr + head.to(tl.int64) * sections,
            section, stride_vn, num_keys, dim, padded, SECTION_ROWS, CHUNK, WIDTH, NATIVE,
        )  # fmt: skip
    elif index < v_programs + k_programs:
        head, block = (index - v_programs) // k_blocks, (index - v_programs) % k_blocks
        at = (head // kv_heads).to(tl.int64) * stride_kb + (head % kv_heads).to(tl.int64) * stride_kh
        _quantise_rows(
            k_ptr + at, k8_ptr + head.to(tl.int64) * num_keys * WIDTH, k_scale_ptr + head.to(tl.int64) * k_blocks,
            block, stride_kn, num_keys, dim, BLOCK_N, TILE_N, WIDTH, NATIVE,
        )  # fmt: skip
    else:
        index = index - v_programs - k_programs
        head, block = index // q_blocks, index % q_blocks
        at = (head // q_heads).to(tl.int64) * stride_qb + (head % q_heads).to(tl.int64) * stride_qh
        _quantise_rows(
            q_ptr + at, q8_ptr + head.to(tl.int64) * num_q * WIDTH, q_scale_ptr + head.to(tl.int64) * q_blocks, block,
            stride_qm, num_q, dim, Q_ROWS, Q_ROWS, WIDTH, NATIVE,
        )  # fmt: skip


def quantise(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_keys: int, block_n: int, section: int) -> Operands:
    """Returns the operands of the FP8 forward for the first num_keys keys. q, k, v have stride 1 in D, and D <= 128.

    q, k and v are fp16 or bf16, or e4m3 with scales of the caller. In the latter case elements keep their values, and
    the caller multiplies the scales made here by its own. Deterministic. Allocates Sq + 2 · num_keys rows of W bytes
    per head, and the scales.
    """
    (batches, q_heads, num_q, dim), kv_heads = q.shape, k.shape[1]
    width = 64 if dim <= 64 else 128
    padded = (num_keys + 127) // 128 * 128
    q_blocks, k_blocks = -(-num_q // Q_ROWS), -(-num_keys // block_n)
    sections = -(-num_keys // (block_n * section))

    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    made = Operands(
        q=empty(batches, q_heads, num_q, width),
        k=empty(batches, kv_heads, num_keys, width),
        v=empty(batches, kv_heads, width, padded),
        q_scale=empty(batches, q_heads, q_blocks, dtype=torch.float32),
        k_scale=empty(batches, kv_heads, k_blocks, dtype=torch.float32),
        v_scale=empty(batches, kv_heads, sections, dtype=torch.float32),
        num_keys=num_keys,
        block_n=block_n,
        section=section,
    )
    v_programs, k_programs = batches * kv_heads * sections, batches * kv_heads * k_blocks
    programs = v_programs + k_programs + batches * q_heads * q_blocks
    if programs == 0:
        return made
    with torch.cuda.device_of(q):
        _attention_fp8_quantise_kernel[(programs,)](
            q, k, v, made.q, made.k, made.v, made.q_scale, made.k_scale, made.v_scale,
            q_heads, kv_heads, num_q, num_keys, padded, dim, q_blocks, k_blocks, sections, v_programs, k_programs,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            Q_ROWS=Q_ROWS, BLOCK_N=block_n, TILE_N=triton.next_power_of_2(block_n), SECTION_ROWS=block_n * section,
            CHUNK=CHUNK, WIDTH=width, NATIVE=q.is_cuda, num_warps=WARPS,
        )  # fmt: skip
    return made

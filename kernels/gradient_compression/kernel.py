"""The three kernels of a compressed all-reduce: quantise, reduce, dequantise. A chunk for each of N ranks.

Napkin maths, n bf16 elements, two H200: memory 4250 GB/s, NVLink about 400 GB/s a direction, b bytes an element
quantised (1.016 for int8 and fp8, 0.516 for int4, scales among them), residual in bf16.

    quantise     reads 2n + 2n, writes 2n + b·n                    7.0n bytes of memory for int8
    reduce       reads b·n, of which (N−1)/N over the link, writes b·n/N, residual of one chunk 4n/N
    dequantise   reads b·n, of which (N−1)/N over the link, writes 2n
    link         2·b·n·(N−1)/N = 1.016n against 2n for an all-reduce in bf16

64 MiB of bf16, n = 33.5 M: memory 6n + 2n/N + b·n·(3 + 1/N), some 0.08 ms; link 0.085 ms for int8, 0.043 for int4,
0.17 ms in bf16. Where a peer's memory is read directly, reduce and dequantise move both at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .formats import decode, encode, load_float, scale_of, store_float


@triton.jit
def _part(source_ptr, table_ptr, part, part_bytes, offset):
    """Where a rank's part begins: by the table of the ranks' addresses or, without one, in a row behind source_ptr."""
    if table_ptr is not None:
        base = tl.load(table_ptr + part).to(tl.pointer_type(tl.uint8))
        return tl.multiple_of(base + offset, 16)
    return source_ptr + tl.cast(part_bytes, tl.int64) * part + offset


@triton.jit
def _load_blocks(part_ptr, block, blocks, scales_at, KIND: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    """Blocks of a quantised chunk in fp32, [rows, BLOCK]."""
    WIDTH: tl.constexpr = BLOCK // 2 if KIND == "int4" else BLOCK
    inside = block < blocks
    at = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    code = tl.load(part_ptr + at, mask=inside[:, None], other=0)
    scales_ptr = (part_ptr + scales_at).to(tl.pointer_type(tl.float32))
    return decode(code, tl.load(scales_ptr + block, mask=inside, other=1.0), KIND, NATIVE)


@triton.jit
def _store_blocks(part_ptr, x, block, blocks, scales_at, KIND: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    """Quantises blocks of a chunk, [rows, BLOCK], and returns what they are after dequantisation."""
    WIDTH: tl.constexpr = BLOCK // 2 if KIND == "int4" else BLOCK
    inside = block < blocks
    x = x * 0.0 + x  # NaN in place of an infinity, which no code stands for
    scale = scale_of(x, KIND)
    code = encode(x, scale, KIND, NATIVE)
    at = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(part_ptr + at, code, mask=inside[:, None])
    scales_ptr = (part_ptr + scales_at).to(tl.pointer_type(tl.float32))
    tl.store(scales_ptr + block, scale, mask=inside)
    return decode(code, scale, KIND, NATIVE)


@triton.jit
def _gradient_compression_quantize_kernel(
    x_ptr,
    residual_ptr,
    wire_ptr,
    numel,
    elements,
    blocks,
    scales_at,
    chunk_bytes,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """x + residual into chunks, one along the second axis of the grid; what is lost becomes the residual."""
    chunk = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    within = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    begin = chunk * elements
    mask = (within < elements) & (within < numel - begin)
    x = load_float(x_ptr + begin + within, mask)
    if residual_ptr is not None:
        x += load_float(residual_ptr + begin + within, mask)
    kept = _store_blocks(wire_ptr + chunk * chunk_bytes, x, block, blocks, scales_at, KIND, NATIVE, BLOCK)
    if residual_ptr is not None:
        lost = x - kept
        # A gradient that is not finite reaches every rank once. Kept, it would come back in each later step.
        store_float(residual_ptr + begin + within, tl.where(lost == lost, lost, 0.0), mask)


@triton.jit
def _gradient_compression_reduce_kernel(
    source_ptr,
    table_ptr,
    residual_ptr,
    out_ptr,
    elements,
    part_bytes,
    offset,
    blocks,
    scales_at,
    begin,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
    REQUANTIZE: tl.constexpr,
    AVERAGE: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The ranks' versions of this rank's chunk, of `elements` elements from `begin` on, summed in fp32 in the order of
    the ranks. Quantised once more, or stored as numbers. What that loses goes into the residual, as the sum's."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for rank in tl.range(0, WORLD):
        part = _part(source_ptr, table_ptr, rank, part_bytes, offset)
        total += _load_blocks(part, block, blocks, scales_at, KIND, NATIVE, BLOCK)
    if AVERAGE:
        total = total * (1 / WORLD)
    within = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = within < elements
    if REQUANTIZE:
        kept = _store_blocks(out_ptr, total, block, blocks, scales_at, KIND, NATIVE, BLOCK)
        if residual_ptr is not None:
            lost = total - kept
            if AVERAGE:
                lost = lost * WORLD
            residual_ptr += tl.cast(begin, tl.int64)
            lost = load_float(residual_ptr + within, mask) + tl.where(lost == lost, lost, 0.0)
            store_float(residual_ptr + within, lost, mask)
    else:
        store_float(out_ptr + within, total, mask)


@triton.jit
def _gradient_compression_dequantize_kernel(
    source_ptr,
    table_ptr,
    x_ptr,
    numel,
    elements,
    part_bytes,
    offset,
    blocks,
    scales_at,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The reduced chunks into x, one along the second axis of the grid."""
    chunk = tl.program_id(1)
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part = _part(source_ptr, table_ptr, chunk, part_bytes, offset)
    x = _load_blocks(part, block, blocks, scales_at, KIND, NATIVE, BLOCK)
    begin = chunk.to(tl.int64) * elements
    within = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    store_float(x_ptr + begin + within, x, (within < elements) & (within < numel - begin))

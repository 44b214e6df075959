"""The three kernels of a compressed all-reduce: quantise, reduce, dequantise. Each of N ranks owns one chunk. For
one rank a fourth kernel computes in registers what the three would.

Estimate, n bf16 elements, two H200: memory 4250 GB/s, NVLink about 400 GB/s per direction, b bytes per quantised
element (1.016 for int8 and fp8, 0.516 for int4, with scales). A residual in bf16 adds 4n to the first kernel.

                memory                                   link, for N = 2
    quantise    reads 2n, writes b·n                     b·n/2
    reduce      reads b·n, writes b·n/2 + n              b·n/2
    dequantise  reads b·n/2, writes n                    0

If the ranks write into each other's memory, 64 MiB (n = 33.5 M) need 0.085 ms of link in int8 and 0.043 ms in int4,
which overlap the memory traffic of the first two kernels, and 0.012 ms for the third. An all-reduce in bf16 sends 2n
bytes over the link, 0.17 ms.

Instruction issue is as close a limit: 132 SMs issue about 29 10^12 thread instructions per second. For int4 in bf16,
quantise executes 14 per element that it processes, reduce 31 and dequantise 10: 16, 18 and 6 us for 64 MiB, less than
the link takes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .formats import decode, load_float, quantize, store_float, store_residual, through_residual


@triton.jit
def _part(base_ptr, table_ptr, part, part_bytes, offset):
    """The pointer to a part, from the table of the ranks' addresses or, without one, consecutively from base_ptr."""
    if table_ptr is not None:
        address = tl.load(table_ptr + part).to(tl.pointer_type(tl.uint8))
        return tl.multiple_of(address + offset, 16)
    return base_ptr + tl.cast(part_bytes, tl.int64) * part


@triton.jit
def _codes_ptr(part_ptr, KIND: tl.constexpr):
    """The pointer to a chunk's codes: 32-bit words, or bytes for fp8."""
    return part_ptr if KIND == "fp8" else part_ptr.to(tl.pointer_type(tl.int32))


@triton.jit
def _get(part_ptr, block, blocks, scales_at, KIND: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    """Loads and dequantises blocks of a quantised chunk to fp32, [rows, BLOCK]."""
    WIDTH: tl.constexpr = BLOCK if KIND == "fp8" else BLOCK // 8 if KIND == "int4" else BLOCK // 4
    inside = block < blocks
    at = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    code = tl.load(_codes_ptr(part_ptr, KIND) + at, mask=inside[:, None], other=0)
    scales_ptr = (part_ptr + scales_at).to(tl.pointer_type(tl.float32))
    return decode(code, tl.load(scales_ptr + block, mask=inside, other=1.0), KIND, NATIVE)


@triton.jit
def _put(part_ptr, code, scale, block, blocks, scales_at, KIND: tl.constexpr):
    """Stores blocks of a quantised chunk."""
    inside = block < blocks
    at = block[:, None] * code.shape[1] + tl.arange(0, code.shape[1])[None, :]
    tl.store(_codes_ptr(part_ptr, KIND) + at, code, mask=inside[:, None])
    scales_ptr = (part_ptr + scales_at).to(tl.pointer_type(tl.float32))
    tl.store(scales_ptr + block, scale, mask=inside)


@triton.jit
def _gradient_compression_quantize_kernel(
    x_ptr,
    residual_ptr,
    out_ptr,
    table_ptr,
    numel,
    elements,
    blocks,
    scales_at,
    part_bytes,
    rank,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Quantises x + residual into one chunk per rank. Each chunk is written to that rank's memory, in the slot of this
    rank, or all are written consecutively. The quantisation error becomes the residual."""
    # CTAs that run at the same time write chunks for all ranks, so that all links and the memory are always busy.
    chunk = (tl.program_id(0) + rank + 1) % WORLD
    block = (tl.program_id(0) // WORLD).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    within = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    begin = chunk.to(tl.int64) * elements
    mask = (within < elements) & (within < numel - begin)
    x = load_float(x_ptr + begin + within, mask)
    if residual_ptr is not None:
        x += load_float(residual_ptr + begin + within, mask)
    code, scale, kept = quantize(x, KIND, NATIVE)
    place = tl.cast(rank, tl.int64) * part_bytes
    _put(_part(out_ptr, table_ptr, chunk, part_bytes, place), code, scale, block, blocks, scales_at, KIND)
    if residual_ptr is not None:
        lost = x - kept
        # A gradient that is not finite reaches every rank once. In the residual it would return in each later step.
        store_residual(residual_ptr + begin + within, lost, mask)


@triton.jit
def _gradient_compression_reduce_kernel(
    source_ptr,
    residual_ptr,
    out_ptr,
    table_ptr,
    x_ptr,
    own,
    begin,
    blocks,
    scales_at,
    part_bytes,
    rank,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
    REQUANTIZE: tl.constexpr,
    AVERAGE: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sums all ranks' versions of this rank's chunk, of `own` elements from `begin` on, in fp32 in the order of the
    ranks. The result is stored as floating point or quantised again: once for all ranks, or to each other rank's memory
    and, dequantised, to x. The error of that quantisation of the sum is added to the residual."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for part in tl.range(0, WORLD, loop_unroll_factor=2):  # so that the loads of two parts are in flight together
        part_ptr = _part(source_ptr, None, part, part_bytes, 0)
        total += _get(part_ptr, block, blocks, scales_at, KIND, NATIVE, BLOCK)
    if AVERAGE:
        total = total * (1 / WORLD)
    within = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = within < own
    if REQUANTIZE:
        code, scale, kept = quantize(total, KIND, NATIVE)
        if table_ptr is not None:
            place = tl.cast(rank, tl.int64) * part_bytes
            for step in tl.static_range(1, WORLD):
                peer_ptr = _part(out_ptr, table_ptr, (rank + step) % WORLD, part_bytes, place)
                _put(peer_ptr, code, scale, block, blocks, scales_at, KIND)
            store_float(x_ptr + tl.cast(begin, tl.int64) + within, kept, mask)
        else:
            _put(out_ptr, code, scale, block, blocks, scales_at, KIND)
        if residual_ptr is not None:
            lost = total - kept
            if AVERAGE:
                lost = lost * WORLD
            residual_ptr += tl.cast(begin, tl.int64)
            lost = load_float(residual_ptr + within, mask) + tl.where(lost == lost, lost, 0.0)
            store_residual(residual_ptr + within, lost, mask)
    else:
        store_float(out_ptr + within, total, mask)


@triton.jit
def _gradient_compression_dequantize_kernel(
    source_ptr,
    x_ptr,
    numel,
    elements,
    blocks,
    scales_at,
    part_bytes,
    rank,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
    OTHERS: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Dequantises the reduced chunks into x: all of them or, with OTHERS, those of the other ranks."""
    chunks: tl.constexpr = WORLD - 1 if OTHERS else WORLD
    chunk = tl.program_id(0) % chunks
    if OTHERS:
        chunk += (chunk >= rank).to(tl.int32)
    block = (tl.program_id(0) // chunks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part_ptr = _part(source_ptr, None, chunk, part_bytes, 0)
    x = _get(part_ptr, block, blocks, scales_at, KIND, NATIVE, BLOCK)
    begin = chunk.to(tl.int64) * elements
    within = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    store_float(x_ptr + begin + within, x, (within < elements) & (within < numel - begin))


@triton.jit
def _gradient_compression_alone_kernel(
    x_ptr,
    residual_ptr,
    numel,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """What the three kernels compute for one rank, bit for bit: x + residual, quantised and dequantised twice."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    within = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = within < numel
    x = load_float(x_ptr + within, mask)
    if residual_ptr is not None:
        x += load_float(residual_ptr + within, mask)
    _, _, kept = quantize(x, KIND, NATIVE)
    total = kept + 0.0  # a sum over one rank, in which -0 becomes 0
    _, _, result = quantize(total, KIND, NATIVE)
    store_float(x_ptr + within, result, mask)
    if residual_ptr is not None:
        lost = total - result
        lost = through_residual(residual_ptr, x - kept) + tl.where(lost == lost, lost, 0.0)
        store_residual(residual_ptr + within, lost, mask)

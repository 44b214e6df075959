"""The portable forward: one CTA for each tile of queries, which loops over the blocks of keys in its list.

FLOPs: 4·D for each pair of query and key in a kept block. At H32 D128, S = 8192 and a quarter of the blocks that is
0.27 TFLOP, 0.39 ms at the 700 TFLOP/s that GEMMs reach on one NVIDIA H200. q, k, v and the output are 0.27 GB, 64 µs.
The lists cost a 4-byte load for each tile of keys.

With s = q·k the probabilities are exp2(s·c − m), c = scale·log2(e): one fused multiply-add and one exponential each.
m is the running maximum of s·c. (Dao et al. 2022, arXiv:2205.14135, algorithms 1 and 5, and 2023, arXiv:2307.08691.)
The bias of a block costs nothing: it is subtracted from m.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import configs
from ..index import HEADER
from ..problem import PLAIN, Problem, strides

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tile_and_head(cta, tiles, heads, section):
    """Returns tile and head of a CTA: section by section of heads, and in a section tile 0 of each head, then tile 1,
    ..."""
    first = cta // (tiles * section) * section
    here = tl.minimum(section, heads - first)
    rest = cta - first * tiles
    return rest // here, first + rest % here


@triton.jit
def _load_rows(ptr, row, cols, stride, count, dim, MASK: tl.constexpr, EVEN_D: tl.constexpr):
    """Loads a tile [rows, cols] of a matrix of `count` rows, with 0 outside. Unmasked loads become cp.async copies."""
    ptrs = ptr + row[:, None] * stride + cols[None, :]
    if MASK and EVEN_D:
        tile = tl.load(ptrs, mask=(row < count)[:, None], other=0.0)
    elif MASK:
        tile = tl.load(ptrs, mask=(row < count)[:, None] & (cols < dim)[None, :], other=0.0)
    elif EVEN_D:
        tile = tl.load(ptrs)
    else:
        tile = tl.load(ptrs, mask=(cols < dim)[None, :], other=0.0)
    return tile


@triton.jit
def _store_rows(ptr, tile, row, cols, stride, count, dim, EVEN_D: tl.constexpr):
    mask = (row < count)[:, None] if EVEN_D else (row < count)[:, None] & (cols < dim)[None, :]
    tl.store(ptr + row[:, None] * stride + cols[None, :], tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _row_list(table_ptr, rank, columns, SPLIT: tl.constexpr):
    """Returns (tile, block, line): the index of the tile of queries with this rank, its block, and the pointer to its
    line of the table. A block has SPLIT tiles."""
    block = tl.load(table_ptr + rank // SPLIT * (HEADER + columns) + 2)
    return block * SPLIT + rank % SPLIT, block, table_ptr + block * (HEADER + columns)


@triton.jit
def _block_of_step(list_ptr, step, last, SPLIT: tl.constexpr):
    """Returns the block of a step (loop iteration), in a list whose entries below `last` are processed. It is loaded
    one step ahead: if a tile's address depended on a load of the same step, fewer tiles would be in flight. The step is
    clamped, as there may be no next one."""
    return tl.load(list_ptr + tl.minimum(step // SPLIT, last - 1))


@triton.jit
def _divisor(peak, total):
    """Returns the sum by which a row is divided: 1 where no key was seen, so that out is 0, and lse -inf because peak
    is. NaN where keys were seen but all probabilities are 0, because scaled scores exceed the range of fp32: a GPU
    computes s·c − inf in one FMA, which is −inf where s is finite."""
    return tl.where(total == 0.0, tl.where(peak == float("-inf"), 1.0, float("nan")), total)


@triton.jit
def _attend(
    acc,
    peak,
    total,
    q,
    k_ptr,
    v_ptr,
    list_ptr,
    bias_ptr,
    first,
    last,
    seen,
    keys,
    dim,
    stride_kn,
    stride_vn,
    stride_bn,
    scale_log2,
    MASK: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Runs the online softmax over entries [first, last) of the list. A query sees the keys below `seen`.

    acc accumulates exp2(s·c + bias − peak)·v, and total accumulates exp2(s·c + bias − peak).
    """
    cols = tl.arange(0, q.shape[1])
    row = tl.arange(0, BLOCK_N)
    SPLIT: tl.constexpr = BLOCK // BLOCK_N
    following = _block_of_step(list_ptr, first * SPLIT, last, SPLIT)
    for step in tl.range(first * SPLIT, last * SPLIT):
        block = following
        following = _block_of_step(list_ptr, step + 1, last, SPLIT)
        start = block * BLOCK + step % SPLIT * BLOCK_N
        wide = start.to(tl.int64)
        k = _load_rows(k_ptr + wide * stride_kn, row, cols, stride_kn, keys - start, dim, MASK, EVEN_D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MASK:
            s = tl.where((start + row)[None, :] < seen[:, None], s, float("-inf"))
        higher = tl.max(s, 1) * scale_log2
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + block.to(tl.int64) * stride_bn) * LOG2_E
            higher += bias
        higher = tl.maximum(peak, higher)
        # For a row that has seen no key yet: exp2(-inf - 0) is 0, but exp2(-inf - -inf) would be NaN.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        rescale = tl.exp2(peak - shift)
        if bias_ptr is not None:
            shift -= bias
        p = tl.exp2(s * scale_log2 - shift[:, None])
        total = total * rescale + tl.sum(p, 1)
        v = _load_rows(v_ptr + wide * stride_vn, row, cols, stride_vn, keys - start, dim, MASK, EVEN_D)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        peak = higher
    return acc, peak, total


@triton.jit(do_not_specialize=PLAIN)
def _block_sparse_attention_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    bias_ptr,
    out_ptr,
    lse_ptr,
    peak_ptr,
    total_ptr,
    queries,
    keys,
    rows,
    columns,
    dim,
    heads,
    all_heads,
    group,
    section,
    scale_log2,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_ob,
    stride_oh,
    stride_om,
    stride_tb,
    stride_th,
    stride_bb,
    stride_bh,
    stride_bm,
    stride_bn,
    UNIT: tl.constexpr,
    CAUSAL: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tiles = rows * (BLOCK // BLOCK_M)
    rank, head = _tile_and_head(tl.program_id(0), tiles, all_heads, section)
    batch, own = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    shared = own // group
    table_ptr += batch * stride_tb + own * stride_th
    tile, block, line_ptr = _row_list(table_ptr, rank, columns, BLOCK // BLOCK_M)
    if bias_ptr is not None:
        bias_ptr += batch * stride_bb + own * stride_bh + block.to(tl.int64) * stride_bm
    dim *= UNIT
    start = tile * BLOCK_M
    row, cols = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    wide = start.to(tl.int64)
    q_ptr += (batch * stride_qb + own * stride_qh + wide * stride_qm) * UNIT
    k_ptr += (batch * stride_kb + shared * stride_kh) * UNIT
    v_ptr += (batch * stride_vb + shared * stride_vh) * UNIT
    out_ptr += (batch * stride_ob + own * stride_oh + wide * stride_om) * UNIT
    q = _load_rows(q_ptr, row, cols, stride_qm * UNIT, queries - start, dim, True, EVEN_D)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    count, whole = tl.load(line_ptr), tl.load(line_ptr + 1)
    seen = row * 0 + keys
    if CAUSAL:
        seen = tl.minimum(seen, start + row + keys - queries + 1)
    acc, peak, total = _attend(
        acc, peak, total, q, k_ptr, v_ptr, line_ptr + HEADER, bias_ptr, 0, whole, seen, keys, dim, stride_kn * UNIT,
        stride_vn * UNIT, stride_bn, scale_log2, False, EVEN_D, BLOCK, BLOCK_N, PRECISION,
    )  # fmt: skip
    if CAUSAL or not EVEN_N:
        acc, peak, total = _attend(
            acc, peak, total, q, k_ptr, v_ptr, line_ptr + HEADER, bias_ptr, whole, count, seen, keys, dim,
            stride_kn * UNIT, stride_vn * UNIT, stride_bn, scale_log2, True, EVEN_D, BLOCK, BLOCK_N, PRECISION,
        )  # fmt: skip
    total = _divisor(peak, total)
    out = acc / total[:, None]
    _store_rows(out_ptr, out, row, cols, stride_om * UNIT, queries - start, dim, EVEN_D)
    at = head.to(tl.int64) * queries + start + row
    here = row < queries - start
    tl.store(lse_ptr + at, (peak + tl.log2(total)) * LN_2, mask=here)
    if peak_ptr is not None:
        tl.store(peak_ptr + at, peak, mask=here)
        tl.store(total_ptr + at, total, mask=here)


def portable_fwd(problem: Problem, out: torch.Tensor, lse: torch.Tensor, statistics: torch.Tensor | None) -> None:
    """Writes out [B, Hq, Sq, D], `readable`, and lse [B, Hq, Sq], contiguous. Unless it is None, also writes
    `statistics` [2, B, Hq, Sq]: the final maximum and sum of each row. Requires at least one query and one key."""
    peak, total = (None, None) if statistics is None else statistics
    config = configs.pick_fwd_config(*problem.kind())
    unit = problem.unit(out)
    with torch.cuda.device_of(problem.q):
        _block_sparse_attention_fwd_kernel[(problem.row_tiles(config) * problem.all_heads,)](
            out_ptr=out,
            lse_ptr=lse,
            peak_ptr=peak,
            total_ptr=total,
            heads=problem.q.shape[1],
            all_heads=problem.all_heads,
            section=configs.pick_section(problem.all_heads, problem.key_bytes()),
            EVEN_N=problem.keys % problem.block == 0,
            **strides("o", out, unit),
            **problem.arguments(unit),
            **problem.tiles(config),
        )

"""The portable forward: one CTA for each tile of queries, which loops over the keys that it sees.

FLOPs: 4·D for each visible pair of query and key. At H8 D64, Q = 205 000, K = 200 000 that is 84 TFLOP, which takes
120 ms on one NVIDIA H200, whose GEMMs reach some 700 TFLOP/s. q, k, v and the output are 0.8 GB, or 0.2 ms. Each pair
takes one exponential, 3.3e11 in all: at 16 a clock on each SM that is 79 ms, to be overlapped with the GEMMs.

With s = q·k the probabilities are exp2(s·c − m), c = scale·log2(e): one fused multiply-add and one exponential each.
m is the running maximum of s·c. (Dao et al. 2022, arXiv:2205.14135, algorithm 1, and 2023, arXiv:2307.08691.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..configs import portable as configs
from ..problem import PLAIN, Problem, head_stride, strides
from .band import _bounds, _keys_seen, _keys_seen_by_all, _tile_and_head, section

LN_2 = tl.constexpr(0.6931471805599453)


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
def _store_rows(ptr, tile, row, cols, stride, count, dim, EVEN_D: tl.constexpr, ADD: tl.constexpr = False):
    """Stores a tile. With ADD the tile is added to the values in memory."""
    mask = (row < count)[:, None] if EVEN_D else (row < count)[:, None] & (cols < dim)[None, :]
    ptrs = ptr + row[:, None] * stride + cols[None, :]
    if ADD:
        tile += tl.load(ptrs, mask=mask, other=0.0)
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=mask)


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
    first,
    last,
    low,
    high,
    keys,
    dim,
    stride_kn,
    stride_vn,
    scale_log2,
    MASK: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Runs the online softmax over the key tiles in [first, last). A query sees keys low <= j < high.

    acc accumulates exp2(s·c − peak)·v, and total accumulates exp2(s·c − peak).
    """
    cols = tl.arange(0, q.shape[1])
    row = tl.arange(0, BLOCK_N)
    for start in tl.range(first, last, BLOCK_N):
        wide = tl.cast(start, tl.int64)
        k = _load_rows(k_ptr + wide * stride_kn, row, cols, stride_kn, keys - start, dim, MASK, EVEN_D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MASK:
            key = start + row
            visible = key[None, :] < high[:, None]
            if HAS_LEFT:
                visible = visible & (key[None, :] >= low[:, None])
            s = tl.where(visible, s, float("-inf"))
        higher = tl.maximum(peak, tl.max(s, 1) * scale_log2)
        # For a row that has seen no key yet: exp2(-inf - 0) is 0, but exp2(-inf - -inf) would be NaN.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s * scale_log2 - shift[:, None])
        rescale = tl.exp2(peak - shift)
        total = total * rescale + tl.sum(p, 1)
        v = _load_rows(v_ptr + wide * stride_vn, row, cols, stride_vn, keys - start, dim, MASK, EVEN_D)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        peak = higher
    return acc, peak, total


@triton.jit
def _attend_all(
    q,
    k_ptr,
    v_ptr,
    position,
    first,
    last,
    begin,
    end,
    keys,
    dim,
    left,
    right,
    stride_kn,
    stride_vn,
    scale_log2,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Returns acc, peak and total of a tile of queries over the keys in [begin, end), which some of the queries see.

    `position` is the key with which each query is aligned (see `band`); `first` and `last` are its extremes.
    """
    acc = tl.zeros([q.shape[0], q.shape[1]], dtype=tl.float32)
    peak = tl.full([q.shape[0]], float("-inf"), dtype=tl.float32)
    total = tl.zeros([q.shape[0]], dtype=tl.float32)
    low, high = _bounds(position, keys, left, right, HAS_LEFT, HAS_RIGHT)
    inner, outer = _keys_seen_by_all(begin, end, first, last, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_N)
    if HAS_LEFT:
        acc, peak, total = _attend(
            acc, peak, total, q, k_ptr, v_ptr, begin, inner, low, high, keys, dim, stride_kn, stride_vn, scale_log2,
            True, HAS_LEFT, EVEN_D, BLOCK_N, PRECISION,
        )  # fmt: skip
    acc, peak, total = _attend(
        acc, peak, total, q, k_ptr, v_ptr, inner, outer, low, high, keys, dim, stride_kn, stride_vn, scale_log2,
        False, HAS_LEFT, EVEN_D, BLOCK_N, PRECISION,
    )  # fmt: skip
    return _attend(
        acc, peak, total, q, k_ptr, v_ptr, outer, end, low, high, keys, dim, stride_kn, stride_vn, scale_log2,
        True, HAS_LEFT, EVEN_D, BLOCK_N, PRECISION,
    )  # fmt: skip


@triton.jit
def _store_statistics(lse_ptr, peak_ptr, total_ptr, at, peak, total, mask):
    """Stores lse, and for fp32 also peak and total, as the rounding of lse is too large an error for huge scores."""
    tl.store(lse_ptr + at, (peak + tl.log2(total)) * LN_2, mask=mask)
    if peak_ptr is not None:
        tl.store(peak_ptr + at, peak, mask=mask)
        tl.store(total_ptr + at, total, mask=mask)


@triton.jit
def _merge(acc, lse, running_ptr, before, row, cols, stride, dim, EVEN_D: tl.constexpr):
    """Merges acc and lse with a running attention whose lse is `before`. With L = log(exp(before) + exp(lse)), returns
    exp(before − L)·running + exp(lse − L)·acc, and L. Rows of `running` that have seen no key are not read, nor those
    past the last row."""
    top = tl.maximum(before, lse)  # on a GPU the maximum of NaN and a number is the number
    none = (before == float("-inf")) & (lse == float("-inf"))
    both = tl.exp(before - tl.where(none, 0.0, top)) + tl.exp(lse - tl.where(none, 0.0, top))
    merged = tl.where(none | (top == float("inf")), top, top + tl.log(both))
    mask = (before != float("-inf"))[:, None]
    if not EVEN_D:
        mask = mask & (cols < dim)[None, :]
    running = tl.load(running_ptr + row[:, None] * stride + cols[None, :], mask=mask, other=0.0)
    weight = tl.where(before == float("-inf"), 0.0, tl.exp(before - merged))
    own = tl.where(lse == float("-inf"), 0.0, tl.exp(lse - merged))
    return running * weight[:, None] + acc * own[:, None], merged


@triton.jit(do_not_specialize=PLAIN)
def _attention_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    peak_ptr,
    total_ptr,
    running_ptr,
    queries,
    keys,
    dim,
    heads,
    all_heads,
    group,
    section,
    left,
    right,
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
    stride_rb,
    stride_rh,
    stride_rm,
    stride_lh,
    UNIT: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes out and lse of a tile of queries. With running_ptr, fp32, the epilogue merges them with a running
    attention over other keys, whose lse it reads from lse_ptr and replaces (`_merge`)."""
    tiles = tl.cdiv(queries, BLOCK_M)
    tile, head = _tile_and_head(tl.program_id(0), tiles, all_heads, section)
    if HAS_RIGHT:
        tile = tiles - 1 - tile  # the longest first: the last wave then has short tiles
    batch = (head // heads).to(tl.int64)
    own = (head % heads).to(tl.int64)
    shared = own // group
    dim *= UNIT
    start = tile * BLOCK_M
    row = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    wide = start.to(tl.int64)
    q_ptr += (batch * stride_qb + own * stride_qh + wide * stride_qm) * UNIT
    k_ptr += (batch * stride_kb + shared * stride_kh) * UNIT
    v_ptr += (batch * stride_vb + shared * stride_vh) * UNIT
    out_ptr += (batch * stride_ob + own * stride_oh + wide * stride_om) * UNIT
    q = _load_rows(q_ptr, row, cols, stride_qm * UNIT, queries - start, dim, True, EVEN_D)
    first = start + keys - queries
    last = tl.minimum(start + BLOCK_M, queries) - 1 + keys - queries
    begin, end = _keys_seen(first, last, keys, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_N)
    acc, peak, total = _attend_all(
        q, k_ptr, v_ptr, first + row, first, last, begin, end, keys, dim, left, right,
        stride_kn * UNIT, stride_vn * UNIT, scale_log2, HAS_LEFT, HAS_RIGHT, EVEN_D, BLOCK_N, PRECISION,
    )  # fmt: skip
    total = _divisor(peak, total)
    out = acc / total[:, None]
    at = head.to(tl.int64) * stride_lh + start + row
    here = row < queries - start
    if running_ptr is None:
        _store_statistics(lse_ptr, peak_ptr, total_ptr, at, peak, total, here)
    else:
        running_ptr += (batch * stride_rb + own * stride_rh + wide * stride_rm) * UNIT
        before = tl.load(lse_ptr + at, mask=here, other=float("-inf"))
        lse = (peak + tl.log2(total)) * LN_2
        out, lse = _merge(out, lse, running_ptr, before, row, cols, stride_rm * UNIT, dim, EVEN_D)
        tl.store(lse_ptr + at, lse, mask=here)
    _store_rows(out_ptr, out, row, cols, stride_om * UNIT, queries - start, dim, EVEN_D)


def portable_fwd(
    problem: Problem,
    out: torch.Tensor,
    lse: torch.Tensor,
    statistics: torch.Tensor | None,
    running: torch.Tensor | None = None,
) -> None:
    """Writes out [B, Hq, Sq, D], `readable`, and lse [B, Hq, Sq], with contiguous rows and one stride between heads.
    Unless it is None, also writes `statistics` [2, B, Hq, Sq]: the final maximum and sum of each row. With `running`,
    fp32 and `readable`, out and lse are merged with it and with the previous lse. Requires at least one query."""
    peak, total = (None, None) if statistics is None else statistics
    config = configs.pick_fwd_config(*problem.kind())
    unit = problem.unit(out) if running is None else problem.unit(out, running)
    with torch.cuda.device_of(problem.q):
        _attention_fwd_kernel[(triton.cdiv(problem.queries, config.block_m) * problem.all_heads,)](
            out_ptr=out,
            lse_ptr=lse,
            peak_ptr=peak,
            total_ptr=total,
            running_ptr=running,
            heads=problem.q.shape[1],
            all_heads=problem.all_heads,
            section=section(problem.all_heads, problem.key_bytes(), problem.banded),
            stride_lh=head_stride(lse),
            **strides("o", out, unit),
            **strides("r", out if running is None else running, unit),
            **problem.arguments(unit),
            **problem.tiles(config),
        )

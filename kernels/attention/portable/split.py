"""The forward for few queries and many keys: split-K over the keys of a head, and a second kernel that combines the
results. (Dao et al. 2023, Flash-Decoding; the formula is that of the online softmax.)

    m = max m_s        l = Σ exp2(m_s − m)·l_s        out = Σ exp2(m_s − m)·acc_s / l          over the splits s

Decoding, Q = 1, is bound by memory: at H8 D64 and 200 000 keys, k and v are 410 MB, 96 µs at the 4254 GB/s of a copy on
one NVIDIA H200. So the query heads that share a KV head are packed into one tile, and k and v are read once for all of
them: row r of a tile is query r // group of head r % group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..configs import portable as configs
from ..problem import PLAIN, Problem, strides
from .band import _keys_seen
from .forward import _attend_all, _divisor, _store_statistics


@triton.jit(do_not_specialize=PLAIN)
def _attention_split_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    part_ptr,
    peak_ptr,
    total_ptr,
    queries,
    keys,
    dim,
    heads,
    group,
    splits,
    keys_per_split,
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
    UNIT: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Writes part [B·Hkv, splits, group·Sq, D], accumulators that are not yet normalised, and peak and total, the same
    without D. `heads` counts KV heads; keys_per_split is a multiple of BLOCK_N."""
    rows = queries * group
    tiles = tl.cdiv(rows, BLOCK_M)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()  # the combine kernel may start once all these CTAs have; it then waits
    # Consecutive CTAs compute the query tiles of the same split of one head.
    tile = tl.program_id(0) % tiles
    split = tl.program_id(0) // tiles % splits
    head = tl.program_id(0) // tiles // splits
    batch, shared = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    dim *= UNIT
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    query, member = row // group, row % group
    q_ptr += (batch * stride_qb + shared * group * stride_qh) * UNIT
    k_ptr += (batch * stride_kb + shared * stride_kh) * UNIT
    v_ptr += (batch * stride_vb + shared * stride_vh) * UNIT
    offsets = (query.to(tl.int64) * stride_qm + member.to(tl.int64) * stride_qh) * UNIT
    here = (row < rows)[:, None] if EVEN_D else (row < rows)[:, None] & (cols < dim)[None, :]
    q = tl.load(q_ptr + offsets[:, None] + cols[None, :], mask=here, other=0.0)
    shift = keys - queries
    first = tile * BLOCK_M // group + shift
    last = (tl.minimum(tile * BLOCK_M + BLOCK_M, rows) - 1) // group + shift
    begin, end = _keys_seen(first, last, keys, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_N)
    begin = tl.maximum(begin, split * keys_per_split)
    end = tl.minimum(end, split * keys_per_split + keys_per_split)
    acc, peak, total = _attend_all(
        q, k_ptr, v_ptr, query + shift, first, last, begin, end, keys, dim, left, right,
        stride_kn * UNIT, stride_vn * UNIT, scale_log2, HAS_LEFT, HAS_RIGHT, EVEN_D, BLOCK_N, PRECISION,
    )  # fmt: skip
    at = (head * splits + split).to(tl.int64) * rows + row
    tl.store(part_ptr + at[:, None] * dim + cols[None, :], acc, mask=here)
    tl.store(peak_ptr + at, peak, mask=row < rows)
    tl.store(total_ptr + at, total, mask=row < rows)


@triton.jit(do_not_specialize=PLAIN)
def _attention_combine_kernel(
    part_ptr,
    part_peak_ptr,
    part_total_ptr,
    out_ptr,
    lse_ptr,
    peak_ptr,
    total_ptr,
    queries,
    dim,
    heads,
    group,
    splits,
    stride_ob,
    stride_oh,
    stride_om,
    UNIT: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Combines the splits, one row per CTA. It reads BLOCK_S splits at a time, to overlap their memory latency.
    `heads` counts KV heads."""
    rows = queries * group
    head = tl.program_id(0) // rows
    row = tl.program_id(0) % rows
    batch, shared = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    dim *= UNIT
    cols = tl.arange(0, BLOCK_D)
    first = head.to(tl.int64) * splits * rows + row
    peak = tl.full([1], float("-inf"), dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # until the split kernel has written its results
    for start in range(0, splits, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        at = first + split.to(tl.int64) * rows
        part_peak = tl.load(part_peak_ptr + at, mask=split < splits, other=float("-inf"))
        part_total = tl.load(part_total_ptr + at, mask=split < splits, other=0.0)
        here = (split < splits)[:, None] if EVEN_D else (split < splits)[:, None] & (cols < dim)[None, :]
        part = tl.load(part_ptr + at[:, None] * dim + cols[None, :], mask=here, other=0.0)
        higher = tl.maximum(peak, tl.max(part_peak, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        rescale = tl.exp2(peak - shift)
        weight = tl.exp2(part_peak - shift)
        total = total * rescale + tl.sum(weight * part_total, 0)
        acc = acc * rescale + tl.sum(weight[:, None] * part, 0)
        peak = higher
    total = _divisor(peak, total)
    query, member = (row // group).to(tl.int64), (row % group).to(tl.int64)
    to = out_ptr + (batch * stride_ob + (shared * group + member) * stride_oh + query * stride_om) * UNIT + cols
    tl.store(to, (acc / total).to(out_ptr.dtype.element_ty), mask=cols < dim)
    out_at = (head.to(tl.int64) * group + member) * queries + query + tl.arange(0, 1)
    _store_statistics(lse_ptr, peak_ptr, total_ptr, out_at, peak, total, None)


def split_fwd(
    problem: Problem, out: torch.Tensor, lse: torch.Tensor, statistics: torch.Tensor | None, splits: int
) -> None:
    """Computes the same as `portable_fwd`, with split-K over the keys, in at most `splits` splits."""
    rows, heads = problem.queries * problem.group, problem.all_kv_heads
    config = configs.pick_split_config(rows, *problem.kind())
    keys_per_split = triton.cdiv(triton.cdiv(problem.keys, splits), config.block_n) * config.block_n
    splits = triton.cdiv(problem.keys, keys_per_split)
    part = torch.empty(heads, splits, rows, problem.dim, dtype=torch.float32, device=out.device)
    part_peak = torch.empty(heads, splits, rows, dtype=torch.float32, device=out.device)
    part_total = torch.empty_like(part_peak)
    peak, total = (None, None) if statistics is None else statistics
    unit = problem.unit()
    # Programmatic dependent launch: the second kernel starts before the first one ends.
    overlap = problem.capability() >= (9, 0)
    with torch.cuda.device_of(out):
        _attention_split_fwd_kernel[(triton.cdiv(rows, config.block_m) * splits * heads,)](
            part_ptr=part,
            peak_ptr=part_peak,
            total_ptr=part_total,
            heads=problem.k.shape[1],
            splits=splits,
            keys_per_split=keys_per_split,
            **problem.arguments(unit),
            **problem.tiles(config),
            OVERLAP=overlap,
        )
        unit = problem.unit(out)
        block_s = min(triton.next_power_of_2(splits), 4096 // config.block_d)
        _attention_combine_kernel[(rows * heads,)](
            part,
            part_peak,
            part_total,
            out,
            lse,
            peak,
            total,
            problem.queries,
            problem.dim // unit,
            problem.k.shape[1],
            problem.group,
            splits,
            **strides("o", out, unit),
            UNIT=unit,
            EVEN_D=problem.dim == config.block_d,
            BLOCK_D=config.block_d,
            BLOCK_S=block_s,
            OVERLAP=overlap,
            num_warps=max(1, block_s * config.block_d // 1024),
            **({"launch_pdl": True} if overlap else {}),
        )

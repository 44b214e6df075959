"""dQ of a tile of queries, in a loop over the visible keys: one of the two kernels of the separate backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..configs import portable as configs
from ..problem import PLAIN, Problem, strides
from .band import _bounds, _keys_seen, _keys_seen_by_all, _tile_and_head, section
from .delta import ROWS, RowTerms
from .forward import _load_rows, _store_rows


@triton.jit
def _add_query_gradient(
    dq,
    q,
    dout,
    lse,
    delta,
    inverse,
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
    BANDED: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds the contribution of the key tiles in [first, last) to dq. A query sees keys low <= j < high."""
    cols = tl.arange(0, q.shape[1])
    row = tl.arange(0, BLOCK_N)
    for start in tl.range(first, last, BLOCK_N, disable_licm=True):
        wide = tl.cast(start, tl.int64)
        k = _load_rows(k_ptr + wide * stride_kn, row, cols, stride_kn, keys - start, dim, MASK, EVEN_D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        p = tl.exp2(s * scale_log2 - lse[:, None])
        if inverse is not None:
            p *= inverse[:, None]
        if MASK and BANDED:
            key = start + row
            p = tl.where(key[None, :] < high[:, None], p, 0.0)
            if HAS_LEFT:
                p = tl.where(key[None, :] >= low[:, None], p, 0.0)
        v = _load_rows(v_ptr + wide * stride_vn, row, cols, stride_vn, keys - start, dim, MASK, EVEN_D)
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        if MASK and not BANDED:
            # ds and not p: for an infinite gradient of lse, p = 0 would make ds NaN. In a band registers are too few.
            ds = tl.where((start + row)[None, :] < high[:, None], ds, 0.0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=PLAIN)
def _attention_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    inverse_ptr,
    dq_ptr,
    queries,
    padded,
    keys,
    dim,
    heads,
    all_heads,
    group,
    section,
    left,
    right,
    scale,
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
    stride_gb,
    stride_gh,
    stride_gm,
    stride_db,
    stride_dh,
    stride_dn,
    UNIT: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    ADD: tl.constexpr,
):
    """Computes dq of a tile of queries. With ADD it is added to dq in memory."""
    tiles = tl.cdiv(queries, BLOCK_M)
    tile, head = _tile_and_head(tl.program_id(0), tiles, all_heads, section)
    if HAS_RIGHT:
        tile = tiles - 1 - tile  # the longest first
    batch, own = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    shared = own // group
    start = tile * BLOCK_M
    wide = start.to(tl.int64)
    dim *= UNIT
    row, cols = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    q_ptr += (batch * stride_qb + own * stride_qh + wide * stride_qm) * UNIT
    dout_ptr += (batch * stride_gb + own * stride_gh + wide * stride_gm) * UNIT
    k_ptr += (batch * stride_kb + shared * stride_kh) * UNIT
    v_ptr += (batch * stride_vb + shared * stride_vh) * UNIT
    q = _load_rows(q_ptr, row, cols, stride_qm * UNIT, queries - start, dim, True, EVEN_D)
    dout = _load_rows(dout_ptr, row, cols, stride_gm * UNIT, queries - start, dim, True, EVEN_D)
    rows_before = head.to(tl.int64) * (padded * ROWS) + start
    lse = tl.load(lse_ptr + rows_before + row)
    delta = tl.load(delta_ptr + rows_before + row)
    inverse = None
    if inverse_ptr is not None:
        inverse = tl.load(inverse_ptr + rows_before + row)
    first = start + keys - queries
    last = tl.minimum(start + BLOCK_M, queries) - 1 + keys - queries
    begin, end = _keys_seen(first, last, keys, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_N)
    inner, outer = _keys_seen_by_all(begin, end, first, last, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_N)
    low, high = _bounds(first + row, keys, left, right, HAS_LEFT, HAS_RIGHT)
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    if PRECISION == "ieee":
        # fp32 has one loop, masked throughout: two loops would need too many registers for rows of q and dout.
        outer = begin
    else:
        if HAS_LEFT:
            dq = _add_query_gradient(
                dq, q, dout, lse, delta, inverse, k_ptr, v_ptr, begin, inner, low, high, keys, dim, stride_kn * UNIT,
                stride_vn * UNIT, scale_log2, True, HAS_LEFT or HAS_RIGHT, HAS_LEFT, EVEN_D, BLOCK_N, PRECISION,
            )  # fmt: skip
        dq = _add_query_gradient(
            dq, q, dout, lse, delta, inverse, k_ptr, v_ptr, inner, outer, low, high, keys, dim, stride_kn * UNIT,
            stride_vn * UNIT, scale_log2, False, HAS_LEFT or HAS_RIGHT, HAS_LEFT, EVEN_D, BLOCK_N, PRECISION,
        )  # fmt: skip
    dq = _add_query_gradient(
        dq, q, dout, lse, delta, inverse, k_ptr, v_ptr, outer, end, low, high, keys, dim, stride_kn * UNIT,
        stride_vn * UNIT, scale_log2, True, HAS_LEFT or HAS_RIGHT, HAS_LEFT, EVEN_D, BLOCK_N, PRECISION,
    )  # fmt: skip
    dq_ptr += (batch * stride_db + own * stride_dh + wide * stride_dn) * UNIT
    _store_rows(dq_ptr, dq * scale, row, cols, stride_dn * UNIT, queries - start, dim, EVEN_D, ADD)


def query_gradient(problem: Problem, dout: torch.Tensor, terms: RowTerms, dq: torch.Tensor, add: bool = False) -> None:
    """Writes dq, or adds to it. Requires at least one query."""
    config = configs.pick_dq_config(*problem.kind())
    unit = problem.unit(dout, dq)
    with torch.cuda.device_of(problem.q):
        _attention_dq_kernel[(triton.cdiv(problem.queries, config.block_m) * problem.all_heads,)](
            dout_ptr=dout,
            dq_ptr=dq,
            heads=problem.q.shape[1],
            all_heads=problem.all_heads,
            section=section(problem.all_heads, problem.key_bytes(), problem.banded),
            scale=problem.scale,
            **strides("g", dout, unit),
            **strides("d", dq, unit, "n"),
            ADD=add,
            **terms.arguments(),
            **problem.arguments(unit),
            **problem.tiles(config),
        )

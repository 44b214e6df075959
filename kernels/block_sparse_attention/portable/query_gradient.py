"""dQ of a tile of queries, in a loop over the key blocks of its list, and the gradient of each block's bias: one of the
two kernels of the backward.

    dbias of a block = Σ ds over its pairs

A CTA processes each block of its list once, so it stores the sum over its rows without accumulating in memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import configs
from ..index import HEADER
from ..problem import PLAIN, Problem, strides
from .delta import ROWS, RowTerms
from .forward import LOG2_E, _block_of_step, _load_rows, _row_list, _store_rows, _tile_and_head


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
    list_ptr,
    bias_ptr,
    dbias_ptr,
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
    """Adds the contribution of entries [first, last) of the list to dq. A query sees the keys below `seen`."""
    cols = tl.arange(0, q.shape[1])
    row = tl.arange(0, BLOCK_N)
    SPLIT: tl.constexpr = BLOCK // BLOCK_N
    share = 0.0
    following = _block_of_step(list_ptr, first * SPLIT, last, SPLIT)
    for step in tl.range(first * SPLIT, last * SPLIT, disable_licm=True):
        block = following
        following = _block_of_step(list_ptr, step + 1, last, SPLIT)
        start = block * BLOCK + step % SPLIT * BLOCK_N
        wide = start.to(tl.int64)
        k = _load_rows(k_ptr + wide * stride_kn, row, cols, stride_kn, keys - start, dim, MASK, EVEN_D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        shift = lse
        if bias_ptr is not None:
            shift -= tl.load(bias_ptr + block.to(tl.int64) * stride_bn) * LOG2_E
        p = tl.exp2(s * scale_log2 - shift[:, None])
        if inverse is not None:
            p *= inverse[:, None]
        v = _load_rows(v_ptr + wide * stride_vn, row, cols, stride_vn, keys - start, dim, MASK, EVEN_D)
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        if MASK:  # ds and not p: for an infinite gradient of lse, p = 0 would make ds NaN
            ds = tl.where((start + row)[None, :] < seen[:, None], ds, 0.0)
        if dbias_ptr is not None:
            # Each tile of a block stores the partial sum so far; the last store is the result.
            share = tl.where(step % SPLIT == 0, 0.0, share) + tl.sum(tl.sum(ds, 1), 0)
            tl.store(dbias_ptr + block, share)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=PLAIN)
def _block_sparse_attention_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    bias_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    inverse_ptr,
    dq_ptr,
    dbias_ptr,
    queries,
    padded,
    keys,
    rows,
    columns,
    dim,
    heads,
    all_heads,
    group,
    section,
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
    stride_dm,
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
    """Computes dq and, if there is a bias, dbias [B·Hq, tiles of queries, blocks of keys], initially zero."""
    tiles = rows * (BLOCK // BLOCK_M)
    rank, head = _tile_and_head(tl.program_id(0), tiles, all_heads, section)
    batch, own = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    shared = own // group
    table_ptr += batch * stride_tb + own * stride_th
    tile, block, line_ptr = _row_list(table_ptr, rank, columns, BLOCK // BLOCK_M)
    if bias_ptr is not None:
        bias_ptr += batch * stride_bb + own * stride_bh + block.to(tl.int64) * stride_bm
    if dbias_ptr is not None:
        dbias_ptr += (head.to(tl.int64) * tiles + tile) * columns
    start = tile * BLOCK_M
    wide = start.to(tl.int64)
    dim *= UNIT
    padded *= ROWS
    row, cols = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    q_ptr += (batch * stride_qb + own * stride_qh + wide * stride_qm) * UNIT
    dout_ptr += (batch * stride_gb + own * stride_gh + wide * stride_gm) * UNIT
    k_ptr += (batch * stride_kb + shared * stride_kh) * UNIT
    v_ptr += (batch * stride_vb + shared * stride_vh) * UNIT
    if dbias_ptr is None:
        q = _load_rows(q_ptr, row, cols, stride_qm * UNIT, queries - start, dim, True, EVEN_D)
    else:
        # Padding queries are copies of the last one, as in key_gradients.py: dbias sums their ds too.
        query = tl.minimum(row, queries - 1 - start)
        q = _load_rows(q_ptr, query, cols, stride_qm * UNIT, queries - start, dim, False, EVEN_D)
    dout = _load_rows(dout_ptr, row, cols, stride_gm * UNIT, queries - start, dim, True, EVEN_D)
    rows_before = head.to(tl.int64) * padded + start
    lse = tl.load(lse_ptr + rows_before + row)
    delta = tl.load(delta_ptr + rows_before + row)
    inverse = None
    if inverse_ptr is not None:
        inverse = tl.load(inverse_ptr + rows_before + row)
    count, whole = tl.load(line_ptr), tl.load(line_ptr + 1)
    seen = row * 0 + keys
    if CAUSAL:
        seen = tl.minimum(seen, start + row + keys - queries + 1)
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    if PRECISION == "ieee":
        # fp32 has one loop, masked throughout: two loops would need too many registers for rows of q and dout.
        whole *= 0
    else:
        dq = _add_query_gradient(
            dq, q, dout, lse, delta, inverse, k_ptr, v_ptr, line_ptr + HEADER, bias_ptr, dbias_ptr, 0, whole, seen,
            keys, dim, stride_kn * UNIT, stride_vn * UNIT, stride_bn, scale_log2,
            False, EVEN_D, BLOCK, BLOCK_N, PRECISION,
        )  # fmt: skip
    if PRECISION == "ieee" or CAUSAL or not EVEN_N:
        dq = _add_query_gradient(
            dq, q, dout, lse, delta, inverse, k_ptr, v_ptr, line_ptr + HEADER, bias_ptr, dbias_ptr, whole, count, seen,
            keys, dim, stride_kn * UNIT, stride_vn * UNIT, stride_bn, scale_log2,
            True, EVEN_D, BLOCK, BLOCK_N, PRECISION,
        )  # fmt: skip
    dq_ptr += (batch * stride_db + own * stride_dh + wide * stride_dm) * UNIT
    _store_rows(dq_ptr, dq * scale, row, cols, stride_dm * UNIT, queries - start, dim, EVEN_D)


def query_gradient(
    problem: Problem, dout: torch.Tensor, terms: RowTerms, dq: torch.Tensor, need_dbias: bool
) -> torch.Tensor | None:
    """Writes dq. Returns the gradient of the bias, fp32 [B, Hq, nq, nk], if it is needed. Requires at least one query
    and one key."""
    config = configs.pick_dq_config(*problem.kind())
    unit = problem.unit(dout, dq)
    split = problem.block // config.block_m
    shape = (*problem.q.shape[:2], problem.row_tiles(config), problem.columns)
    dbias = torch.zeros(shape, dtype=torch.float32, device=dq.device) if need_dbias else None
    with torch.cuda.device_of(problem.q):
        _block_sparse_attention_dq_kernel[(problem.row_tiles(config) * problem.all_heads,)](
            dout_ptr=dout,
            dq_ptr=dq,
            dbias_ptr=dbias,
            heads=problem.q.shape[1],
            all_heads=problem.all_heads,
            section=configs.pick_section(problem.all_heads, problem.key_bytes()),
            scale=problem.scale,
            EVEN_N=problem.keys % problem.block == 0,
            **strides("g", dout, unit),
            **strides("d", dq, unit),
            **terms.arguments(),
            **problem.arguments(unit),
            **problem.tiles(config),
        )
    # If a block has several tiles of queries, each has written a partial sum.
    return dbias if dbias is None or split == 1 else dbias.unflatten(2, (-1, split)).sum(3)

"""dK and dV of a tile of keys, in a loop over the query blocks that keep its key block: one of the two kernels of the
backward.

Scores are transposed tiles, [keys, queries]: k and v stay in place over the loop, and p and ds are GEMM operands in
registers. One CTA loops over the query heads that share a KV head, each with its own list: their gradients accumulate
in registers, without partial sums or atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import configs
from ..index import HEADER
from ..problem import PLAIN, Problem, strides
from .delta import ROWS, RowTerms
from .forward import LOG2_E, _load_rows, _store_rows, _tile_and_head


@triton.jit
def _add_key_gradients(
    dk,
    dv,
    k,
    v,
    q_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    inverse_ptr,
    list_ptr,
    bias_ptr,
    count,
    key,
    queries,
    keys,
    dim,
    stride_qm,
    stride_gm,
    stride_bm,
    scale_log2,
    CAUSAL: tl.constexpr,
    EVEN_M: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds the contributions of the first `count` query blocks of a list to dk and dv of the keys in `key`.

    Registers are the limit: dk, dv and the two tiles of scores use all of them. So under a causal mask every tile is
    masked, as separate loops for the diagonal and the rest would need two sets of addresses. For the same reason, loop
    invariants are recomputed in the loop.
    """
    cols = tl.arange(0, k.shape[1])
    row = tl.arange(0, BLOCK_M)
    SPLIT: tl.constexpr = BLOCK // BLOCK_M
    for step in tl.range(0, count * SPLIT, disable_licm=True):
        block = tl.load(list_ptr + step // SPLIT)
        start = block * BLOCK + step % SPLIT * BLOCK_M
        wide = start.to(tl.int64)
        # Padding queries are copies of the last one. Were they zeros, their scores with an infinite key would be NaN,
        # and so would p, although lse2 is +inf. The score of a copy is NaN or +inf only where that of the last is.
        query = row if EVEN_M else tl.minimum(row, queries - 1 - start)
        q = _load_rows(q_ptr + wide * stride_qm, query, cols, stride_qm, queries - start, dim, False, EVEN_D)
        if PRECISION == "ieee":
            # The same operand order as in the forward, so that scores round alike: else p is off by a score's last bit.
            s = tl.trans(tl.dot(q, tl.trans(k), input_precision=PRECISION))
        else:
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        lse = tl.load(lse_ptr + start + row)
        if bias_ptr is not None:
            lse -= tl.load(bias_ptr + block.to(tl.int64) * stride_bm) * LOG2_E
        s = s * scale_log2 - lse[None, :]
        if CAUSAL:
            s = tl.where(key[:, None] <= (start + row + keys - queries)[None, :], s, float("-inf"))
        p = tl.exp2(s)
        if inverse_ptr is not None:
            p *= tl.load(inverse_ptr + start + row)[None, :]
        dout = _load_rows(dout_ptr + wide * stride_gm, row, cols, stride_gm, queries - start, dim, not EVEN_M, EVEN_D)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
        ds = (p * (dp - tl.load(delta_ptr + start + row)[None, :])).to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=PLAIN)
def _block_sparse_attention_dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    bias_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    inverse_ptr,
    dk_ptr,
    dv_ptr,
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
    stride_dn,
    stride_eb,
    stride_eh,
    stride_en,
    stride_tb,
    stride_th,
    stride_bb,
    stride_bh,
    stride_bm,
    stride_bn,
    UNIT: tl.constexpr,
    CAUSAL: tl.constexpr,
    EVEN_M: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`heads` and `all_heads` count KV heads. The order of lines is that of the first query head of a group."""
    SPLIT: tl.constexpr = BLOCK // BLOCK_N
    rank, head = _tile_and_head(tl.program_id(0), columns * SPLIT, all_heads, section)
    batch, shared = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    own = shared * group
    table_ptr += batch * stride_tb + own * stride_th + rows * (HEADER + columns)
    block = tl.load(table_ptr + rank // SPLIT * (HEADER + rows) + 2)
    table_ptr += block * (HEADER + rows)
    if bias_ptr is not None:
        bias_ptr += batch * stride_bb + own * stride_bh + block.to(tl.int64) * stride_bn
    start = block * BLOCK + rank % SPLIT * BLOCK_N
    wide = start.to(tl.int64)
    dim *= UNIT
    padded *= ROWS
    row, cols = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    k_ptr += (batch * stride_kb + shared * stride_kh + wide * stride_kn) * UNIT
    v_ptr += (batch * stride_vb + shared * stride_vh + wide * stride_vn) * UNIT
    k = _load_rows(k_ptr, row, cols, stride_kn * UNIT, keys - start, dim, True, EVEN_D)
    v = _load_rows(v_ptr, row, cols, stride_vn * UNIT, keys - start, dim, True, EVEN_D)
    q_ptr += (batch * stride_qb + own * stride_qh) * UNIT
    dout_ptr += (batch * stride_gb + own * stride_gh) * UNIT
    rows_before = head.to(tl.int64) * group * padded
    lse_ptr += rows_before
    delta_ptr += rows_before
    if inverse_ptr is not None:
        inverse_ptr += rows_before
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    for _ in tl.range(0, group, disable_licm=True):
        dk, dv = _add_key_gradients(
            dk, dv, k, v, q_ptr, dout_ptr, lse_ptr, delta_ptr, inverse_ptr, table_ptr + HEADER, bias_ptr,
            tl.load(table_ptr), start + row, queries, keys, dim, stride_qm * UNIT, stride_gm * UNIT, stride_bm,
            scale_log2, CAUSAL, EVEN_M, EVEN_D, BLOCK, BLOCK_M, PRECISION,
        )  # fmt: skip
        q_ptr += stride_qh.to(tl.int64) * UNIT
        dout_ptr += stride_gh.to(tl.int64) * UNIT
        table_ptr += stride_th
        lse_ptr += padded
        delta_ptr += padded
        if inverse_ptr is not None:
            inverse_ptr += padded
        if bias_ptr is not None:
            bias_ptr += stride_bh
    dk_ptr += (batch * stride_db + shared * stride_dh + wide * stride_dn) * UNIT
    dv_ptr += (batch * stride_eb + shared * stride_eh + wide * stride_en) * UNIT
    _store_rows(dk_ptr, dk * scale, row, cols, stride_dn * UNIT, keys - start, dim, EVEN_D)
    _store_rows(dv_ptr, dv, row, cols, stride_en * UNIT, keys - start, dim, EVEN_D)


def key_gradients(problem: Problem, dout: torch.Tensor, terms: RowTerms, dk: torch.Tensor, dv: torch.Tensor) -> None:
    """Writes dk and dv. Requires at least one key and one query."""
    config = configs.pick_dkdv_config(*problem.kind())
    unit = problem.unit(dout, dk, dv)
    with torch.cuda.device_of(problem.q):
        _block_sparse_attention_dkdv_kernel[(problem.column_tiles(config) * problem.all_kv_heads,)](
            dout_ptr=dout,
            dk_ptr=dk,
            dv_ptr=dv,
            heads=problem.k.shape[1],
            all_heads=problem.all_kv_heads,
            section=configs.pick_section(problem.all_kv_heads, problem.query_bytes()),
            scale=problem.scale,
            **strides("g", dout, unit),
            **strides("d", dk, unit, "n"),
            **strides("e", dv, unit, "n"),
            EVEN_M=problem.even_rows(),
            **terms.arguments(),
            **problem.arguments(unit),
            **problem.tiles(config),
        )

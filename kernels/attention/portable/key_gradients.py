"""dK and dV of a tile of keys: device functions of the separate and the fused backward, and the kernel of the separate
one.

Scores are transposed tiles, [keys, queries]: k and v stay in place over the loop, and p and ds are GEMM operands in
registers. One CTA loops over the query heads that share a KV head: their gradients accumulate in registers, without
partial sums or atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..configs import portable as configs
from ..problem import PLAIN, Problem, strides
from .band import _queries_seeing, _tile_and_head, section
from .delta import ROWS, RowTerms
from .forward import _load_rows, _store_rows


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
    dq_ptr,
    key,
    begin,
    end,
    queries,
    keys,
    dim,
    left,
    right,
    stride_qm,
    stride_gm,
    scale_log2,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds the contributions of queries `begin` to `end` of one head to dk and dv of the keys in `key`. With dq_ptr,
    [padded, dim] in fp32, the keys' contribution to dq is added there as well.

    Registers are the scarce resource: dk, dv and the two tiles of scores use all of them. So in a band every tile is
    masked, as separate loops for edge and inner tiles would need two sets of addresses. For the same reason, loop
    invariants are recomputed in the loop.
    """
    cols = tl.arange(0, k.shape[1])
    row = tl.arange(0, BLOCK_M)
    for start in tl.range(begin, end, BLOCK_M, disable_licm=True):
        wide = tl.cast(start, tl.int64)
        if dq_ptr is not None:
            dq_ptrs = dq_ptr + wide * dim + row[:, None] * dim + cols[None, :]
            dq_mask = None if EVEN_D else (cols < dim)[None, :]
            dq = tl.load(dq_ptrs, mask=dq_mask)  # issued early, to hide its latency
        # Padding queries are copies of the last one. Were they zeros, their scores with an infinite key would be NaN,
        # and so would p, although lse2 is +inf. The score of a copy is NaN or +inf only where that of the last is.
        query = row if EVEN_M else tl.minimum(row, queries - 1 - start)
        q = _load_rows(q_ptr + wide * stride_qm, query, cols, stride_qm, queries - start, dim, False, EVEN_D)
        if PRECISION == "ieee":
            # The same operand order as in the forward, so that scores round alike: else p is off by a score's last bit.
            s = tl.trans(tl.dot(q, tl.trans(k), input_precision=PRECISION))
        else:
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        p = tl.exp2(s * scale_log2 - tl.load(lse_ptr + start + row)[None, :])
        if inverse_ptr is not None:
            p *= tl.load(inverse_ptr + start + row)[None, :]
        if HAS_LEFT or HAS_RIGHT:
            position = start + row + keys - queries
            if HAS_RIGHT:
                p = tl.where(key[:, None] <= (position + right)[None, :], p, 0.0)
            if HAS_LEFT:
                p = tl.where(key[:, None] >= (position - left)[None, :], p, 0.0)
        dout = _load_rows(dout_ptr + wide * stride_gm, row, cols, stride_gm, queries - start, dim, not EVEN_M, EVEN_D)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
        ds = p * (dp - tl.load(delta_ptr + start + row)[None, :])
        if dq_ptr is not None and not EVEN_N:
            # Padding keys would corrupt dq only, where exp2(-lse) overflows or a gradient is infinite.
            ds = tl.where(key[:, None] < keys, ds, 0.0)
        ds = ds.to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)
        if dq_ptr is not None:
            tl.store(dq_ptrs, dq + tl.dot(tl.trans(ds), k, input_precision=PRECISION), mask=dq_mask)
    return dk, dv


@triton.jit
def _key_gradients(
    k,
    v,
    q_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    inverse_ptr,
    dq_ptr,
    start,
    queries,
    padded,
    keys,
    dim,
    group,
    left,
    right,
    stride_qh,
    stride_qm,
    stride_gh,
    stride_gm,
    scale_log2,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Returns dk / scale and dv of the tile of keys at `start`, from all queries of all query heads of its group. The
    pointers point to the first of these heads."""
    BLOCK_N: tl.constexpr = k.shape[0]
    dk = tl.zeros([BLOCK_N, k.shape[1]], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, k.shape[1]], dtype=tl.float32)
    key = start + tl.arange(0, BLOCK_N)
    last_key = tl.minimum(start + BLOCK_N, keys) - 1
    begin, end = _queries_seeing(start, last_key, queries, keys - queries, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_M)
    for _ in tl.range(0, group, disable_licm=True):
        dk, dv = _add_key_gradients(
            dk, dv, k, v, q_ptr, dout_ptr, lse_ptr, delta_ptr, inverse_ptr, dq_ptr, key, begin, end, queries, keys, dim,
            left, right, stride_qm, stride_gm, scale_log2,
            HAS_LEFT, HAS_RIGHT, EVEN_M, EVEN_N, EVEN_D, BLOCK_M, PRECISION,
        )  # fmt: skip
        q_ptr += stride_qh
        dout_ptr += stride_gh
        lse_ptr += padded
        delta_ptr += padded
        if inverse_ptr is not None:
            inverse_ptr += padded
        if dq_ptr is not None:
            dq_ptr += tl.cast(padded, tl.int64) * dim
    return dk, dv


@triton.jit(do_not_specialize=PLAIN)
def _attention_dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    inverse_ptr,
    dk_ptr,
    dv_ptr,
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
    stride_eb,
    stride_eh,
    stride_en,
    UNIT: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    EVEN_M: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    ADD: tl.constexpr,
):
    """`heads` and `all_heads` count KV heads. With ADD the results are added to dk and dv in memory."""
    padded *= ROWS
    # Under a causal mask most queries see the first keys, so the longest tiles come first.
    tile, head = _tile_and_head(tl.program_id(0), tl.cdiv(keys, BLOCK_N), all_heads, section)
    batch, shared = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    own = shared * group
    start = tile * BLOCK_N
    wide = start.to(tl.int64)
    dim *= UNIT
    row, cols = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    k_ptr += (batch * stride_kb + shared * stride_kh + wide * stride_kn) * UNIT
    v_ptr += (batch * stride_vb + shared * stride_vh + wide * stride_vn) * UNIT
    k = _load_rows(k_ptr, row, cols, stride_kn * UNIT, keys - start, dim, True, EVEN_D)
    v = _load_rows(v_ptr, row, cols, stride_vn * UNIT, keys - start, dim, True, EVEN_D)
    rows_before = head.to(tl.int64) * group * padded
    lse_ptr += rows_before
    delta_ptr += rows_before
    if inverse_ptr is not None:
        inverse_ptr += rows_before
    dk, dv = _key_gradients(
        k, v, q_ptr + (batch * stride_qb + own * stride_qh) * UNIT,
        dout_ptr + (batch * stride_gb + own * stride_gh) * UNIT, lse_ptr, delta_ptr, inverse_ptr, None,
        start, queries, padded, keys, dim, group, left, right,
        stride_qh.to(tl.int64) * UNIT, stride_qm * UNIT, stride_gh.to(tl.int64) * UNIT, stride_gm * UNIT, scale_log2,
        HAS_LEFT, HAS_RIGHT, EVEN_M, True, EVEN_D, BLOCK_M, PRECISION,
    )  # fmt: skip
    dk_ptr += (batch * stride_db + shared * stride_dh + wide * stride_dn) * UNIT
    dv_ptr += (batch * stride_eb + shared * stride_eh + wide * stride_en) * UNIT
    _store_rows(dk_ptr, dk * scale, row, cols, stride_dn * UNIT, keys - start, dim, EVEN_D, ADD)
    _store_rows(dv_ptr, dv, row, cols, stride_en * UNIT, keys - start, dim, EVEN_D, ADD)


def key_gradients(
    problem: Problem,
    dout: torch.Tensor,
    terms: RowTerms,
    dk: torch.Tensor,
    dv: torch.Tensor,
    add: bool = False,
) -> None:
    """Writes the first `keys` rows of dk and dv, or adds to them. Requires at least one key and one query."""
    config = configs.pick_dkdv_config(*problem.kind())
    unit = problem.unit(dout, dk, dv)
    with torch.cuda.device_of(problem.q):
        _attention_dkdv_kernel[(triton.cdiv(problem.keys, config.block_n) * problem.all_kv_heads,)](
            dout_ptr=dout,
            dk_ptr=dk,
            dv_ptr=dv,
            heads=problem.k.shape[1],
            all_heads=problem.all_kv_heads,
            section=section(problem.all_kv_heads, problem.query_bytes(), problem.banded),
            scale=problem.scale,
            **strides("g", dout, unit),
            **strides("d", dk, unit, "n"),
            **strides("e", dv, unit, "n"),
            EVEN_M=problem.queries % config.block_m == 0,
            ADD=add,
            **terms.arguments(),
            **problem.arguments(unit),
            **problem.tiles(config),
        )

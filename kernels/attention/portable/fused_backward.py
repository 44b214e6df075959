"""The backward in its fused form: p and ds of each tile are computed once and contribute to dQ, dK and dV.

It takes five GEMMs of 2·D FLOPs per visible pair, where the separate form takes seven. The cost is dQ. A CTA keeps dk
and dv of its keys in registers and loops over the queries, so many CTAs add to each tile of dQ. To avoid atomics, each
CTA adds to a partial dQ of its own: `splits` of them in fp32, splits·4·Hq·Sq·D bytes a batch, independent of Sk. A
second kernel sums them in order. A CTA computes every splits-th tile of keys, and reads and writes its dQ once for each
of them: 8·D bytes against 10·D·BLOCK_N FLOPs a query. With 128 keys that is 160 FLOPs a byte, and with 64 keys 80. One
NVIDIA H200 has some 700 TFLOP/s for 4.2 TB/s, 167 FLOPs a byte: memory traffic can be the limit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..configs import portable as configs
from ..problem import PLAIN, Problem, Saved, strides
from .delta import ROWS, row_terms
from .forward import _load_rows, _store_rows
from .key_gradients import _key_gradients


@triton.jit(do_not_specialize=PLAIN)
def _attention_fused_bwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    inverse_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    queries,
    padded,
    keys,
    dim,
    heads,
    all_heads,
    group,
    splits,
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
    EVEN_N: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`heads` and `all_heads` count KV heads. dq_ptr: [splits, B·Hq, padded · ROWS, D], fp32, initially zero."""
    padded *= ROWS
    # Consecutive CTAs are the splits of one head: they read the same queries at about the same time.
    head = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    batch, shared = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    own = shared * group
    dim *= UNIT
    row, cols = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    k_ptr += (batch * stride_kb + shared * stride_kh) * UNIT
    v_ptr += (batch * stride_vb + shared * stride_vh) * UNIT
    dk_ptr += (batch * stride_db + shared * stride_dh) * UNIT
    dv_ptr += (batch * stride_eb + shared * stride_eh) * UNIT
    q_ptr += (batch * stride_qb + own * stride_qh) * UNIT
    dout_ptr += (batch * stride_gb + own * stride_gh) * UNIT
    rows_before = head.to(tl.int64) * group * padded
    lse_ptr += rows_before
    delta_ptr += rows_before
    if inverse_ptr is not None:
        inverse_ptr += rows_before
    dq_ptr += (split.to(tl.int64) * all_heads * group * padded + rows_before) * dim
    # Every splits-th tile: under a causal mask each CTA then has short and long tiles.
    for start in tl.range(split * BLOCK_N, keys, splits * BLOCK_N, disable_licm=True):
        wide = tl.cast(start, tl.int64)
        k_tile_ptr = k_ptr + wide * stride_kn * UNIT
        v_tile_ptr = v_ptr + wide * stride_vn * UNIT
        k = _load_rows(k_tile_ptr, row, cols, stride_kn * UNIT, keys - start, dim, True, EVEN_D)
        v = _load_rows(v_tile_ptr, row, cols, stride_vn * UNIT, keys - start, dim, True, EVEN_D)
        dk, dv = _key_gradients(
            k, v, q_ptr, dout_ptr, lse_ptr, delta_ptr, inverse_ptr, dq_ptr, start, queries, padded, keys, dim,
            group, left, right, stride_qh.to(tl.int64) * UNIT, stride_qm * UNIT, stride_gh.to(tl.int64) * UNIT,
            stride_gm * UNIT, scale_log2, HAS_LEFT, HAS_RIGHT, EVEN_M, EVEN_N, EVEN_D, BLOCK_M, PRECISION,
        )  # fmt: skip
        dk_tile_ptr = dk_ptr + wide * stride_dn * UNIT
        dv_tile_ptr = dv_ptr + wide * stride_en * UNIT
        _store_rows(dk_tile_ptr, dk * scale, row, cols, stride_dn * UNIT, keys - start, dim, EVEN_D)
        _store_rows(dv_tile_ptr, dv, row, cols, stride_en * UNIT, keys - start, dim, EVEN_D)
        # Another thread of this CTA may read the updated dq for the next tile.
        tl.debug_barrier()


@triton.jit(do_not_specialize=PLAIN)
def _attention_sum_dq_kernel(
    part_ptr,
    dq_ptr,
    queries,
    padded,
    dim,
    heads,
    all_heads,
    splits,
    scale,
    stride_db,
    stride_dh,
    stride_dm,
    UNIT: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tiles = tl.cdiv(queries, BLOCK_M)
    head = tl.program_id(0) // tiles
    start = tl.program_id(0) % tiles * BLOCK_M
    dim *= UNIT
    row, cols = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    padded *= ROWS
    part_ptr += (head.to(tl.int64) * padded + start) * dim
    total = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for _ in range(splits):
        total += _load_rows(part_ptr, row, cols, dim, queries - start, dim, True, EVEN_D)
        part_ptr += tl.cast(padded, tl.int64) * all_heads * dim
    batch, own, wide = (head // heads).to(tl.int64), (head % heads).to(tl.int64), start.to(tl.int64)
    dq_ptr += (batch * stride_db + own * stride_dh + wide * stride_dm) * UNIT
    _store_rows(dq_ptr, total * scale, row, cols, stride_dm * UNIT, queries - start, dim, EVEN_D)


def fused_bwd(problem: Problem, saved: Saved, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> None:
    """Writes dq and the first `keys` rows of dk and dv. Requires at least one query and one key."""
    terms = row_terms(problem, saved)
    config = configs.pick_fused_config(*problem.kind())
    tiles = triton.cdiv(problem.keys, config.block_n)
    splits = configs.pick_fused_splits(problem.all_kv_heads, tiles, problem.sms())
    padded = terms.lse2.shape[1]
    parts = torch.zeros(splits, problem.all_heads, padded, problem.dim, dtype=torch.float32, device=dq.device)
    unit = problem.unit(saved.dout, dk, dv)
    with torch.cuda.device_of(problem.q):
        _attention_fused_bwd_kernel[(problem.all_kv_heads * splits,)](
            dout_ptr=saved.dout,
            dq_ptr=parts,
            dk_ptr=dk,
            dv_ptr=dv,
            heads=problem.k.shape[1],
            all_heads=problem.all_kv_heads,
            splits=splits,
            scale=problem.scale,
            **strides("g", saved.dout, unit),
            **strides("d", dk, unit, "n"),
            **strides("e", dv, unit, "n"),
            EVEN_M=problem.queries % config.block_m == 0,
            EVEN_N=problem.keys % config.block_n == 0,
            **terms.arguments(),
            **problem.arguments(unit),
            **problem.tiles(config),
        )
    _sum_parts(problem, parts, dq, config.block_d)


def _sum_parts(problem: Problem, parts: torch.Tensor, dq: torch.Tensor, block_d: int) -> None:
    """Computes dq = scale · the sum of the partial dQ, added in a fixed order."""
    block_m = max(1, 4096 // block_d)
    unit = problem.unit(dq)
    with torch.cuda.device_of(dq):
        _attention_sum_dq_kernel[(triton.cdiv(problem.queries, block_m) * problem.all_heads,)](
            parts,
            dq,
            problem.queries,
            parts.shape[2] // ROWS.value,
            problem.dim // unit,
            problem.q.shape[1],
            problem.all_heads,
            parts.shape[0],
            problem.scale,
            **strides("d", dq, unit),
            UNIT=unit,
            EVEN_D=problem.dim == block_d,
            BLOCK_M=block_m,
            BLOCK_D=block_d,
            num_warps=4,
        )

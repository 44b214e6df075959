"""The row statistics that the backward needs for each query besides q and dout.

    delta = rowsum(dout ∘ out) − dlse        lse2 = log2(e)·lse        p = exp2(s·c − lse2)

In fp32, lse2 is the running maximum and p is divided by the running sum, as in the forward. Otherwise, where scores are
in the thousands, the rounding of lse would dominate the error of p.
The kernel reads out and dout, 4·D bytes a query in bf16, which is negligible compared with the GEMMs.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..configs import portable as configs
from ..problem import PLAIN, Problem, Saved, strides
from .forward import _load_rows

# Results are padded to a multiple of ROWS, which every BLOCK_M divides, so they are read without a mask. Kernels are
# passed the length in units of ROWS, from which the compiler derives that the results of each head are aligned.
ROWS = tl.constexpr(128)
INFINITY = tl.constexpr(float("inf"))
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=PLAIN)
def _attention_delta_kernel(
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    peak_ptr,
    total_ptr,
    delta_ptr,
    lse2_ptr,
    inverse_ptr,
    queries,
    padded,
    dim,
    heads,
    stride_ob,
    stride_oh,
    stride_om,
    stride_gb,
    stride_gh,
    stride_gm,
    UNIT: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Computes delta and lse2. Rows that see no key, and padding rows, get lse2 = +inf: p is then 0 without a mask.
    Without lse_ptr it computes delta only, without padding."""
    head = tl.program_id(0) // padded
    start = tl.program_id(0) % padded * ROWS
    padded *= ROWS
    dim *= UNIT
    batch, own, wide = (head // heads).to(tl.int64), (head % heads).to(tl.int64), start.to(tl.int64)
    out_ptr += (batch * stride_ob + own * stride_oh + wide * stride_om) * UNIT
    dout_ptr += (batch * stride_gb + own * stride_gh + wide * stride_gm) * UNIT
    row = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    here = start + row < queries
    out = _load_rows(out_ptr, row, cols, stride_om * UNIT, queries - start, dim, True, EVEN_D)
    dout = _load_rows(dout_ptr, row, cols, stride_gm * UNIT, queries - start, dim, True, EVEN_D)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    at = head.to(tl.int64) * queries + start + row
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + at, mask=here, other=0.0)
    if lse_ptr is None:
        tl.store(delta_ptr + at, delta, mask=here)
    else:
        lse = tl.load(lse_ptr + at, mask=here, other=float("-inf"))
        # A row that sees no key has delta 0 even if its incoming gradients are not finite: 0 · inf would be NaN.
        empty = lse == float("-inf")
        padded_at = head.to(tl.int64) * padded + start + row
        tl.store(delta_ptr + padded_at, tl.where(empty, 0.0, delta))
        if peak_ptr is None:
            lse2 = lse * LOG2_E
        else:
            lse2 = tl.load(peak_ptr + at, mask=here, other=0.0)
            tl.store(inverse_ptr + padded_at, 1.0 / tl.load(total_ptr + at, mask=here, other=1.0))
        tl.store(lse2_ptr + padded_at, tl.where(empty, INFINITY, lse2))


class RowTerms(NamedTuple):
    """Row statistics, fp32 [B·Hq, Sq rounded up to ROWS]. `inverse`, 1 / sum, is None unless tensors are fp32."""

    lse2: torch.Tensor
    delta: torch.Tensor
    inverse: torch.Tensor | None

    def arguments(self) -> dict[str, Any]:
        """Arguments of the backward kernels."""
        return {
            "lse_ptr": self.lse2,
            "delta_ptr": self.delta,
            "inverse_ptr": self.inverse,
            "padded": self.lse2.shape[1] // ROWS.value,
        }


def row_terms(problem: Problem, saved: Saved) -> RowTerms:
    queries, heads = problem.queries, problem.all_heads
    padded = triton.cdiv(queries, ROWS.value)
    lse2 = torch.empty(heads, padded * ROWS.value, dtype=torch.float32, device=saved.lse.device)
    terms = RowTerms(lse2, torch.empty_like(lse2), None if saved.statistics is None else torch.empty_like(lse2))
    peak, total = (None, None) if saved.statistics is None else saved.statistics
    block_d = configs.padded(problem.dim)
    unit = problem.unit(saved.out, saved.dout)
    with torch.cuda.device_of(lse2):
        _attention_delta_kernel[(padded * heads,)](
            saved.out,
            saved.dout,
            saved.lse,
            saved.dlse,
            peak,
            total,
            terms.delta,
            terms.lse2,
            terms.inverse,
            queries,
            padded,
            problem.dim // unit,
            problem.q.shape[1],
            **strides("o", saved.out, unit),
            **strides("g", saved.dout, unit),
            UNIT=unit,
            EVEN_D=problem.dim == block_d,
            BLOCK_M=ROWS.value,
            BLOCK_D=block_d,
            num_warps=8,
        )
    return terms


def given_terms(lse: torch.Tensor, delta: torch.Tensor) -> RowTerms:
    """Returns the RowTerms of given lse and delta [B, Hq, Sq]."""
    queries, empty = lse.shape[2], lse == -math.inf
    shape = (*lse.shape[:2], triton.cdiv(queries, ROWS.value) * ROWS.value)
    lse2, rows = lse.new_full(shape, math.inf), lse.new_zeros(shape)
    lse2[:, :, :queries] = (lse * LOG2_E.value).masked_fill_(empty, math.inf)
    rows[:, :, :queries] = delta.masked_fill(empty, 0.0)
    return RowTerms(lse2.flatten(0, 1), rows.flatten(0, 1), None)


def row_sums(out: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None) -> torch.Tensor:
    """Returns rowsum(dout ∘ out) − dlse, fp32 [B, Hq, Sq]. out and dout are `readable`, dlse contiguous. Requires at
    least one row."""
    batch, heads, queries, dim = out.shape
    delta = torch.empty(out.shape[:3], dtype=torch.float32, device=out.device)
    padded, block_d = triton.cdiv(queries, ROWS.value), configs.padded(dim)
    unit = Problem(out, dout, dout, 1.0, -1, -1, queries).unit()
    with torch.cuda.device_of(out):
        _attention_delta_kernel[(padded * batch * heads,)](
            out,
            dout,
            None,
            dlse,
            None,
            None,
            delta,
            None,
            None,
            queries,
            padded,
            dim // unit,
            heads,
            **strides("o", out, unit),
            **strides("g", dout, unit),
            UNIT=unit,
            EVEN_D=dim == block_d,
            BLOCK_M=ROWS.value,
            BLOCK_D=block_d,
            num_warps=8,
        )
    return delta

"""The backward for Hopper in CUDA C++ (backward.cu): which problems it supports, and its launches.

One pass over the kept blocks computes dQ, dK and dV by five GEMMs of 2·D FLOPs per kept pair. Three launches:
preprocess (delta, lse to base 2, zeros for dQ), the main kernel, and postprocess, which casts dQ.

Workspace: fp32 dQ, 4·D bytes per query and head, and 8 bytes per query and head for lse and delta.
CTAs add to that dQ in no fixed order: dQ is not deterministic; dK and dV are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import configs
from ..index import HEADER
from ..problem import LOG2_E, Problem, Saved, unexpanded
from . import cuda_driver
from .cuda_driver import address, tensor_map
from .forward import cuda_unsupported_reason

BLOCK = 128  # queries and keys of a block of the mask; a CTA has the keys of one block
GROUP_KEYS = 64  # keys of a warp group, and rows of a TMA box of k, v, dk or dv
HELPER_ROWS = 64  # queries of a CTA of preprocess and postprocess; as in the source
SHARED_BYTES = 227 * 1024  # the most that a CTA can have: one CTA an SM
NAMES = tuple(f"block_sparse_attention_cuda_bwd{part}" for part in ("", "_preprocess", "_postprocess"))

_ROWS = "(Pqqq)"  # address and strides, in elements, of a [B, H, S, D] tensor
# Six tensor maps and backward.cu's Problem: four addresses, the table's strides, nine integers, two floats.
_MAIN = "MMMMMM(PPPPqqiiiiiiiiiff)"
_PREPROCESS, _POSTPROCESS = f"{_ROWS}{_ROWS}PPPPPiii", f"{_ROWS}Piiif"


def cuda_bwd_unsupported_reason(problem: Problem, *others: torch.Tensor) -> str | None:
    """Returns why the kernel in CUDA C++ cannot run a problem with these other tensors in q's dtype, or None."""
    if problem.block != BLOCK:
        return f"it supports blocks of {BLOCK}, not {problem.block}"
    if problem.bias is not None:
        return "it does not support block_bias"
    return cuda_unsupported_reason(problem, *others)


def query_tile(dim: int) -> int:
    """Returns the queries of a tile; as BM in the source."""
    return 128 if dim == 64 else 64


def cuda_bwd_plan(
    problem: Problem, saved: Saved, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
) -> Callable[..., None]:
    """Returns a function of (q, k, v, table, out, lse, dout, dlse, dq, dk, dv), which must have the signatures of
    these. It writes dq, dk and dv. The problem has no `cuda_bwd_unsupported_reason`, and at least one query and one
    key."""
    read = (problem.q, problem.k, problem.v, saved.out, saved.dout)
    expanded = any(unexpanded(x) is not x for x in read)
    q, k, v, out, dout = map(unexpanded, read)
    device, padded = q.device, problem.rows * BLOCK
    # One workspace, offsets in units of 4 bytes: fp32 dQ, then lse2 and delta of each query.
    rows = problem.all_heads * padded
    lse2_at, delta_at, room = rows * problem.dim, rows * (problem.dim + 1), rows * (problem.dim + 2)
    preprocess, main, postprocess = _launches(problem, rows // HELPER_ROWS)
    tile = query_tile(problem.dim)
    q_map, dout_map = (tensor_map(x, problem.queries, tile) for x in (q, dout))
    k_map, v_map, dk_map, dv_map = (tensor_map(x, problem.keys, GROUP_KEYS) for x in (k, v, dk, dv))
    out_strides, dout_strides, dq_strides = (x.stride()[:3] for x in (out, dout, dq))
    columns_at = problem.table.element_size() * problem.rows * (HEADER.value + problem.columns)
    numbers = (*problem.table_strides(), *_sizes(problem), problem.scale, problem.scale * LOG2_E)
    counts, scale = (problem.queries, padded, q.shape[1]), problem.scale

    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        table: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
    ) -> None:
        if expanded:
            q, k, v, out, dout = map(unexpanded, (q, k, v, out, dout))
        workspace = torch.empty_strided((room,), (1,), dtype=torch.float32, device=device)
        base, dout_at = workspace.data_ptr(), dout.data_ptr()
        lse2, delta = base + 4 * lse2_at, base + 4 * delta_at
        incoming = (out.data_ptr(), *out_strides, dout_at, *dout_strides, lse.data_ptr(), address(dlse))
        preprocess(*incoming, lse2, delta, base, *counts)
        main(
            q_map(q.data_ptr()),
            dout_map(dout_at),
            k_map(k.data_ptr()),
            v_map(v.data_ptr()),
            dk_map(dk.data_ptr()),
            dv_map(dv.data_ptr()),
            base,
            lse2,
            delta,
            table.data_ptr() + columns_at,
            *numbers,
        )
        postprocess(dq.data_ptr(), *dq_strides, base, *counts, scale)

    return run


def _launches(problem: Problem, helpers: int) -> tuple[cuda_driver.Launch, cuda_driver.Launch, cuda_driver.Launch]:
    """Returns the launches (preprocess, main, postprocess). `helpers`: CTAs of preprocess, and of postprocess."""
    device = problem.q.device.index
    defines = (
        f"HEAD_DIM={problem.dim}",
        f"IS_CAUSAL={int(problem.causal)}",
        f"FP16={int(problem.q.dtype == torch.float16)}",
    )
    with torch.cuda.device_of(problem.q):
        main, before, after = cuda_driver.kernels(device, "backward.cu", NAMES, defines, SHARED_BYTES)
    ctas = problem.columns * problem.all_kv_heads
    return (
        cuda_driver.Launch(device, before, helpers, 256, 0, _PREPROCESS),
        cuda_driver.Launch(device, main, ctas, 384, SHARED_BYTES, _MAIN),
        cuda_driver.Launch(device, after, helpers, 256, 0, _POSTPROCESS),
    )


def _sizes(problem: Problem) -> tuple[int, ...]:
    """Returns the integers of backward.cu's Problem."""
    config = configs.pick_cuda_bwd_config(problem.queries, problem.dim, problem.all_kv_heads)
    return (
        problem.queries,
        problem.keys,
        problem.rows,
        problem.columns,
        problem.k.shape[1],
        problem.group,
        problem.all_kv_heads,
        min(config.section, problem.all_kv_heads),
        min(config.early, problem.columns),
    )

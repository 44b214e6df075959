"""The backward for Hopper in CUDA C++ (backward.cu): which problems it takes, and its launches.

One pass over the kept blocks makes dQ, dK and dV, five products of 2·D a kept pair. Three launches: what the main
kernel needs of each query, the main kernel, and dQ's cast.

Memory beside the results: fp32 dQ, 4·D bytes a query and head, and 8 bytes a query and head.
CTAs add to that dQ in no fixed order: dQ is not the same bit for bit in each run; dK and dV are.
"""

from __future__ import annotations

import ctypes

import torch

from .. import configs
from ..index import HEADER
from ..problem import LOG2_E, Problem, Saved, unexpanded
from . import cuda_driver
from .cuda_driver import Rows, launch, pointer, tensor_map
from .forward import cuda_unsupported_reason

BLOCK = 128  # queries and keys of a block of the mask; a CTA has the keys of one
GROUP_KEYS = 64  # of a warp group, and of a box in which keys are read and their gradients written
HELPER_ROWS = 64  # of a CTA of the other kernels; as in the source
SHARED_BYTES = 227 * 1024  # all that a CTA can have: two CTAs never fit
NAMES = tuple(f"block_sparse_attention_cuda_bwd{part}" for part in ("", "_prepare", "_finish"))


class _Problem(ctypes.Structure):
    """As in backward.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("dq_sum", "lse2", "delta", "table")),
        *((name, ctypes.c_longlong) for name in ("table_batch", "table_head")),
        *((name, ctypes.c_int) for name in ("queries", "keys", "rows", "columns", "kv_heads", "group")),
        *((name, ctypes.c_int) for name in ("all_kv_heads", "section", "early")),
        *((name, ctypes.c_float) for name in ("scale", "scale_log2")),
    ]


def cuda_bwd_unsupported_reason(problem: Problem, *others: torch.Tensor) -> str | None:
    """Why the kernel in CUDA C++ cannot run a problem with these other tensors of its layout, or None."""
    if problem.block != BLOCK:
        return f"it takes blocks of {BLOCK}, not {problem.block}"
    if problem.bias is not None:
        return "it takes no bias of blocks"
    return cuda_unsupported_reason(problem, *others)


def query_tile(dim: int) -> int:
    """Queries of a tile; as BM in the source."""
    return 128 if dim == 64 else 64


def cuda_bwd(problem: Problem, saved: Saved, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> None:
    """Writes dq, dk and dv of a problem without `cuda_bwd_unsupported_reason`. There is at least one query and one key."""
    q, k, v, dout, out = (unexpanded(x) for x in (problem.q, problem.k, problem.v, saved.dout, saved.out))
    table, dim = problem.table, problem.dim
    config = configs.pick_cuda_bwd_config(problem.queries, dim, problem.all_kv_heads)
    padded = problem.rows * BLOCK
    dq_sum = torch.empty(problem.all_heads, padded, dim, dtype=torch.float32, device=q.device)
    lse2, delta = torch.empty(2, problem.all_heads, padded, dtype=torch.float32, device=q.device)
    sizes = [ctypes.c_int(x) for x in (problem.queries, padded, q.shape[1])]
    helpers = problem.all_heads * (padded // HELPER_ROWS)
    described = _Problem(
        dq_sum.data_ptr(),
        lse2.data_ptr(),
        delta.data_ptr(),
        table.data_ptr() + table.element_size() * problem.rows * (HEADER.value + problem.columns),
        # A table that batches or heads share is read again by each of them.
        table.stride(0) if table.shape[0] > 1 else 0,
        table.stride(1) if table.shape[1] > 1 else 0,
        problem.queries,
        problem.keys,
        problem.rows,
        problem.columns,
        k.shape[1],
        problem.group,
        problem.all_kv_heads,
        min(config.section, problem.all_kv_heads),
        min(config.early, problem.columns),
        problem.scale,
        problem.scale * LOG2_E,
    )
    with torch.cuda.device_of(q):
        defines = (f"HEAD_DIM={dim}", f"IS_CAUSAL={int(problem.causal)}", f"FP16={int(q.dtype == torch.float16)}")
        backward, prepare, finish = cuda_driver.kernels(q.device.index, "backward.cu", NAMES, defines, SHARED_BYTES)
        incoming = [Rows.of(out), Rows.of(dout), pointer(saved.lse), pointer(saved.dlse)]
        launch(prepare, helpers, 256, 0, [*incoming, pointer(lse2), pointer(delta), pointer(dq_sum), *sizes])
        maps = [tensor_map(x, problem.queries, query_tile(dim)) for x in (q, dout)]
        maps += [tensor_map(x, problem.keys, GROUP_KEYS) for x in (k, v, dk, dv)]
        launch(backward, problem.columns * problem.all_kv_heads, 384, SHARED_BYTES, [*maps, described])
        launch(finish, helpers, 256, 0, [Rows.of(dq), pointer(dq_sum), *sizes, ctypes.c_float(problem.scale)])

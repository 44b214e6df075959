"""The fused backward for Hopper in CUDA C++ (cuda_backward.cu): one pass over the tiles makes dQ, dK and dV.

Three launches: what the main kernel needs of each query, the main kernel, and dQ's cast; where the last round of CTAs
is shared out, a fourth adds up its dK and dV.

Memory beside the results: fp32 dQ, 4·D bytes a query and head, and 8 bytes a query and head.
CTAs add to that dQ in no fixed order: dQ is not the same bit for bit in each run; dK and dV are.
"""

from __future__ import annotations

import ctypes

import torch

from . import cuda_driver, dispatch
from .cuda_driver import Rows, launch, pointer, tensor_map
from .delta import Saved
from .dispatch import CUDA_BWD_KEYS as KEYS
from .hopper import whole
from .problem import LOG2_E, Problem

SHARED_BYTES = 227 * 1024  # all that a CTA can have: tiles of 80 queries need it, and two CTAs never fit
NAMES = tuple(f"attention_cuda_bwd{part}" for part in ("", "_prepare", "_finish", "_finish_keys"))


class _Problem(ctypes.Structure):
    """As in cuda_backward.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("dq_sum", "lse2", "delta", "parts")),
        *((name, ctypes.c_int) for name in ("queries", "keys", "m_tiles", "n_blocks", "kv_heads", "group")),
        *((name, ctypes.c_int) for name in ("all_kv_heads", "section", "whole", "splits", "alternate")),
        *((name, ctypes.c_float) for name in ("scale", "scale_log2")),
    ]


def helper_rows(tile: int) -> int:
    """Rows of a CTA of the other kernels; as HELPER_ROWS in the source."""
    return tile if tile % 64 else 64


def cuda_bwd(problem: Problem, saved: Saved, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> None:
    """Writes dq, and the rows of dk and dv that count, of a problem that `cuda_refuses` does not."""
    q, k, v, dout = (whole(x) for x in (problem.q, problem.k, problem.v, saved.dout))
    kv_heads, dim = k.shape[1], problem.dim
    causal = problem.right == 0
    config = dispatch.pick_cuda_bwd_config(
        problem.queries,
        problem.keys,
        dim,
        problem.all_kv_heads,
        problem.group,
        causal,
        problem.multiprocessors(),
    )
    tile, n_blocks = config.queries, -(-problem.keys // KEYS)
    m_tiles = -(-problem.queries // tile)
    padded = m_tiles * tile
    unshared = problem.all_kv_heads * n_blocks - config.shared
    dq_sum = torch.empty(problem.all_heads, padded, dim, dtype=torch.float32, device=q.device)
    parts = torch.empty(config.shared * config.splits, 2, KEYS, dim, dtype=torch.float32, device=q.device)
    lse2, delta = torch.empty(2, problem.all_heads, padded, dtype=torch.float32, device=q.device)
    sizes = [ctypes.c_int(x) for x in (problem.queries, padded, q.shape[1])]
    helpers = problem.all_heads * (padded // helper_rows(tile))
    with torch.cuda.device_of(q):
        defines = (
            f"HEAD_DIM={dim}",
            f"IS_CAUSAL={int(causal)}",
            f"FP16={int(q.dtype == torch.float16)}",
            f"QUERIES={tile}",
            f"DIRECT={int(config.direct)}",
        )
        backward, prepare, finish, finish_keys = cuda_driver.kernels(
            q.device.index, "cuda_backward.cu", NAMES, defines, SHARED_BYTES
        )
        incoming = [Rows.of(saved.out), Rows.of(dout), pointer(saved.lse), pointer(saved.dlse)]
        terms = [pointer(lse2), pointer(delta), pointer(dq_sum)]
        # A single block of keys stores its dQ and adds to nothing, but does not come by tiles that see no key.
        blind = causal and problem.queries - problem.keys >= tile
        stored = n_blocks == 1 and config.direct and not blind
        launch(prepare, helpers, 256, 0, [*incoming, *terms, *sizes, ctypes.c_int(not stored)])
        described = _Problem(
            dq_sum.data_ptr(),
            lse2.data_ptr(),
            delta.data_ptr(),
            parts.data_ptr(),
            problem.queries,
            problem.keys,
            m_tiles,
            n_blocks,
            kv_heads,
            problem.group,
            problem.all_kv_heads,
            config.section,
            unshared,
            config.splits,
            config.alternate,
            problem.scale,
            problem.scale * LOG2_E,
        )
        maps = [tensor_map(x, problem.queries, tile) for x in (q, dout)]
        maps += [tensor_map(x, problem.keys, 64) for x in (k, v, dk, dv)]
        launch(backward, unshared + config.shared * config.splits, 384, SHARED_BYTES, [*maps, described])
        if config.shared:
            launch(finish_keys, 2 * config.shared, 256, 0, [Rows.of(dv), Rows.of(dk), described])
        launch(finish, helpers, 256, 0, [Rows.of(dq), pointer(dq_sum), *sizes, ctypes.c_float(problem.scale)])

"""The fused backward for Hopper in CUDA C++ (backward.cu): one pass over the tiles makes dQ, dK and dV.

Three launches: what the main kernel needs of each query, the main kernel, and dQ's cast; where the last round of CTAs
is shared out, a fourth adds up its dK and dV. At D = 128 CTAs of the main launch do the work of the other two for some
heads while others multiply (backward_roles.cuh); counters in device memory, zeroed before, say how far they are.
Where a CTA has whole heads (backward_kv_head.cuh) it casts dQ itself. Many short blocks of keys go to CTAs that
stay, draw them and do one after the other (backward_persistent.cuh). Up to 128 keys each query is one CTA's alone:
the main kernel then does the work of the first and of the third launch, and needs no memory beside the results and
shares.

Memory beside the results: fp32 dQ, 4·D bytes a query and head, and 8 bytes a query and head.
CTAs add to that dQ in no fixed order: dQ is not the same bit for bit in each run, unless a CTA has all keys of a head;
dK and dV are.
"""

from __future__ import annotations

import ctypes

import torch

from ..configs import backward as configs
from ..configs.backward import CUDA_BWD_KEYS as KEYS
from ..configs.roles import pick_roles_plan
from ..problem import LOG2_E, Problem, Saved, unexpanded, zero
from . import cuda_driver, roles
from .cuda_driver import Rows, launch, pointer, tensor_map

SHARED_BYTES = 227 * 1024  # all that a CTA can have: tiles of 80 queries need it, and two CTAs never fit
WARP_ROWS = 16  # of a warp of the main kernel: what it stores at a time of dq, and of dk and dv of whole heads
NAMES = tuple(f"attention_cuda_bwd{part}" for part in ("", "_prepare", "_finish", "_finish_keys"))


class _Problem(ctypes.Structure):
    """As in backward.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("dq_sum", "lse2", "delta", "parts")),
        *((name, ctypes.c_int) for name in ("queries", "keys", "m_tiles", "n_blocks", "kv_heads", "group")),
        *((name, ctypes.c_int) for name in ("all_kv_heads", "section", "whole", "splits", "alternate")),
        *((name, ctypes.c_float) for name in ("scale", "scale_log2")),
    ]


def helper_rows(tile: int) -> int:
    """Rows of a CTA of the other kernels; as HELPER_ROWS in the source."""
    return tile if tile % 64 else 64


def configuration(problem: Problem) -> configs.CudaBackwardConfig:
    return configs.pick_cuda_bwd_config(
        problem.queries,
        problem.keys,
        problem.dim,
        problem.all_kv_heads,
        problem.group,
        problem.right == 0,
        problem.sms(),
    )


def cuda_bwd_repeats(problem: Problem) -> bool:
    """Whether dQ is the same bit for bit in each run, as dK and dV are: one CTA makes all of a tile's."""
    return problem.keys <= KEYS or configuration(problem).whole_heads


def cuda_bwd(problem: Problem, saved: Saved, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> None:
    """Writes dq, and the rows of dk and dv that count, of a problem that has no `cuda_unsupported_reason`."""
    q, k, v, dout, out = (unexpanded(x) for x in (problem.q, problem.k, problem.v, saved.dout, saved.out))
    kv_heads, dim = k.shape[1], problem.dim
    causal = problem.right == 0
    config = configuration(problem)
    tile, n_blocks = config.queries, -(-problem.keys // KEYS)
    single = n_blocks == 1
    summed = 0 if single else problem.all_heads
    m_tiles = -(-problem.queries // tile)
    padded = m_tiles * tile
    unshared = problem.all_kv_heads * n_blocks - config.shared
    items = ctas = unshared + config.shared * config.splits
    if config.chained:
        ctas = min(items, problem.sms())
    dq_sum = torch.empty(summed, padded, dim, dtype=torch.float32, device=q.device)
    parts = torch.empty(config.shared * config.splits, 2, KEYS, dim, dtype=torch.float32, device=q.device)
    lse2, delta = torch.empty(2, summed, padded, dtype=torch.float32, device=q.device)
    ticket = torch.empty(1, dtype=torch.int32, device=q.device) if config.chained and causal else None
    plan = None
    if config.span:
        heads, sms = problem.all_kv_heads, problem.sms()
        plan = pick_roles_plan(config, heads, problem.group, m_tiles, n_blocks, sms)
        counters = torch.zeros(2, plan.spans, dtype=torch.int32, device=q.device)
    sizes = [ctypes.c_int(x) for x in (problem.queries, padded, q.shape[1])]
    helpers = problem.all_heads * (padded // helper_rows(tile))
    with torch.cuda.device_of(q):
        defines = (
            f"HEAD_DIM={dim}",
            f"IS_CAUSAL={int(causal)}",
            f"FP16={int(q.dtype == torch.float16)}",
            f"QUERIES={tile}",
            f"SINGLE={int(single)}",
            f"WHOLE={int(config.whole_heads)}",
            f"CHAINED={int(config.chained)}",
            f"ROLES={int(plan is not None)}",
        )
        backward, prepare, finish, finish_keys = cuda_driver.kernels(
            q.device.index, "backward.cu", NAMES, defines, SHARED_BYTES
        )
        incoming = [Rows.of(out), Rows.of(dout), pointer(saved.lse), pointer(saved.dlse)]
        terms = [pointer(lse2), pointer(delta), pointer(dq_sum)]
        if not (single or plan):
            launch(prepare, helpers, 256, 0, [*incoming, *terms, *sizes, pointer(ticket), ctypes.c_int(ctas)])
        described = _Problem(
            dq_sum.data_ptr(),
            pointer(saved.lse if single else lse2),
            pointer(saved.dlse if single else delta),
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
        maps += [tensor_map(x, problem.keys, 64) for x in (k, v)]
        if config.chained:
            arguments = [*maps, Rows.of(dk), Rows.of(dv), described, pointer(ticket), ctypes.c_int(items)]
        else:
            others = maps[:2]  # which are not read where `prepare` and `finish` are launched
            if single or config.whole_heads or plan:
                rows = tile if plan else WARP_ROWS
                others = [tensor_map(x, problem.queries, n) for x, n in ((dq, rows), (out, tile))]
            rows = WARP_ROWS if config.whole_heads else 64
            arguments = [*maps, *(tensor_map(x, problem.keys, rows) for x in (dk, dv)), described, *others]
        if plan:
            ctas, arguments = plan.ctas, [*arguments, roles.told(plan, saved.lse, saved.dlse, counters)]
        launch(backward, problem.all_kv_heads if config.whole_heads else ctas, 384, SHARED_BYTES, arguments)
        if config.shared:
            ctas = config.shared * KEYS * dim // (8 * 256)  # 16 numbers of dv or of dk a thread
            launch(finish_keys, ctas, 256, 0, [Rows.of(dv), Rows.of(dk), described])
        if not (single or config.whole_heads or plan):
            launch(finish, helpers, 256, 0, [Rows.of(dq), pointer(dq_sum), *sizes, ctypes.c_float(problem.scale)])
        elif causal and not plan:  # tiles that see no key are no CTA's
            zero(dq[:, :, : max(0, problem.queries - problem.keys) // tile * tile])

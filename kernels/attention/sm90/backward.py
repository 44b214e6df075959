"""The fused backward for Hopper in CUDA C++ (backward.cu): one pass over the tiles computes dQ, dK and dV.

Three launches: preprocess computes what the main kernel needs of each query, the main kernel follows, and postprocess
casts dQ; where the last round of CTAs is shared out, a fourth adds up its dK and dV. The schedule (configs/backward.py)
says which of these are left out: with ROLES, CTAs of the main launch preprocess and postprocess some heads while others
multiply; with CTA_PER_KV_HEAD the main kernel casts dQ; with SINGLE_BLOCK it does everything, and needs no memory
beside the results and shares.

Memory beside the results: fp32 dQ, 4·D bytes a query and head, and 8 bytes a query and head.
CTAs add to that dQ in no fixed order: dQ is deterministic only where one CTA computes all of it; dK and dV always are.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch

from ..configs import backward as configs
from ..configs.backward import CUDA_BWD_KEYS as KEYS
from ..configs.backward import CudaBackwardConfig, Schedule
from ..configs.roles import RolesPlan, pick_roles_plan
from ..problem import LOG2_E, Problem, Saved, unexpanded, zero
from . import cuda_driver, roles
from .cuda_driver import Rows, launch, pointer, tensor_map

SHARED_BYTES = 227 * 1024  # all that a CTA can have: tiles of 80 queries need it, and two CTAs never fit
WARP_ROWS = 16  # of a warp of the main kernel: what it stores at a time of dq, and of dk and dv with CTA_PER_KV_HEAD
NAMES = tuple(f"attention_cuda_bwd{part}" for part in ("", "_preprocess", "_postprocess", "_sum_shares"))
DETERMINISTIC = (Schedule.SINGLE_BLOCK, Schedule.CTA_PER_KV_HEAD)  # one CTA computes all of a tile's dQ


class _Problem(ctypes.Structure):
    """As in backward_work.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("dq_sum", "lse2", "delta", "parts")),
        *((name, ctypes.c_int) for name in ("queries", "keys", "m_tiles", "n_blocks", "kv_heads", "group")),
        *((name, ctypes.c_int) for name in ("all_kv_heads", "section", "unshared", "splits", "alternate")),
        *((name, ctypes.c_float) for name in ("scale", "scale_log2")),
    ]


class _Sizes(NamedTuple):
    """Tiles of queries of a head and their rows, blocks of keys of a head, and all blocks that one CTA computes."""

    m_tiles: int
    padded: int
    n_blocks: int
    unshared: int

    @classmethod
    def of(cls, problem: Problem, config: CudaBackwardConfig) -> _Sizes:
        m_tiles, n_blocks = -(-problem.queries // config.queries), -(-problem.keys // KEYS)
        return cls(m_tiles, m_tiles * config.queries, n_blocks, problem.all_kv_heads * n_blocks - config.shared)


class _Workspace(NamedTuple):
    """Memory beside the results: fp32 sums of dQ, dK and dV of shares, and lse2 and delta of each query."""

    dq_sum: torch.Tensor
    parts: torch.Tensor
    lse2: torch.Tensor
    delta: torch.Tensor

    @classmethod
    def of(cls, problem: Problem, config: CudaBackwardConfig, padded: int) -> _Workspace:
        heads = 0 if config.schedule is Schedule.SINGLE_BLOCK else problem.all_heads
        fp32: dict[str, Any] = dict(dtype=torch.float32, device=problem.q.device)
        return cls(
            torch.empty(heads, padded, problem.dim, **fp32),
            torch.empty(config.shared * config.splits, 2, KEYS, problem.dim, **fp32),
            *torch.empty(2, heads, padded, **fp32),
        )


def helper_rows(tile: int) -> int:
    """Rows of a CTA of the other kernels; as HELPER_ROWS in the source."""
    return tile if tile % 64 else 64


def configuration(problem: Problem) -> CudaBackwardConfig:
    return configs.pick_cuda_bwd_config(
        problem.queries,
        problem.keys,
        problem.dim,
        problem.all_kv_heads,
        problem.group,
        problem.right == 0,
        problem.sms(),
    )


def cuda_bwd_is_deterministic(problem: Problem) -> bool:
    """Whether dQ is the same bit for bit in each run, as dK and dV are."""
    return configuration(problem).schedule in DETERMINISTIC


def cuda_bwd(problem: Problem, saved: Saved, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> None:
    """Writes dq, and the rows of dk and dv that count, of a problem that has no `cuda_unsupported_reason`."""
    config = configuration(problem)
    schedule, causal = config.schedule, problem.right == 0
    sizes = _Sizes.of(problem, config)
    work = _Workspace.of(problem, config, sizes.padded)
    items = sizes.unshared + config.shared * config.splits
    device, dout, out = problem.q.device, unexpanded(saved.dout), unexpanded(saved.out)
    counts = [ctypes.c_int(x) for x in (problem.queries, sizes.padded, problem.q.shape[1])]
    helpers = problem.all_heads * (sizes.padded // helper_rows(config.queries))
    apart = schedule in (Schedule.CTA_PER_BLOCK, Schedule.PERSISTENT)  # dQ is cast by a launch of its own
    with torch.cuda.device_of(problem.q):
        main, preprocess, postprocess, sum_shares = cuda_driver.kernels(
            device.index, "backward.cu", NAMES, _defines(problem, config), SHARED_BYTES
        )
        described = _described(problem, saved, config, sizes, work)
        ctas, arguments, ticket = items, [], None
        maps = _maps(problem, config, dout, out, dq, dk, dv)
        if schedule is Schedule.PERSISTENT:
            ticket = torch.empty(1, dtype=torch.int32, device=device) if causal else None
            ctas = min(items, problem.sms())
            arguments = [*maps[:4], Rows.of(dk), Rows.of(dv), described, pointer(ticket), ctypes.c_int(items)]
        else:
            arguments = [*maps[:6], described, *maps[6:]]
        if schedule is Schedule.CTA_PER_KV_HEAD:
            ctas = problem.all_kv_heads
        if schedule is Schedule.ROLES:
            plan = _plan(problem, config, sizes)
            counters = torch.zeros(2 * plan.spans + 1, dtype=torch.int32, device=device)
            ctas, arguments = plan.ctas, [*arguments, roles.roles_argument(plan, saved.lse, saved.dlse, counters)]
        if schedule not in (Schedule.SINGLE_BLOCK, Schedule.ROLES):
            incoming = [Rows.of(out), Rows.of(dout), pointer(saved.lse), pointer(saved.dlse)]
            terms = [pointer(work.lse2), pointer(work.delta), pointer(work.dq_sum)]
            launch(preprocess, helpers, 256, 0, [*incoming, *terms, *counts, pointer(ticket), ctypes.c_int(ctas)])
        launch(main, ctas, 384, SHARED_BYTES, arguments)
        if config.shared:
            sums = config.shared * KEYS * problem.dim // (8 * 256)  # 16 numbers of dv or of dk a thread
            launch(sum_shares, sums, 256, 0, [Rows.of(dv), Rows.of(dk), described])
        if apart:
            cast = [Rows.of(dq), pointer(work.dq_sum), *counts, ctypes.c_float(problem.scale)]
            launch(postprocess, helpers, 256, 0, cast)
        elif causal and schedule is not Schedule.ROLES:  # tiles that see no key are no CTA's
            zero(dq[:, :, : max(0, problem.queries - problem.keys) // config.queries * config.queries])


def _defines(problem: Problem, config: CudaBackwardConfig) -> tuple[str, ...]:
    return (
        f"HEAD_DIM={problem.dim}",
        f"IS_CAUSAL={int(problem.right == 0)}",
        f"FP16={int(problem.q.dtype == torch.float16)}",
        f"QUERIES={config.queries}",
        f"SCHEDULE={config.schedule.value}",
    )


def _described(problem: Problem, saved: Saved, config: CudaBackwardConfig, sizes: _Sizes, work: _Workspace) -> _Problem:
    single = config.schedule is Schedule.SINGLE_BLOCK
    return _Problem(
        work.dq_sum.data_ptr(),
        pointer(saved.lse if single else work.lse2),
        pointer(saved.dlse if single else work.delta),
        work.parts.data_ptr(),
        problem.queries,
        problem.keys,
        sizes.m_tiles,
        sizes.n_blocks,
        problem.k.shape[1],
        problem.group,
        problem.all_kv_heads,
        config.section,
        sizes.unshared,
        config.splits,
        config.alternate,
        problem.scale,
        problem.scale * LOG2_E,
    )


def _maps(
    problem: Problem,
    config: CudaBackwardConfig,
    dout: torch.Tensor,
    out: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> list[ctypes.Array]:
    """Tensor maps of q, dout, k, v, dk, dv, dq and out, as far as the schedule uses them."""
    tile, schedule = config.queries, config.schedule
    q, k, v = (unexpanded(x) for x in (problem.q, problem.k, problem.v))
    maps = [tensor_map(x, problem.queries, tile) for x in (q, dout)]
    maps += [tensor_map(x, problem.keys, 64) for x in (k, v)]
    if schedule is Schedule.PERSISTENT:
        return maps
    rows = WARP_ROWS if schedule is Schedule.CTA_PER_KV_HEAD else 64
    maps += [tensor_map(x, problem.keys, rows) for x in (dk, dv)]
    if schedule is Schedule.CTA_PER_BLOCK:
        return [*maps, *maps[:2]]  # of dq and out, which are not read
    rows = tile if schedule is Schedule.ROLES else WARP_ROWS
    return [*maps, *(tensor_map(x, problem.queries, n) for x, n in ((dq, rows), (out, tile)))]


def _plan(problem: Problem, config: CudaBackwardConfig, sizes: _Sizes) -> RolesPlan:
    return pick_roles_plan(config, problem.all_kv_heads, problem.group, sizes.m_tiles, sizes.n_blocks, problem.sms())

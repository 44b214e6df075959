"""The fused backward for Hopper in CUDA C++ (backward.cu): one pass over the tiles computes dQ, dK and dV.

Three launches: preprocess (delta and lse of each query, zeros for dQ), the main kernel, and postprocess, which casts
dQ. Where key blocks of the last wave are split over CTAs, a fourth adds up their partial dK and dV. The schedule
(configs/backward.py) says which of these are left out. With ROLES, CTAs of the main launch preprocess and postprocess
some heads while others run the main loop. With CTA_PER_KV_HEAD the main kernel casts dQ. With SINGLE_BLOCK it computes
everything, and its workspace is only the partial dK and dV.

Workspace: fp32 dQ, 4·D bytes per query and head, and 8 bytes per query and head for lse and delta.
CTAs add to that dQ in no fixed order: dQ is deterministic only where one CTA computes all of it; dK and dV always are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..configs import backward as configs
from ..configs import roles as roles_configs
from ..configs.backward import CUDA_BWD_KEYS as KEYS
from ..configs.backward import CudaBackwardConfig, Schedule
from ..problem import LOG2_E, Problem, Saved, unexpanded, zero
from . import cuda_driver, roles
from .cuda_driver import TensorMap, address, tensor_map

Backward = Callable[..., None]
SHARED_BYTES = 227 * 1024  # the most that a CTA can have: tiles of 80 queries need it, and two CTAs never fit an SM
WARP_ROWS = 16  # rows that a warp of the main kernel stores at a time: of dq, and with CTA_PER_KV_HEAD of dk and dv
NAMES = tuple(f"attention_cuda_bwd{part}" for part in ("", "_preprocess", "_postprocess", "_sum_shares"))
DETERMINISTIC = (Schedule.SINGLE_BLOCK, Schedule.CTA_PER_KV_HEAD)  # one CTA computes all of a tile's dQ


class Described(NamedTuple):
    """The fields of struct Problem of backward_work.cuh. The first four are addresses, which change from call to
    call."""

    dq_sum: int
    lse2: int
    delta: int
    parts: int
    queries: int
    keys: int
    m_tiles: int
    n_blocks: int
    kv_heads: int
    group: int
    all_kv_heads: int
    section: int
    unshared: int
    splits: int
    alternate: int
    shift: int
    scale: float
    scale_log2: float


DESCRIBED, ROWS = "(PPPPiiiiiiiiiiiiff)", "(Pqqq)"  # a Problem; address and strides of a tensor
_MAIN, _PERSISTENT = f"MMMMMM{DESCRIBED}MM", f"MMMM{ROWS}{ROWS}{DESCRIBED}Pi"
_PREPROCESS, _POSTPROCESS = f"{ROWS}{ROWS}PPPPPiiiPi", f"{ROWS}Piiif"
_SUM_SHARES = f"{ROWS}{ROWS}{DESCRIBED}"


class Sizes(NamedTuple):
    """Tiles of queries per head and their rows, key blocks per head, and the number of key blocks that are not
    split."""

    m_tiles: int
    padded: int
    n_blocks: int
    unshared: int

    @classmethod
    def of(cls, problem: Problem, config: CudaBackwardConfig) -> Sizes:
        m_tiles, n_blocks = -(-problem.queries // config.queries), -(-problem.keys // KEYS)
        return cls(m_tiles, m_tiles * config.queries, n_blocks, problem.all_kv_heads * n_blocks - config.shared)


class Workspace(NamedTuple):
    """The workspace, one allocation: fp32 accumulators of dQ, partial dK and dV, lse2 and delta of each query, and the
    tile scheduler's counter. Offsets, and the size, in units of 4 bytes."""

    parts: int
    lse2: int
    delta: int
    counter: int
    size: int

    @classmethod
    def of(cls, problem: Problem, config: CudaBackwardConfig, padded: int) -> Workspace:
        rows = 0 if config.schedule is Schedule.SINGLE_BLOCK else problem.all_heads * padded
        parts = rows * problem.dim
        lse2 = parts + config.shared * config.splits * 2 * KEYS * problem.dim
        counter = lse2 + 2 * rows
        return cls(parts, lse2, lse2 + rows, counter, counter + (config.schedule is Schedule.PERSISTENT))


def helper_rows(tile: int) -> int:
    """Returns the rows per CTA of preprocess and postprocess; as HELPER_ROWS in the source."""
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
    """Returns whether dQ is deterministic; dK and dV always are."""
    return configuration(problem).schedule in DETERMINISTIC


def cuda_bwd_plan(problem: Problem, saved: Saved, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Backward:
    """Returns a function of (q, k, v, out, lse, dout, dlse, dq, dk, dv), which must have the signatures of these. It
    writes dq and the first `keys` rows of dk and dv. The problem has no `cuda_unsupported_reason`."""
    config = configuration(problem)
    schedule, causal, device = config.schedule, problem.right == 0, problem.q.device
    sizes = Sizes.of(problem, config)
    work = Workspace.of(problem, config, sizes.padded)
    read = (problem.q, problem.k, problem.v, saved.out, saved.dout)
    expanded = any(unexpanded(x) is not x for x in read)
    q, k, v, out, dout = map(unexpanded, read)
    single, has_roles = schedule is Schedule.SINGLE_BLOCK, schedule is Schedule.ROLES
    has_postprocess = schedule in (Schedule.CTA_PER_BLOCK, Schedule.PERSISTENT)  # a launch that casts dQ
    launches = _Launches.of(problem, config, sizes)
    maps = _maps(problem, config, q, k, v, dout, out, dq, dk, dv)
    numbers = numbers_of(problem, config, sizes, problem.keys - problem.queries)
    rows = tuple(x.stride()[:3] for x in (dq, dk, dv, out, dout))
    counts = (problem.queries, sizes.padded, problem.q.shape[1])
    plan = _roles_plan(problem, config, sizes) if has_roles else None
    role_numbers = roles.numbers(plan) if plan else ()
    unseen = causal and not (has_postprocess or has_roles)  # no CTA computes tiles that see no key
    scale = problem.scale
    zeros = max(0, problem.queries - problem.keys) // config.queries * config.queries if unseen else 0

    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
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
        room, base = None, 0
        if work.size:
            room = torch.empty_strided((work.size,), (1,), dtype=torch.float32, device=device)
            base = room.data_ptr()
        lse_at, dlse_at, dq_at, dk_at, dv_at = (
            lse.data_ptr(),
            address(dlse),
            dq.data_ptr(),
            dk.data_ptr(),
            dv.data_ptr(),
        )
        lse2 = lse_at if single else base + 4 * work.lse2
        delta = dlse_at if single else base + 4 * work.delta
        described = (base, lse2, delta, base + 4 * work.parts, *numbers)
        counter = base + 4 * work.counter if causal and schedule is Schedule.PERSISTENT else 0
        at = (q.data_ptr(), dout.data_ptr(), k.data_ptr(), v.data_ptr(), dk_at, dv_at, dq_at, out.data_ptr())
        made = [one(where) for one, where in zip(maps, at, strict=False)]
        if launches.preprocess is not None:
            incoming = (at[7], *rows[3], at[1], *rows[4], lse_at, dlse_at)
            launches.preprocess(*incoming, lse2, delta, base, *counts, counter, launches.ctas)
        if schedule is Schedule.PERSISTENT:
            launches.main(*made, dk_at, *rows[1], dv_at, *rows[2], *described, counter, launches.items)
        elif plan is not None:
            counters = torch.zeros(2 * plan.spans + 1, dtype=torch.int32, device=device)
            role_pointers = roles.pointers(plan, lse_at, dlse_at, counters.data_ptr())
            launches.main(*made[:6], *described, *made[6:], *role_pointers, *role_numbers)
        else:
            launches.main(*made[:6], *described, *(made[6:] or made[:2]))  # without maps of dq and out: any two, unread
        if launches.sum_shares is not None:
            launches.sum_shares(dv_at, *rows[2], dk_at, *rows[1], *described)
        if launches.postprocess is not None:
            launches.postprocess(dq_at, *rows[0], base, *counts, scale)
        elif zeros:
            zero(dq[:, :, :zeros])

    return run


class _Launches(NamedTuple):
    """The launches of a backward, in order; None for those that its schedule leaves out."""

    preprocess: cuda_driver.Launch | None
    main: cuda_driver.Launch
    sum_shares: cuda_driver.Launch | None
    postprocess: cuda_driver.Launch | None
    ctas: int  # of the main launch
    items: int  # work items of these CTAs: blocks of keys, or splits of blocks

    @classmethod
    def of(cls, problem: Problem, config: CudaBackwardConfig, sizes: Sizes) -> _Launches:
        schedule, device = config.schedule, problem.q.device.index
        items = sizes.unshared + config.shared * config.splits
        ctas, layout = items, _MAIN
        if schedule is Schedule.PERSISTENT:
            ctas, layout = min(items, problem.sms()), _PERSISTENT
        elif schedule is Schedule.CTA_PER_KV_HEAD:
            ctas = problem.all_kv_heads
        elif schedule is Schedule.ROLES:
            ctas, layout = _roles_plan(problem, config, sizes).ctas, _MAIN + roles.LAYOUT
        with torch.cuda.device_of(problem.q):
            main, preprocess, postprocess, sum_shares = cuda_driver.kernels(
                device, "backward.cu", NAMES, defines_of(problem, config), SHARED_BYTES
            )

        def helper(handle: Any, ctas: int, layout: str) -> cuda_driver.Launch:
            return cuda_driver.Launch(device, handle, ctas, 256, 0, layout)

        helpers = problem.all_heads * (sizes.padded // helper_rows(config.queries))
        sums = config.shared * KEYS * problem.dim // (2 * 256)  # CTAs: a thread sums 4 elements of dv or of dk
        before = schedule not in (Schedule.SINGLE_BLOCK, Schedule.ROLES)
        after = schedule in (Schedule.CTA_PER_BLOCK, Schedule.PERSISTENT)
        return cls(
            helper(preprocess, helpers, _PREPROCESS) if before else None,
            cuda_driver.Launch(device, main, ctas, 384, SHARED_BYTES, layout),
            helper(sum_shares, sums, _SUM_SHARES) if config.shared else None,
            helper(postprocess, helpers, _POSTPROCESS) if after else None,
            ctas,
            items,
        )


def defines_of(problem: Problem, config: CudaBackwardConfig) -> tuple[str, ...]:
    return (
        f"HEAD_DIM={problem.dim}",
        f"IS_CAUSAL={int(problem.right == 0)}",
        f"FP16={int(problem.q.dtype == torch.float16)}",
        f"QUERIES={config.queries}",
        f"SCHEDULE={config.schedule.value}",
    )


def numbers_of(problem: Problem, config: CudaBackwardConfig, sizes: Sizes, shift: int) -> tuple[float, ...]:
    """Returns the fields of Described without the addresses. Under a mask query i sees keys up to i + shift."""
    return (
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
        shift,
        problem.scale,
        problem.scale * LOG2_E,
    )


def _maps(problem: Problem, config: CudaBackwardConfig, *tensors: torch.Tensor) -> list[TensorMap]:
    """Returns tensor maps of q, dout, k, v, dk, dv, dq and out, as far as the schedule uses them. `tensors`: q, k, v,
    dout, out, dq, dk and dv, none of them expanded."""
    q, k, v, dout, out, dq, dk, dv = tensors
    tile, schedule = config.queries, config.schedule
    maps = [tensor_map(x, problem.queries, tile) for x in (q, dout)]
    maps += [tensor_map(x, problem.keys, 64) for x in (k, v)]
    if schedule is Schedule.PERSISTENT:
        return maps
    rows = WARP_ROWS if schedule is Schedule.CTA_PER_KV_HEAD else 64
    maps += [tensor_map(x, problem.keys, rows) for x in (dk, dv)]
    if schedule is Schedule.CTA_PER_BLOCK:
        return maps
    rows = tile if schedule is Schedule.ROLES else WARP_ROWS
    return [*maps, *(tensor_map(x, problem.queries, n) for x, n in ((dq, rows), (out, tile)))]


def _roles_plan(problem: Problem, config: CudaBackwardConfig, sizes: Sizes) -> roles_configs.RolesPlan:
    return roles_configs.pick_roles_plan(
        config, problem.all_kv_heads, problem.group, sizes.m_tiles, sizes.n_blocks, problem.sms()
    )

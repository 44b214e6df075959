"""The forward for Hopper in CUDA C++ (forward.cu): which problems it supports, and its launch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import configs
from ..problem import LOG2_E, Problem, unexpanded
from . import cuda_driver
from .cuda_driver import address, tensor_map

ROWS = 64  # queries per warp group: M of a wgmma is 64
SLACK = 8.0  # a row's maximum is not updated while no score exceeds it by more than this (logarithm to base 2)
SHORT = 16, 1024  # up to so many tiles per team, and keys: static schedule, as a counter needs a launch to set it

# Three tensor maps and forward.cu's Problem: lse, out and its strides, the table and its strides, the bias and its
# strides, the counter, three floats, nine integers.
_LAYOUT = "MMM(PPqqqPqqPqqqqPfffiiiiiiiii)"


def cuda_unsupported_reason(problem: Problem, *others: torch.Tensor) -> str | None:
    """Returns why the kernel in CUDA C++ cannot run a problem with these other tensors in q's dtype, or None."""
    if problem.dim not in (64, 128):
        return f"it supports head dimensions 64 and 128, not {problem.dim}"
    if problem.capability() != (9, 0):
        return "it needs a GPU of compute capability 9.0 (Hopper)"
    if problem.q.dtype not in (torch.float16, torch.bfloat16):
        return f"it supports float16 and bfloat16, not {problem.q.dtype}"
    if problem.unit(*others) != 8:
        return "it requires rows, heads and batches on 16-byte boundaries, for TMA"
    if not 1e-30 <= problem.scale <= 1e30:
        return f"it supports scales from 1e-30 to 1e30, as it has the inverse in fp32, not {problem.scale}"
    # Indices of a tile, of a key, and of an element of a head's table are 32 bits wide.
    places = problem.rows * (problem.columns + 3)
    if max(problem.all_heads * problem.rows, problem.queries + problem.keys, places) >= 2**31 - 2**20:
        return "its 32-bit indices of tiles, keys and blocks would overflow"
    return cuda_driver.no_compiler()


def cuda_fwd_plan(problem: Problem, out: torch.Tensor) -> Callable[..., None]:
    """Returns a function of (q, k, v, table, bias, out, lse), which must have the signatures of these. It writes out
    [B, Hq, Sq, D] and lse [B, Hq, Sq], contiguous. The problem has no `cuda_unsupported_reason`, and at least one query
    and one key."""
    q, k, v = (unexpanded(x) for x in (problem.q, problem.k, problem.v))
    expanded = q is not problem.q or k is not problem.k or v is not problem.v
    config = configs.pick_cuda_config(problem.dim, problem.block)
    num_tiles, sms, device = problem.all_heads * problem.rows, problem.sms(), q.device
    teams = sms * config.teams
    fixed = num_tiles <= teams or (num_tiles <= SHORT[0] * teams and problem.keys <= SHORT[1])
    shared = shared_bytes(problem.dim, problem.block, config)
    with torch.cuda.device_of(q):
        names, defines = ("block_sparse_attention_cuda_fwd",), _defines(problem, config)
        (kernel,) = cuda_driver.kernels(device.index, "forward.cu", names, defines, shared)
    threads = 128 * (config.teams * problem.block // ROWS + 1)
    launch = cuda_driver.Launch(device.index, kernel, min(sms, num_tiles), threads, shared, _LAYOUT)
    q_map = tensor_map(q, problem.queries, ROWS)
    k_map, v_map = (tensor_map(x, problem.keys, config.block_n) for x in (k, v))
    out_strides, table_strides, bias_strides = out.stride()[:3], problem.table_strides(), problem.bias_strides()
    scale_log2 = problem.scale * LOG2_E
    numbers = (scale_log2, 1 / scale_log2, SLACK / scale_log2, *_sizes(problem))

    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        table: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        if expanded:
            q, k, v = unexpanded(q), unexpanded(k), unexpanded(v)
        counter = None if fixed else torch.full((1,), teams, dtype=torch.int32, device=device)
        launch(
            q_map(q.data_ptr()),
            k_map(k.data_ptr()),
            v_map(v.data_ptr()),
            lse.data_ptr(),
            out.data_ptr(),
            *out_strides,
            table.data_ptr(),
            *table_strides,
            address(bias),
            *bias_strides,
            address(counter),
            *numbers,
        )

    return run


def _sizes(problem: Problem) -> tuple[int, ...]:
    """Returns the integers of forward.cu's Problem."""
    return (
        problem.all_heads * problem.rows,
        problem.rows,
        problem.columns,
        configs.pick_cuda_section(problem.keys, problem.dim, problem.group, problem.all_heads),
        problem.all_heads,
        problem.q.shape[1],
        problem.group,
        problem.queries,
        problem.keys,
    )


def _defines(problem: Problem, config: configs.CudaConfig) -> tuple[str, ...]:
    return (
        f"HEAD_DIM={problem.dim}",
        f"BLOCK={problem.block}",
        f"CAUSAL={int(problem.causal)}",
        f"BIAS={int(problem.bias is not None)}",
        f"FP16={int(problem.q.dtype == torch.float16)}",
        f"BLOCK_N={config.block_n}",
        f"STAGES={config.stages}",
        f"PING_PONG={int(config.ping_pong)}",
        f"Q_REGISTERS={int(config.q_registers)}",
        f"Q_BUFFERS={config.q_buffers}",
        f"TEAMS={config.teams}",
    )


def shared_bytes(dim: int, block: int, config: configs.CudaConfig) -> int:
    """Returns the shared memory of a CTA. Each team has queries, stages of keys and values, descriptors of a tile and
    its steps, and mbarriers."""
    queries = block // ROWS * config.q_buffers
    numbers, barriers = 16 + 8 * config.stages, 2 * queries + 4 * config.stages + 2
    team = 2 * dim * (ROWS * queries + 2 * config.block_n * config.stages) + numbers + 8 * barriers
    return team + (config.teams - 1) * (-(-team // 1024) * 1024)

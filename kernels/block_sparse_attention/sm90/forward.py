"""The forward for Hopper in CUDA C++ (forward.cu): which problems it takes, and its launch."""

from __future__ import annotations

import ctypes

import torch

from .. import configs
from ..problem import LOG2_E, Problem, unexpanded
from . import cuda_driver
from .cuda_driver import launch, tensor_map

ROWS = 64  # of queries for each warp group: one wgmma is 64 rows high
SLACK = 8.0  # a row's maximum is kept while no score is above it by more than this, in powers of 2
SHORT = 16, 1024  # up to so many tiles a team and keys, tiles go in a fixed order: setting a counter is a launch


class _Problem(ctypes.Structure):
    """As in forward.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("lse", "out")),
        *((name, ctypes.c_uint64) for name in ("out_batch", "out_head", "out_row")),
        ("table", ctypes.c_void_p),
        *((name, ctypes.c_uint64) for name in ("table_batch", "table_head")),
        ("bias", ctypes.c_void_p),
        *((name, ctypes.c_uint64) for name in ("bias_batch", "bias_head", "bias_row", "bias_column")),
        ("next_tile", ctypes.c_void_p),
        *((name, ctypes.c_float) for name in ("scale_log2", "per_scale_log2", "slack")),
        *((name, ctypes.c_int) for name in ("num_tiles", "rows", "columns", "section", "heads", "q_heads", "group")),
        *((name, ctypes.c_int) for name in ("num_q", "num_keys")),
    ]


def cuda_unsupported_reason(problem: Problem, *others: torch.Tensor) -> str | None:
    """Why the kernel in CUDA C++ cannot run a problem with these other tensors of its layout, or None."""
    if problem.dim not in (64, 128):
        return f"it takes heads of 64 and 128 numbers, not {problem.dim}"
    if problem.capability() != (9, 0):
        return "it needs a GPU of compute capability 9.0 (Hopper)"
    if problem.q.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {problem.q.dtype}"
    if problem.unit(*others) != 8:
        return "TMA wants rows, heads and batches on 16-byte boundaries"
    # A tile's number, a key's, and the place of a number in a head's lines of the table.
    places = problem.rows * (problem.columns + 3)
    if max(problem.all_heads * problem.rows, problem.queries + problem.keys, places) >= 2**31 - 2**20:
        return "it counts tiles, keys and blocks in 32 bits"
    return cuda_driver.no_compiler()


def cuda_fwd(problem: Problem, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Writes out [B, Hq, Sq, D] and lse [B, Hq, Sq], contiguous, of a problem without `cuda_unsupported_reason`. There is at
    least one query and one key."""
    q, k, v = (unexpanded(x) for x in (problem.q, problem.k, problem.v))
    config = configs.pick_cuda_config(problem.dim, problem.block)
    num_tiles = problem.all_heads * problem.rows
    sms = problem.sms()
    teams = sms * config.teams
    fixed = num_tiles <= teams or (num_tiles <= SHORT[0] * teams and problem.keys <= SHORT[1])
    shared = shared_bytes(problem.dim, problem.block, config)
    with torch.cuda.device_of(q):
        counter = None if fixed else torch.full((1,), teams, dtype=torch.int32, device=q.device)
        described = _described(problem, out, lse, counter)
        (kernel,) = cuda_driver.kernels(
            q.device.index, "forward.cu", ("block_sparse_attention_cuda_fwd",), _defines(problem, config), shared
        )
        maps = [
            tensor_map(q, problem.queries, ROWS),
            *(tensor_map(x, problem.keys, config.block_n) for x in (k, v)),
        ]
        groups = config.teams * problem.block // ROWS
        launch(kernel, min(sms, num_tiles), 128 * (groups + 1), shared, [*maps, described])


def _described(problem: Problem, out: torch.Tensor, lse: torch.Tensor, counter: torch.Tensor | None) -> _Problem:
    table, bias, scale_log2 = problem.table, problem.bias, problem.scale * LOG2_E
    return _Problem(
        lse.data_ptr(),
        out.data_ptr(),
        *out.stride()[:3],
        table.data_ptr(),
        # A table that batches or heads share is read again by each of them.
        table.stride(0) if table.shape[0] > 1 else 0,
        table.stride(1) if table.shape[1] > 1 else 0,
        None if bias is None else bias.data_ptr(),
        *((0, 0, 0, 0) if bias is None else bias.stride()),
        None if counter is None else counter.data_ptr(),
        scale_log2,
        1 / scale_log2,
        SLACK / scale_log2,
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
    """Of a CTA: for each team queries, rings of keys and values, what is told of a tile and of steps, and barriers."""
    queries = block // ROWS * config.q_buffers
    told, barriers = 16 + 8 * config.stages, 2 * queries + 4 * config.stages + 2
    team = 2 * dim * (ROWS * queries + 2 * config.block_n * config.stages) + told + 8 * barriers
    return team + (config.teams - 1) * (-(-team // 1024) * 1024)

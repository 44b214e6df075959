"""The forward for Hopper in CUDA C++ (forward.cu): which problems it takes, and its launch."""

from __future__ import annotations

import ctypes

import torch

from ..configs import forward as configs
from ..configs.forward import ROWS
from ..problem import LOG2_E, Problem, tma_unsupported_reason, unexpanded
from . import cuda_driver
from .cuda_driver import launch, tensor_map

SLACK = 8.0  # a row's maximum is kept while no score is above it by more than this, in powers of 2
WHOLE_FIRST = 3 / 8  # of the heads, without a mask, go first with all of their row blocks, also one that is not full
SHORT = 16, 1024  # up to so many tiles for each CTA and keys, tiles go in a fixed order: a counter needs zeroing first


class _Problem(ctypes.Structure):
    """As in forward.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("lse", "out")),
        *((name, ctypes.c_uint64) for name in ("out_batch", "out_head", "out_row")),
        ("next_tile", ctypes.c_void_p),
        *((name, ctypes.c_float) for name in ("scale_log2", "slack")),
        *((name, ctypes.c_int) for name in ("num_tiles", "num_m", "section", "heads", "q_heads", "group")),
        *((name, ctypes.c_int) for name in ("num_q", "num_keys")),
    ]


def cuda_unsupported_reason(problem: Problem, *others: torch.Tensor) -> str | None:
    """Why the kernels in CUDA C++ cannot run a problem with these other tensors of its layout, or None."""
    if problem.dim not in (64, 128):
        return f"it takes heads of 64 and 128 numbers, not {problem.dim}"
    return tma_unsupported_reason(problem, *others) or cuda_driver.no_compiler()


def cuda_fwd(problem: Problem, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Writes out and lse of a problem that has no `cuda_unsupported_reason`."""
    q, k, v = (unexpanded(x) for x in (problem.q, problem.k, problem.v))
    dim, causal = problem.dim, problem.right == 0
    config = configs.pick_cuda_config(dim, problem.queries, problem.keys, causal, problem.all_heads, problem.sms())
    heads = problem.all_heads
    num_m = -(-problem.queries // (ROWS * config.consumers))
    num_tiles = heads * num_m
    shared = shared_bytes(dim, config)
    places = problem.sms()
    fixed = num_tiles <= places or (num_tiles <= SHORT[0] * places and problem.keys <= SHORT[1])
    if causal:
        of_section = heads if fixed else configs.pick_section(problem.keys, 4 * dim, problem.group, heads)
    else:
        of_section = int(WHOLE_FIRST * heads)
    with torch.cuda.device_of(q):
        counter = None if fixed else torch.zeros(1, dtype=torch.int32, device=q.device)
        described = _Problem(
            lse.data_ptr(),
            out.data_ptr(),
            *out.stride()[:3],
            None if counter is None else counter.data_ptr(),
            problem.scale * LOG2_E,
            SLACK / (problem.scale * LOG2_E),
            num_tiles,
            num_m,
            of_section,
            heads,
            q.shape[1],
            problem.group,
            problem.queries,
            problem.keys,
        )
        defines = (
            f"HEAD_DIM={dim}",
            f"CAUSAL={int(causal)}",
            f"FP16={int(q.dtype == torch.float16)}",
            f"BLOCK_N={config.block_n}",
            f"STAGES={config.stages}",
            f"CONSUMERS={config.consumers}",
            f"PING_PONG={int(config.ping_pong)}",
            f"Q_REGISTERS={int(config.q_registers)}",
            f"Q_BUFFERS={config.q_buffers}",
        )
        (kernel,) = cuda_driver.kernels(q.device.index, "forward.cu", ("attention_cuda_fwd",), defines, shared)
        maps = [
            tensor_map(q, problem.queries, ROWS),
            *(tensor_map(x, problem.keys, config.block_n) for x in (k, v)),
        ]
        launch(kernel, min(places, num_tiles), 128 * (config.consumers + 1), shared, [*maps, described])


def shared_bytes(dim: int, config: configs.CudaConfig) -> int:
    """Of a CTA: queries, rings of keys and values, barriers, and the number of the next tile."""
    queries = config.consumers * config.q_buffers
    barriers = 2 * queries + 4 * config.stages + 2
    return 2 * dim * (ROWS * queries + 2 * config.block_n * config.stages) + 8 * barriers + 8

"""The forward for Hopper in CUDA C++ (forward.cu): which problems it supports, and its launch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..configs import forward as configs
from ..configs.forward import ROWS
from ..problem import LOG2_E, Problem, head_stride, tma_unsupported_reason, unexpanded
from . import cuda_driver
from .cuda_driver import address, tensor_map

SLACK = 8.0  # a row's maximum is not updated while no score exceeds it by more than this (base-2 logarithm)
UNREORDERED_HEADS = 3 / 8  # without a mask, this part of the heads has its partial row blocks in place, not at the end
SHORT = 16, 1024  # up to so many tiles per CTA, and keys: static schedule, as a counter needs a launch to zero it


# Three tensor maps and forward.cu's Problem: lse, out and its strides, the counter, two floats, nine integers. With
# CARRY also the running attention's address and strides, and the stride of a head of lse.
_LAYOUT, _CARRY_LAYOUT = "MMM(PPqqqPffiiiiiiiii)", "MMM(PPqqqPffiiiiiiiiiPqqqq)"


def cuda_unsupported_reason(problem: Problem, *others: torch.Tensor) -> str | None:
    """Returns why the kernels in CUDA C++ cannot run a problem with these other tensors in q's dtype, or None."""
    if problem.dim not in (64, 128):
        return f"it supports head dimensions 64 and 128, not {problem.dim}"
    return tma_unsupported_reason(problem, *others) or cuda_driver.no_compiler()


def cuda_fwd_plan(problem: Problem, out: torch.Tensor) -> Callable[..., None]:
    """Returns a function of (q, k, v, out, lse), which must have the signatures of these. It writes out and lse. The
    problem has no `cuda_unsupported_reason`."""
    return _plan(problem, problem.keys - problem.queries, out, 0, _LAYOUT)


def cuda_partial_fwd_plan(
    problem: Problem, shift: int, out: torch.Tensor, lse: torch.Tensor, result: torch.Tensor | None
) -> Callable[..., None]:
    """Returns a function of (q, k, v, out, lse, result), which must have the signatures of these. It merges attention
    over a block of keys into a running attention. The problem has no `cuda_unsupported_reason`. With a mask
    (problem.right is 0) query i sees keys up to i + shift, and the last query sees all. out: fp32, rows of D
    contiguous, 8-byte aligned; lse: [B, Hq, queries], rows contiguous, one head stride; result: as `out` of
    `cuda_fwd_plan`, or None."""
    written = out if result is None else result
    start = _plan(problem, shift, written, 1 if result is None else 2, _CARRY_LAYOUT)
    strides = (*out.stride()[:3], head_stride(lse))

    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        result: torch.Tensor | None,
    ) -> None:
        start(q, k, v, out if result is None else result, lse, out.data_ptr(), *strides)

    return run


def _plan(problem: Problem, shift: int, out: torch.Tensor, carry: int, layout: str) -> Callable[..., None]:
    """Returns a function that launches the kernel, given (q, k, v, out, lse) and the parameters that `layout` has in
    addition to `_LAYOUT`. `carry`: CARRY in forward.cu."""
    q, k, v = (unexpanded(x) for x in (problem.q, problem.k, problem.v))
    expanded = q is not problem.q or k is not problem.k or v is not problem.v
    dim, causal = problem.dim, problem.right == 0
    config = configs.pick_cuda_config(dim, problem.queries, problem.keys, causal, problem.all_heads, problem.sms())
    heads, ctas = problem.all_heads, problem.sms()
    num_m = -(-problem.queries // (ROWS * config.consumers))
    num_tiles = heads * num_m
    shared, device = shared_bytes(dim, config), q.device
    fixed = num_tiles <= ctas or (num_tiles <= SHORT[0] * ctas and problem.keys <= SHORT[1])
    if causal:
        of_section = heads if fixed else configs.pick_section(problem.keys, 4 * dim, problem.group, heads)
    else:
        of_section = int(UNREORDERED_HEADS * heads)
    with torch.cuda.device_of(q):
        defines = _defines(problem, config, carry)
        (kernel,) = cuda_driver.kernels(device.index, "forward.cu", ("attention_cuda_fwd",), defines, shared)
    grid, threads = min(ctas, num_tiles), 128 * (config.consumers + 1)
    launch = cuda_driver.Launch(device.index, kernel, grid, threads, shared, layout)
    q_map = tensor_map(q, problem.queries, ROWS)
    k_map, v_map = (tensor_map(x, problem.keys, config.block_n) for x in (k, v))
    scale_log2, out_strides = problem.scale * LOG2_E, out.stride()[:3]
    slack = min(SLACK / scale_log2, torch.finfo(torch.float32).max)  # in units of raw scores
    sizes = (num_tiles, num_m, of_section, heads, q.shape[1], problem.group, problem.queries, problem.keys, shift)

    def start(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *more: int
    ) -> None:
        if expanded:
            q, k, v = unexpanded(q), unexpanded(k), unexpanded(v)
        counter = None if fixed else torch.zeros(1, dtype=torch.int32, device=device)
        launch(
            q_map(q.data_ptr()),
            k_map(k.data_ptr()),
            v_map(v.data_ptr()),
            lse.data_ptr(),
            out.data_ptr(),
            *out_strides,
            address(counter),
            scale_log2,
            slack,
            *sizes,
            *more,
        )

    return start


def _defines(problem: Problem, config: configs.CudaConfig, carry: int) -> tuple[str, ...]:
    return (
        f"HEAD_DIM={problem.dim}",
        f"CAUSAL={int(problem.right == 0)}",
        f"FP16={int(problem.q.dtype == torch.float16)}",
        f"BLOCK_N={config.block_n}",
        f"STAGES={config.stages}",
        f"CONSUMERS={config.consumers}",
        f"PING_PONG={int(config.ping_pong)}",
        f"Q_REGISTERS={int(config.q_registers)}",
        f"Q_BUFFERS={config.q_buffers}",
        f"CARRY={carry}",
    )


def shared_bytes(dim: int, config: configs.CudaConfig) -> int:
    """Returns the shared memory of a CTA: queries, circular buffers of keys and values, mbarriers, next tile index."""
    queries = config.consumers * config.q_buffers
    barriers = 2 * queries + 4 * config.stages + 2
    return 2 * dim * (ROWS * queries + 2 * config.block_n * config.stages) + 8 * barriers + 8

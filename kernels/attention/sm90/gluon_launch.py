"""Launches the Gluon forward: which problems it supports, TMA descriptors, and the grid of the persistent kernel."""

from __future__ import annotations

from typing import Any

import torch
import triton

from ..configs import forward as configs
from ..configs.forward import ROWS
from ..configs.portable import padded
from ..problem import LOG2_E, Problem, tma_unsupported_reason, unexpanded
from .gluon_forward import NO_GLUON, _attention_gluon_fwd_kernel

if NO_GLUON is None:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def gluon_unsupported_reason(problem: Problem) -> str | None:
    """Returns why this forward cannot run a problem, or None if it can."""
    if problem.dim < 32:
        return f"it supports head dimensions of at least 32, not {problem.dim}"
    return tma_unsupported_reason(problem) or NO_GLUON


def gluon_fwd(problem: Problem, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Writes out and lse of a problem without `gluon_unsupported_reason`."""
    q, k = problem.q, problem.k
    causal = problem.right == 0
    config = configs.pick_gluon_config(problem.dim, causal)
    block_d = padded(problem.dim)
    num_m = triton.cdiv(problem.queries, ROWS * config.consumers)
    num_tiles = problem.all_heads * num_m
    sms = problem.sms()
    dynamic = causal and num_tiles > sms
    with torch.cuda.device_of(q):
        _attention_gluon_fwd_kernel[(min(sms, num_tiles),)](
            _descriptor(q, problem.queries, ROWS, block_d),
            _descriptor(k, problem.keys, config.block_n, block_d),
            _descriptor(problem.v, problem.keys, config.block_n, block_d),
            _descriptor(out, problem.queries, ROWS, block_d),
            lse,
            torch.zeros(1, dtype=torch.int32, device=q.device) if dynamic else lse,
            problem.scale * LOG2_E,
            num_tiles,
            num_m,
            configs.pick_section(problem.keys, 4 * problem.dim, problem.group, problem.all_heads),
            q.shape[0],
            q.shape[1],
            problem.group,
            problem.queries,
            problem.keys,
            CONSUMERS=config.consumers,
            STAGES=config.stages,
            CAUSAL=causal,
            DYNAMIC=dynamic,
            PING_PONG=config.ping_pong,
            SHARE=config.share,
            REGISTERS=config.registers,
            num_warps=4,
        )


def _descriptor(x: torch.Tensor, rows: int, block_rows: int, block_d: int) -> Any:
    """Returns a TMA descriptor of the first `rows` rows of a [B, H, S, D] tensor, with boxes [1, 1, block_rows,
    block_d]."""
    x = unexpanded(x)
    element = gl.float16 if x.dtype == torch.float16 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, block_rows, block_d], element)
    shape = [x.shape[0], x.shape[1], rows, x.shape[3]]
    # The stride of a dimension of one element is arbitrary in PyTorch, but TMA requires a multiple of 16 bytes.
    strides = [8 if size == 1 else stride for size, stride in zip(shape[:-1], x.stride()[:-1], strict=True)] + [1]
    return TensorDescriptor(x, shape, strides, [1, 1, block_rows, block_d], layout)

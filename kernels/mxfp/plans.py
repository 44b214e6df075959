"""Launch plans: everything about a call that does not change with the tensors' contents and addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from . import configs
from .kernel import _mxfp_bwd_kernel, _mxfp_fwd_kernel
from .launch import Launch

Plan = Callable[[torch.Tensor], torch.Tensor]


def fwd_plan(x: torch.Tensor, alpha: float) -> Plan:
    """Takes x like this one, as `op` has checked it, and returns y."""
    return _plan(_mxfp_fwd_kernel, x, alpha)


def bwd_plan(dy: torch.Tensor, alpha: float) -> Plan:
    """Takes dy like this one and returns dx."""
    return _plan(_mxfp_bwd_kernel, dy, alpha)


def _plan(kernel: Any, x: torch.Tensor, alpha: float) -> Plan:
    if x.numel() == 0:
        return lambda x: torch.empty_like(x, memory_format=torch.contiguous_format)
    matrix = _rows(x)
    copied = matrix.data_ptr() != x.data_ptr()  # otherwise the kernel is given x itself: it needs the address alone
    launch = _launch(kernel, matrix, alpha)

    def run(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        launch(_rows(x) if copied else x, y)
        return y

    return run


def _launch(kernel: Any, x: torch.Tensor, alpha: float) -> Launch:
    rows, dim = x.shape
    # The interpreter stands for an sm_80.
    capability = torch.cuda.get_device_capability(x.device) if x.is_cuda else (8, 0)
    config = configs.pick_config(rows, dim, x.dtype, capability)
    # One dimension: the others of a grid end at 65535.
    grid = (triton.cdiv(rows, config.block_m) * triton.cdiv(dim, config.block_n),)
    return Launch(
        kernel,
        grid,
        x.device,
        (rows, dim, x.stride(0), alpha),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
    )


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """[rows, dim] with unit inner stride: a view where the strides allow it, otherwise a copy."""
    tensor = tensor.reshape(-1, tensor.shape[-1])
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] == 1 else tensor.contiguous()

"""Launch plans of gelu: everything about a call that does not change with the tensors' contents and addresses."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from . import configs
from .kernel import _gelu_bwd_kernel, _gelu_fwd_kernel
from .launch import Launch
from .layout import Walk, in_order_of, walk

Forward = Callable[[torch.Tensor], torch.Tensor]
Backward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def fwd_plan(x: torch.Tensor, tanh: bool) -> Forward:
    """Takes x like this one and returns y. Inputs as `op` has checked them."""
    if x.numel() == 0:
        return lambda x: torch.empty_like(x)
    steps = walk((torch.empty_like(x, device="meta"),), (x,))
    y_strides, x_strides = steps.strides
    write = _launch(_gelu_fwd_kernel, x, steps, 1, (*x_strides, *y_strides), tanh)
    (copied,) = steps.copied

    def run(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        write(in_order_of(y, x) if copied else x, y)
        return y

    return run


def bwd_plan(dy: torch.Tensor, x: torch.Tensor, tanh: bool) -> Backward:
    """Takes (dy, x) like these and returns dx."""
    if x.numel() == 0:
        return lambda dy, x: torch.empty_like(x)
    steps = walk((torch.empty_like(x, device="meta"),), (x, dy))
    dx_strides, x_strides, dy_strides = steps.strides
    write = _launch(_gelu_bwd_kernel, x, steps, 2, (*dy_strides, *x_strides, *dx_strides), tanh)
    x_copied, dy_copied = steps.copied

    def run(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        dx = torch.empty_like(x)
        write(in_order_of(dx, dy) if dy_copied else dy, in_order_of(dx, x) if x_copied else x, dx)
        return dx

    return run


def _launch(
    kernel: triton.JITFunction, x: torch.Tensor, steps: Walk, reads: int, strides: tuple[int, ...], tanh: bool
) -> Launch:
    """Of tensors with these strides, in the order of the kernel's parameters."""
    # The interpreter stands for an sm_80.
    capability = torch.cuda.get_device_capability(x.device) if x.is_cuda else (8, 0)
    config = configs.pick_config(steps.rows, steps.cols, x.dtype, reads, steps.transposed, capability)
    tiles = triton.cdiv(steps.rows, config.block_m) * triton.cdiv(steps.cols, config.block_n)
    return Launch(
        kernel,
        (tiles,),
        x.device,
        (steps.rows, steps.cols, *strides),
        TANH=tanh,
        SPLIT=steps.aligned,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        EVICTION=config.eviction,
        num_warps=config.num_warps,
    )

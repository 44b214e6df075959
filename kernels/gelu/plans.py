"""Launch plans of gelu: everything in a call that does not depend on the tensors' values and addresses."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from . import configs
from .kernel import _gelu_bwd_kernel, _gelu_fwd_kernel
from .launch import Launch
from .layout import Coalesced, coalesce, in_order_of

Forward = Callable[[torch.Tensor], torch.Tensor]
Backward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def fwd_plan(x: torch.Tensor, tanh: bool) -> Forward:
    """Returns a function of x that returns y, for all x with this signature. `op` has checked the inputs."""
    if x.numel() == 0:
        return lambda x: torch.empty_like(x)
    layout = coalesce((torch.empty_like(x, device="meta"),), (x,))
    y_strides, x_strides = layout.strides
    write = _launch(_gelu_fwd_kernel, x, layout, 1, (*x_strides, *y_strides), tanh)
    (copied,) = layout.copied

    def run(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        write(in_order_of(y, x) if copied else x, y)
        return y

    return run


def bwd_plan(dy: torch.Tensor, x: torch.Tensor, tanh: bool) -> Backward:
    """Returns a function of (dy, x) that returns dx, for all tensors with these signatures."""
    if x.numel() == 0:
        return lambda dy, x: torch.empty_like(x)
    layout = coalesce((torch.empty_like(x, device="meta"),), (x, dy))
    dx_strides, x_strides, dy_strides = layout.strides
    write = _launch(_gelu_bwd_kernel, x, layout, 2, (*dy_strides, *x_strides, *dx_strides), tanh)
    x_copied, dy_copied = layout.copied

    def run(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        dx = torch.empty_like(x)
        write(in_order_of(dx, dy) if dy_copied else dy, in_order_of(dx, x) if x_copied else x, dx)
        return dx

    return run


def _launch(
    kernel: triton.JITFunction, x: torch.Tensor, layout: Coalesced, reads: int, strides: tuple[int, ...], tanh: bool
) -> Launch:
    """The launch of a kernel on tensors with these strides, given in the order of the kernel's parameters."""
    # The interpreter has no device; sm_80 is assumed.
    capability = torch.cuda.get_device_capability(x.device) if x.is_cuda else (8, 0)
    config = configs.pick_config(layout.rows, layout.cols, x.dtype, reads, layout.transposed, capability)
    tiles = triton.cdiv(layout.rows, config.block_m) * triton.cdiv(layout.cols, config.block_n)
    return Launch(
        kernel,
        (tiles,),
        x.device,
        (layout.rows, layout.cols, *strides),
        TANH=tanh,
        SPLIT=layout.aligned,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        EVICTION=config.eviction,
        num_warps=config.num_warps,
    )

"""TEMPLATE: the kernels and their launchers.

Napkin maths, bf16, R rows of D, one NVIDIA H200:
  forward   reads x, writes y      4·R·D bytes
  backward  reads dy, writes dx    4·R·D bytes
One multiplication an element is nothing beside that: the floor is the time to move the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class Config:
    """Each CTA has a tile of `block_m` rows by `block_n` columns."""

    block_m: int
    block_n: int
    num_warps: int


def pick_config(rows: int, dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    """Configuration of both kernels. Pure. The numbers are a start: `tune` says what to put here."""
    block_n = min(triton.next_power_of_2(dim), 2048)
    return Config(block_m=max(1, 2048 // block_n), block_n=block_n, num_warps=4)


@triton.jit
def _TEMPLATE_fwd_kernel(
    x_ptr,
    y_ptr,
    rows,
    dim,
    stride_xm,
    alpha,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)  # 64 bits, because a tensor may have more than 2^31 elements
    tiles_n = tl.cdiv(dim, BLOCK_N)
    row = (tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    col = (tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (row < rows) & (col < dim)
    x = tl.load(x_ptr + row * stride_xm + col, mask=mask).to(tl.float32)
    tl.store(y_ptr + row * dim + col, (x * alpha).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _TEMPLATE_bwd_kernel(
    dy_ptr,
    dx_ptr,
    rows,
    dim,
    stride_dym,
    alpha,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dx = alpha · dy."""
    tile = tl.program_id(0).to(tl.int64)
    tiles_n = tl.cdiv(dim, BLOCK_N)
    row = (tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    col = (tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (row < rows) & (col < dim)
    dy = tl.load(dy_ptr + row * stride_dym + col, mask=mask).to(tl.float32)
    tl.store(dx_ptr + row * dim + col, (dy * alpha).to(dx_ptr.dtype.element_ty), mask=mask)


def TEMPLATE_fwd(x: torch.Tensor, alpha: float) -> torch.Tensor:
    """y. Inputs as `op` has checked them."""
    return _launch(_TEMPLATE_fwd_kernel, x, alpha)


def TEMPLATE_bwd(dy: torch.Tensor, alpha: float) -> torch.Tensor:
    """dx."""
    return _launch(_TEMPLATE_bwd_kernel, dy, alpha)


def _launch(kernel: triton.JITFunction, x: torch.Tensor, alpha: float) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y
    x = _rows(x)
    rows, dim = x.shape
    with torch.cuda.device_of(x):
        # The interpreter stands for an sm_80.
        capability = torch.cuda.get_device_capability(x.device) if x.is_cuda else (8, 0)
        config = pick_config(rows, dim, x.dtype, capability)
        # One dimension: the others of a grid end at 65535.
        kernel[(triton.cdiv(rows, config.block_m) * triton.cdiv(dim, config.block_n),)](
            x,
            y,
            rows,
            dim,
            x.stride(0),
            alpha,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            num_warps=config.num_warps,
        )
    return y


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """[rows, dim] with unit inner stride: a view where the strides allow it, otherwise a copy."""
    tensor = tensor.reshape(-1, tensor.shape[-1])
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] == 1 else tensor.contiguous()

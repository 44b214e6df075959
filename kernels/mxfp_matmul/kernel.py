"""mxfp_matmul: the kernels.

Napkin maths, bf16, R rows of D, one NVIDIA H200:
  forward   reads x, writes y      4·R·D bytes
  backward  reads dy, writes dx    4·R·D bytes
One multiplication an element is nothing beside that: the floor is the time to move the bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What changes from call to call comes first, then integers, then constexprs: see `Launch`.


@triton.jit
def _mxfp_matmul_fwd_kernel(
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
def _mxfp_matmul_bwd_kernel(
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

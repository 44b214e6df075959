# A copy of parts/heads_backward/plan.py, made by `nox -s vendor`: change it there.
"""The backward of K feed-forward layers of one input: launches and products, given the gradient of their results.

    y[r, g] = w2[g] · act(w1[g] · x[r])

Rows are taken in chunks, so that the gradient of the hidden is in memory for one chunk at a time. For each, one kernel
writes it, of which two products make the gradient of x and terms of that of w1. All sums have a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from ..configs import heads_backward as configs
from ..launch import Launch
from . import products
from .dhidden import _heads_dhidden_kernel
from .passes import _heads_pass_kernel
from .sums import _heads_dw1_kernel, _heads_dx_kernel, _heads_sum_kernel

SUM_BLOCK = 512

Optional = torch.Tensor | None
Needs = tuple[bool, bool, bool]  # the gradients of x, w1 and w2
Gradients = tuple[Optional, Optional, Optional]
Strides = tuple[int, ...]
# The gradient of y for a chunk, [rows, K, O], given the chunk's first row, its number of rows, and its pre
# [rows, K, pitch], or None where that is not in memory.
Incoming = Callable[[int, int, Optional], torch.Tensor]
Backward = Callable[[Incoming, torch.Tensor, torch.Tensor, torch.Tensor], Gradients]


def chunks_of(rows: int, heads: int, hidden: int) -> list[tuple[int, int]]:
    """First row and number of rows of each chunk."""
    size = configs.pick_chunk_rows(rows, heads, hidden)
    return [(start, min(size, rows - start)) for start in range(0, rows, size)]


def by_library(x: torch.Tensor, w2: torch.Tensor) -> bool:
    """Whether pre of a chunk is in memory: cuBLAS makes the large products."""
    return configs.pick_library(x.shape[0], w2.shape[1], x.dtype, x.is_cuda) and bool(x.numel() and w2.numel())


def backward_plan(
    x: torch.Tensor, dy_strides: Strides, w1: torch.Tensor, w2: torch.Tensor, activation: str, needs: Needs
) -> Backward:
    """Takes (incoming, x, w1, w2) like these, x [rows, D], and returns the gradients of x, w1 and w2, contiguous, None
    where not needed. `incoming` is called once a chunk, in order, unless x or w2 has no elements; what it returns is
    read before the next call."""
    heads, _, hidden = w2.shape
    pitch = configs.pick_pitch(hidden)
    # Elements there are in each sum; otherwise a gradient is zero.
    chunks = chunks_of(x.shape[0], heads, hidden) if x.shape[0] and w2.numel() else []
    if by_library(x, w2):
        within, parts = _pass_launches(dy_strides, x, w2, activation, chunks)
        return _by_library(chunks, pitch, within, parts, w2, needs)
    within, parts = _dhidden_launches(dy_strides, x, w1, w2, activation, chunks)
    return _by_triton(chunks, pitch, within, parts, x, w1, w2, needs)


def _by_triton(
    chunks: list[tuple[int, int]],
    pitch: int,
    within: list[Launch],
    parts: int,
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    needs: Needs,
) -> Backward:
    (dim, device), heads = (x.shape[1], x.device), w2.shape[0]
    need_dpre = needs[0] or needs[1]
    for_x = [_dx_launch(x, w1, pitch, *chunk) for chunk in chunks] if needs[0] and dim else []
    for_w1 = [_dw1_launch(x, w1, pitch, *chunk) for chunk in chunks] if needs[1] and dim else []
    total = sum_launch(w2, parts) if parts > 1 and needs[2] else None

    def run(incoming: Incoming, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> Gradients:
        dx, dw1, dw2 = (
            (like.new_empty if chunks else like.new_zeros)(like.shape) if need else None
            for like, need in zip((x, w1, w2), needs, strict=True)
        )
        dpre = x.new_empty((chunks[0][1], heads, pitch)) if chunks and need_dpre else None
        dw2_parts = torch.empty((parts, *w2.shape), device=device) if total is not None else dw2
        sums = torch.empty(w1.shape, device=device) if len(for_w1) > 1 else None
        for index, (launch, chunk) in enumerate(zip(within, chunks, strict=True)):
            launch(incoming(*chunk, None), x, w1, w2, dpre, dw2_parts)
            if for_x:
                for_x[index](dpre, w1, dx)
            if for_w1:
                for_w1[index](dpre, x, sums if index else None, dw1 if index == len(chunks) - 1 else sums)
        if total is not None:
            total(dw2_parts, dw2)
        return dx, dw1, dw2

    return run


def _by_library(
    chunks: list[tuple[int, int]], pitch: int, within: list[Launch], parts: int, w2: torch.Tensor, needs: Needs
) -> Backward:
    """With the products by cuBLAS, and a pass over what they leave in memory."""
    total = sum_launch(w2, parts) if parts > 1 and needs[2] else None

    def run(incoming: Incoming, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> Gradients:
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else None
        dw2 = w2.new_empty(w2.shape) if needs[2] else None
        pre = x.new_empty((chunks[0][1], w2.shape[0], pitch))  # and the gradient of it, in its place
        dw2_parts = torch.empty((parts, *w2.shape), device=x.device) if total is not None else dw2
        weight = products.padded(w1, pitch)
        sums = None
        for launch, (start, rows) in zip(within, chunks, strict=True):
            chunk = x[start : start + rows]
            products.write_pre(chunk, weight, pre[:rows])
            launch(incoming(start, rows, pre), w2, pre, dw2_parts)
            if dx is not None:
                products.write_dx(pre[:rows], weight, dx[start : start + rows])
            if needs[1]:
                sums = products.add_dw1(pre[:rows], chunk, sums)
        if total is not None:
            total(dw2_parts, dw2)
        return dx, products.rounded(sums, w1) if sums is not None else None, dw2

    return run


def _dhidden_launches(
    dy_strides: Strides, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, activation: str, chunks: list
) -> tuple[list[Launch], int]:
    """For each chunk what writes dpre and its parts of dw2, given (dy, x, w1, w2, dpre, dw2); and how many parts there
    are."""
    dim, (heads, dim_out, hidden), (capability, sms) = x.shape[1], w2.shape, device_of(x)
    pitch, aligned = configs.pick_pitch(hidden), whole_vectors(x) and whole_vectors(w1)
    launches, parts = [], 0
    for start, rows in chunks:
        config = configs.pick_dhidden_config(rows, dim, heads, hidden, aligned, x.dtype, capability, sms)
        part = config.tiles * config.block_m
        splits = triton.cdiv(rows, part)
        sizes = start, parts, rows, part, dim, heads, hidden, pitch, dim_out
        launches.append(
            Launch(
                _heads_dhidden_kernel,
                (splits * heads * triton.cdiv(pitch, config.block_h),),
                x.device,
                (*sizes, *dy_strides, *x.stride(), *w1.stride(), *w2.stride()),
                ACTIVATION=activation,
                BLOCK_M=config.block_m,
                BLOCK_H=config.block_h,
                BLOCK_K=config.block_k,
                BLOCK_O=block_o(dim_out),
                EVEN_K=dim % config.block_k == 0,
                num_warps=config.num_warps,
                num_stages=config.stages,
            )
        )
        parts += splits
    return launches, parts


def _pass_launches(
    dy_strides: Strides, x: torch.Tensor, w2: torch.Tensor, activation: str, chunks: list
) -> tuple[list[Launch], int]:
    """For each chunk what makes dpre of pre and writes its parts of dw2, given (dy, w2, pre, dw2); and how many parts
    there are."""
    (heads, dim_out, hidden), (_, sms) = w2.shape, device_of(x)
    pitch = configs.pick_pitch(hidden)
    launches, parts = [], 0
    for _, rows in chunks:
        config = configs.pick_pass_config(rows, heads, hidden, sms)
        part = config.tiles * config.block_m
        splits = triton.cdiv(rows, part)
        launches.append(
            Launch(
                _heads_pass_kernel,
                (splits * heads * triton.cdiv(pitch, config.block_h),),
                x.device,
                (parts, rows, part, heads, hidden, pitch, *dy_strides, *w2.stride()),
                ACTIVATION=activation,
                DIM_OUT=dim_out,
                BLOCK_M=config.block_m,
                BLOCK_H=config.block_h,
                num_warps=config.num_warps,
                num_stages=config.stages,
            )
        )
        parts += splits
    return launches, parts


def _dx_launch(x: torch.Tensor, w1: torch.Tensor, pitch: int, start: int, rows: int) -> Launch:
    """Writes a chunk of dx, given (dpre, w1, dx)."""
    (heads, hidden, dim), (capability, sms) = w1.shape, device_of(x)
    config = configs.pick_dx_config(rows, dim, whole_vectors(w1), x.dtype, capability, sms)
    return Launch(
        _heads_dx_kernel,
        (triton.cdiv(rows, config.block_m) * triton.cdiv(dim, config.block_n),),
        x.device,
        (start, rows, dim, heads, hidden, pitch, *w1.stride()),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        EVEN_N=dim % config.block_n == 0,
        num_warps=config.num_warps,
        num_stages=config.stages,
    )


def _dw1_launch(x: torch.Tensor, w1: torch.Tensor, pitch: int, start: int, rows: int) -> Launch:
    """Adds a chunk to dw1, given (dpre, x, sums before, sums)."""
    (heads, hidden, dim), (capability, _) = w1.shape, device_of(x)
    config = configs.pick_dw1_config(rows, dim, hidden, whole_vectors(x), x.dtype, capability)
    return Launch(
        _heads_dw1_kernel,
        (heads * triton.cdiv(hidden, config.block_m) * triton.cdiv(dim, config.block_n),),
        x.device,
        (start, rows, dim, heads, hidden, pitch, *x.stride()),
        BLOCK_H=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_R=config.block_k,
        EVEN_N=dim % config.block_n == 0,
        num_warps=config.num_warps,
        num_stages=config.stages,
    )


def sum_launch(like: torch.Tensor, parts: int) -> Launch:
    """Writes a tensor like this, given (parts, tensor)."""
    elements, grid = like.numel(), (triton.cdiv(like.numel(), SUM_BLOCK),)
    return Launch(_heads_sum_kernel, grid, like.device, (elements, parts), BLOCK=SUM_BLOCK, num_warps=4)


def block_o(dim_out: int) -> int:
    return max(configs.MIN_BLOCK, triton.next_power_of_2(dim_out))


def device_of(tensor: torch.Tensor) -> tuple[tuple[int, int], int]:
    """Compute capability and number of SMs; in the interpreter those of an sm_80, with few SMs."""
    if not tensor.is_cuda:
        return (8, 0), 2
    properties = torch.cuda.get_device_properties(tensor.device)
    return (properties.major, properties.minor), properties.multi_processor_count


def whole_vectors(tensor: torch.Tensor) -> bool:
    """Whether all rows are contiguous and start on 16-byte boundaries."""
    per_vector = 16 // tensor.element_size()
    return (
        tensor.stride(-1) == 1
        and tensor.data_ptr() % 16 == 0
        and all(stride % per_vector == 0 for stride in tensor.stride()[:-1])
    )

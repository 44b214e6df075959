"""Launch plans of heads_mlp: everything about a call that does not change with the tensors' contents and addresses."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from . import configs, library
from .kernel import _heads_mlp_dhidden_kernel, _heads_mlp_fwd_kernel
from .launch import Launch
from .passes import _heads_mlp_pass_kernel
from .sums import _heads_mlp_dw1_kernel, _heads_mlp_dx_kernel, _heads_mlp_sum_kernel

SUM_BLOCK = 512

Optional = torch.Tensor | None
Needs = tuple[bool, bool, bool]  # the gradients of x, w1 and w2
Gradients = tuple[Optional, Optional, Optional]
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Backward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Gradients]


def fwd_plan(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, activation: str) -> Forward:
    """Takes (x, w1, w2) like these, as `op` has checked them, and returns y."""
    copied, flat = _flat(x, 1)
    shape = (*x.shape[:-1], *w2.shape[:2])
    launch = _fwd_launch(flat, w1, w2, activation) if flat.shape[0] and w2.shape[0] and w2.shape[1] else None

    def run(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(shape)
        if launch is not None:
            launch(_flat(x, 1)[1] if copied else x, w1, w2, y)
        return y

    return run


def _fwd_launch(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, activation: str) -> Launch:
    (rows, dim), (heads, dim_out, hidden), (capability, sms) = x.shape, w2.shape, _device(x)
    aligned = _whole_vectors(x) and _whole_vectors(w1)
    config = configs.pick_fwd_config(rows, dim, heads, hidden, aligned, x.dtype, capability, sms)
    return Launch(
        _heads_mlp_fwd_kernel,
        (triton.cdiv(rows, config.block_m) * triton.cdiv(heads, config.heads),),
        x.device,
        (rows, dim, heads, hidden, dim_out, config.heads, *x.stride(), *w1.stride(), *w2.stride()),
        ACTIVATION=activation,
        BLOCK_M=config.block_m,
        BLOCK_H=config.block_h,
        BLOCK_K=config.block_k,
        BLOCK_O=_block_o(dim_out),
        EVEN_K=dim % config.block_k == 0,
        RESIDENT=config.resident,
        num_warps=config.num_warps,
        num_stages=config.stages,
    )


def bwd_plan(
    dy: torch.Tensor, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, activation: str, needs: Needs
) -> Backward:
    """Takes (dy, x, w1, w2) like these and returns the gradients of x, w1 and w2, None where not needed.

    Rows are taken in chunks. For each, one kernel writes the hidden's gradient, of which two more make their products.
    """
    (x_copied, flat), (dy_copied, dy_flat) = _flat(x, 1), _flat(dy, 2)
    (rows, dim), (heads, dim_out, hidden), device = flat.shape, w2.shape, x.device
    shape, need_dpre = x.shape, needs[0] or needs[1]
    size, pitch = configs.pick_chunk_rows(rows, heads, hidden), configs.pick_pitch(hidden)
    # Elements there are in each sum; otherwise a gradient is zero.
    any_terms = bool(rows and heads and hidden and dim_out)
    starts = range(0, rows, size) if any_terms else range(0)
    chunks = [(start, min(size, rows - start)) for start in starts]
    by_library = configs.pick_library(rows, dim_out, x.dtype, x.is_cuda) and any_terms and dim > 0
    if by_library:
        within, parts = _pass_launches(dy_flat, flat, w2, activation, chunks)
        return _by_library(shape, dy_copied, chunks, pitch, within, parts, w2, needs)
    within, parts = _dhidden_launches(dy_flat, flat, w1, w2, activation, chunks)
    for_x = [_dx_launch(flat, w1, pitch, *chunk) for chunk in chunks] if needs[0] and dim else []
    for_w1 = [_dw1_launch(flat, w1, pitch, *chunk) for chunk in chunks] if needs[1] and dim else []
    total = _sum_launch(w2, parts) if parts > 1 and needs[2] else None

    def run(dy: torch.Tensor, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> Gradients:
        dy, x_rows = _flat(dy, 2)[1] if dy_copied else dy, _flat(x, 1)[1] if x_copied else x
        dx, dw1, dw2 = (
            (x.new_empty if chunks else x.new_zeros)(of) if need else None
            for of, need in zip((shape, w1.shape, w2.shape), needs, strict=True)
        )
        dpre = x.new_empty((size, heads, pitch)) if chunks and need_dpre else None
        dw2_parts = torch.empty((parts, *w2.shape), device=device) if total is not None else dw2
        sums = torch.empty(w1.shape, device=device) if len(for_w1) > 1 else None
        for index, launch in enumerate(within):
            launch(dy, x_rows, w1, w2, dpre, dw2_parts)
            if for_x:
                for_x[index](dpre, w1, dx)
            if for_w1:
                for_w1[index](dpre, x_rows, sums if index else None, dw1 if index == len(chunks) - 1 else sums)
        if total is not None:
            total(dw2_parts, dw2)
        return dx, dw1, dw2

    return run


def _by_library(
    shape: torch.Size,
    dy_copied: bool,
    chunks: list,
    pitch: int,
    within: list[Launch],
    parts: int,
    w2: torch.Tensor,
    needs: Needs,
) -> Backward:
    """As the rest of `bwd_plan`, with the sums over the hidden's gradient by cuBLAS."""
    heads = w2.shape[0]
    total = _sum_launch(w2, parts) if parts > 1 and needs[2] else None

    def run(dy: torch.Tensor, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> Gradients:
        dy, x = _flat(dy, 2)[1] if dy_copied else dy, _flat(x, 1)[1]
        dx = x.new_empty(shape) if needs[0] else None
        dx_rows = dx.view(x.shape) if dx is not None else None
        dw2 = w2.new_empty(w2.shape) if needs[2] else None
        pre = x.new_empty((chunks[0][1], heads, pitch))  # and the gradient of it, in its place
        dw2_parts = torch.empty((parts, *w2.shape), device=x.device) if total is not None else dw2
        weight = library.padded(w1, pitch)
        sums = None
        for launch, (start, rows) in zip(within, chunks, strict=True):
            chunk = x[start : start + rows]
            library.write_pre(chunk, weight, pre[:rows])
            launch(dy, w2, pre, dw2_parts)
            if dx_rows is not None:
                library.write_dx(pre[:rows], weight, dx_rows[start : start + rows])
            if needs[1]:
                sums = library.add_dw1(pre[:rows], chunk, sums)
        if total is not None:
            total(dw2_parts, dw2)
        return dx, library.rounded(sums, w1) if sums is not None else None, dw2

    return run


def _dhidden_launches(
    dy: torch.Tensor, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, activation: str, chunks: list
) -> tuple[list[Launch], int]:
    """For each chunk what writes dpre and its parts of dw2, given (dy, x, w1, w2, dpre, dw2); and how many parts there
    are."""
    dim, (heads, dim_out, hidden), (capability, sms) = x.shape[1], w2.shape, _device(x)
    pitch, aligned = configs.pick_pitch(hidden), _whole_vectors(x) and _whole_vectors(w1)
    launches, parts = [], 0
    for start, rows in chunks:
        config = configs.pick_dhidden_config(rows, dim, heads, hidden, aligned, x.dtype, capability, sms)
        part = config.tiles * config.block_m
        splits = triton.cdiv(rows, part)
        sizes = start, parts, rows, part, dim, heads, hidden, pitch, dim_out
        launches.append(
            Launch(
                _heads_mlp_dhidden_kernel,
                (splits * heads * triton.cdiv(pitch, config.block_h),),
                x.device,
                (*sizes, *dy.stride(), *x.stride(), *w1.stride(), *w2.stride()),
                ACTIVATION=activation,
                BLOCK_M=config.block_m,
                BLOCK_H=config.block_h,
                BLOCK_K=config.block_k,
                BLOCK_O=_block_o(dim_out),
                EVEN_K=dim % config.block_k == 0,
                num_warps=config.num_warps,
                num_stages=config.stages,
            )
        )
        parts += splits
    return launches, parts


def _pass_launches(
    dy: torch.Tensor, x: torch.Tensor, w2: torch.Tensor, activation: str, chunks: list
) -> tuple[list[Launch], int]:
    """For each chunk what makes dpre of pre and writes its parts of dw2, given (dy, w2, pre, dw2); and how many parts
    there are."""
    (heads, dim_out, hidden), (_, sms) = w2.shape, _device(x)
    pitch = configs.pick_pitch(hidden)
    launches, parts = [], 0
    for start, rows in chunks:
        config = configs.pick_pass_config(rows, heads, hidden, sms)
        part = config.tiles * config.block_m
        splits = triton.cdiv(rows, part)
        launches.append(
            Launch(
                _heads_mlp_pass_kernel,
                (splits * heads * triton.cdiv(pitch, config.block_h),),
                x.device,
                (start, parts, rows, part, heads, hidden, pitch, *dy.stride(), *w2.stride()),
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
    (heads, hidden, dim), (capability, sms) = w1.shape, _device(x)
    config = configs.pick_dx_config(rows, dim, _whole_vectors(w1), x.dtype, capability, sms)
    return Launch(
        _heads_mlp_dx_kernel,
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
    (heads, hidden, dim), (capability, _) = w1.shape, _device(x)
    config = configs.pick_dw1_config(rows, dim, hidden, _whole_vectors(x), x.dtype, capability)
    return Launch(
        _heads_mlp_dw1_kernel,
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


def _sum_launch(like: torch.Tensor, parts: int) -> Launch:
    """Writes a tensor like this, given (parts, tensor)."""
    elements, grid = like.numel(), (triton.cdiv(like.numel(), SUM_BLOCK),)
    return Launch(_heads_mlp_sum_kernel, grid, like.device, (elements, parts), BLOCK=SUM_BLOCK, num_warps=4)


def _block_o(dim_out: int) -> int:
    return max(configs.MIN_BLOCK, triton.next_power_of_2(dim_out))


def _device(tensor: torch.Tensor) -> tuple[tuple[int, int], int]:
    """Compute capability and number of SMs; in the interpreter those of an sm_80, with few SMs."""
    if not tensor.is_cuda:
        return (8, 0), 2
    properties = torch.cuda.get_device_properties(tensor.device)
    return (properties.major, properties.minor), properties.multi_processor_count


def _whole_vectors(tensor: torch.Tensor) -> bool:
    """Whether all rows are contiguous and start on 16-byte boundaries."""
    per_vector = 16 // tensor.element_size()
    return (
        tensor.stride(-1) == 1
        and tensor.data_ptr() % 16 == 0
        and all(stride % per_vector == 0 for stride in tensor.stride()[:-1])
    )


def _flat(tensor: torch.Tensor, last: int) -> tuple[bool, torch.Tensor]:
    """Whether a copy is needed for one dimension in place of all but the `last` ones, and that tensor."""
    leading, rest = tensor.shape[:-last], tensor.shape[-last:]
    flat = tensor.reshape(leading.numel(), *rest)
    return flat.data_ptr() != tensor.data_ptr(), flat

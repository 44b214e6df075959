"""The backward of K feed-forward layers of one input: its launches, given the gradient of the results.

    y[r, g] = w2[g] · act(w1[g] · x[r])

Rows are processed in chunks, so that the gradient of the hidden is in memory for one chunk at a time. For each chunk
one kernel writes that gradient and partial sums of w2's, in CUDA C++ on Hopper and in Triton elsewhere. Two GEMMs
compute from it the gradient of x and the chunk's contribution to that of w1: in one launch of CUDA C++, by cuBLAS, or
in Triton. All sums have a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from ..configs import heads_backward as configs
from ..launch import Launch
from ..sm90 import heads, heads_dhidden, heads_products
from . import products
from .dhidden import _heads_dhidden_kernel
from .operands import device_of, whole_vectors
from .sums import _heads_dw1_kernel, _heads_dx_kernel, _heads_sum_kernel

SUM_BLOCK, SUM_AT_ONCE = 512, 16  # elements of a CTA, and parts that it loads at once if there are more

Optional = torch.Tensor | None
Needs = tuple[bool, bool, bool]  # the gradients of x, w1 and w2
Gradients = tuple[Optional, Optional, Optional]
Strides = tuple[int, ...]
Chunks = list[tuple[int, int]]  # first row and number of rows of each
# Returns the gradient of y for a chunk, [rows, K, O], given the chunk's first row and its number of rows.
Incoming = Callable[[int, int], torch.Tensor]
# Given (incoming, x, w1, w2) and, if another tensor's parts are added up (`also`), those parts and the sum.
Backward = Callable[..., Gradients]
Parts = tuple[torch.Tensor, int]  # a tensor like the sum, and how many fp32 parts it has
# Given a chunk's (dy, x, w1, w2, dpre, dw2): writes dpre and its parts of dw2, those that are not None.
Hidden = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Optional, Optional], None]


def chunks_of(rows: int, heads: int, hidden: int) -> Chunks:
    size = configs.pick_chunk_rows(rows, heads, hidden)
    return [(start, min(size, rows - start)) for start in range(0, rows, size)]


def in_cuda(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> bool:
    """Whether CUDA C++ computes the gradient of the hidden."""
    return configs.pick_cuda(x.shape[0], possible=heads.unsupported_reason(x, w1, w2) is None)


def backward_plan(
    x: torch.Tensor,
    dy_strides: Strides,
    w1: torch.Tensor,
    w2: torch.Tensor,
    activation: str,
    needs: Needs,
    also: Parts | None = None,
) -> Backward:
    """The plan takes (incoming, x, w1, w2) like these, x [rows, D], and returns the gradients of x, w1 and w2,
    contiguous, None where not needed. It calls `incoming` once a chunk, in order, unless there are no rows or w2 has no
    elements, and reads the result before the next call. With `also` it takes (..., parts, sum) of another tensor as
    well, and adds the parts up; `incoming` must have written them by the end of its last call."""
    rows, (count, _, hidden) = x.shape[0], w2.shape
    pitch = configs.pick_pitch(hidden)
    # Without chunks the gradients are sums of no elements: zero.
    chunks = chunks_of(rows, count, hidden) if rows and w2.numel() else []
    cuda = bool(chunks) and in_cuda(x, w1, w2)
    launches = _cuda_launches if cuda else _dhidden_launches
    within, parts = launches(dy_strides, x, w1, w2, activation, chunks)
    if configs.pick_products(rows, x.shape[1], possible=cuda):
        return _by_cuda(chunks, pitch, within, parts, x, w1, w2, needs, also)
    if chunks and x.shape[1] and (cuda or configs.pick_library(rows, x.dtype, x.is_cuda)):
        run = _by_library(chunks, pitch, within, parts, cuda, w2, needs)
    else:
        run = _by_triton(chunks, pitch, within, parts, x, w1, w2, needs)
    return run if also is None else _and_then(run, sum_launch(also))


def _and_then(run: Backward, add_up: Launch) -> Backward:
    def both(incoming: Incoming, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, *sums: torch.Tensor) -> Gradients:
        found = run(incoming, x, w1, w2)
        add_up(*sums, None, None)
        return found

    return both


def _by_triton(
    chunks: Chunks,
    pitch: int,
    within: list[Hidden],
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
    total = sum_launch((w2, parts)) if parts > 1 and needs[2] else None

    def run(incoming: Incoming, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> Gradients:
        dx, dw1, dw2 = (
            (like.new_empty if chunks else like.new_zeros)(like.shape) if need else None
            for like, need in zip((x, w1, w2), needs, strict=True)
        )
        dpre = x.new_empty((chunks[0][1], heads, pitch)) if chunks and need_dpre else None
        dw2_parts = torch.empty((parts, *w2.shape), dtype=torch.float32, device=device) if total is not None else dw2
        sums = torch.empty(w1.shape, dtype=torch.float32, device=device) if len(for_w1) > 1 else None
        for index, (launch, chunk) in enumerate(zip(within, chunks, strict=True)):
            launch(incoming(*chunk), x, w1, w2, dpre, dw2_parts)
            if for_x:
                for_x[index](dpre, w1, dx)
            if for_w1:
                for_w1[index](dpre, x, sums if index else None, dw1 if index == len(chunks) - 1 else sums)
        if total is not None:
            total(dw2_parts, dw2, None, None)
        return dx, dw1, dw2

    return run


def _by_library(
    chunks: Chunks, pitch: int, within: list[Hidden], parts: int, added: bool, w2: torch.Tensor, needs: Needs
) -> Backward:
    """The backward with its GEMMs by cuBLAS. `added`: each chunk adds to the parts of dw2 of the chunks before."""
    single = len(chunks) == 1
    total = sum_launch((w2, parts)) if (parts > 1 or (added and not single)) and needs[2] else None

    def run(incoming: Incoming, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> Gradients:
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else None
        dw2 = w2.new_empty(w2.shape) if needs[2] else None
        dpre = x.new_empty((chunks[0][1], w2.shape[0], pitch)) if needs[0] or needs[1] else None
        dw2_parts = torch.empty((parts, *w2.shape), dtype=torch.float32, device=x.device) if total is not None else dw2
        weight = products.padded(w1, pitch) if needs[0] else None
        sums = None
        for launch, (start, rows) in zip(within, chunks, strict=True):
            launch(incoming(start, rows), x, w1, w2, dpre, dw2_parts)
            if dx is not None and weight is not None:
                products.write_dx(dpre[:rows], weight, dx[start : start + rows])
            if needs[1] and single:
                sums = products.dw1_of(dpre[:rows], x)
            elif needs[1]:
                sums = products.add_dw1(dpre[:rows], x[start : start + rows], sums)
        if total is not None:
            total(dw2_parts, dw2, None, None)
        return dx, products.rounded(sums, w1) if sums is not None else None, dw2

    return run


def _by_cuda(
    chunks: Chunks,
    pitch: int,
    within: list[Hidden],
    parts: int,
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    needs: Needs,
    also: Parts | None,
) -> Backward:
    """The backward with both GEMMs of a chunk in one launch of CUDA C++. The sums of partial results at the end, two
    per launch: x's gradient, if there is a single chunk, w2's, and `also`."""
    need_dpre, single = needs[0] or needs[1], len(chunks) == 1
    apart = needs[2] and (parts > 1 or not single)  # whether w2's gradient has parts
    steps = [_products_launch(x, w1, needs, *chunk) for chunk in chunks] if need_dpre else []
    dx_parts = max((count for _, count, _ in steps), default=0)
    sums_at_end = [(x, dx_parts)] * (single and dx_parts > 1) + [(w2, parts)] * apart + ([also] if also else [])
    add_up_at_end = [sum_launch(*sums_at_end[first : first + 2]) for first in range(0, len(sums_at_end), 2)]

    def run(incoming: Incoming, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, *also: torch.Tensor) -> Gradients:
        dx, dw1, dw2 = (
            like.new_empty(like.shape) if need else None for like, need in zip((x, w1, w2), needs, strict=True)
        )
        dpre = x.new_empty((chunks[0][1], w2.shape[0], pitch)) if need_dpre else None
        dw2_parts = torch.empty((parts, *w2.shape), dtype=torch.float32, device=x.device) if apart else dw2
        memory = x.new_empty(dx_parts * chunks[0][1] * x.shape[1], dtype=torch.float32) if dx_parts > 1 else None
        sums = torch.empty(w1.shape, dtype=torch.float32, device=x.device) if needs[1] and not single else None
        for index, (launch, (start, rows)) in enumerate(zip(within, chunks, strict=True)):
            launch(incoming(start, rows), x, w1, w2, dpre, dw2_parts)
            if need_dpre:
                multiply, count, add_up = steps[index]
                rows_of_dx, to = dx[start : start + rows] if dx is not None else None, memory if count > 1 else None
                multiply(dpre, x, w1, to, rows_of_dx, sums, dw1 if index == len(chunks) - 1 else None, index > 0)
                if add_up is not None and not single:
                    add_up(to, rows_of_dx, None, None)
        ends = ((memory, dx) if single and dx_parts > 1 else ()) + ((dw2_parts, dw2) if apart else ()) + also
        for index, launch_of_two in enumerate(add_up_at_end):
            pair = ends[4 * index : 4 * index + 4]
            launch_of_two(*pair, *(None,) * (4 - len(pair)))
        return dx, dw1, dw2

    return run


def _products_launch(
    x: torch.Tensor, w1: torch.Tensor, needs: Needs, start: int, rows: int
) -> tuple[Callable[..., None], int, Launch | None]:
    """For a chunk: the launch of the GEMMs, the number of parts of x's gradient, and the launch that adds them up,
    given (parts, rows of x's gradient), None for a single part."""
    (heads, hidden, dim), (_, sms) = w1.shape, device_of(x)
    config = configs.pick_products_config(rows, dim, heads, hidden, sms, *needs[:2])
    parts = triton.cdiv(heads, config.dx_heads) if config.dx_heads else 0
    launch = heads_products.launch(start, rows, x, w1, config)
    return launch, parts, sum_launch((x[:rows], parts)) if parts > 1 else None


def _cuda_launches(
    dy_strides: Strides, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, activation: str, chunks: Chunks
) -> tuple[list[Hidden], int]:
    """The launches in CUDA C++, each of which adds to the parts of the chunks before; and the number of parts of dw2,
    the largest of a chunk."""
    (count, hidden, _), (_, sms) = w1.shape, device_of(x)
    launches: list[Hidden] = []
    parts = 0
    for start, rows in chunks:
        config = configs.pick_cuda_config(rows, count, hidden, sms)
        launches.append(heads_dhidden.launch(start, rows, x, w1, w2, dy_strides, activation, config, parts))
        parts = max(parts, triton.cdiv(triton.cdiv(rows, configs.BLOCK), config.tiles))
    return launches, parts


def _dhidden_launches(
    dy_strides: Strides, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, activation: str, chunks: Chunks
) -> tuple[list[Hidden], int]:
    """The launches in Triton, and the number of parts of dw2, over all chunks."""
    dim, (heads, dim_out, hidden), (capability, sms) = x.shape[1], w2.shape, device_of(x)
    pitch, aligned = configs.pick_pitch(hidden), whole_vectors(x) and whole_vectors(w1)
    launches: list[Hidden] = []
    parts = 0
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
    """Adds a chunk's contribution to dw1, given (dpre, x, sums of the chunks before, sums)."""
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


def sum_launch(first: Parts, second: Parts | None = None) -> Launch:
    """Adds up the parts of one or two tensors, given (parts, tensor, parts, tensor); the last two are None if there is
    no second tensor."""
    (like, parts), (elements, more) = first, (second[0].numel(), second[1]) if second else (0, 0)
    grid = (triton.cdiv(like.numel(), SUM_BLOCK) + triton.cdiv(elements, SUM_BLOCK),)
    fixed = like.numel(), parts, elements, more
    at_once, more_at_once = (SUM_AT_ONCE if n > SUM_AT_ONCE else 1 for n in (parts, more))
    options = dict(BLOCK=SUM_BLOCK, AT_ONCE=at_once, MORE_AT_ONCE=more_at_once, num_warps=4)
    return Launch(_heads_sum_kernel, grid, like.device, fixed, **options)


def block_o(dim_out: int) -> int:
    return max(configs.MIN_BLOCK, triton.next_power_of_2(dim_out))

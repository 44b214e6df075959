"""RMSNorm: the kernels for rows that fit in the registers of a CTA, and the launchers.

Napkin maths, bf16, R rows of D, one NVIDIA H200 that copies 4254 GB/s:
  forward   reads x, writes y             4·R·D bytes   32768 x 8192: 1.07 GB, 252 us
  backward  reads x and dy, writes dx     6·R·D bytes   32768 x 8192: 1.61 GB, 379 us
The weight, rstd (4 bytes a row) and dW are noise beside that, and so are the FLOPs (about 4 and 11 an element).
So each tensor crosses the bus once: a row stays in registers between its reduction and its output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import cluster
from .wide import _rmsnorm_wide_fwd_kernel, _rmsnorm_wide_mean_kernel

MAX_BLOCK = 16384  # the widest row that is kept in the registers of one CTA
EVICT_LAST_BYTES = 60e6  # a little more than the L2 of an H100 or H200


@dataclass(frozen=True)
class FwdConfig:
    """A tile is `block_m` whole rows of block_n + tail columns, or one row in chunks where those are fewer than dim
    (then x is read twice, from L2 the second time). A CTA for each tile. `eviction` is the L2 policy of the loads of x;
    `weight_first` has the weight loaded along with x rather than when it is needed, at the price of registers."""

    block_m: int
    block_n: int
    num_warps: int
    eviction: str
    tail: int = 0
    weight_first: bool = False


@dataclass(frozen=True)
class ClusterConfig:
    """A row is split over `ctas` CTAs of a cluster: `slice` vectors of 16 bytes each, the last what is left. A thread
    has `vectors` of them. Registers are limited so that `resident` CTAs fit on a multiprocessor."""

    ctas: int
    threads: int
    vectors: int
    slice: int
    resident: int


@dataclass(frozen=True)
class BwdConfig:
    """A tile is `block_m` rows, whole or, where block_n < dim, in slices of `block_n` columns. programs_per_sm CTAs
    stay on each multiprocessor and loop over the tiles, with the loads of `stages` tiles in flight."""

    block_m: int
    block_n: int
    num_warps: int
    programs_per_sm: int
    stages: int


def pick_fwd_config(rows: int, dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> FwdConfig:
    """Configuration of the forward kernel. Pure.

    x is dead once it is read, and yet evict_last makes large problems faster on an H200: what leaves L2 in the place of
    x is y, so that writes go out early and in order (README, what was tried).
    """
    block_n = triton.next_power_of_2(dim)
    eviction = "evict_last" if rows * dim * dtype.itemsize > EVICT_LAST_BYTES else ""
    if block_n > MAX_BLOCK:
        narrow = dtype.itemsize == 2 and block_n > 2 * MAX_BLOCK
        return FwdConfig(1, 2 * MAX_BLOCK, 32, "") if narrow else FwdConfig(1, MAX_BLOCK, 32, "evict_last")
    if block_n <= 2048:
        return FwdConfig(2048 // block_n, block_n, 4, eviction, weight_first=True)
    tail = triton.next_power_of_2(dim - block_n // 2)
    if tail <= block_n // 4:
        # 5120 is 4096 and 1024: 5 % faster than a row of 8192 of which three eighths are masked. Here the weight comes
        # last, for its registers would cost a third of the CTAs on a multiprocessor.
        return FwdConfig(1, block_n // 2, min(8, block_n // 1024), eviction, tail)
    # On sm_80 ptxas would rather spill than give 8 warps of a row of 4096 the 33rd register.
    warps = {4096: 8 if capability >= (9, 0) else 4, 8192: 8, 16384: 16}
    return FwdConfig(1, block_n, warps[block_n], eviction, weight_first=True)


def pick_cluster_config(dim: int, dtype: torch.dtype, weight: bool, residual: bool) -> ClusterConfig:
    """Configuration of the forward of wide rows on Hopper: the fewest CTAs of 256 threads with at most 6 vectors each.
    Pure. Of what was tried (README) it alone is within 1.5 % of a copy at each of five widths.

    80 to 96 KB of x are then on their way to a multiprocessor, whose 4 or 5 CTAs wait at different times.
    """
    threads, most, line = 256, 6, 128 // cluster.VECTOR
    vectors = dim * dtype.itemsize // cluster.VECTOR  # of a row
    ctas = triton.next_power_of_2(triton.cdiv(vectors, threads * most))
    part = triton.cdiv(triton.cdiv(vectors, ctas), line) * line  # whole lines of L2
    each = triton.cdiv(part, threads)
    # What ptxas needs without a spill: x, what is held beside it, and 8 more for a second address or for masks.
    even = ctas * threads * each == vectors
    registers = 16 + 4 * each * (2 if weight or residual else 1) + (8 if residual or not even else 0)
    resident = min(8, 65536 // (threads * triton.cdiv(registers, 8) * 8))
    return ClusterConfig(ctas, threads, each, part, resident)


def pick_bwd_config(rows: int, dim: int, dtype: torch.dtype, tensors: int, capability: tuple[int, int]) -> BwdConfig:
    """Configuration of the backward kernel, which reads `tensors` tensors. Pure.

    Always a loop, because each CTA carries its share of dW in registers. So few CTAs fit on a multiprocessor that the
    next rows have to be on their way to shared memory while this one is reduced: `stages`.
    """
    block_n = triton.next_power_of_2(dim)
    padded = dim <= block_n * 3 // 4
    if block_n == MAX_BLOCK:
        return BwdConfig(1, block_n, num_warps=16 if padded else 8, programs_per_sm=1, stages=1)
    if block_n > MAX_BLOCK:
        block_n, padded = 2048, False  # a slice
    block_m = max(1, 2048 // block_n)
    stage = block_m * block_n * dtype.itemsize * tensors  # bytes
    programs = max(1, min(4, 32768 // stage))
    stages = max(1, min(4 if padded else 3, _shared_memory(capability) // (programs * stage)))
    num_warps = max(2, min(16, 2 ** int(math.log2(stage / 4096))))
    return BwdConfig(block_m, block_n, num_warps, programs, stages)


def _shared_memory(capability: tuple[int, int]) -> int:
    """Bytes of shared memory per multiprocessor that stages may take up."""
    return {(8, 0): 160, (8, 7): 160, (9, 0): 224, (10, 0): 224}.get(capability, 96) * 1024


@triton.jit
def _load_h(
    x_ptr, residual_ptr, h_ptr, row, cols, rows, dim, stride_xm, stride_rm, EVEN: tl.constexpr, EVICTION: tl.constexpr
):
    """x, or x + residual, which is stored as well; not yet in fp32."""
    wide_row = row.to(tl.int64)[:, None]
    # Without a mask the loads and stores need no predicate, and one register less for each of them.
    mask = None if EVEN else (row < rows)[:, None] & (cols < dim)[None, :]
    other = None if EVEN else 0.0
    h = tl.load(x_ptr + wide_row * stride_xm + cols[None, :], mask=mask, other=other, eviction_policy=EVICTION)
    if residual_ptr is not None:
        residual_ptrs = residual_ptr + wide_row * stride_rm + cols[None, :]
        residual = tl.load(residual_ptrs, mask=mask, other=other, eviction_policy=EVICTION)
        # y is made from h as it is stored, so that the backward, which reads h, sees the same numbers.
        h = (h.to(tl.float32) + residual.to(tl.float32)).to(h.dtype)
        tl.store(h_ptr + wide_row * dim + cols[None, :], h, mask=mask)
    return h


@triton.jit
def _load_weight(weight_ptr, cols, dim, weight_offset, EVEN: tl.constexpr):
    weight = tl.load(weight_ptr + cols, mask=None if EVEN else cols < dim, other=None if EVEN else 0.0)
    return weight.to(tl.float32) + weight_offset


@triton.jit
def _store_y(y_ptr, y, row, cols, rows, dim, EVEN: tl.constexpr):
    mask = None if EVEN else (row < rows)[:, None] & (cols < dim)[None, :]
    tl.store(y_ptr + row.to(tl.int64)[:, None] * dim + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rmsnorm_fwd_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    h_ptr,
    rstd_ptr,
    rows,
    dim,
    stride_xm,
    stride_rm,
    eps,
    weight_offset,
    SAVE_RSTD: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """A row is BLOCK_N columns and, in a second piece, TAIL more: 5120 = 4096 + 1024."""
    EVEN: tl.constexpr = EVEN_N and BLOCK_M == 1
    EVEN_HEAD: tl.constexpr = BLOCK_M == 1 and (EVEN_N or TAIL > 0)
    cols = tl.arange(0, BLOCK_N)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    if weight_ptr is not None and WEIGHT_FIRST:
        weight = _load_weight(weight_ptr, cols, dim, weight_offset, EVEN_N)
    h = _load_h(x_ptr, residual_ptr, h_ptr, row, cols, rows, dim, stride_xm, stride_rm, EVEN_HEAD, EVICTION)
    if TAIL:
        tail_cols = BLOCK_N + tl.arange(0, TAIL)
        tail = _load_h(x_ptr, residual_ptr, h_ptr, row, tail_cols, rows, dim, stride_xm, stride_rm, EVEN, EVICTION)
    # All loads are on their way before the first reduction, which is a barrier.
    h = h.to(tl.float32)
    squares = tl.sum(h * h, axis=1)
    if TAIL:
        tail = tail.to(tl.float32)
        squares += tl.sum(tail * tail, axis=1)
    rstd = tl.rsqrt(squares / dim + eps)
    y = h * rstd[:, None]
    if weight_ptr is not None:
        if not WEIGHT_FIRST:
            weight = _load_weight(weight_ptr, cols, dim, weight_offset, EVEN_N or TAIL > 0)
        y *= weight[None, :]
    _store_y(y_ptr, y, row, cols, rows, dim, EVEN_HEAD)
    if TAIL:
        y = tail * rstd[:, None]
        if weight_ptr is not None:
            y *= _load_weight(weight_ptr, tail_cols, dim, weight_offset, EVEN_N)[None, :]
        _store_y(y_ptr, y, row, tail_cols, rows, dim, EVEN)
    if SAVE_RSTD:
        tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit
def _rmsnorm_bwd_kernel(
    dy_ptr,
    h_ptr,
    rstd_ptr,
    mean_ptr,
    weight_ptr,
    dh_ptr,
    dx_ptr,
    dw_ptr,
    rows,
    dim,
    stride_dym,
    stride_hm,
    stride_dhm,
    weight_offset,
    NEED_DX: tl.constexpr,
    NEED_DW: tl.constexpr,
    SLICED: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dx = rstd · (g − x̂ · mean(g · x̂)) + dh with g = dy · (w + offset), x̂ = h · rstd; dw = Σ_rows dy · x̂.

    A program has all columns or, where the mean of each row is given, a slice of them.
    """
    cols = tl.arange(0, BLOCK_N)
    if SLICED:
        cols += tl.program_id(1) * BLOCK_N
    in_row = (cols < dim)[None, :]
    if weight_ptr is not None and NEED_DX:
        weight = tl.load(weight_ptr + cols, mask=cols < dim, other=0.0).to(tl.float32) + weight_offset
    if NEED_DW:
        dw = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    tiles = tl.cdiv(rows, BLOCK_M)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        wide_row = row.to(tl.int64)[:, None]
        mask = None if EVEN_N and BLOCK_M == 1 else (row < rows)[:, None] & in_row
        other = None if EVEN_N and BLOCK_M == 1 else 0.0
        h = tl.load(h_ptr + wide_row * stride_hm + cols[None, :], mask=mask, other=other)
        dy = tl.load(dy_ptr + wide_row * stride_dym + cols[None, :], mask=mask, other=other)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        x_hat = h.to(tl.float32) * rstd[:, None]
        g = dy.to(tl.float32)
        if NEED_DW:
            dw += g * x_hat
        if NEED_DX:
            if weight_ptr is not None:
                g = g * weight[None, :]
            if SLICED:
                mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
            else:
                mean = tl.sum(g * x_hat, axis=1) / dim
            dx = (g - x_hat * mean[:, None]) * rstd[:, None]
            if dh_ptr is not None:
                dh = tl.load(dh_ptr + wide_row * stride_dhm + cols[None, :], mask=mask, other=other)
                dx += dh.to(tl.float32)
            tl.store(dx_ptr + wide_row * dim + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEED_DW:
        # One row of partial sums per CTA, added up in a fixed order by the next kernel: no atomics, so repeatable.
        partial_ptr = dw_ptr + tl.program_id(0).to(tl.int64) * dim + cols
        tl.store(partial_ptr, tl.sum(dw, axis=0), mask=cols < dim)


@triton.jit
def _rmsnorm_dw_kernel(partial_ptr, dw_ptr, partials, dim, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """dw = Σ partials, in fp32."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, partials, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        mask = (row < partials)[:, None] & (cols < dim)[None, :]
        acc += tl.load(partial_ptr + row[:, None].to(tl.int64) * dim + cols[None, :], mask=mask, other=0.0)
    tl.store(dw_ptr + cols, tl.sum(acc, axis=0).to(dw_ptr.dtype.element_ty), mask=cols < dim)


def rmsnorm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    save_rstd: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, h (x itself when there is no residual) and rstd [rows] fp32, empty unless it is to be saved for the backward.
    Inputs as `op` has checked them."""
    dim = x.shape[-1]
    x2 = _rows(x)
    residual2 = None if residual is None else _rows(residual)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    h = x if residual is None else torch.empty_like(y)
    rows = x2.shape[0]
    rstd = torch.empty(rows if save_rstd else 0, dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return y, h, rstd
    weight = None if weight is None else weight.contiguous()
    with torch.cuda.device_of(x):
        capability, _ = _device(x)
        if dim > MAX_BLOCK and cluster.cluster_refuses(x2, residual2, weight, capability) is None:
            split = pick_cluster_config(dim, x.dtype, weight is not None, residual is not None)
            saved = h if residual is not None else None, rstd if save_rstd else None
            cluster.cluster_fwd(split, x2, residual2, weight, y, *saved, eps, weight_offset)
            return y, h, rstd
        config = pick_fwd_config(rows, dim, x.dtype, capability)
        width = config.block_n + config.tail
        wide = width < dim
        narrow_only = {} if wide else {"TAIL": config.tail, "WEIGHT_FIRST": config.weight_first}
        kernel = _rmsnorm_wide_fwd_kernel if wide else _rmsnorm_fwd_kernel
        kernel[(triton.cdiv(rows, config.block_m),)](
            x2,
            residual2,
            weight,
            y,
            h,
            rstd,
            rows,
            dim,
            x2.stride(0),
            0 if residual2 is None else residual2.stride(0),
            eps,
            weight_offset,
            SAVE_RSTD=save_rstd,
            EVEN_N=dim % width == 0,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            EVICTION=config.eviction,
            **narrow_only,
            num_warps=config.num_warps,
        )
    return y, h, rstd


def rmsnorm_bwd(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    weight_offset: float,
    need_dx: bool,
    need_dw: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dx (None unless need_dx) and dw (None unless need_dw)."""
    dim = h.shape[-1]
    h2, dy2 = _rows(h), _rows(dy)
    dh2 = None if dh is None else _rows(dh)
    rows = h2.shape[0]
    dx = torch.empty(h.shape, dtype=h.dtype, device=h.device) if need_dx else None
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format) if weight is not None and need_dw else None
    if h.numel() == 0:
        return dx, None if dw is None else dw.zero_()
    weight = None if weight is None else weight.contiguous()
    with torch.cuda.device_of(h):
        capability, multiprocessors = _device(h)
        config = pick_bwd_config(rows, dim, h.dtype, 2 if dh is None else 3, capability)
        slices = triton.cdiv(dim, config.block_n)
        programs = max(1, multiprocessors * config.programs_per_sm // slices)
        programs = min(triton.cdiv(rows, config.block_m), programs)
        partial = torch.empty(programs, dim, dtype=torch.float32, device=h.device) if need_dw else None
        mean = _row_means(dy2, h2, rstd, weight, weight_offset) if slices > 1 and need_dx else None
        _rmsnorm_bwd_kernel[(programs, slices)](
            dy2,
            h2,
            rstd,
            mean,
            weight,
            dh2,
            dx,
            partial,
            rows,
            dim,
            dy2.stride(0),
            h2.stride(0),
            0 if dh2 is None else dh2.stride(0),
            weight_offset,
            NEED_DX=need_dx,
            NEED_DW=need_dw,
            SLICED=slices > 1,
            EVEN_N=dim % config.block_n == 0,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            STAGES=config.stages,
            num_warps=config.num_warps,
        )
        if need_dw:
            # Latency alone counts here: enough CTAs to fill the GPU, each with all of its loads in flight at once.
            block_m, block_n = min(256, triton.next_power_of_2(programs)), 32 if dim >= 4096 else 16
            grid = (triton.cdiv(dim, block_n),)
            _rmsnorm_dw_kernel[grid](partial, dw, programs, dim, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=8)
    return dx, dw


def _row_means(
    dy: torch.Tensor, h: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor | None, weight_offset: float
) -> torch.Tensor:
    """mean(g · x̂) of each row, fp32."""
    rows, dim = h.shape
    mean, block_n = torch.empty_like(rstd), 8192
    _rmsnorm_wide_mean_kernel[(rows,)](
        dy,
        h,
        rstd,
        weight,
        mean,
        dim,
        dy.stride(0),
        h.stride(0),
        weight_offset,
        EVEN_N=dim % block_n == 0,
        BLOCK_N=block_n,
        num_warps=16,
    )
    return mean


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """[rows, dim] with unit inner stride: a view where the strides allow it, otherwise a copy."""
    tensor = tensor.reshape(-1, tensor.shape[-1])
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] == 1 else tensor.contiguous()


def _device(tensor: torch.Tensor) -> tuple[tuple[int, int], int]:
    """Compute capability and number of multiprocessors; the interpreter stands for a small sm_80."""
    if not tensor.is_cuda:
        return (8, 0), 2
    properties = torch.cuda.get_device_properties(tensor.device)
    return (properties.major, properties.minor), properties.multi_processor_count

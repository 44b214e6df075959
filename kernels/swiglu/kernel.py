"""Gated linear units: the kernels and their launchers.

Napkin maths, bf16, n elements of output, one NVIDIA H200 that copies 4254 GB/s:
  forward   reads gate and up, writes y                      6·n bytes   16384 x 11008: 1.08 GB, 254 us
  backward  reads dy, gate and up, writes dgate and dup     10·n bytes   16384 x 11008: 1.80 GB, 424 us
In the time in which its bytes cross the bus an element of the forward has 42 instructions of one lane, of the backward
70. The formulas in `activation` take about a third of that. Rows on any boundary have kernels of their own on Hopper
(unaligned.cu).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from . import unaligned
from .activation import _activation, _activation_and_slope
from .layout import Walk, walk

EVICT_LAST_BYTES = 20e6  # a tensor


@dataclass(frozen=True)
class Config:
    """Each CTA has a tile of `block_m` rows by `block_n` columns. `eviction` is the L2 policy of the loads."""

    block_m: int
    block_n: int
    num_warps: int
    eviction: str


@dataclass(frozen=True)
class UnalignedConfig:
    """A CTA of `threads`; a lane has `slots` vectors of 16 bytes of each tensor. Registers are limited so that
    `resident` CTAs fit on a multiprocessor. `eviction` is the L2 policy of the loads."""

    threads: int
    slots: int
    resident: int
    eviction: str


def pick_config(
    rows: int, cols: int, dtype: torch.dtype, aligned: bool, transposed: bool, capability: tuple[int, int]
) -> Config:
    """Configuration of both kernels. Pure."""
    if transposed:
        return Config(64, 64, 8, "")  # square, because the tile crosses shared memory
    if not aligned:
        # Every element is an access of its own: small tiles, little padding. 205000 x 1365 packed, bf16, on one H200:
        # 3719 GB/s forward, 3640 backward; 2 x 2048 columns and 8 warps 2997 and 1951.
        block_n = min(triton.next_power_of_2(cols), 512)
        return Config(2048 // block_n, block_n, 4, "")
    # What is read is dead, and yet it should stay in L2: what leaves in its place is what is written, early and in
    # order. 16384 x 11008 bf16 on one H200: 4349 GB/s forward with it, 4294 without; evict_first 4097.
    eviction = "evict_last" if rows * cols * dtype.itemsize > EVICT_LAST_BYTES else ""
    if rows == 1:
        # Best forward at 2048 x 11008 and 16384 x 11008, 3853 and 4349 GB/s; 4328 backward, 0.2 % behind the best.
        return Config(1, 2048, 8, eviction)
    # Packed halves, same size: 4334 forward, 4338 backward; any 2048 to 4096 elements of 256 to 2048 columns are within
    # 0.8 % of that.
    block_n = min(triton.next_power_of_2(cols), 1024)
    return Config(4096 // block_n, block_n, 8, eviction)


def pick_unaligned_config(
    rows: int, cols: int, dtype: torch.dtype, gradients: int, capability: tuple[int, int]
) -> UnalignedConfig | None:
    """Configuration of unaligned.cu for rows that are not aligned, of the forward or with 1 or 2 gradients; None where
    Triton takes them. Pure.

    Chosen by count, registers and bytes on their way (unaligned.cu), and by measurement (README).
    """
    if capability != (9, 0) or dtype.itemsize != 2 or rows < 2:
        return None
    eviction = "evict_last" if rows * cols * dtype.itemsize > EVICT_LAST_BYTES else ""
    lanes = unaligned.pieces(cols, 1, gradients == 2) * unaligned.WARP
    # A warp has vectors of one row alone. With fewer of its lanes at work the instructions would take longer than the
    # bytes.
    if cols < 0.7 * lanes * unaligned.VECTOR:
        return None
    # 32 registers forward, 48 backward: 64 and 40 warps, 64 and 60 KB on their way to a multiprocessor. In small CTAs:
    # one that ends makes room for the next sooner.
    return UnalignedConfig(128, 1, 10 if gradients else 16, eviction)


@triton.jit
def _corner(rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """First row and first column of this CTA's tile, in 64 bits. One dimension of CTAs: the others end at 65535."""
    tile = tl.program_id(0)
    tile_m, tile_n = tile * 0, tile
    if rows != 1:  # which a single row is compiled with, so that it does without the division
        tiles_n = tl.cdiv(cols, BLOCK_N).to(tl.int32)
        tile_m, tile_n = tile // tiles_n, tile % tiles_n
    return tile_m.to(tl.int64) * BLOCK_M, tile_n.to(tl.int64) * BLOCK_N


@triton.jit
def _swiglu_fwd_tile(
    gate_ptr,
    up_ptr,
    y_ptr,
    m,
    n,
    mask,
    stride_gm,
    stride_gn,
    stride_um,
    stride_un,
    stride_ym,
    stride_yn,
    ACTIVATION: tl.constexpr,
    EVICTION: tl.constexpr,
):
    gate = tl.load(gate_ptr + (m * stride_gm + n * stride_gn), mask=mask, eviction_policy=EVICTION)
    up = tl.load(up_ptr + (m * stride_um + n * stride_un), mask=mask, eviction_policy=EVICTION)
    is_wide: tl.constexpr = gate.dtype == tl.float32
    y = _activation(gate.to(tl.float32), ACTIVATION, is_wide) * up.to(tl.float32)
    tl.store(y_ptr + (m * stride_ym + n * stride_yn), y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_bwd_tile(
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    m,
    n,
    mask,
    stride_dym,
    stride_dyn,
    stride_gm,
    stride_gn,
    stride_um,
    stride_un,
    stride_dgm,
    stride_dgn,
    stride_dum,
    stride_dun,
    ACTIVATION: tl.constexpr,
    NEED_DGATE: tl.constexpr,
    NEED_DUP: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """dgate = dy · up · act'(gate), dup = dy · act(gate)."""
    gate = tl.load(gate_ptr + (m * stride_gm + n * stride_gn), mask=mask, eviction_policy=EVICTION)
    dy = tl.load(dy_ptr + (m * stride_dym + n * stride_dyn), mask=mask, eviction_policy=EVICTION)
    if NEED_DGATE:
        up = tl.load(up_ptr + (m * stride_um + n * stride_un), mask=mask, eviction_policy=EVICTION)
    is_wide: tl.constexpr = gate.dtype == tl.float32
    value, slope = _activation_and_slope(gate.to(tl.float32), ACTIVATION, is_wide)
    dy = dy.to(tl.float32)
    if NEED_DGATE:
        dgate = dy * up.to(tl.float32) * slope
        if ACTIVATION == "relu":
            dgate = tl.where(slope == 0.0, 0.0, dgate)  # also where dy or up is inf or NaN
        tl.store(dgate_ptr + (m * stride_dgm + n * stride_dgn), dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    if NEED_DUP:
        dup = dy * value
        tl.store(dup_ptr + (m * stride_dum + n * stride_dun), dup.to(dup_ptr.dtype.element_ty), mask=mask)


# Only tiles at the edge have a mask. Where rows are aligned (SPLIT) its limit is a multiple of 16 columns, so that a
# mask is one for a whole 16-byte access, and the last cols % 16 columns are an access of their own.


@triton.jit
def _swiglu_fwd_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    rows,
    cols,
    stride_gm,
    stride_gn,
    stride_um,
    stride_un,
    stride_ym,
    stride_yn,
    ACTIVATION: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVICTION: tl.constexpr,
):
    first_m, first_n = _corner(rows, cols, BLOCK_M, BLOCK_N)
    gate_ptr += first_m * stride_gm + first_n * stride_gn
    up_ptr += first_m * stride_um + first_n * stride_un
    y_ptr += first_m * stride_ym + first_n * stride_yn
    m = tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
    n = tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
    strides = (stride_gm, stride_gn, stride_um, stride_un, stride_ym, stride_yn)
    if (first_m + BLOCK_M <= rows) & (first_n + BLOCK_N <= cols):
        _swiglu_fwd_tile(gate_ptr, up_ptr, y_ptr, m, n, None, *strides, ACTIVATION, EVICTION)
    else:
        limit = (cols // 16 * 16 if SPLIT else cols) - first_n
        mask = (m < rows - first_m) & (n < limit)
        _swiglu_fwd_tile(gate_ptr, up_ptr, y_ptr, m, n, mask, *strides, ACTIVATION, EVICTION)
        if SPLIT and limit < tl.minimum(cols - first_n, BLOCK_N):
            odd = limit + tl.arange(0, 16).to(tl.int64)[None, :]
            in_row = (m < rows - first_m) & (odd < cols - first_n)
            _swiglu_fwd_tile(gate_ptr, up_ptr, y_ptr, m, odd, in_row, *strides, ACTIVATION, EVICTION)


@triton.jit
def _swiglu_bwd_kernel(
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    rows,
    cols,
    stride_dym,
    stride_dyn,
    stride_gm,
    stride_gn,
    stride_um,
    stride_un,
    stride_dgm,
    stride_dgn,
    stride_dum,
    stride_dun,
    ACTIVATION: tl.constexpr,
    NEED_DGATE: tl.constexpr,
    NEED_DUP: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVICTION: tl.constexpr,
):
    first_m, first_n = _corner(rows, cols, BLOCK_M, BLOCK_N)
    dy_ptr += first_m * stride_dym + first_n * stride_dyn
    gate_ptr += first_m * stride_gm + first_n * stride_gn
    if NEED_DGATE:
        up_ptr += first_m * stride_um + first_n * stride_un
        dgate_ptr += first_m * stride_dgm + first_n * stride_dgn
    if NEED_DUP:
        dup_ptr += first_m * stride_dum + first_n * stride_dun
    m = tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
    n = tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
    ptrs = (dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr)
    strides = (stride_dym, stride_dyn, stride_gm, stride_gn, stride_um, stride_un)
    strides += (stride_dgm, stride_dgn, stride_dum, stride_dun)
    if (first_m + BLOCK_M <= rows) & (first_n + BLOCK_N <= cols):
        _swiglu_bwd_tile(*ptrs, m, n, None, *strides, ACTIVATION, NEED_DGATE, NEED_DUP, EVICTION)
    else:
        limit = (cols // 16 * 16 if SPLIT else cols) - first_n
        mask = (m < rows - first_m) & (n < limit)
        _swiglu_bwd_tile(*ptrs, m, n, mask, *strides, ACTIVATION, NEED_DGATE, NEED_DUP, EVICTION)
        if SPLIT and limit < tl.minimum(cols - first_n, BLOCK_N):
            odd = limit + tl.arange(0, 16).to(tl.int64)[None, :]
            in_row = (m < rows - first_m) & (odd < cols - first_n)
            _swiglu_bwd_tile(*ptrs, m, odd, in_row, *strides, ACTIVATION, NEED_DGATE, NEED_DUP, EVICTION)


def swiglu_fwd(gate: torch.Tensor, up: torch.Tensor | None, activation: str) -> torch.Tensor:
    """y. Without `up`, `gate` has both, one after the other in its last dimension. Inputs as `op` has checked them."""
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    y = torch.empty_like(gate)
    if y.numel():
        steps = walk((y,), (gate, up))
        _launch(_swiglu_fwd_kernel, steps, (1, 2, 0), ACTIVATION=activation)
    return y


def swiglu_bwd(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, activation: str, need_dgate: bool, need_dup: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dgate and dup, each None unless it is needed; without `up` the gradient of the packed tensor, and None."""
    if up is None:
        packed = torch.empty_like(gate)
        (gate, up), (dgate, dup) = gate.chunk(2, dim=-1), packed.chunk(2, dim=-1)
        _backward(dy, gate, up, dgate, dup, activation)
        return packed, None
    # In one memory order, that of gate, so that one walk goes through both.
    dgate = torch.empty_like(gate) if need_dgate else None
    dup = torch.empty_like(gate) if need_dup else None
    _backward(dy, gate, up, dgate, dup, activation)
    return dgate, dup


def _backward(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    dgate: torch.Tensor | None,
    dup: torch.Tensor | None,
    activation: str,
) -> None:
    outputs = [t for t in (dgate, dup) if t is not None]
    inputs = [dy, gate] if dgate is None else [dy, gate, up]  # dup alone does not need up
    if not gate.numel() or not outputs:
        return
    steps = walk(outputs, inputs)
    first = len(outputs)
    places = (
        first,
        first + 1,
        None if dgate is None else first + 2,
        None if dgate is None else 0,
        None if dup is None else first - 1,
    )
    flags = dict(ACTIVATION=activation, NEED_DGATE=dgate is not None, NEED_DUP=dup is not None)
    _launch(_swiglu_bwd_kernel, steps, places, **flags)


def _launch(kernel: triton.JITFunction, steps: Walk, places: Sequence[int | None], **flags) -> None:
    """`places` says which tensors of the walk are the kernel's pointers, in order; None stands for one not used."""
    first = steps.tensors[0]
    with torch.cuda.device_of(first):
        # The interpreter stands for an sm_80.
        capability = torch.cuda.get_device_capability(first.device) if first.is_cuda else (8, 0)
        if not steps.aligned and _launched_unaligned(steps, places, capability, flags):
            return
        config = pick_config(steps.rows, steps.cols, first.dtype, steps.aligned, steps.transposed, capability)
        tiles = triton.cdiv(steps.rows, config.block_m) * triton.cdiv(steps.cols, config.block_n)
        kernel[(tiles,)](
            *(None if place is None else steps.tensors[place] for place in places),
            steps.rows,
            steps.cols,
            *(stride for place in places for stride in ((0, 0) if place is None else steps.strides[place])),
            **flags,
            SPLIT=steps.aligned,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            EVICTION=config.eviction,
            num_warps=config.num_warps,
        )


def _launched_unaligned(
    steps: Walk, places: Sequence[int | None], capability: tuple[int, int], flags: dict[str, Any]
) -> bool:
    """Launches unaligned.cu if it takes the walk."""
    needs = flags.get("NEED_DGATE", False), flags.get("NEED_DUP", False)
    config = pick_unaligned_config(steps.rows, steps.cols, steps.tensors[0].dtype, sum(needs), capability)
    if config is None or unaligned.unaligned_refuses(steps, capability) is not None:
        return False
    unaligned.unaligned_launch(config, steps, places, flags["ACTIVATION"], *needs)
    return True

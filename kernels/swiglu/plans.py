"""Launch plans of swiglu: everything in a call that does not depend on the tensors' values and addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from . import configs, unaligned
from .kernel import _swiglu_bwd_kernel, _swiglu_fwd_kernel
from .launch import Launch
from .layout import Coalesced, coalesce, in_order_of

BACKENDS = ("auto", "triton", "cuda")
Optional = torch.Tensor | None
Forward = Callable[[torch.Tensor, Optional], torch.Tensor]
Backward = Callable[[torch.Tensor, torch.Tensor, Optional], tuple[Optional, Optional]]


def fwd_plan(gate: torch.Tensor, up: torch.Tensor | None, activation: str, backend: str) -> Forward:
    """Returns a function of (gate, up) that returns y, for all tensors with these signatures. Without `up`, `gate`
    holds both as the halves of its last dimension. `op` has checked the inputs. Raises RuntimeError where `backend`
    does not support them."""
    dtype, device = gate.dtype, gate.device
    halves = gate.chunk(2, dim=-1) if up is None else (gate, up)
    like = torch.empty_like(halves[0], device="meta")
    size, stride = like.shape, like.stride()
    if not like.numel():
        return lambda gate, up: torch.empty_strided(size, stride, dtype=dtype, device=device)
    layout = coalesce((like,), halves)
    y_strides, gate_strides, up_strides = layout.strides
    write = _launch(layout, (gate_strides, up_strides, y_strides), gate, activation, backend)
    up_half, copied = _second_half(gate) if up is None else None, any(layout.copied)

    def run(gate: torch.Tensor, up: Optional) -> torch.Tensor:
        if up_half is None:
            y = torch.empty_like(gate)
        else:
            y = torch.empty_strided(size, stride, dtype=dtype, device=device)
            up = up_half(gate)
        if copied:
            gate, up = _ordered(y, (gate if up_half is None else gate.chunk(2, dim=-1)[0], up), layout.copied)
        write(gate, up, y)
        return y

    return run


def bwd_plan(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    activation: str,
    backend: str,
    need_dgate: bool,
    need_dup: bool,
) -> Backward:
    """Returns a function of (dy, gate, up), for all tensors with these signatures. It returns dgate and dup, each None
    unless needed; without `up`, the gradient of the packed tensor, and None. Here `backend` "cuda" prefers CUDA C++ but
    falls back to Triton, because dy may have any strides."""
    if up is None:
        return _packed_bwd_plan(dy, gate, activation, backend)
    if not gate.numel() or not (need_dgate or need_dup):
        return lambda dy, gate, up: (
            torch.empty_like(gate) if need_dgate else None,
            torch.empty_like(gate) if need_dup else None,
        )
    # Both gradients in the memory order of gate, so that they coalesce with it.
    like = torch.empty_like(gate, device="meta")
    inputs = (dy, gate, up) if need_dgate else (dy, gate)  # dup alone does not need up
    layout = coalesce((like,) * (need_dgate + need_dup), inputs)
    output_strides, unused = layout.strides[0], (0, 0)
    dy_strides, gate_strides, *up_strides = layout.strides[need_dgate + need_dup :]
    strides = dy_strides, gate_strides, *(up_strides or [unused])
    outputs = tuple(output_strides if need else unused for need in (need_dgate, need_dup))
    write = _launch(layout, (*strides, *outputs), gate, activation, backend, need_dgate, need_dup)
    any_copied, copied = any(layout.copied), (*layout.copied, False)[:3]

    def run(dy: torch.Tensor, gate: torch.Tensor, up: Optional) -> tuple[Optional, Optional]:
        dgate = torch.empty_like(gate) if need_dgate else None
        dup = torch.empty_like(gate) if need_dup else None
        if not need_dgate:
            up = None
        if any_copied:
            dy, gate, up = _ordered(dup if dgate is None else dgate, (dy, gate, up), copied)
        write(dy, gate, up, dgate, dup)
        return dgate, dup

    return run


def _packed_bwd_plan(dy: torch.Tensor, gate: torch.Tensor, activation: str, backend: str) -> Backward:
    if not gate.numel():
        return lambda dy, gate, up: (torch.empty_like(gate), None)
    like = torch.empty_like(gate, device="meta")
    layout = coalesce(like.chunk(2, dim=-1), (dy, *gate.chunk(2, dim=-1)))
    dgate_strides, dup_strides, *input_strides = layout.strides
    write = _launch(layout, (*input_strides, dgate_strides, dup_strides), gate, activation, backend, True, True)
    up_half, dup_half, copied = _second_half(gate), _second_half(like), any(layout.copied)

    def run(dy: torch.Tensor, gate: torch.Tensor, up: Optional) -> tuple[Optional, Optional]:
        packed = torch.empty_like(gate)
        dup, up = dup_half(packed), up_half(gate)
        if copied:
            dy, gate, up = _ordered(packed.chunk(2, dim=-1)[0], (dy, gate.chunk(2, dim=-1)[0], up), layout.copied)
        write(dy, gate, up, packed, dup)
        return packed, None

    return run


def _launch(
    layout: Coalesced,
    strides: Sequence[tuple[int, int]],
    like: torch.Tensor,
    activation: str,
    backend: str,
    need_dgate: bool = False,
    need_dup: bool = False,
) -> Callable[..., None]:
    """The launch of the forward kernel or, if a gradient is needed, of the backward kernel. Uses unaligned.cu where
    `backend` allows it and it can run, otherwise Triton. Returns a function of the tensors in the order of the kernel's
    parameters, None for those not used. `strides` are in the same order; `like` has their dtype and device."""
    capability, gradients, dtype = _capability(like), need_dgate + need_dup, like.dtype
    if backend == "cuda" or (backend == "auto" and configs.fills_warps(layout.cols, gradients)):
        reason = unaligned.unsupported_reason(layout, dtype, capability)
        if reason and backend == "cuda" and not gradients:
            raise RuntimeError(f'swiglu: backend="cuda" cannot run here: {reason}')
        if reason is None:
            cuda_config = configs.pick_unaligned_config(layout.rows, layout.cols, dtype, gradients, capability)
            row_strides = tuple(row for row, _ in strides)
            return unaligned.unaligned_launch(cuda_config, layout, row_strides, like, activation, need_dgate, need_dup)
    config = configs.pick_config(layout.rows, layout.cols, dtype, layout.aligned, layout.transposed, capability)
    tiles = triton.cdiv(layout.rows, config.block_m) * triton.cdiv(layout.cols, config.block_n)
    return Launch(
        _swiglu_bwd_kernel if gradients else _swiglu_fwd_kernel,
        (tiles,),
        like.device,
        (layout.rows, layout.cols, *(stride for pair in strides for stride in pair)),
        ACTIVATION=activation,
        **({"NEED_DGATE": need_dgate, "NEED_DUP": need_dup} if gradients else {}),
        SPLIT=layout.aligned,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        EVICTION=config.eviction,
        num_warps=config.num_warps,
    )


def _capability(tensor: torch.Tensor) -> tuple[int, int]:
    """The compute capability; (8, 0) in the interpreter."""
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else (8, 0)


def _second_half(like: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function of a packed tensor with the strides of `like` that returns its second half: `up`, or its
    gradient. as_strided is the view with the least host time."""
    *leading, last = like.shape
    size, stride, skip = (*leading, last // 2), like.stride(), last // 2 * like.stride(-1)
    return lambda tensor: tensor.as_strided(size, stride, tensor.storage_offset() + skip)


def _ordered(first: Any, tensors: Sequence[Any], copied: Sequence[bool]) -> tuple[Any, ...]:
    """The tensors (or None), where those marked in `copied` are replaced by copies in the memory order of `first`."""
    return tuple(in_order_of(first, t) if c else t for t, c in zip(tensors, copied, strict=True))

"""Launch plans of swiglu: everything about a call that does not change with the tensors' contents and addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from . import configs, unaligned
from .kernel import _swiglu_bwd_kernel, _swiglu_fwd_kernel
from .launch import Launch
from .layout import Walk, in_order_of, walk

BACKENDS = ("auto", "triton", "cuda")
Optional = torch.Tensor | None
Forward = Callable[[torch.Tensor, Optional], torch.Tensor]
Backward = Callable[[torch.Tensor, torch.Tensor, Optional], tuple[Optional, Optional]]


def fwd_plan(gate: torch.Tensor, up: torch.Tensor | None, activation: str, backend: str) -> Forward:
    """Takes (gate, up) like these and returns y. Without `up`, `gate` has both, one after the other in its last
    dimension. Inputs as `op` has checked them. RuntimeError where `backend` cannot take them."""
    dtype, device = gate.dtype, gate.device
    halves = gate.chunk(2, dim=-1) if up is None else (gate, up)
    like = torch.empty_like(halves[0], device="meta")
    size, stride = like.shape, like.stride()
    if not like.numel():
        return lambda gate, up: torch.empty_strided(size, stride, dtype=dtype, device=device)
    steps = walk((like,), halves)
    of_y, of_gate, of_up = steps.strides
    write = _launch(steps, (of_gate, of_up, of_y), gate, activation, backend)
    second, copied = _second_half(gate) if up is None else None, any(steps.copied)

    def run(gate: torch.Tensor, up: Optional) -> torch.Tensor:
        if second is None:
            y = torch.empty_like(gate)
        else:
            y = torch.empty_strided(size, stride, dtype=dtype, device=device)
            up = second(gate)
        if copied:
            gate, up = _ordered(y, (gate if second is None else gate.chunk(2, dim=-1)[0], up), steps.copied)
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
    """Takes (dy, gate, up) like these and returns dgate and dup, each None unless it is needed; without `up` the
    gradient of the packed tensor, and None. `backend` "cuda" means "auto": an incoming gradient has any strides."""
    if up is None:
        return _packed_bwd_plan(dy, gate, activation, backend)
    if not gate.numel() or not (need_dgate or need_dup):
        return lambda dy, gate, up: (
            torch.empty_like(gate) if need_dgate else None,
            torch.empty_like(gate) if need_dup else None,
        )
    # In one memory order, that of gate, so that one walk goes through both.
    like = torch.empty_like(gate, device="meta")
    inputs = (dy, gate, up) if need_dgate else (dy, gate)  # dup alone does not need up
    steps = walk((like,) * (need_dgate + need_dup), inputs)
    of_output, unused = steps.strides[0], (0, 0)
    of_dy, of_gate, *of_up = steps.strides[need_dgate + need_dup :]
    strides = of_dy, of_gate, *(of_up or [unused])
    outputs = tuple(of_output if need else unused for need in (need_dgate, need_dup))
    write = _launch(steps, (*strides, *outputs), gate, activation, backend, need_dgate, need_dup)
    any_copied, copied = any(steps.copied), (*steps.copied, False)[:3]

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
    steps = walk(like.chunk(2, dim=-1), (dy, *gate.chunk(2, dim=-1)))
    of_dgate, of_dup, *of_inputs = steps.strides
    write = _launch(steps, (*of_inputs, of_dgate, of_dup), gate, activation, backend, True, True)
    second, second_of_gradient, copied = _second_half(gate), _second_half(like), any(steps.copied)

    def run(dy: torch.Tensor, gate: torch.Tensor, up: Optional) -> tuple[Optional, Optional]:
        packed = torch.empty_like(gate)
        dup, up = second_of_gradient(packed), second(gate)
        if copied:
            dy, gate, up = _ordered(packed.chunk(2, dim=-1)[0], (dy, gate.chunk(2, dim=-1)[0], up), steps.copied)
        write(dy, gate, up, packed, dup)
        return packed, None

    return run


def _launch(
    steps: Walk,
    strides: Sequence[tuple[int, int]],
    like: torch.Tensor,
    activation: str,
    backend: str,
    need_dgate: bool = False,
    need_dup: bool = False,
) -> Callable[..., None]:
    """Given the tensors of the forward kernel or, with a gradient, of the backward one, in its order, whose strides
    these are; None for those that it does not use. `like` has their dtype and device."""
    capability, gradients, dtype = _capability(like), need_dgate + need_dup, like.dtype
    if backend == "cuda" or (backend == "auto" and configs.fills_warps(steps.cols, gradients)):
        reason = unaligned.unsupported_reason(steps, dtype, capability)
        if reason and backend == "cuda" and not gradients:
            raise RuntimeError(f'swiglu: backend="cuda" cannot run here: {reason}')
        if reason is None:
            split = configs.pick_unaligned_config(steps.rows, steps.cols, dtype, gradients, capability)
            of_rows = tuple(row for row, _ in strides)
            return unaligned.unaligned_launch(split, steps, of_rows, like, activation, need_dgate, need_dup)
    config = configs.pick_config(steps.rows, steps.cols, dtype, steps.aligned, steps.transposed, capability)
    tiles = triton.cdiv(steps.rows, config.block_m) * triton.cdiv(steps.cols, config.block_n)
    return Launch(
        _swiglu_bwd_kernel if gradients else _swiglu_fwd_kernel,
        (tiles,),
        like.device,
        (steps.rows, steps.cols, *(stride for pair in strides for stride in pair)),
        ACTIVATION=activation,
        **({"NEED_DGATE": need_dgate, "NEED_DUP": need_dup} if gradients else {}),
        SPLIT=steps.aligned,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        EVICTION=config.eviction,
        num_warps=config.num_warps,
    )


def _capability(tensor: torch.Tensor) -> tuple[int, int]:
    """The interpreter stands for an sm_80."""
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else (8, 0)


def _second_half(like: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Takes a packed tensor like this one and returns `up`, or its gradient. As a view by strides, which is the one
    that costs least."""
    *leading, last = like.shape
    size, stride, skip = (*leading, last // 2), like.stride(), last // 2 * like.stride(-1)
    return lambda tensor: tensor.as_strided(size, stride, tensor.storage_offset() + skip)


def _ordered(first: Any, tensors: Sequence[Any], copied: Sequence[bool]) -> tuple[Any, ...]:
    """The tensors, or None; those to be copied in the memory order of `first`."""
    return tuple(in_order_of(first, t) if c else t for t, c in zip(tensors, copied, strict=True))

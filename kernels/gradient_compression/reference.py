"""gradient_compression in plain PyTorch: the oracle. fp32 or, given fp64, fp64; returns new tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

BLOCK = 256
LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}


def gradient_compression_reference(
    tensor: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    kind: str = "int8",
    average: bool = True,
    transport: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The new tensor and, if there is a residual, the new residual. Gathers every rank's tensors uncompressed."""
    if residual is not None and residual.shape != tensor.shape:
        raise ValueError("residual must have the shape of tensor")
    initialized = dist.is_available() and dist.is_initialized()
    world = dist.get_world_size(group) if initialized else 1
    rank = dist.get_rank(group) if initialized else 0
    tensors = _gathered(tensor, group, world)
    if residual is None:
        return exchange_reference(tensors, [None] * world, kind, average)[0]
    reduced, kept = exchange_reference(tensors, _gathered(residual, group, world), kind, average)
    return reduced, kept[rank]


def exchange_reference(
    tensors: list[torch.Tensor], residuals: Sequence[torch.Tensor | None], kind: str, average: bool
) -> tuple[torch.Tensor, list[Any]]:
    """(result of all ranks, new residual of each rank), computed from all ranks' tensors."""
    world, numel, shape = len(tensors), tensors[0].numel(), tensors[0].shape
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    total, kept = torch.zeros(numel, dtype=dtype, device=tensors[0].device), []
    for tensor, residual in zip(tensors, residuals, strict=True):
        x = tensor.reshape(-1).to(dtype)
        if residual is not None:
            x = x + residual.reshape(-1).to(dtype)
        y = roundtrip(x, kind)
        total = total + y
        kept.append(None if residual is None else _stored(x - y, residual.dtype))
    if average:
        total = total * (1 / world)
    y = roundtrip(total, kind)
    lost = _finite((total - y) * world if average else total - y)
    size = math.ceil(math.ceil(numel / BLOCK) / world) * BLOCK
    for rank, residual in enumerate(kept):
        if residual is not None:
            own = slice(min(rank * size, numel), min((rank + 1) * size, numel))
            residual[own] = _stored(residual[own].to(dtype) + lost[own], residual.dtype)
    return y.to(tensors[0].dtype).reshape(shape), [None if r is None else r.reshape(shape) for r in kept]


def roundtrip(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Flat x quantised in blocks and dequantised, in x's dtype."""
    blocks = -(-x.numel() // BLOCK)
    padded = F.pad(x, (0, blocks * BLOCK - x.numel())).reshape(blocks, BLOCK)
    padded = padded + 0 * padded  # ±inf becomes NaN
    amax = torch.where(padded.isnan(), 0, padded.abs()).amax(1, keepdim=True)
    scale = torch.where(amax > 0, (amax * (1 / LARGEST[kind])).clamp(min=2.0**-126), 1.0)
    y = padded * (1 / scale)
    y = y.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) if kind == "fp8" else y.round()
    return (y * scale).reshape(-1)[: x.numel()]


def _finite(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), 0, x)


def _stored(lost: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Errors as a residual of that dtype has them. It stays finite: what fp16 cannot hold is its largest number."""
    lost = _finite(lost)
    return (lost.clamp(-65504, 65504) if dtype == torch.float16 else lost).to(dtype)


def _gathered(tensor: torch.Tensor, group: dist.ProcessGroup | None, world: int) -> list[torch.Tensor]:
    if world == 1:
        return [tensor]
    everyone = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(world)]
    dist.all_gather(everyone, tensor.contiguous(), group=group)
    return everyone

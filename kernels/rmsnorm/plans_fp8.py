"""Launch plans of rmsnorm_fp8: everything about a call that does not depend on the tensors' contents and addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton

from . import configs
from .kernel_fp8 import _rmsnorm_fp8_kernel, _rmsnorm_fp8_transposed_kernel
from .launch import Launch
from .plans import _copied, _dense, _device, _rows, row_count

BLOCK = 128  # elements that share a scale
BLOCK_N = 64  # columns of a tile of the transposed copy
Optional = torch.Tensor | None
# (x, weight, residual) -> data, scale; data_t, scale_t if requested; h if there is a residual. fp8 data as bytes
Quantise = Callable[[torch.Tensor, Optional, Optional], list[torch.Tensor]]


def result_shapes(shape: Sequence[int], granularity: str, transpose: bool) -> list[tuple[tuple[int, ...], bool]]:
    """(shape, whether it holds scales) of data and scale and, with `transpose`, of data_t and scale_t."""
    *lead, dim = shape
    groups = 1 if granularity == "row" else -(-dim // BLOCK)
    shapes = [((*lead, dim), False), ((*lead, groups), True)]
    if transpose:
        rows = 1
        for size in lead:
            rows = rows * size
        shapes += [((dim, rows), False), ((dim, -(-rows // BLOCK)), True)]
    return shapes


def scale_dtype(scale_format: str) -> torch.dtype:
    """The dtype of the scales that a kernel writes: bytes for UE8M0."""
    return torch.uint8 if scale_format == "e8m0" else torch.float32


def quantise_plan(
    x: torch.Tensor,
    weight: Optional,
    residual: Optional,
    eps: float,
    weight_offset: float,
    e4m3: bool,
    granularity: str,
    scale_format: str,
    transpose: bool,
) -> Quantise:
    """Returns a function of (x, weight, residual), for tensors with the signatures of these, that returns what
    `Quantise` lists. `op_fp8` must have checked the inputs."""
    device, rows, dim = x.device, row_count("rmsnorm_fp8", x), x.shape[-1]
    shapes = result_shapes(x.shape, granularity, transpose)
    of_scales = scale_dtype(scale_format)
    x_copied, residual_copied = _copied(x) if x.numel() else False, _copied(residual) if x.numel() else False
    weight_copied = weight is not None and not weight.is_contiguous()
    quantise = transposed = None
    if x.numel():
        numbers = {
            "E4M3": e4m3,
            "POW2": scale_format != "fp32",
            "NATIVE": _device(x)[0] >= (8, 9),
        }
        x2, residual2 = _rows(x), _rows(residual)
        quantise = _rows_launch(x2, residual2, eps, weight_offset, granularity, transpose, numbers)
        if transpose:
            pitch = x2.stride(0) if residual is None else dim
            transposed = _transposed_launch(x2, pitch, weight_offset, numbers)

    def run(x: torch.Tensor, weight: Optional, residual: Optional) -> list[torch.Tensor]:
        made = [
            torch.empty(shape, dtype=of_scales if scales else torch.uint8, device=device) for shape, scales in shapes
        ]
        h = x if residual is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        if quantise is None:
            for tensor, (_, scales) in zip(made, shapes, strict=True):
                if scales:
                    tensor.fill_(127 if scale_format == "e8m0" else 1)  # 127 is 1 in UE8M0
            return made if residual is None else [*made, h]
        x = _rows(x) if x_copied else x
        residual = _rows(residual) if residual_copied else residual
        weight = _dense(weight) if weight_copied else weight
        rstd = torch.empty((rows,), dtype=torch.float32, device=device) if transpose else None
        quantise(x, residual, weight, made[0], made[1], h, rstd)
        if transposed is not None:
            transposed(x if residual is None else h, rstd, weight, made[2], made[3])
        return made if residual is None else [*made, h]

    return run


def _rows_launch(
    x: torch.Tensor,
    residual: Optional,
    eps: float,
    weight_offset: float,
    granularity: str,
    save_rstd: bool,
    numbers: dict[str, bool],
) -> Launch:
    """The launch of the quantisation by rows, a function of (x, residual, weight, data, scale, h, rstd). Tiles are
    those of the forward in x's dtype, but a row is in one piece of at least BLOCK columns."""
    rows, dim = x.shape
    config = configs.pick_fwd_config(rows, dim, x.dtype, _device(x)[0])
    block_n = max(BLOCK, triton.next_power_of_2(dim))
    # A narrower row is padded. With as many rows as in the forward, the registers of a tile would spill.
    block_m = min(config.block_m, 2048 // BLOCK)
    return Launch(
        _rmsnorm_fp8_kernel,
        (triton.cdiv(rows, block_m),),
        x.device,
        (rows, dim, x.stride(0), 0 if residual is None else residual.stride(0), eps, weight_offset),
        GROUP=block_n if granularity == "row" else BLOCK,
        SAVE_RSTD=save_rstd,
        **numbers,
        EVEN_N=dim == block_n,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        EVICTION=config.eviction,
        num_warps=config.num_warps * (2 if config.tail else 1),
    )


def _transposed_launch(x: torch.Tensor, pitch: int, weight_offset: float, numbers: dict[str, bool]) -> Launch:
    """The launch of the transposed copy, a function of (h, rstd, weight, data_t, scale_t)."""
    rows, dim = x.shape
    return Launch(
        _rmsnorm_fp8_transposed_kernel,
        (triton.cdiv(rows, BLOCK) * triton.cdiv(dim, BLOCK_N),),
        x.device,
        (rows, dim, pitch, weight_offset),
        **numbers,
        EVEN=rows % BLOCK == 0 and dim % BLOCK_N == 0,
        BLOCK=BLOCK,
        BLOCK_N=BLOCK_N,
        num_warps=8,
    )

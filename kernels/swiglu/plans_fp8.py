"""Launch plans of swiglu_fp8: everything in a call that does not depend on the tensors' values and addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton

from . import configs
from .kernel_fp8 import _swiglu_fp8_kernel, _swiglu_fp8_rows_kernel
from .launch import Launch

BLOCK = 128  # elements that share a scale
MAX_SIZE = 2**31 - 2048  # row and column indices are 32-bit, including the end of the last tile
# (gate, up) -> data and scale, and with transpose data_t and scale_t; fp8 data as uint8
Quantise = Callable[[torch.Tensor, torch.Tensor | None], list[torch.Tensor]]


@dataclass(frozen=True)
class Tile:
    """One launch: whether it writes data, the transposed copy or both, and the tile of a CTA."""

    data: bool
    transpose: bool
    block_m: int
    block_n: int
    num_warps: int


def _tiles(transpose: bool, whole: bool) -> tuple[Tile, ...]:
    """The tile of each launch. One launch computes all outputs, unless tiles are partial: then the transposed copy has
    its own launch, which reads the input again. Predicates and single-element stores of both would spill hundreds of
    bytes a thread."""
    data, copy = Tile(True, False, 32, BLOCK, num_warps=8), Tile(False, True, BLOCK, 32, num_warps=8)
    if not transpose:
        return (data,)
    return (Tile(True, True, BLOCK, BLOCK, num_warps=16),) if whole else (data, copy)


def result_shapes(shape: Sequence[int], granularity: str, transpose: bool) -> list[tuple[tuple[int, ...], bool]]:
    """(shape, whether it holds scales) of data, scale, data_t and scale_t, for a y of the given shape."""
    *lead, dim = shape
    groups = 1 if granularity == "row" else (dim + BLOCK - 1) // BLOCK
    shapes = [((*lead, dim), False), ((*lead, groups), True)]
    if transpose:
        rows = 1
        for size in lead:
            rows = rows * size
        shapes += [((dim, rows), False), ((dim, (rows + BLOCK - 1) // BLOCK), True)]
    return shapes


def scale_dtype(scale_format: str) -> torch.dtype:
    """The dtype of the scales that a kernel writes: uint8 for UE8M0."""
    return torch.uint8 if scale_format == "e8m0" else torch.float32


def quantise_plan(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    activation: str,
    e4m3: bool,
    granularity: str,
    scale_format: str,
    transpose: bool,
) -> Quantise:
    """Returns the function (gate, up) -> results, for all tensors with these signatures. `op_fp8` has checked the
    inputs. Raises ValueError for more rows or columns than the kernels can count: torch.compile would trace that check
    in `op_fp8`, and cannot compare a number of rows that depends on data."""
    device = gate.device
    shape = (*gate.shape[:-1], gate.shape[-1] // 2) if up is None else tuple(gate.shape)
    shapes = result_shapes(shape, granularity, transpose)
    of_scales = scale_dtype(scale_format)
    launches: list[Callable[..., None]] = []
    if gate.numel():
        if max(gate.numel() // gate.shape[-1], shape[-1]) > MAX_SIZE:
            wanted = f"at most {MAX_SIZE} rows and columns (of each half without up)"
            raise ValueError(f"swiglu_fp8: gate must have {wanted}, got shape {tuple(gate.shape)}")
        operands = _operands(gate, up)
        numbers = dict(ACTIVATION=activation, E4M3=e4m3, POW2=scale_format != "fp32", NATIVE=_native(gate))
        if granularity == "row":
            launches = [_rows_launch(*operands, numbers)]
        else:
            launches = _block_launches(*operands, transpose, numbers)

    def run(gate: torch.Tensor, up: torch.Tensor | None) -> list[torch.Tensor]:
        made = [
            torch.empty(shape, dtype=of_scales if scales else torch.uint8, device=device) for shape, scales in shapes
        ]
        if launches:
            operands = _operands(gate, up)
            for launch in launches:
                launch(*operands, *made)
        else:
            for tensor, (_, scales) in zip(made, shapes, strict=True):
                if scales:
                    tensor.fill_(127 if scale_format == "e8m0" else 1)  # UE8M0's 1
        return made

    return run


def _rows_launch(gate: torch.Tensor, up: torch.Tensor, numbers: dict[str, Any]) -> Launch:
    """The launch for granularity "row", a function of (gate, up, data, scale)."""
    rows, cols = gate.shape
    config = configs.pick_rows_config(cols)
    return Launch(
        _swiglu_fp8_rows_kernel,
        (triton.cdiv(rows, config.block_m),),
        gate.device,
        (rows, cols, gate.stride(0), up.stride(0)),
        **numbers,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        TAIL=config.tail,
        num_warps=config.num_warps,
    )


def _block_launches(
    gate: torch.Tensor, up: torch.Tensor, transpose: bool, numbers: dict[str, Any]
) -> list[Callable[..., None]]:
    """The launches for granularity "1x128", functions of (gate, up, data, scale) and, with `transpose`, data_t and
    scale_t."""
    rows, cols = gate.shape
    launches: list[Callable[..., None]] = []
    for tile in _tiles(transpose, whole=rows % BLOCK == 0 and cols % BLOCK == 0):
        launch = Launch(
            _swiglu_fp8_kernel,
            (triton.cdiv(rows, tile.block_m) * triton.cdiv(cols, tile.block_n),),
            gate.device,
            (rows, cols, gate.stride(0), up.stride(0)),
            **numbers,
            DATA=tile.data,
            TRANSPOSE=tile.transpose,
            EVEN=rows % tile.block_m == 0 and cols % tile.block_n == 0,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            num_warps=tile.num_warps,
        )
        launches.append(launch if transpose else partial(_without_transpose, launch))
    return launches


def _without_transpose(launch: Launch, *tensors: torch.Tensor) -> None:
    launch(*tensors, None, None)


def _operands(gate: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """gate and up as [rows, cols]; the halves of a packed tensor."""
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return _rows(gate), _rows(up)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """[rows, cols] with unit inner stride: a view where the strides allow it, otherwise a copy."""
    tensor = tensor.reshape(-1, tensor.shape[-1])
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] == 1 else tensor.contiguous()


def _native(tensor: torch.Tensor) -> bool:
    """Whether the device has fp8 conversion instructions (sm_89 and later)."""
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (8, 9)

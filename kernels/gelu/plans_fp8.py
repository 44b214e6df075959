"""Launch plans of gelu_fp8: everything in a call that does not depend on the tensors' values and addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton

from .kernel_fp8 import _gelu_fp8_kernel
from .launch import Launch

BLOCK = 128  # elements that share a scale
MAX_SIZE = 2**31 - 512  # row and column indices are 32-bit, including the end of the last tile
# (x) -> data and scale, and with transpose data_t and scale_t; fp8 data as uint8
Quantise = Callable[[torch.Tensor], list[torch.Tensor]]


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


def result_shapes(shape: Sequence[int], transpose: bool) -> list[tuple[tuple[int, ...], bool]]:
    """(shape, whether it holds scales) of data, scale, data_t and scale_t, for a y of the given shape."""
    *lead, dim = shape
    shapes = [((*lead, dim), False), ((*lead, (dim + BLOCK - 1) // BLOCK), True)]
    if transpose:
        rows = 1
        for size in lead:
            rows = rows * size
        shapes += [((dim, rows), False), ((dim, (rows + BLOCK - 1) // BLOCK), True)]
    return shapes


def scale_dtype(scale_format: str) -> torch.dtype:
    """The dtype of the scales that a kernel writes: uint8 for UE8M0."""
    return torch.uint8 if scale_format == "e8m0" else torch.float32


def quantise_plan(x: torch.Tensor, approximate: str, e4m3: bool, scale_format: str, transpose: bool) -> Quantise:
    """Returns the function x -> results, for all x with this signature. `op_fp8` has checked the inputs. Raises
    ValueError for more rows or columns than the kernel can count: torch.compile would trace that check in `op_fp8`, and
    cannot compare a number of rows that depends on data."""
    device = x.device
    shape = tuple(x.shape)
    shapes = result_shapes(shape, transpose)
    of_scales = scale_dtype(scale_format)
    launches = []
    if x.numel():
        if max(x.numel() // shape[-1], shape[-1]) > MAX_SIZE:
            raise ValueError(f"gelu_fp8: x must have at most {MAX_SIZE} rows and columns, got shape {shape}")
        x2 = _rows(x)
        rows, cols = x2.shape
        whole = rows % BLOCK == 0 and cols % BLOCK == 0
        for tile in _tiles(transpose, whole):
            launches.append(
                Launch(
                    _gelu_fp8_kernel,
                    (triton.cdiv(rows, tile.block_m) * triton.cdiv(cols, tile.block_n),),
                    device,
                    (rows, cols, x2.stride(0)),
                    APPROXIMATE=approximate,
                    DATA=tile.data,
                    TRANSPOSE=tile.transpose,
                    E4M3=e4m3,
                    POW2=scale_format != "fp32",
                    NATIVE=_native(x),
                    EVEN=rows % tile.block_m == 0 and cols % tile.block_n == 0,
                    BLOCK_M=tile.block_m,
                    BLOCK_N=tile.block_n,
                    num_warps=tile.num_warps,
                )
            )

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        made = [
            torch.empty(shape, dtype=of_scales if scales else torch.uint8, device=device) for shape, scales in shapes
        ]
        if launches:
            operands = (_rows(x),)
            for launch in launches:
                launch(*operands, *made, *(None for _ in range(4 - len(made))))
        else:
            for tensor, (_, scales) in zip(made, shapes, strict=True):
                if scales:
                    tensor.fill_(127 if scale_format == "e8m0" else 1)  # UE8M0's 1
        return made

    return run


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """[rows, cols] with unit inner stride: a view where the strides allow it, otherwise a copy."""
    tensor = tensor.reshape(-1, tensor.shape[-1])
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] == 1 else tensor.contiguous()


def _native(tensor: torch.Tensor) -> bool:
    """Whether the device has fp8 conversion instructions (sm_89 and later)."""
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (8, 9)

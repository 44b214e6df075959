"""Which kernel quantises what, with which configuration; and the launchers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton

from .dequantize import _fp8_dequantize_kernel
from .rows import _fp8_odd_row_kernel, _fp8_row_kernel, _fp8_wide_row_kernel
from .tiles import _fp8_amax_kernel, _fp8_tile_kernel
from .turned import _fp8_turned_kernel

BLOCK = 128  # the side of a block that has a scale of its own
GRANULARITIES = ("tensor", "row", "column", "1x128", "128x128")
MAX_ROW = 32768  # the widest row that is kept in the registers of one CTA
VECTOR = 16  # elements of a store of data
ODD_ROW = 1024  # the least tile of a row that begins on no boundary and has a CTA of its own
FLAT = 4096  # the tile of a tensor whose rows do not matter
EVICT_LAST_BYTES = 100e6  # twice the L2 of an H100 or H200


@dataclass(frozen=True)
class Config:
    """A CTA for each tile of block_m by block_n elements; where the largest of a row is sought, a tile is block_m whole
    rows, or one row in chunks if block_n < dim. `eviction` is the L2 policy of the loads of x."""

    block_m: int
    block_n: int
    num_warps: int
    eviction: str


@dataclass(frozen=True)
class DequantizeConfig:
    """A CTA for each tile."""

    block_m: int
    block_n: int
    num_warps: int


def pick_config(
    granularity: str,
    transpose: bool,
    source: str,
    rows: int,
    dim: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
) -> Config:
    """The configuration of one call, the same for both passes where there are two. Pure.

    source  of the scales: "tile", what a CTA reads itself; "amax", a pass before; "given", by the caller
    """
    eviction = "evict_last" if rows * dim * dtype.itemsize > EVICT_LAST_BYTES else ""
    if source == "tile" and granularity == "row":
        return _row_config(dim, eviction)
    # The predicates of a ragged tile need registers: with 64 elements a thread it would spill hundreds of bytes.
    ragged = rows % BLOCK or dim % BLOCK
    if transpose and "128" in granularity:
        return Config(BLOCK, BLOCK, 16 if ragged else 8, eviction)
    if granularity == "128x128":
        return Config(BLOCK, BLOCK, 32 if ragged else 8, eviction)
    if granularity == "column" and not (transpose or ragged):
        return Config(BLOCK, BLOCK // 2, 4, eviction)
    if transpose or granularity == "column":
        return Config(64 if ragged else BLOCK, BLOCK, 16 if ragged else 8, eviction)
    if granularity == "1x128":
        return Config(32, BLOCK, 8, eviction)
    block_n = max(BLOCK, min(triton.next_power_of_2(dim), FLAT))
    return Config(FLAT // block_n, block_n, 8, eviction)


def _row_config(dim: int, eviction: str) -> Config:
    """Sixteen elements a thread, and thirty-two where a row is so wide that there are no more threads. Rows that are
    not whole vectors begin each on another boundary: a CTA for each, but where they are so short that it would idle.
    """
    block_n = max(32, triton.next_power_of_2(dim))
    if block_n > MAX_ROW:
        return Config(1, 16384, 32, "evict_last")
    if dim % VECTOR and block_n >= ODD_ROW:
        return Config(1, block_n, max(2, min(32, block_n // 512)), eviction)
    block_m = max(1, 2048 // block_n)
    return Config(block_m, block_n, max(4, min(32, block_m * block_n // 512)), eviction)


def pick_dequantize_config(
    granularity: str, rows: int, dim: int, dtype: torch.dtype, capability: tuple[int, int]
) -> DequantizeConfig:
    """The configuration of dequantize. Pure. `dtype` is that of the result."""
    block_n = BLOCK if "128" in granularity else max(BLOCK, min(triton.next_power_of_2(dim), 1024))
    return DequantizeConfig(max(1, FLAT // block_n), block_n, 8)


def scale_shape(shape: Sequence[int], granularity: str) -> tuple[int, ...]:
    """Of the scales of a tensor of that shape, [..., D]."""
    *lead, dim = shape
    blocks = (dim + BLOCK - 1) // BLOCK
    return {
        "tensor": (),
        "row": (*lead, 1),
        "column": (*(1 for _ in lead), dim),
        "1x128": (*lead, blocks),
        "128x128": ((math.prod(lead) + BLOCK - 1) // BLOCK, blocks),
    }[granularity]


def result_names(granularity: str, transpose: bool, given: bool, return_amax: bool) -> list[str]:
    """What `quantize` returns: not a scale that is given, nor a scale_t that is the scale itself."""
    names = {
        "data": True,
        "scale": not given,
        "data_t": transpose,
        "scale_t": transpose and not given and granularity != "tensor",
        "amax": return_amax,
    }
    return [name for name, wanted in names.items() if wanted]


def allocate(
    x: torch.Tensor, names: Sequence[str], granularity: str, scale_format: str, mn_major: bool
) -> dict[str, torch.Tensor]:
    """Tensors of those names, without contents. 8-bit numbers are held as uint8."""
    rows, dim = math.prod(x.shape[:-1]), x.shape[-1]

    def scales(shape: Sequence[int]) -> torch.Tensor:
        shape = scale_shape(shape, granularity)
        if not mn_major:
            return x.new_empty(shape, dtype=torch.uint8 if scale_format == "e8m0" else torch.float32)
        *lead, blocks = shape
        count = math.prod(lead)
        columns = x.new_empty((blocks, (count + 3) // 4 * 4), dtype=torch.float32)  # each on a boundary of 16 bytes
        return columns.t()[:count].view(shape)

    make = {
        "data": lambda: x.new_empty(x.shape, dtype=torch.uint8),
        "scale": lambda: scales(x.shape),
        "data_t": lambda: x.new_empty((dim, rows), dtype=torch.uint8),
        "scale_t": lambda: scales((dim, rows)),
        "amax": lambda: x.new_empty((), dtype=torch.float32),
    }
    return {name: make[name]() for name in names}


def quantize(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    e4m3: bool,
    granularity: str,
    scale_format: str,
    transpose: bool,
    mn_major: bool,
    return_amax: bool,
) -> list[torch.Tensor]:
    """The tensors of `result_names`. Inputs as `op` has checked them."""
    names = result_names(granularity, transpose, scale is not None, return_amax)
    out = allocate(x, names, granularity, scale_format, mn_major)
    if x.numel() == 0:
        for name in ("scale", "scale_t"):
            if name in out:
                out[name].fill_(127 if scale_format == "e8m0" else 1)  # UE8M0's 1
        if return_amax:
            out["amax"].zero_()
        return list(out.values())
    x2 = _rows(x)
    if not transpose and not mn_major and x2.is_contiguous():
        if granularity == "tensor":
            x2 = x2.view(-1, FLAT if x2.numel() % FLAT == 0 else x2.numel())
        if granularity == "1x128" and x2.shape[1] % BLOCK == 0:
            x2 = x2.view(-1, BLOCK)
    numbers = {"E4M3": e4m3, "POW2": scale_format != "fp32", "NATIVE": _capability(x) >= (8, 9)}
    with torch.cuda.device_of(x):
        if granularity == "row" and scale is None and not transpose:
            _quantize_rows(x2, out, numbers)
        else:
            _quantize_tiles(x2, scale, out, numbers, granularity, transpose)
    return list(out.values())


def _quantize_rows(x: torch.Tensor, out: dict[str, torch.Tensor], numbers: dict[str, bool]) -> None:
    rows, dim = x.shape
    config = pick_config("row", False, "tile", rows, dim, x.dtype, _capability(x))
    if dim % VECTOR and config.block_m == 1 and config.block_n >= dim and x.stride(0) == dim:
        _fp8_odd_row_kernel[(rows,)](
            x,
            out["data"],
            out["scale"],
            dim,
            **numbers,
            BLOCK_N=config.block_n,
            EVICTION=config.eviction,
            num_warps=config.num_warps,
        )
        return
    kernel = _fp8_row_kernel if config.block_n >= dim else _fp8_wide_row_kernel
    kernel[(triton.cdiv(rows, config.block_m),)](
        x,
        out["data"],
        out["scale"],
        rows,
        dim,
        x.stride(0),
        **numbers,
        EVEN=rows % config.block_m == 0 and dim % config.block_n == 0,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        EVICTION=config.eviction,
        num_warps=config.num_warps,
    )


def _quantize_tiles(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    out: dict[str, torch.Tensor],
    numbers: dict[str, bool],
    granularity: str,
    transpose: bool,
) -> None:
    rows, dim = x.shape
    source = "given" if scale is not None else "tile" if "128" in granularity else "amax"
    config = pick_config(granularity, transpose, source, rows, dim, x.dtype, _capability(x))
    grid = (triton.cdiv(rows, config.block_m) * triton.cdiv(dim, config.block_n),)
    launch = {
        "EVEN": rows % config.block_m == 0 and dim % config.block_n == 0,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "EVICTION": config.eviction,
        "num_warps": config.num_warps,
    }
    per_row = granularity == "row" or (granularity == "column" and transpose)
    per_column = granularity == "column" or (granularity == "row" and transpose)
    row_amax, col_amax = None, None
    if "amax" in out:
        row_amax = out["amax"].zero_().view(torch.int32)
    elif source == "amax":
        largest = x.new_zeros(max(1, rows * per_row + dim * per_column), dtype=torch.int32)
        row_amax, col_amax = largest, largest[rows * per_row :]
    if source == "amax":
        flags = {"PER_ROW": per_row, "PER_COLUMN": per_column}
        _fp8_amax_kernel[grid](x, row_amax, col_amax, rows, dim, x.stride(0), **flags, **launch)
    scale = out["scale"] if scale is None else scale.contiguous()
    launch |= {
        "GROUPS": {"row": "rows", "1x128": "rows", "column": "columns"}.get(granularity, "tile"),
        "SOURCE": source,
        "RAISE_AMAX": "amax" in out and source == "given",
        **numbers,
    }
    if not transpose:
        of_columns, count = granularity == "column", dim if granularity == "column" else rows
        amax, strides = col_amax if of_columns else row_amax, _strides(scale, count, granularity)
        _fp8_tile_kernel[grid](x, out["data"], scale, amax, rows, dim, x.stride(0), *strides, **launch)
        return
    scale_t = out.get("scale_t")
    # In data_t a column of x is a row.
    by_row, by_col = (scale_t, scale) if granularity == "column" else (scale, scale_t)
    _fp8_turned_kernel[grid](
        x,
        out["data"],
        out["data_t"],
        by_row,
        by_col,
        row_amax,
        col_amax,
        rows,
        dim,
        x.stride(0),
        *_strides(by_row, rows, granularity),
        *_strides(by_col, dim, granularity),
        WORDS=rows % 4 == 0,
        **launch,
    )


def _strides(scale: torch.Tensor | None, count: int, granularity: str) -> tuple[int, int]:
    """From the scale of one row (or row of blocks) to the next, and from one block of a row to the next."""
    if scale is None or granularity == "tensor":
        return 0, 0
    if "128" not in granularity:
        return 1, 0
    groups = scale.view(triton.cdiv(count, BLOCK) if granularity == "128x128" else count, -1)
    return groups.stride(0), groups.stride(1)


def dequantize(
    data: torch.Tensor, scale: torch.Tensor, e4m3: bool, granularity: str, dtype: torch.dtype
) -> torch.Tensor:
    """data · scale. Inputs as `op` has checked them."""
    y = data.new_empty(data.shape, dtype=dtype)
    if data.numel() == 0:
        return y
    data, scale = _rows(data), scale.contiguous()
    if data.is_contiguous():
        if granularity == "tensor":
            data = data.view(-1, FLAT if data.numel() % FLAT == 0 else data.numel())
        if granularity == "1x128" and data.shape[1] % BLOCK == 0:
            data = data.view(-1, BLOCK)
    rows, dim = data.shape
    with torch.cuda.device_of(data):
        config = pick_dequantize_config(granularity, rows, dim, dtype, _capability(data))
        stride_m, stride_n = (0, 1) if granularity == "column" else _strides(scale, rows, granularity)
        _fp8_dequantize_kernel[(triton.cdiv(rows, config.block_m) * triton.cdiv(dim, config.block_n),)](
            data,
            scale,
            y,
            rows,
            dim,
            data.stride(0),
            stride_m,
            stride_n,
            ROWS_PER_SCALE=BLOCK if granularity == "128x128" else 1,
            PER_COLUMN=granularity == "column",
            E4M3=e4m3,
            NATIVE=_capability(data) >= (8, 9),
            EVEN=rows % config.block_m == 0 and dim % config.block_n == 0,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            num_warps=config.num_warps,
        )
    return y


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """[rows, dim] with unit inner stride: a view where the strides allow it, otherwise a copy."""
    tensor = tensor.reshape(-1, tensor.shape[-1])
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] == 1 else tensor.contiguous()


def _capability(tensor: torch.Tensor) -> tuple[int, int]:
    """The interpreter stands for an sm_80."""
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else (8, 0)

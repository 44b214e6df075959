"""Launch plans of fp8: everything in a call that does not depend on the tensors' values and addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from . import configs
from .configs import BLOCK, FLAT, VECTOR
from .dequantize import _fp8_dequantize_kernel
from .kernel import _fp8_odd_row_kernel, _fp8_row_kernel, _fp8_wide_row_kernel
from .launch import Launch
from .results import allocate, result_names
from .tiles import _fp8_amax_kernel, _fp8_tile_kernel
from .transposed import _fp8_transposed_kernel

Quantize = Callable[[torch.Tensor, torch.Tensor | None], list[torch.Tensor]]
Dequantize = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Write = Callable[[torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor]], None]


def quantize_plan(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    e4m3: bool,
    granularity: str,
    scale_format: str,
    transpose: bool,
    mn_major: bool,
    return_amax: bool,
) -> Quantize:
    """Returns a function of (x, scale) that returns the tensors of `result_names`, for all tensors with these
    signatures. fp8 and UE8M0 are uint8, also a given scale; scale is None unless given. `op` has checked the inputs."""
    names = result_names(granularity, transpose, scale is not None, return_amax)
    device = x.device
    shape_of_x = torch.empty(x.shape, dtype=x.dtype, device="meta")
    made = allocate(shape_of_x, names, granularity, scale_format, mn_major)
    buffers = [(name, _buffer(tensor)) for name, tensor in made.items()]
    if x.numel() == 0:
        write = _empty_write(scale_format)
    else:
        x2 = _rows(x)
        copied = x2.data_ptr() != x.data_ptr()
        if not transpose and not mn_major and x2.is_contiguous():
            x2 = _flat(x2, granularity)
        numbers = {"E4M3": e4m3, "POW2": scale_format != "fp32", "NATIVE": _capability(x) >= (8, 9)}
        if granularity == "row" and scale is None and not transpose:
            write = _rows_write(x2, numbers)
        else:
            write = _tiles_write(x2, scale, made, numbers, granularity, transpose)

    def run(x: torch.Tensor, scale: torch.Tensor | None) -> list[torch.Tensor]:
        out = {}
        for name, (size, stride, dtype, padded) in buffers:
            if padded:
                out[name] = torch.empty_strided((padded,), (1,), dtype=dtype, device=device).as_strided(size, stride)
            else:
                out[name] = torch.empty_strided(size, stride, dtype=dtype, device=device)
        write(_rows(x) if x.numel() and copied else x, scale, out)
        return list(out.values())

    return run


def _buffer(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype, int]:
    """Size, stride and dtype of a tensor, and the number of elements of its storage if larger than its own, else 0."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.shape, tensor.stride(), tensor.dtype, elements if elements != tensor.numel() else 0


def _empty_write(scale_format: str) -> Write:
    """The function for an x without elements: scales are 1, amax is 0."""

    def write(x: torch.Tensor, scale: torch.Tensor | None, out: dict[str, torch.Tensor]) -> None:
        for name in ("scale", "scale_t"):
            if name in out:
                out[name].fill_(127 if scale_format == "e8m0" else 1)  # UE8M0's 1
        if "amax" in out:
            out["amax"].zero_()

    return write


def _rows_write(x: torch.Tensor, numbers: dict[str, bool]) -> Write:
    """Granularity "row", in one launch. x [rows, dim]."""
    rows, dim = x.shape
    config = configs.pick_config("row", False, "tile", rows, dim, x.dtype, _capability(x))
    tile = {"BLOCK_N": config.block_n, "EVICTION": config.eviction, "num_warps": config.num_warps}
    if dim % VECTOR and config.block_m == 1 and config.block_n >= dim and x.stride(0) == dim:
        launch = Launch(_fp8_odd_row_kernel, (rows,), x.device, (dim,), **numbers, **tile)
    else:
        launch = Launch(
            _fp8_row_kernel if config.block_n >= dim else _fp8_wide_row_kernel,
            (triton.cdiv(rows, config.block_m),),
            x.device,
            (rows, dim, x.stride(0)),
            **numbers,
            EVEN=rows % config.block_m == 0 and dim % config.block_n == 0,
            BLOCK_M=config.block_m,
            **tile,
        )
    return lambda x, scale, out: launch(x, out["data"], out["scale"])


def _tiles_write(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    made: dict[str, torch.Tensor],
    numbers: dict[str, bool],
    granularity: str,
    transpose: bool,
) -> Write:
    """All cases except granularity "row" without transpose or given scale: one launch, preceded by one for the maxima
    where tiles share scales. x [rows, dim]; `made` has the shapes and strides of the results."""
    rows, dim = x.shape
    device = x.device
    source = "given" if scale is not None else "tile" if "128" in granularity else "amax"
    config = configs.pick_config(granularity, transpose, source, rows, dim, x.dtype, _capability(x))
    grid = (triton.cdiv(rows, config.block_m) * triton.cdiv(dim, config.block_n),)
    tile = {
        "EVEN": rows % config.block_m == 0 and dim % config.block_n == 0,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "EVICTION": config.eviction,
        "num_warps": config.num_warps,
    }
    per_row = granularity == "row" or (granularity == "column" and transpose)
    per_column = granularity == "column" or (granularity == "row" and transpose)
    returned = "amax" in made
    maxima = max(1, rows * per_row + dim * per_column) if source == "amax" and not returned else 0
    find = None
    if source == "amax":
        flags = {"PER_ROW": per_row, "PER_COLUMN": per_column}
        find = Launch(_fp8_amax_kernel, grid, device, (rows, dim, x.stride(0)), **flags, **tile)
    scale_copied = scale is not None and not scale.is_contiguous()
    options = {
        "GROUPS": {"row": "rows", "1x128": "rows", "column": "columns"}.get(granularity, "tile"),
        "SOURCE": source,
        "RAISE_AMAX": returned and source == "given",
        **numbers,
        **tile,
    }
    of_columns = granularity == "column"
    store = (_transposed_launch if transpose else _tile_launch)(
        x, made["scale"] if scale is None else scale.contiguous(), made.get("scale_t"), granularity, grid, options
    )

    def write(x: torch.Tensor, scale: torch.Tensor | None, out: dict[str, torch.Tensor]) -> None:
        row_amax = col_amax = None
        if returned:
            row_amax = out["amax"].zero_().view(torch.int32)
        elif maxima:
            row_amax = torch.empty_strided((maxima,), (1,), dtype=torch.int32, device=device).zero_()
            col_amax = row_amax[rows:] if per_row else row_amax
        if find is not None:
            find(x, row_amax, col_amax)
        if scale is None:
            scale = out["scale"]
        elif scale_copied:
            scale = scale.contiguous()
        if not transpose:
            store(x, out["data"], scale, col_amax if of_columns else row_amax)
            return
        # A column of x is a row of data_t.
        by_row, by_col = scale, out.get("scale_t")
        if of_columns:
            by_row, by_col = by_col, by_row
        store(x, out["data"], out["data_t"], by_row, by_col, row_amax, col_amax)

    return write


def _tile_launch(
    x: torch.Tensor,
    scale: torch.Tensor,
    scale_t: torch.Tensor | None,
    granularity: str,
    grid: tuple[int, ...],
    options: dict[str, Any],
) -> Launch:
    """The launch, a function of (x, data, scale, amax)."""
    rows, dim = x.shape
    strides = _strides(scale, dim if granularity == "column" else rows, granularity)
    return Launch(_fp8_tile_kernel, grid, x.device, (rows, dim, x.stride(0), *strides), **options)


def _transposed_launch(
    x: torch.Tensor,
    scale: torch.Tensor,
    scale_t: torch.Tensor | None,
    granularity: str,
    grid: tuple[int, ...],
    options: dict[str, Any],
) -> Launch:
    """The launch, a function of (x, data, data_t, scales of rows, of columns, maxima of rows, of columns)."""
    rows, dim = x.shape
    by_row, by_col = (scale_t, scale) if granularity == "column" else (scale, scale_t)
    strides = *_strides(by_row, rows, granularity), *_strides(by_col, dim, granularity)
    fixed = (rows, dim, x.stride(0), *strides)
    return Launch(_fp8_transposed_kernel, grid, x.device, fixed, WORDS=rows % 4 == 0, **options)


def _strides(scale: torch.Tensor | None, count: int, granularity: str) -> tuple[int, int]:
    """The strides of scales from one row (or row of blocks) to the next, and from one block of a row to the next."""
    if scale is None or granularity == "tensor":
        return 0, 0
    if "128" not in granularity:
        return 1, 0
    groups = scale.view(triton.cdiv(count, BLOCK) if granularity == "128x128" else count, -1)
    return groups.stride(0), groups.stride(1)


def dequantize_plan(
    data: torch.Tensor, scale: torch.Tensor, e4m3: bool, granularity: str, dtype: torch.dtype
) -> Dequantize:
    """Returns a function of (data, scale) that returns data · scale, for all tensors with these signatures. fp8 and
    UE8M0 are uint8. `op` has checked the inputs."""
    shape, device = data.shape, data.device
    stride = torch.empty(shape, device="meta").stride()
    if data.numel() == 0:
        return lambda data, scale: torch.empty_strided(shape, stride, dtype=dtype, device=device)
    data2, dense = _rows(data), scale.contiguous()
    data_copied, scale_copied = data2.data_ptr() != data.data_ptr(), not scale.is_contiguous()
    if data2.is_contiguous():
        data2 = _flat(data2, granularity)
    rows, dim = data2.shape
    config = configs.pick_dequantize_config(granularity, rows, dim, dtype, _capability(data))
    strides = (0, 1) if granularity == "column" else _strides(dense, rows, granularity)
    launch = Launch(
        _fp8_dequantize_kernel,
        (triton.cdiv(rows, config.block_m) * triton.cdiv(dim, config.block_n),),
        device,
        (rows, dim, data2.stride(0), *strides),
        ROWS_PER_SCALE=BLOCK if granularity == "128x128" else 1,
        PER_COLUMN=granularity == "column",
        E4M3=e4m3,
        NATIVE=_capability(data) >= (8, 9),
        EVEN=rows % config.block_m == 0 and dim % config.block_n == 0,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
    )

    def run(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        y = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        launch(_rows(data) if data_copied else data, scale.contiguous() if scale_copied else scale, y)
        return y

    return run


def _flat(x: torch.Tensor, granularity: str) -> torch.Tensor:
    """A view of a contiguous [rows, dim] with rows that suit the kernel, where the result does not depend on rows."""
    if granularity == "tensor":
        return x.view(-1, FLAT if x.numel() % FLAT == 0 else x.numel())
    if granularity == "1x128" and x.shape[1] % BLOCK == 0:
        return x.view(-1, BLOCK)
    return x


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """[rows, dim] with unit inner stride: a view where the strides allow it, otherwise a copy."""
    tensor = tensor.reshape(-1, tensor.shape[-1])
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] == 1 else tensor.contiguous()


def _capability(tensor: torch.Tensor) -> tuple[int, int]:
    """The compute capability; (8, 0) in the interpreter."""
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else (8, 0)

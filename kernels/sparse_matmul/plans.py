"""Launch plans of sparse_matmul: everything in a call that does not depend on the tensors' values and addresses."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from . import configs, library
from .kernel import (
    _sparse_matmul_dbias_kernel,
    _sparse_matmul_dvalues_kernel,
    _sparse_matmul_dx_kernel,
    _sparse_matmul_dz_kernel,
    _sparse_matmul_fwd_kernel,
)
from .launch import Launch
from .sm90 import products

BACKENDS = ("auto", "triton", "cuda")
DZ_BLOCK, DBIAS_BLOCK_M, DBIAS_BLOCK_N = 1024, 64, 64

Optional = torch.Tensor | None
Needs = tuple[bool, bool, bool]
# (x, values, metadata, bias) -> y, and z if it is saved
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Optional], tuple[torch.Tensor, Optional]]
# (dy, x, values, metadata, z) -> gradients of x, values and bias
Backward = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Optional], tuple[Optional, Optional, Optional]
]


def fwd_plan(
    x: torch.Tensor,
    values: torch.Tensor,
    metadata: torch.Tensor,
    bias: Optional,
    activation: str | None,
    save: bool,
    backend: str,
) -> Forward:
    """Returns a function of (x, values, metadata, bias), for all tensors with these signatures. It returns y and, with
    `save`, the pre-activation z. `op` has checked the inputs."""
    device, dtype, cols = x.device, x.dtype, values.shape[0]
    shape = (*x.shape[:-1], cols)
    strides = torch.empty(shape, device="meta").stride()
    x_copied, values_copied, metadata_copied = _copied(x), _copied(values), not metadata.is_contiguous()
    depth = x.shape[-1]
    rows = _count(x)
    reason = None
    if backend != "triton":
        reason = products.unsupported_reason(_matrix(x), _matrix(values), metadata, capability(x))
    if backend == "cuda" and reason:
        raise RuntimeError(f'sparse_matmul: backend="cuda" cannot run here: {reason}')
    launch: Callable[..., None] | None = None
    if rows and cols:
        chosen = configs.pick_backend(backend, rows, dtype, x.is_cuda, possible=reason is None)
        # With K = 0 there is nothing for TMA to load.
        make = {"cuda": _cuda_launch, "library": _library_launch}.get(chosen if depth else "triton", _fwd_launch)
        launch = make(_matrix(x), _matrix(values), bias, activation)

    def run(
        x: torch.Tensor, values: torch.Tensor, metadata: torch.Tensor, bias: Optional
    ) -> tuple[torch.Tensor, Optional]:
        y = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        z = torch.empty_strided(shape, strides, dtype=dtype, device=device) if save else None
        if launch is not None:
            x = _matrix(x) if x_copied else x
            values = _matrix(values) if values_copied else values
            launch(x, values, metadata.contiguous() if metadata_copied else metadata, bias, y, z)
        return y, z

    return run


def bwd_plan(
    dy: torch.Tensor,
    x: torch.Tensor,
    values: torch.Tensor,
    metadata: torch.Tensor,
    biased: bool,
    activation: str | None,
    needs: Needs,
    backend: str,
) -> Backward:
    """Returns a function of (dy, x, values, metadata, z), for all tensors with these signatures. It returns the
    gradients of x, values and bias, contiguous: None where `needs` is False or there is no bias. z is None without an
    activation."""
    device, dtype, (cols, half), depth = x.device, x.dtype, values.shape, x.shape[-1]
    rows = _count(x)
    need_dx, need_dvalues, need_dbias = needs[0], needs[1], needs[2] and biased
    dy_copied, x_copied, values_copied = _copied(dy), _copied(x), _copied(values)
    metadata_copied = not metadata.is_contiguous()
    stride_dy = _matrix(dy).stride(0)
    for_z = None
    if activation is not None and rows and cols:
        for_z = _dz_launch(rows, cols, stride_dy, activation, device)
    stride_dz = stride_dy if for_z is None else cols
    sizes = rows, cols, depth
    by_library = cols > 0 and configs.pick_backend(backend, rows, dtype, x.is_cuda) == "library"
    for_x: Callable[..., None] | None = None
    for_values: Callable[..., None] | None = None
    if need_dx and rows and depth:
        for_x = (
            library.dx_launch(rows, _matrix(values), capability(x))
            if by_library
            else _dx_launch(sizes, stride_dz, values)
        )
    if need_dvalues and cols and depth:
        for_values = (
            library.dvalues_launch(rows, values, capability(x)) if by_library else _dvalues_launch(sizes, stride_dz, x)
        )
    for_bias = _dbias_launch(sizes, stride_dz, device) if need_dbias and cols else None
    x_strides = torch.empty(x.shape, device="meta").stride()

    def run(
        dy: torch.Tensor, x: torch.Tensor, values: torch.Tensor, metadata: torch.Tensor, z: Optional
    ) -> tuple[Optional, Optional, Optional]:
        dx = dvalues = dbias = None
        dz = _matrix(dy) if dy_copied else dy
        if for_z is not None:
            dy, dz = dz, torch.empty_strided((rows, cols), (cols, 1), dtype=dtype, device=device)
            for_z(dy, z, dz)
        metadata = metadata.contiguous() if metadata_copied else metadata
        if need_dx:
            dx = torch.empty_strided(x.shape, x_strides, dtype=dtype, device=device)
            if for_x is not None:
                for_x(dz, _matrix(values) if values_copied else values, metadata, dx)
        if need_dvalues:
            dvalues = torch.empty_strided((cols, half), (half, 1), dtype=dtype, device=device)
            if for_values is not None:
                for_values(dz, _matrix(x) if x_copied else x, metadata, dvalues)
        if need_dbias:
            dbias = torch.empty_strided((cols,), (1,), dtype=dtype, device=device)
            if for_bias is not None:
                for_bias(dz, dbias)
        return dx, dvalues, dbias

    return run


def _fwd_launch(x: torch.Tensor, values: torch.Tensor, bias: Optional, activation: str | None) -> Launch:
    """The launch, a function of (x, values, metadata, bias, y, z) that writes y and z."""
    (rows, depth), cols = x.shape, values.shape[0]
    config = configs.pick_fwd_config(rows, cols, depth, x.dtype, capability(x))
    return Launch(
        _sparse_matmul_fwd_kernel,
        (triton.cdiv(rows, config.block_m) * triton.cdiv(cols, config.block_n),),
        x.device,
        (rows, cols, depth, x.stride(0), values.stride(0), 0 if bias is None else bias.stride(0)),
        ACTIVATION=activation,
        **_blocks(config),
    )


def _library_launch(
    x: torch.Tensor, values: torch.Tensor, bias: Optional, activation: str | None
) -> Callable[..., None]:
    return library.fwd_launch(x, values, activation, capability(x))


def _cuda_launch(x: torch.Tensor, values: torch.Tensor, bias: Optional, activation: str | None) -> Callable[..., None]:
    config = configs.pick_cuda_config(x.shape[0], values.shape[0], x.shape[1])
    return products.launch(x, values, bias, activation, config)


def _dz_launch(rows: int, cols: int, stride_dy: int, activation: str, device: torch.device) -> Launch:
    return Launch(
        _sparse_matmul_dz_kernel,
        (triton.cdiv(rows * cols, DZ_BLOCK),),
        device,
        (rows * cols, cols, stride_dy),
        ACTIVATION=activation,
        BLOCK=DZ_BLOCK,
        num_warps=4,
    )


def _dx_launch(sizes: tuple[int, int, int], stride_dz: int, values: torch.Tensor) -> Launch:
    rows, cols, depth = sizes
    config = configs.pick_dx_config(rows, cols, depth, values.dtype, capability(values))
    return Launch(
        _sparse_matmul_dx_kernel,
        (triton.cdiv(rows, config.block_m) * triton.cdiv(depth, config.block_k),),
        values.device,
        (*sizes, stride_dz, _matrix(values).stride(0)),
        **_blocks(config),
    )


def _dvalues_launch(sizes: tuple[int, int, int], stride_dz: int, x: torch.Tensor) -> Launch:
    rows, cols, depth = sizes
    config = configs.pick_dvalues_config(rows, cols, depth, x.dtype, capability(x))
    return Launch(
        _sparse_matmul_dvalues_kernel,
        (triton.cdiv(cols, config.block_n) * triton.cdiv(depth, config.block_k),),
        x.device,
        (*sizes, stride_dz, _matrix(x).stride(0)),
        **_blocks(config),
    )


def _dbias_launch(sizes: tuple[int, int, int], stride_dz: int, device: torch.device) -> Launch:
    rows, cols, _ = sizes
    return Launch(
        _sparse_matmul_dbias_kernel,
        (triton.cdiv(cols, DBIAS_BLOCK_N),),
        device,
        (rows, cols, stride_dz),
        BLOCK_M=DBIAS_BLOCK_M,
        BLOCK_N=DBIAS_BLOCK_N,
        num_warps=4,
    )


def _blocks(config: configs.Config) -> dict[str, int]:
    return {
        "GROUP": config.group,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def _count(x: torch.Tensor) -> int:
    """The number of rows of x [..., K]; K may be 0."""
    count = 1
    for size in x.shape[:-1]:
        count *= size
    return count


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """[rows, columns] with unit inner stride: a view where the strides allow it, otherwise a copy."""
    x = x.reshape(_count(x), x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _copied(x: torch.Tensor) -> bool:
    return _matrix(x).data_ptr() != x.data_ptr()


def capability(tensor: torch.Tensor) -> tuple[int, int]:
    """The compute capability; (8, 0) in the interpreter."""
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else (8, 0)

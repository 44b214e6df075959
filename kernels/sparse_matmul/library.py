"""GEMMs with many rows by PyTorch (cuBLAS), with the weight decompressed into memory. The functions have the arguments
and results of the launches of `plans`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from . import configs
from .compression import _sparse_matmul_decompress_kernel, _sparse_matmul_gather_kernel
from .kernel import _sparse_matmul_activation_kernel
from .launch import Launch

ACTIVATION_BLOCK = 1024

Optional = torch.Tensor | None
Decompress = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def decompress_plan(values: torch.Tensor, capability: tuple[int, int]) -> Decompress:
    """Returns a function of (values, metadata) that returns the weight [N, K]. Rows of values are contiguous."""
    rows, depth = values.shape[0], 2 * values.shape[1]
    launch = _tiled(_sparse_matmul_decompress_kernel, values, (rows, depth, values.stride(0)), capability)

    def run(values: torch.Tensor, metadata: torch.Tensor) -> torch.Tensor:
        weight = values.new_empty(rows, depth)
        launch(values, metadata, weight)
        return weight

    return run


def fwd_launch(
    x: torch.Tensor, values: torch.Tensor, activation: str | None, capability: tuple[int, int]
) -> Callable[..., None]:
    """Returns a function of (x, values, metadata, bias, y, z) that writes y and, with an activation, z unless that is
    None. z is rounded before the activation, as in PyTorch."""
    (rows, depth), cols = x.shape, values.shape[0]
    decompressed, activate = decompress_plan(values, capability), None
    if activation is not None:
        count = rows * cols
        options = {"ACTIVATION": activation, "BLOCK": ACTIVATION_BLOCK, "num_warps": 4}
        grid = (triton.cdiv(count, ACTIVATION_BLOCK),)
        activate = Launch(_sparse_matmul_activation_kernel, grid, x.device, (count,), **options)

    def run(x: torch.Tensor, values: torch.Tensor, metadata: torch.Tensor, bias: Optional, y, z: Optional) -> None:
        product = y if activate is None or z is None else z
        matrix, weight, out = x.view(rows, depth), decompressed(values, metadata).mT, product.view(rows, cols)
        if bias is None:
            torch.mm(matrix, weight, out=out)
        else:
            torch.addmm(bias, matrix, weight, out=out)
        if activate is not None:
            activate(product, y)

    return run


def dx_launch(rows: int, values: torch.Tensor, capability: tuple[int, int]) -> Callable[..., None]:
    """Returns a function of (dz, values, metadata, dx) that writes dx."""
    decompressed = decompress_plan(values, capability)

    def run(dz: torch.Tensor, values: torch.Tensor, metadata: torch.Tensor, dx: torch.Tensor) -> None:
        weight = decompressed(values, metadata)
        torch.mm(dz.view(rows, weight.shape[0]), weight, out=dx.view(rows, weight.shape[1]))

    return run


def dvalues_launch(rows: int, values: torch.Tensor, capability: tuple[int, int]) -> Callable[..., None]:
    """A function of (dz, x, metadata, dvalues) that writes dvalues, gathered from a dense gradient in memory."""
    cols, depth = values.shape[0], 2 * values.shape[1]
    gather = _tiled(_sparse_matmul_gather_kernel, values, (cols, depth), capability)

    def run(dz: torch.Tensor, x: torch.Tensor, metadata: torch.Tensor, dvalues: torch.Tensor) -> None:
        dense = torch.empty_strided((cols, depth), (depth, 1), dtype=x.dtype, device=x.device)
        torch.mm(dz.view(rows, cols).mT, x.view(rows, depth), out=dense)  # with `out` autocast casts nothing
        gather(dense, metadata, dvalues)

    return run


def _tiled(kernel, values: torch.Tensor, sizes: tuple[int, ...], capability: tuple[int, int]) -> Launch:
    """A launch with one CTA per tile of the weight."""
    rows, depth = values.shape[0], 2 * values.shape[1]
    config = configs.pick_compress_config(rows, depth, values.dtype, capability)
    grid = (triton.cdiv(rows, config.block_n) * triton.cdiv(depth, config.block_k),)
    blocks = {"BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "num_warps": config.num_warps}
    return Launch(kernel, grid, values.device, sizes, **blocks)

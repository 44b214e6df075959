"""Launch plans of grouped_gemm: the part of a call that does not depend on the tensors' contents and addresses.

All operands are read in place, with any strides.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from . import configs
from .kernel import (
    _grouped_gemm_bias_kernel,
    _grouped_gemm_rows_kernel,
    _grouped_gemm_table_kernel,
    _grouped_gemm_weights_kernel,
)
from .launch import Launch
from .schedule import table_launch, table_size
from .sm90 import products

BACKENDS = ("auto", "triton", "cuda")

Optional = torch.Tensor | None
Needs = tuple[bool, bool, bool]
# (x, weights, offsets, bias) -> y and the table of tiles
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Optional], tuple[torch.Tensor, torch.Tensor]]
# (dy, x, weights, table) -> gradients of x, weights and bias
Backward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[Optional, Optional, Optional]]


def fwd_plan(x: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor, bias: Optional, backend: str) -> Forward:
    """The plan of the forward for tensors like these, which `op` has checked. It takes (x, weights, offsets, bias) and
    returns y and the table of tiles. RuntimeError if `backend` cannot run."""
    rows, (groups, cols), device = x.shape[0], weights.shape[:2], x.device
    size, dtype = table_size(rows, groups), x.dtype
    schedule = table_launch(_grouped_gemm_table_kernel, offsets, rows, _block_m(rows, groups, x))
    product = _rows_launch(x, weights, bias, configs.pick_backend(backend)) if rows and cols else None

    def run(
        x: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor, bias: Optional
    ) -> tuple[torch.Tensor, torch.Tensor]:
        table = torch.empty_strided((size,), (1,), dtype=torch.int32, device=device)
        y = torch.empty_strided((rows, cols), (cols, 1), dtype=dtype, device=device)
        schedule(offsets, table)
        if product is not None:
            product(x, weights, bias, table, y)
        return y, table

    return run


def bwd_plan(
    dy: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, biased: bool, needs: Needs, backend: str
) -> Backward:
    """The plan of the backward for tensors like these. It takes (dy, x, weights, table) and returns the gradients of x,
    weights and bias, None where `needs` is False or there is no bias. dweights has the strides of weights, if these are
    dense. GEMMs that `backend` does not support use Triton, because the caller does not choose the layout of dy."""
    (rows, cols), (groups, _, depth), device, dtype = dy.shape, weights.shape, x.device, x.dtype
    later = "where it can" if backend == "cuda" else configs.pick_backend(backend)
    need_dx, need_dw, need_db = needs[0], needs[1], needs[2] and biased
    for_x = _rows_launch(dy, weights.mT, None, later) if need_dx and rows and depth else None
    for_weights = _weights_launch(dy, x, weights, later) if need_dw and weights.numel() else None
    for_bias = _bias_launch(dy, groups) if need_db and groups and cols else None

    def run(
        dy: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, table: torch.Tensor
    ) -> tuple[Optional, Optional, Optional]:
        dx = dweights = dbias = None
        if need_dx:
            dx = torch.empty_strided((rows, depth), (depth, 1), dtype=dtype, device=device)
            if for_x is not None:
                for_x(dy, weights, None, table, dx)
        if need_dw:
            dweights = torch.empty_like(weights)
            if for_weights is not None:
                for_weights(dy, x, table, dweights)
        if need_db:
            dbias = torch.empty_strided((groups, cols), (cols, 1), dtype=dtype, device=device)
            if for_bias is not None:
                for_bias(dy, table, dbias)
        return dx, dweights, dbias

    return run


def _rows_launch(a: torch.Tensor, b: torch.Tensor, bias: Optional, backend: str) -> Callable[..., None]:
    """Writes out [rows, cols], given (a [rows, depth], weights, bias, table, out). `b` is the view [groups, cols,
    depth] of the weights. backend: "triton", "cuda", or "where it can": "cuda" if it supports the operands, else
    Triton."""
    (rows, depth), (groups, cols, _) = a.shape, b.shape
    capability, sms = _device(a)
    block_m = _block_m(rows, groups, a)
    reason = products.rows_unsupported_reason(a, b, block_m, capability)
    if backend == "cuda" and reason:
        raise RuntimeError(f'grouped_gemm: backend="cuda" cannot run here: {reason}')
    if backend != "triton" and reason is None:
        return products.rows_launch(a, b, bias, configs.pick_cuda_rows_config(cols, depth))
    config = configs.pick_rows_config(cols, depth, block_m, _aligned(a, b, cols, depth), a.dtype, capability)
    most = (rows // block_m + groups + 1) * triton.cdiv(cols, config.block_n)
    return Launch(
        _grouped_gemm_rows_kernel,
        (min(sms * config.ctas, most),),
        a.device,
        (groups, cols, depth, *a.stride(), *b.stride(), *((0, 0) if bias is None else bias.stride())),
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        RASTER=config.raster,
        EVEN_N=cols % config.block_n == 0,
        EVEN_K=depth % config.block_k == 0,
        num_warps=config.num_warps,
        num_stages=config.stages,
    )


def _weights_launch(dy: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, backend: str) -> Callable[..., None]:
    """Writes dweights, given (dy, x, table, dweights)."""
    groups, cols, depth = weights.shape
    dweights, (capability, _) = torch.empty_like(weights, device="meta"), _device(x)
    if backend != "triton" and products.weights_unsupported_reason(dy, x, dweights, capability) is None:
        height, width = (cols, depth) if dweights.stride(2) == 1 else (depth, cols)
        cuda_config = configs.pick_cuda_weights_config(groups, x.shape[0], height, width)
        return products.weights_launch(dy, x, dweights, cuda_config)
    config = configs.pick_weights_config(cols, depth, _aligned(dy, x, cols, depth), x.dtype, capability)
    return Launch(
        _grouped_gemm_weights_kernel,
        (groups * triton.cdiv(cols, config.block_n) * triton.cdiv(depth, config.block_k),),
        x.device,
        (cols, depth, *dy.stride(), *x.stride(), *dweights.stride()),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        BLOCK_R=config.block_r,
        RASTER=config.raster,
        EVEN_N=cols % config.block_n == 0,
        EVEN_K=depth % config.block_k == 0,
        num_warps=config.num_warps,
        num_stages=config.stages,
    )


def _bias_launch(dy: torch.Tensor, groups: int) -> Launch:
    cols = dy.shape[1]
    config = configs.pick_bias_config(cols, dy.dtype, _device(dy)[0])
    grid = (groups * triton.cdiv(cols, config.block_n),)
    return Launch(
        _grouped_gemm_bias_kernel,
        grid,
        dy.device,
        (cols, *dy.stride()),
        BLOCK_N=config.block_n,
        BLOCK_R=config.block_r,
        num_warps=config.num_warps,
    )


def _aligned(a: torch.Tensor, b: torch.Tensor, cols: int, depth: int) -> bool:
    """Whether Triton can prove that both operands consist of whole 16-byte vectors. One stride of each must be 1. The
    sizes, addresses and other strides, for which it specialises kernels, must be multiples of 16."""
    strides = a.stride(), b.stride()
    numbers = (cols, depth, a.data_ptr(), b.data_ptr(), *(s for own in strides for s in own if s != 1))
    return all(1 in own for own in strides) and all(number % 16 == 0 for number in numbers)


def _block_m(rows: int, groups: int, x: torch.Tensor) -> int:
    return configs.pick_block_m(rows, groups, x.dtype, _device(x)[0])


def _device(tensor: torch.Tensor) -> tuple[tuple[int, int], int]:
    """Compute capability and number of SMs; in the interpreter those of an sm_80 with 2 SMs."""
    if not tensor.is_cuda:
        return (8, 0), 2
    properties = torch.cuda.get_device_properties(tensor.device)
    return (properties.major, properties.minor), properties.multi_processor_count

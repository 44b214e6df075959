"""Launch plans of grouped_gemm_fp8: the part of a call that does not depend on the tensors' contents and addresses."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from . import configs
from .checks import INTERPRETED
from .kernel import (
    _grouped_gemm_fp8_rows_kernel,
    _grouped_gemm_fp8_table_kernel,
    _grouped_gemm_fp8_weights_kernel,
)
from .launch import Launch
from .operands import BLOCK, dense, device_of, in_place, is_e4m3
from .schedule import table_launch, table_size
from .sm90 import products

# (two operands, their scales, offsets) -> the result
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# (two operands, their scales, the table of tiles, the result): writes the result.
Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def rows_plan(
    x: torch.Tensor,
    weights: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    offsets: torch.Tensor,
    out_dtype: torch.dtype,
    backend: str,
) -> Product:
    """The plan of the forward for tensors like these, which `op` has checked. It takes (x, weights, scale_x, scale_w,
    offsets) and returns y. RuntimeError if `backend` cannot run."""
    rows, (groups, cols) = x.shape[0], weights.shape[:2]
    backend = _backend("grouped_gemm_fp8", x, weights, backend, rows, groups, of_weights=False)
    block_m = products.BLOCK_M if backend == "cuda" else configs.pick_block_m(rows, groups)
    a, b = _readable(x), _readable(weights)
    write = None
    if rows and cols and backend == "cuda":
        config = configs.pick_cuda_rows_config(groups, rows, cols)
        write = products.rows_launch(a, b, scale_x, scale_w, out_dtype, config)
    elif rows and cols:
        write = _rows_launch(a, b, scale_x, scale_w, block_m)
    return _plan(x, weights, offsets, rows, block_m, (rows, cols), out_dtype, write)


def weights_plan(
    dy_t: torch.Tensor,
    x_t: torch.Tensor,
    scale_dy: torch.Tensor,
    scale_x: torch.Tensor,
    offsets: torch.Tensor,
    out_dtype: torch.dtype,
    backend: str,
) -> Product:
    """The plan of the weights' gradient for tensors like these, which `op_wgrad` has checked. It takes (dy_t, x_t,
    scale_dy, scale_x, offsets) and returns dweights. RuntimeError if `backend` cannot run."""
    (cols, rows), depth, groups = dy_t.shape, x_t.shape[0], offsets.shape[0]
    backend = _backend("grouped_gemm_fp8_wgrad", dy_t, x_t, backend, rows, groups, of_weights=True)
    a, b = _readable(dy_t), _readable(x_t)
    write = None
    if groups and cols and depth and backend == "cuda":
        config = configs.pick_cuda_weights_config(groups, rows, cols, depth)
        write = products.weights_launch(a, b, scale_dy, scale_x, groups, out_dtype, config)
    elif groups and cols and depth:
        write = _weights_launch(a, b, scale_dy, scale_x, groups)
    return _plan(dy_t, x_t, offsets, rows, BLOCK, (groups, cols, depth), out_dtype, write)


def _plan(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    rows: int,
    block_m: int,
    shape: tuple[int, ...],
    out_dtype: torch.dtype,
    write: Write | None,
) -> Product:
    """Launches the table of tiles, then `write`. Operands that the kernels cannot read in place are copied first."""
    a_copied, b_copied, device = not in_place(a), not in_place(b), a.device
    size = table_size(rows, offsets.shape[0])
    schedule = table_launch(_grouped_gemm_fp8_table_kernel, offsets, rows, block_m)

    def run(
        a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty(shape, dtype=out_dtype, device=device)
        if write is not None:
            table = torch.empty_strided((size,), (1,), dtype=torch.int32, device=device)
            schedule(offsets, table)
            write(dense(a) if a_copied else a, dense(b) if b_copied else b, scale_a, scale_b, table, out)
        return out

    return run


def _backend(op: str, a: torch.Tensor, b: torch.Tensor, backend: str, rows: int, groups: int, of_weights: bool) -> str:
    reason = products.unsupported_reason(a, b, device_of(a)[0]) if backend != "triton" else None
    backend = configs.pick_backend(backend, rows, groups, of_weights, possible=reason is None)
    if backend == "cuda" and reason:
        raise RuntimeError(f'{op}: backend="cuda" cannot run here: {reason}')
    return backend if a.numel() and b.numel() else "triton"  # TMA does not support empty tensors


def _readable(codes: torch.Tensor) -> torch.Tensor:
    """The operand as kernels read it: `codes`, or a dense copy."""
    return codes if in_place(codes) else dense(codes)


def _rows_launch(
    x: torch.Tensor, weights: torch.Tensor, scale_x: torch.Tensor, scale_w: torch.Tensor, block_m: int
) -> Write:
    (rows, depth), (groups, cols, _) = x.shape, weights.shape
    capability, sms = device_of(x)
    config = configs.pick_rows_config(cols, depth, block_m, capability)
    most = (rows // block_m + groups + 1) * triton.cdiv(cols, config.block_n)
    launch = Launch(
        _grouped_gemm_fp8_rows_kernel,
        (min(sms * config.ctas, most),),
        x.device,
        (groups, cols, depth, x.stride(0), *weights.stride()[:2], *scale_x.stride(), *scale_w.stride()),
        X_E4M3=is_e4m3(x),
        W_E4M3=is_e4m3(weights),
        DECODE=INTERPRETED,
        EVEN_K=depth % config.block_k == 0,
        RASTER=config.raster,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.stages,
    )
    return _of_bytes(launch) if INTERPRETED else launch


def _weights_launch(
    dy_t: torch.Tensor, x_t: torch.Tensor, scale_dy: torch.Tensor, scale_x: torch.Tensor, groups: int
) -> Write:
    (cols, rows), depth = dy_t.shape, x_t.shape[0]
    config = configs.pick_weights_config(cols, depth, device_of(dy_t)[0])
    launch = Launch(
        _grouped_gemm_fp8_weights_kernel,
        (groups * triton.cdiv(cols, config.block_n) * triton.cdiv(depth, config.block_k),),
        dy_t.device,
        (rows, cols, depth, dy_t.stride(0), x_t.stride(0), *scale_dy.stride(), *scale_x.stride()),
        DY_E4M3=is_e4m3(dy_t),
        X_E4M3=is_e4m3(x_t),
        DECODE=INTERPRETED,
        RASTER=config.raster,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.stages,
    )
    return _of_bytes(launch) if INTERPRETED else launch


def _of_bytes(launch: Launch) -> Write:
    """`launch` with operands viewed as bytes, for the interpreter, in which kernels decode them."""

    def write(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> None:
        launch(a.view(torch.uint8), b.view(torch.uint8), *rest)

    return write

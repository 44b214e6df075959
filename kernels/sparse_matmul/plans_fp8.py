"""Launch plans of fp8 GEMMs: everything in a call that does not depend on the tensors' values and addresses."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from . import configs
from .checks import INTERPRETED
from .kernel_fp8 import _sparse_matmul_fp8_kernel
from .launch import Launch
from .plans import Optional, capability
from .sm90 import products

VECTOR = 16  # bytes
E4M3 = torch.float8_e4m3fn

# (x, values, metadata, scale_x, scale_w, bias) -> y
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Optional], torch.Tensor]


def product_plan(
    x: torch.Tensor,
    values: torch.Tensor,
    metadata: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    bias: Optional,
    activation: str | None,
    out_dtype: torch.dtype,
    backend: str,
) -> Product:
    """Returns a function of (x, values, metadata, scale_x, scale_w, bias) that returns y, for all tensors with these
    signatures. `op_fp8` has checked the inputs. Raises RuntimeError where `backend` does not support them."""
    (rows, depth), cols, device = x.shape, values.shape[0], x.device
    x_copied, values_copied, metadata_copied = not _in_place(x), not _in_place(values), not metadata.is_contiguous()
    x, values = _dense(x) if x_copied else x, _dense(values) if values_copied else values
    reason = products.unsupported_reason_fp8(values, metadata, out_dtype, capability(x)) if backend != "triton" else ""
    if backend == "cuda" and reason:
        raise RuntimeError(f'sparse_matmul: backend="cuda" cannot run here: {reason}')
    write: Callable[..., None] | None = None
    if rows and cols:
        chosen = configs.pick_backend(backend, rows, x.dtype, x.is_cuda, possible=reason is None)
        # With K = 0 there is nothing for TMA to load.
        make = _cuda_launch if chosen == "cuda" and depth else _triton_launch
        write = make(x, values, scale_x, scale_w, bias, activation, out_dtype)

    def run(
        x: torch.Tensor,
        values: torch.Tensor,
        metadata: torch.Tensor,
        scale_x: torch.Tensor,
        scale_w: torch.Tensor,
        bias: Optional,
    ) -> torch.Tensor:
        y = torch.empty_strided((rows, cols), (cols, 1), dtype=out_dtype, device=device)
        if write is not None:
            x = _dense(x) if x_copied else x
            values = _dense(values) if values_copied else values
            write(x, values, metadata.contiguous() if metadata_copied else metadata, scale_x, scale_w, bias, y)
        return y

    return run


def _triton_launch(
    x: torch.Tensor,
    values: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    bias: Optional,
    activation: str | None,
    out_dtype: torch.dtype,
) -> Callable[..., None]:
    """Returns a function of (x, values, metadata, scale_x, scale_w, bias, y) that writes y."""
    (rows, depth), cols = x.shape, values.shape[0]
    config = configs.pick_fp8_config(rows, cols, depth, capability(x))
    launch = Launch(
        _sparse_matmul_fp8_kernel,
        (triton.cdiv(rows, config.block_m) * triton.cdiv(cols, config.block_n),),
        x.device,
        (rows, cols, depth, x.stride(0), values.stride(0), *_strides(scale_x, scale_w, bias)),
        ACTIVATION=activation,
        X_E4M3=x.dtype == E4M3,
        W_E4M3=values.dtype == E4M3,
        DECODE=INTERPRETED,
        GROUP=config.group,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )

    def write(x: torch.Tensor, values: torch.Tensor, *rest: Optional) -> None:
        launch(x.view(torch.uint8) if INTERPRETED else x, values.view(torch.uint8), *rest)

    return write


def _cuda_launch(
    x: torch.Tensor,
    values: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    bias: Optional,
    activation: str | None,
    out_dtype: torch.dtype,
) -> Callable[..., None]:
    config = configs.pick_cuda_config(x.shape[0], values.shape[0], x.shape[1])
    strides = _strides(scale_x, scale_w, bias)
    return products.launch_fp8(x, values, bias, activation, out_dtype, strides, config)


def _strides(scale_x: torch.Tensor, scale_w: torch.Tensor, bias: Optional) -> tuple[int, int, int]:
    """The strides of scale_x, scale_w and bias, 0 for a scale per tensor and without a bias."""
    of_x, of_w = (scale.stride(0) if scale.dim() else 0 for scale in (scale_x, scale_w))
    return of_x, of_w, 0 if bias is None else bias.stride(0)


def _in_place(codes: torch.Tensor) -> bool:
    """Whether rows are contiguous, do not overlap and are 16-byte aligned. Otherwise they are copied."""
    pitch = codes.stride(0)
    return codes.stride(1) == 1 and pitch >= codes.shape[1] and not pitch % VECTOR and not codes.data_ptr() % VECTOR


def _dense(codes: torch.Tensor) -> torch.Tensor:
    """An aligned, contiguous copy. `contiguous` would return an unaligned contiguous tensor unchanged."""
    return codes.clone(memory_format=torch.contiguous_format)

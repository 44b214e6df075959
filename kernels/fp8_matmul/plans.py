"""Launch plans of fp8_matmul: the part of a call that does not depend on the tensors' contents and addresses."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from . import configs
from .checks import INTERPRETED
from .kernel import _fp8_matmul_kernel
from .launch import Launch
from .scaling import BLOCKED, ROW, SQUARE, scaling_of
from .sm90 import few_rows, products

BACKENDS = ("auto", "triton", "cuda")
VECTOR = 16  # elements of 16 bytes

Optional = torch.Tensor | None
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Optional], torch.Tensor]
Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Optional, torch.Tensor], None]


def product_plan(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: Optional,
    out_dtype: torch.dtype,
    fast_accum: bool,
    backend: str,
) -> Product:
    """The plan for tensors like these, which `op` has checked. It takes (a, b, scale_a, scale_b, bias) and returns y.
    UE8M0 scales are passed as bytes. RuntimeError if `backend` cannot run."""
    (rows, depth), cols, device = a.shape, b.shape[0], a.device
    a_copied, b_copied = not _in_place(a), not _in_place(b)
    a, b = _dense(a) if a_copied else a, _dense(b) if b_copied else b
    reason = products.unsupported_reason(scale_a, scale_b, capability(a)) if backend != "triton" else None
    backend = configs.pick_backend(backend, possible=reason is None)
    if backend == "cuda" and reason:
        raise RuntimeError(f'fp8_matmul: backend="cuda" cannot run here: {reason}')
    write = None
    if rows and cols:
        # With K = 0 the operands are empty, which TMA does not support.
        make = _cuda_write if backend == "cuda" and depth else _triton_write
        write = make(a, b, scale_a, scale_b, bias, out_dtype, fast_accum)

    def run(
        a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: Optional
    ) -> torch.Tensor:
        y = torch.empty_strided((rows, cols), (cols, 1), dtype=out_dtype, device=device)
        if write is not None:
            write(_dense(a) if a_copied else a, _dense(b) if b_copied else b, scale_a, scale_b, bias, y)
        return y

    return run


def _triton_write(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: Optional,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Write:
    (rows, depth), cols = a.shape, b.shape[0]
    scaling = scaling_of(rows, cols, depth, scale_a.shape, scale_b.shape)
    blocked = scaling in BLOCKED
    config = configs.pick_config(rows, cols, depth, blocked, fast_accum, capability(a))
    launch = Launch(
        _fp8_matmul_kernel,
        (triton.cdiv(rows, config.block_m) * triton.cdiv(cols, config.block_n),),
        a.device,
        (
            *(rows, cols, depth, a.stride(0), b.stride(0)),
            *scale_strides(scale_a, scaling),
            *scale_strides(scale_b, scaling),
            0 if bias is None else bias.stride(0),
        ),
        SCALING=scaling if blocked else "outer",
        PROMOTE=not fast_accum,
        A_E4M3=a.dtype == torch.float8_e4m3fn,
        B_E4M3=b.dtype == torch.float8_e4m3fn,
        DECODE=INTERPRETED,
        EVEN_K=depth % config.block_k == 0,
        GROUP_M=config.group_m,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if not INTERPRETED:
        return launch

    def write(a: torch.Tensor, b: torch.Tensor, *rest: Optional) -> None:
        launch(a.view(torch.uint8), b.view(torch.uint8), *rest)

    return write


def _cuda_write(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: Optional,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Write:
    (rows, depth), cols = a.shape, b.shape[0]
    scaling = scaling_of(rows, cols, depth, scale_a.shape, scale_b.shape)
    # SCALING of products.cu and few_rows.cu. The latter always promotes: it would not be faster without.
    few = rows <= configs.FEW_ROWS
    number = (2 if scaling == SQUARE else 3) if scaling in BLOCKED else int(few or not fast_accum)
    strides = *scale_strides(scale_a, scaling), *scale_strides(scale_b, scaling)
    if few:
        sms = torch.cuda.get_device_properties(a.device).multi_processor_count
        of_few = configs.pick_few_config(rows, cols, depth, number, sms)
        return few_rows.launch(a, b, bias, out_dtype, number, strides, of_few)
    config = configs.pick_cuda_config(rows, cols, depth, number)
    return products.launch(a, b, bias, out_dtype, number, strides, config)


def scale_strides(scale: torch.Tensor, scaling: str | None) -> tuple[int, int]:
    """The strides of a scale: from one row (or block of 128 rows) to the next, and from one K-block of 128 to the
    next."""
    if scaling in BLOCKED:
        return scale.stride(0), scale.stride(1)
    return (scale.stride(0), 0) if scaling == ROW else (0, 0)


def _in_place(codes: torch.Tensor) -> bool:
    """Whether rows are contiguous, do not overlap, and start on 16-byte boundaries. The stride of a single row is
    arbitrary; if it does not meet this, the matrix is copied too."""
    pitch = codes.stride(0)
    return codes.stride(1) == 1 and pitch >= codes.shape[1] and not pitch % VECTOR and not codes.data_ptr() % VECTOR


def _dense(codes: torch.Tensor) -> torch.Tensor:
    """A contiguous, aligned copy. `contiguous()` would return a contiguous tensor that is not aligned as it is."""
    return codes.clone(memory_format=torch.contiguous_format)


def capability(tensor: torch.Tensor) -> tuple[int, int]:
    """Compute capability; in the interpreter that of an sm_89."""
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else (8, 9)

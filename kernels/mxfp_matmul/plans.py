"""Launch plans of mxfp_matmul: everything in a call that does not depend on the tensors' values and addresses."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import triton

from . import configs
from .formats import BLOCK, CHUNK, chunks
from .kernel import _mxfp_matmul_dense_kernel, _mxfp_matmul_kernel, _mxfp_matmul_sum_kernel
from .launch import Launch
from .sm90 import few_rows, many_rows

BACKENDS = ("auto", "triton", "cuda")
SUM_BLOCK = 1024
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]


def product_plan(
    x: torch.Tensor,
    w: torch.Tensor,
    scales: torch.Tensor,
    tensor_scale: torch.Tensor | None,
    format: str,
    backend: str,
) -> Product:
    """Returns a function of (x, w, scales, tensor_scale) that returns y [..., N], for all tensors with these
    signatures. `op` has checked the inputs. Raises RuntimeError where `backend` does not support them."""
    device, dtype = x.device, x.dtype
    depth, columns = x.shape[-1], scales.shape[1]
    shape = (*x.shape[:-1], columns)
    rows = math.prod(x.shape[:-1])
    reason = few_rows.unsupported_reason(dtype, columns, _capability(x)) if backend != "triton" else None
    chosen = configs.pick_backend(backend, rows, possible=reason is None)
    if chosen == "cuda" and reason:
        raise RuntimeError(f'mxfp_matmul: backend="cuda" cannot run here: {reason}')
    if math.prod(shape) == 0 or depth == 0:
        strides = torch.empty(shape, device="meta").stride()
        return lambda x, w, scales, tensor_scale: torch.empty_strided(
            shape, strides, dtype=dtype, device=device
        ).zero_()
    if chosen == "cuda":
        return _cuda_plan(x, w, scales, shape, format)
    if configs.pick_dense(rows, dtype, x.is_cuda):
        return _dense_plan(_rows(x), columns, shape, format)
    return _triton_plan(x, w, scales, shape, format)


def _cuda_plan(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, shape: tuple[int, ...], format: str) -> Product:
    """As `product_plan`, in CUDA C++."""
    columns, device, dtype = shape[-1], x.device, x.dtype
    strides = torch.empty(shape, device="meta").stride()
    x2 = _rows(x)
    x_copied, x_dense = x2.data_ptr() != x.data_ptr(), not few_rows.in_place(x2)
    x2 = few_rows.dense(x2) if x_dense else x2
    w_copied, scales_copied = _unaligned(w), _unaligned(scales)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    if configs.pick_many(x2.shape[0], columns, sms):
        start = many_rows.launch(x2, columns, format, configs.ManyConfig(), sms)
    else:
        chunk_bytes = CHUNK // 2 + CHUNK // BLOCK[format]
        config = configs.pick_cuda_config(x2.shape[0], columns, chunks(x2.shape[1]), chunk_bytes, sms)
        start = few_rows.launch(x2, columns, format, config)

    def run(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, tensor_scale: torch.Tensor | None) -> torch.Tensor:
        y = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        x = few_rows.dense(_rows(x)) if x_dense else _rows(x) if x_copied else x
        w = w.clone(memory_format=torch.contiguous_format) if w_copied else w
        scales = scales.clone(memory_format=torch.contiguous_format) if scales_copied else scales
        start(x, w, scales, tensor_scale, y)
        return y

    return run


def _unaligned(packed: torch.Tensor) -> bool:
    """Whether it must be copied: not contiguous, or not 16-byte aligned. A plan's key contains both."""
    return not packed.is_contiguous() or packed.data_ptr() % 16 != 0


def _triton_plan(
    x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, shape: tuple[int, ...], format: str
) -> Product:
    """As `product_plan`, in Triton."""
    device, dtype, depth, columns = x.device, x.dtype, x.shape[-1], shape[-1]
    strides = torch.empty(shape, device="meta").stride()
    x2 = _rows(x)
    rows, x_padded = x2.shape[0], not _in_chunks(x2)
    pitch = CHUNK * chunks(depth) if x_padded else x2.stride(0)
    w_copied, scales_copied = _unaligned(w), not scales.is_contiguous()  # words must be aligned
    config = configs.pick_config(rows, columns, chunks(depth), dtype, _capability(x))
    splits = config.splits
    launch = Launch(
        _mxfp_matmul_kernel,
        (triton.cdiv(rows, config.block_m) * triton.cdiv(columns, config.block_n), splits),
        device,
        (rows, columns, chunks(depth), pitch),
        E8M0=format == "mxfp4",
        BLOCK=BLOCK[format],
        SPLITS=splits,
        GROUP_M=config.group_m,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    count = rows * columns
    total = None
    if splits > 1:
        grid = (triton.cdiv(count, SUM_BLOCK),)
        total = Launch(_mxfp_matmul_sum_kernel, grid, device, (count,), SPLITS=splits, BLOCK=SUM_BLOCK, num_warps=4)

    def run(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, tensor_scale: torch.Tensor | None) -> torch.Tensor:
        y = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        x = _chunked(_rows(x)) if x_padded else _rows(x)
        w = w.clone(memory_format=torch.contiguous_format) if w_copied else w
        scales = scales.contiguous() if scales_copied else scales
        if total is None:
            launch(x, w, scales, tensor_scale, y)
            return y
        parts = torch.empty_strided((splits * count,), (1,), dtype=torch.float32, device=device)
        launch(x, w, scales, tensor_scale, parts)
        total(parts, tensor_scale, y)
        return y

    return run


def _in_chunks(x: torch.Tensor) -> bool:
    """Whether x [M, K] is read without a copy: whole chunks of K, 16-byte aligned rows."""
    size = x.element_size()
    return x.shape[1] % CHUNK == 0 and x.stride(0) * size % 16 == 0 and x.data_ptr() % 16 == 0


def _chunked(x: torch.Tensor) -> torch.Tensor:
    """A copy of x [M, K], padded with zeros to whole chunks."""
    copy = x.new_zeros((x.shape[0], CHUNK * chunks(x.shape[1])))
    copy[:, : x.shape[1]] = x
    return copy


def _dense_plan(x: torch.Tensor, columns: int, shape: tuple[int, ...], format: str) -> Product:
    """As `product_plan`, for x [rows, K], with the weights unpacked into memory in each call."""
    rows, depth = x.shape
    grid = (chunks(depth) * triton.cdiv(columns, configs.DENSE_BLOCK_N),)
    launch = Launch(
        _mxfp_matmul_dense_kernel,
        grid,
        x.device,
        (columns, depth),
        E8M0=format == "mxfp4",
        BLOCK=BLOCK[format],
        BLOCK_N=configs.DENSE_BLOCK_N,
        num_warps=configs.DENSE_WARPS,
    )

    def run(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, tensor_scale: torch.Tensor | None) -> torch.Tensor:
        x, dense = _rows(x), x.new_empty((columns, depth))
        w = w.clone(memory_format=torch.contiguous_format) if _unaligned(w) else w
        launch(w, scales.contiguous(), dense)
        y = x.new_empty((rows, columns))
        if tensor_scale is None:
            torch.mm(x, dense.mT, out=y)
        else:  # the tensor scale is applied before the result is rounded
            torch.mul(torch.mm(x, dense.mT, out_dtype=torch.float32), tensor_scale, out=y)
        return y.view(shape)

    return run


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[rows, K] with unit inner stride: a view where the strides allow it, otherwise a copy."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _capability(tensor: torch.Tensor) -> tuple[int, int]:
    """The compute capability; (8, 0) in the interpreter."""
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else (8, 0)

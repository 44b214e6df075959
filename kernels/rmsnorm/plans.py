"""Launch plans of rmsnorm: everything about a call that does not depend on the tensors' contents and addresses."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from . import cluster, configs
from .kernel import _rmsnorm_bwd_kernel, _rmsnorm_dw_kernel, _rmsnorm_fwd_kernel
from .launch import Launch
from .wide import _rmsnorm_wide_fwd_kernel, _rmsnorm_wide_mean_kernel

BACKENDS = ("auto", "triton", "cuda")
MAX_ROWS = 2**31 - 2048  # row indices are 32-bit, including the end of the last tile
Optional = torch.Tensor | None
Forward = Callable[[torch.Tensor, Optional, Optional], tuple[torch.Tensor, torch.Tensor, Optional]]
Backward = Callable[[torch.Tensor, Optional, torch.Tensor, torch.Tensor, Optional], tuple[Optional, Optional]]


def fwd_plan(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    save_rstd: bool,
    backend: str,
) -> Forward:
    """Returns a function of (x, weight, residual), for tensors with the signatures of these, that returns y, h (x
    itself without a residual) and rstd ([rows] in fp32; None unless save_rstd). `op` must have checked the inputs.
    Raises ValueError for too many rows, RuntimeError where `backend` does not support the inputs."""
    device, rows = x.device, row_count("rmsnorm", x)
    if x.numel() == 0:
        write = None
    else:
        x_copied, residual_copied = _copied(x), _copied(residual)
        weight_copied = weight is not None and not weight.is_contiguous()
        write = _fwd_launch(_rows(x), _dense(weight), _rows(residual), eps, weight_offset, backend, save_rstd)

    def run(x: torch.Tensor, weight: Optional, residual: Optional) -> tuple[torch.Tensor, torch.Tensor, Optional]:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        h = x if residual is None else torch.empty_like(y)
        rstd = torch.empty_strided((rows,), (1,), dtype=torch.float32, device=device) if save_rstd else None
        if write is not None:
            write(
                _rows(x) if x_copied else x,
                _rows(residual) if residual_copied else residual,
                weight.contiguous() if weight_copied else weight,  # type: ignore[union-attr]
                y,
                h,
                rstd,
            )
        return y, h, rstd

    return run


def _fwd_launch(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    backend: str,
    save_rstd: bool,
) -> Callable[..., None]:
    """The launch that writes y, h and rstd, a function of (x, residual, weight, y, h, rstd): cluster.cu if `backend`
    allows it and it can run, otherwise Triton. x and residual are [rows, dim] with unit inner stride."""
    (rows, dim), dtype = x.shape, x.dtype
    capability, _ = _device(x)
    reason = cluster.unsupported_reason(x, residual, weight, capability)
    if backend == "cuda" and reason:
        raise RuntimeError(f'rmsnorm: backend="cuda" cannot run here: {reason}')
    if reason is None and backend != "triton":
        split = configs.pick_cluster_config(dim, dtype, weight is not None, residual is not None)
        return cluster.cluster_launch(split, x, residual, weight, save_rstd, eps, weight_offset)
    config = configs.pick_fwd_config(rows, dim, dtype, capability)
    width = config.block_n + config.tail
    wide = width < dim
    return Launch(
        _rmsnorm_wide_fwd_kernel if wide else _rmsnorm_fwd_kernel,
        (triton.cdiv(rows, config.block_m),),
        x.device,
        (rows, dim, x.stride(0), 0 if residual is None else residual.stride(0), eps, weight_offset),
        SAVE_RSTD=save_rstd,
        EVEN_N=dim % width == 0,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        EVICTION=config.eviction,
        **({} if wide else {"TAIL": config.tail, "WEIGHT_FIRST": config.weight_first}),
        num_warps=config.num_warps,
    )


def bwd_plan(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor | None,
    weight_offset: float,
    need_dx: bool,
    need_dw: bool,
    summed: bool = True,
) -> Backward:
    """Returns a function of (dy, dh, h, rstd, weight), for tensors with the signatures of these, that returns dx (None
    unless need_dx) and dw (None unless need_dw). Unless `summed`, dw is returned as its partial sums in fp32."""
    device, dim = h.device, h.shape[-1]
    need_dw = need_dw and weight is not None
    if h.numel() == 0:
        return lambda dy, dh, h, rstd, weight: (
            torch.empty_like(h, memory_format=torch.contiguous_format) if need_dx else None,
            _no_gradient(weight, summed) if need_dw else None,  # type: ignore[arg-type]
        )
    rows = row_count("rmsnorm", h)
    config, slices, programs = _bwd_split(h, dh)
    strides = _rows(dy).stride(0), _rows(h).stride(0), 0 if dh is None else _rows(dh).stride(0)
    copied = _copied(dy), _copied(dh), _copied(h), weight is not None and not weight.is_contiguous()
    any_copied = any(copied)
    write = Launch(
        _rmsnorm_bwd_kernel,
        (programs, slices),
        device,
        (rows, dim, *strides, weight_offset),
        NEED_DX=need_dx,
        NEED_DW=need_dw,
        SLICED=slices > 1,
        EVEN_N=dim % config.block_n == 0,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        STAGES=config.stages,
        num_warps=config.num_warps,
    )
    means = _mean_launch(rows, dim, device, strides, weight_offset) if slices > 1 and need_dx else None
    sum_partials = _dw_launch(programs, dim, device) if summed and need_dw and programs > 1 else None

    def run(
        dy: torch.Tensor, dh: Optional, h: torch.Tensor, rstd: torch.Tensor, weight: Optional
    ) -> tuple[Optional, Optional]:
        dx = torch.empty_like(h, memory_format=torch.contiguous_format) if need_dx else None
        if any_copied:
            given = (dy, dh, h)
            dy, dh, h = (_rows(t) if c else t for t, c in zip(given, copied[:3], strict=True))  # type: ignore[assignment]
            weight = _dense(weight)
        mean = partial = dw = None
        if means is not None:
            mean = torch.empty_like(rstd)
            means(dy, h, rstd, weight, mean)
        if need_dw:
            if sum_partials is not None or not summed:
                partial = dw = torch.empty_strided((programs, dim), (dim, 1), dtype=torch.float32, device=device)
            if summed:
                dw = torch.empty_like(weight)  # type: ignore[arg-type]
                partial = dw if partial is None else partial
        write(dy, h, rstd, mean, weight, dh, dx, partial)
        if sum_partials is not None:
            sum_partials(partial, dw)
        return dx, dw

    return run


def _bwd_split(h: torch.Tensor, dh: torch.Tensor | None) -> tuple[configs.BwdConfig, int, int]:
    """(configuration of the backward, slices of the columns, CTAs per slice). Each CTA writes one row of partial sums
    of dw."""
    dim, (capability, sms) = h.shape[-1], _device(h)
    rows = h.numel() // dim
    config = configs.pick_bwd_config(rows, dim, h.dtype, 2 if dh is None else 3, capability)
    slices = triton.cdiv(dim, config.block_n)
    return config, slices, min(triton.cdiv(rows, config.block_m), max(1, sms * config.programs_per_sm // slices))


def partial_sums(h: torch.Tensor, dh: torch.Tensor | None) -> int:
    """The number of rows of partial sums of dw that the backward writes."""
    return _bwd_split(h, dh)[2] if h.numel() else 1


def _no_gradient(weight: torch.Tensor, summed: bool) -> torch.Tensor:
    """dw for zero rows."""
    if summed:
        return torch.zeros_like(weight, memory_format=torch.contiguous_format)
    return torch.zeros((1, weight.shape[0]), dtype=torch.float32, device=weight.device)


def _mean_launch(
    rows: int, dim: int, device: torch.device, strides: tuple[int, int, int], weight_offset: float
) -> Launch:
    """The launch that writes mean(g · x̂) of each row, fp32."""
    block_n = 8192
    return Launch(
        _rmsnorm_wide_mean_kernel,
        (rows,),
        device,
        (dim, *strides[:2], weight_offset),
        EVEN_N=dim % block_n == 0,
        BLOCK_N=block_n,
        num_warps=16,
    )


def _dw_launch(programs: int, dim: int, device: torch.device) -> Launch:
    """The launch that adds the rows of partial sums to dw. It is latency-bound: hence CTAs for all SMs, each with up to
    256 rows in flight."""
    block_m, block_n = min(256, triton.next_power_of_2(programs)), 32 if dim >= 4096 else 16
    grid = (triton.cdiv(dim, block_n),)
    return Launch(_rmsnorm_dw_kernel, grid, device, (programs, dim), BLOCK_M=block_m, BLOCK_N=block_n, num_warps=8)


def row_count(op: str, x: torch.Tensor) -> int:
    """The number of rows of x. ValueError if the kernels cannot count them: torch.compile would trace this check in
    `op`, and cannot compare a number of rows that depends on data."""
    rows = x.shape[:-1].numel()
    if x.numel() and rows > MAX_ROWS:
        raise ValueError(f"{op}: x must have at most {MAX_ROWS} rows, got {rows}")
    return rows


def _rows(tensor):
    """The tensor as [rows, dim] with unit inner stride: a view where strides allow it, otherwise a copy. None for
    None."""
    if tensor is None:
        return None
    tensor = tensor.reshape(-1, tensor.shape[-1])
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] == 1 else tensor.contiguous()


def _copied(tensor: torch.Tensor | None) -> bool:
    """Whether `_rows` copies. If it does not, a launch takes the tensor itself, of which it uses only the address."""
    return tensor is not None and _rows(tensor).data_ptr() != tensor.data_ptr()


def _dense(weight):
    return None if weight is None else weight.contiguous()


def _device(tensor: torch.Tensor) -> tuple[tuple[int, int], int]:
    """(compute capability, number of SMs). In the interpreter, those of a small sm_80 GPU."""
    if not tensor.is_cuda:
        return (8, 0), 2
    properties = torch.cuda.get_device_properties(tensor.device)
    return (properties.major, properties.minor), properties.multi_processor_count

"""A plain Triton RMSNorm, one program a row, that is right unless it is told which fault to have.

Every fault is one line that says `FAULT == "..."`; "" is the control.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl

_CALLS = itertools.count()
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _fwd_kernel(
    x_ptr,
    r_ptr,
    w_ptr,
    y_ptr,
    h_ptr,
    rstd_ptr,
    dim,
    stride_x,
    stride_r,
    eps,
    offset,
    HAS_R: tl.constexpr,
    HAS_W: tl.constexpr,
    FAULT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    in_row = cols < dim
    if FAULT == "row stride ignored":
        stride_x = dim
    if FAULT == "residual read with the strides of x":
        stride_r = stride_x
    read = cols < BLOCK if FAULT == "no mask on the load" else in_row
    h = tl.load(x_ptr + row * stride_x + cols, mask=read, other=1.0 if FAULT == "padding counted" else 0.0)
    if HAS_R:
        residual = tl.load(r_ptr + row * stride_r + cols, mask=read, other=0.0)
        total = (h.to(tl.float32) + residual.to(tl.float32)).to(h.dtype)
        tl.store(h_ptr + row * dim + cols, residual if FAULT == "residual returned unsummed" else total, mask=in_row)
        h = h if FAULT == "residual not added" else total
    h = h if FAULT == "squares summed in half precision" else h.to(tl.float32)
    squares = tl.sum(h * h)
    rstd = tl.rsqrt(squares.to(tl.float32) / dim + (0.0 if FAULT == "eps dropped" else eps))
    y = h.to(tl.float32) * rstd
    if HAS_W:
        weight = tl.load(w_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
        y = y * (weight if FAULT == "weight_offset dropped" else weight + offset)
    write = in_row
    if FAULT == "last column not written":
        write = cols < dim - 1
    if FAULT == "writes past the end":
        write = cols < BLOCK
    tl.store(y_ptr + row * dim + cols, y.to(y_ptr.dtype.element_ty), mask=write)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def _bwd_kernel(
    dy_ptr,
    dh_ptr,
    h_ptr,
    rstd_ptr,
    w_ptr,
    dx_ptr,
    dw_ptr,
    dim,
    stride_dy,
    stride_dh,
    offset,
    HAS_DH: tl.constexpr,
    HAS_W: tl.constexpr,
    FAULT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    in_row = cols < dim
    if FAULT == "stride of the incoming gradient ignored":
        stride_dy = dim
    x_hat = tl.load(h_ptr + row * dim + cols, mask=in_row, other=0.0).to(tl.float32) * tl.load(rstd_ptr + row)
    dy = tl.load(dy_ptr + row * stride_dy + cols, mask=in_row, other=0.0).to(tl.float32)
    if FAULT == "incoming gradient taken for ones":
        dy = tl.where(in_row, 1.0, 0.0)
    tl.store(dw_ptr + row * dim + cols, dy * x_hat, mask=in_row)
    if HAS_W:
        dy *= tl.load(w_ptr + cols, mask=in_row, other=0.0).to(tl.float32) + offset
    mean = tl.sum(dy * x_hat) / dim
    if FAULT == "sign of the mean in dx":
        mean = -mean
    dx = (dy - x_hat * mean) * tl.load(rstd_ptr + row)
    if HAS_DH and FAULT != "gradient of h dropped":
        dx += tl.load(dh_ptr + row * stride_dh + cols, mask=in_row, other=0.0).to(tl.float32)
    tl.store(dx_ptr + row * dim + cols, dx.to(dx_ptr.dtype.element_ty), mask=in_row)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.reshape(-1, tensor.shape[-1])
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


@torch.library.custom_op("plain_rmsnorm::fwd", mutates_args=())
def _fwd(
    x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None, eps: float, offset: float, fault: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x2, r2 = _rows(x), None if residual is None else _rows(residual)
    rows, dim = x2.shape
    y, h = torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if residual is None:
        h.copy_(x)
    if rows:
        weight = None if weight is None else weight.contiguous()
        stride_r = 0 if r2 is None else r2.stride(0)
        flags = dict(HAS_R=r2 is not None, HAS_W=weight is not None, FAULT=fault, BLOCK=triton.next_power_of_2(dim))
        _fwd_kernel[(rows,)](x2, r2, weight, y, h, rstd, dim, x2.stride(0), stride_r, eps, offset, **flags)
    return y, h, rstd


@_fwd.register_fake
def _(x, weight, residual, eps, offset, fault):
    shape = (1,) if fault == "shape of the fake result" else x.shape
    return x.new_empty(shape), x.new_empty(x.shape), x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)


@torch.library.custom_op("plain_rmsnorm::bwd", mutates_args=())
def _bwd(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    offset: float,
    fault: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    dy2, dh2 = _rows(dy), None if dh is None else _rows(dh)
    rows, dim = dy2.shape
    dx = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    partial = torch.zeros(rows, dim, dtype=torch.float32, device=h.device)
    if rows:
        weight = None if weight is None else weight.contiguous()
        stride_dh = 0 if dh2 is None else dh2.stride(0)
        flags = dict(HAS_DH=dh2 is not None, HAS_W=weight is not None, FAULT=fault, BLOCK=triton.next_power_of_2(dim))
        _bwd_kernel[(rows,)](dy2, dh2, h, rstd, weight, dx, partial, dim, dy2.stride(0), stride_dh, offset, **flags)
    dw = _sum_of_rows(partial, fault)
    return dx, dw.to(h.dtype if weight is None else weight.dtype)


@_bwd.register_fake
def _(dy, dh, h, rstd, weight, offset, fault):
    return h.new_empty(h.shape), h.new_empty(h.shape[-1:]) if weight is None else weight.new_empty(weight.shape)


def _sum_of_rows(partial: torch.Tensor, fault: str) -> torch.Tensor:
    if fault == "dW without the last partial block of rows":
        partial = partial[: len(partial) // 8 * 8]
    if fault == "dW summed in the order of arrival":
        total = torch.zeros(partial.shape[1:], dtype=torch.float32, device=partial.device)
        for row in partial.flip(0) if next(_CALLS) % 2 else partial:
            total += row
        return total
    return -partial.sum(0) if fault == "sign of dW" else partial.sum(0)


def _save(ctx, inputs, output) -> None:
    _, weight, residual, _, ctx.offset, ctx.fault = inputs
    ctx.has_residual = residual is not None
    ctx.save_for_backward(output[1], output[2], weight)


def _backward(ctx, dy, dh, _drstd):
    h, rstd, weight = ctx.saved_tensors
    dx, dw = _bwd(dy, dh if ctx.has_residual else None, h, rstd, weight, ctx.offset, ctx.fault)
    return dx, dw if weight is not None else None, dx.clone() if ctx.has_residual else None, None, None, None


_fwd.register_autograd(_backward, setup_context=_save)


def rmsnorm(x, weight=None, eps=1e-6, residual=None, weight_offset=0.0, fault=""):
    """The public op's signature and checks, and a fault."""
    if fault != "no checks":
        check(x, weight, residual)
    y, h, _ = _fwd(x, weight, residual, eps, weight_offset, fault)
    return y if residual is None else (y, h)


def check(x, weight, residual) -> None:
    """Raises TypeError or ValueError naming the argument."""
    for name, tensor, shape in (("x", x, x.shape), ("weight", weight, x.shape[-1:]), ("residual", residual, x.shape)):
        if tensor is None:
            continue
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} must be fp32, fp16 or bf16, got {tensor.dtype}")
        if tensor.device != x.device:
            raise ValueError(f"{name} must be on {x.device}, got {tensor.device}")
        if tensor.shape != shape:
            raise ValueError(f"{name} must be {tuple(shape)}, got {tuple(tensor.shape)}")

"""A plain Triton GELU, one program a row, that is right unless it is told which fault to have.

Every fault is one line that says `FAULT == "..."`; "" is the control.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _half(u, FAULT: tl.constexpr):
    """(1 + tanh u) / 2, also where tanh is almost -1."""
    if FAULT == "tanh that overflows":
        e = tl.exp(2.0 * u)
        return e / (e + 1.0)
    e = tl.exp(-2.0 * tl.abs(u))
    return tl.where(u < 0, e, 1.0) / (1.0 + e)


@triton.jit
def _inner(x, FAULT: tl.constexpr):
    k = 0.7978 if FAULT == "constant of four digits" else 0.7978845608028654
    cubic = 0.0 if FAULT == "cubic term dropped" else 0.044715
    return k * (x + cubic * x * x * x), k * (1.0 + 3.0 * cubic * x * x)


@triton.jit
def _erf(z, FAULT: tl.constexpr):
    if FAULT == "erf of five digits":  # Abramowitz and Stegun 7.1.25
        t = 1.0 / (1.0 + 0.47047 * tl.abs(z))
        tail = ((0.7478556 * t - 0.0958798) * t + 0.3480242) * t * tl.exp(-z * z)
        return tl.where(z < 0, tail - 1.0, 1.0 - tail)
    return tl.erf(z)


@triton.jit
def _fwd_kernel(x_ptr, y_ptr, dim, stride_x, TANH: tl.constexpr, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    if FAULT == "row stride ignored":
        stride_x = dim
    x = tl.load(x_ptr + row * stride_x + cols, mask=cols < dim).to(tl.float32)
    if FAULT == "nan taken for zero":
        x = tl.where(x == x, x, 0.0)
    if TANH and FAULT != "exact form for tanh":
        twice = 2.0 * _half(_inner(x, FAULT)[0], FAULT)
    else:
        twice = 1.0 + _erf(x * 0.7071067811865476, FAULT)
    if FAULT == "cumulative in half precision":
        twice = twice.to(tl.float16).to(tl.float32)
    y = x * 0.5 * twice
    if FAULT == "zero at -inf":
        y = tl.where(x < -20.0, 0.0, y)
    write = cols < dim
    if FAULT == "last full block alone":
        write = cols < dim // 8 * 8
    if FAULT == "writes past the end":
        write = cols < BLOCK
    tl.store(y_ptr + row * dim + cols, y.to(y_ptr.dtype.element_ty), mask=write)


@triton.jit
def _bwd_kernel(
    dy_ptr,
    x_ptr,
    dx_ptr,
    dim,
    stride_dy,
    stride_x,
    TANH: tl.constexpr,
    FAULT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    if FAULT == "gradient read with the strides of x":
        stride_dy = stride_x
    dy = tl.load(dy_ptr + row * stride_dy + cols, mask=cols < dim).to(tl.float32)
    x = tl.load(x_ptr + row * stride_x + cols, mask=cols < dim).to(tl.float32)
    if TANH and FAULT != "derivative of the exact form":
        u, du = _inner(x, FAULT)
        if FAULT == "derivative of the inner term dropped":
            du = 0.7978845608028654
        slope = _half(u, FAULT) + 2.0 * x * _half(u, FAULT) * _half(-u, FAULT) * du
    else:
        slope = 0.5 * (1.0 + _erf(x * 0.7071067811865476, FAULT))
        if FAULT != "density dropped":
            slope += x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    if FAULT == "incoming gradient taken for ones":
        dy = tl.full(dy.shape, 1.0, tl.float32)
    tl.store(dx_ptr + row * dim + cols, (dy * slope).to(dx_ptr.dtype.element_ty), mask=cols < dim)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.reshape(-1, tensor.shape[-1])
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


@torch.library.custom_op("plain_gelu::fwd", mutates_args=())
def _fwd(x: torch.Tensor, tanh: bool, fault: str) -> torch.Tensor:
    x2 = _rows(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        flags = dict(TANH=tanh, FAULT=fault, BLOCK=triton.next_power_of_2(x2.shape[1]))
        _fwd_kernel[(x2.shape[0],)](x2, y, x2.shape[1], x2.stride(0), **flags)
    return y


@_fwd.register_fake
def _(x, tanh, fault):
    return x.new_empty((1,) if fault == "shape of the fake result" else x.shape)


@torch.library.custom_op("plain_gelu::bwd", mutates_args=())
def _bwd(dy: torch.Tensor, x: torch.Tensor, tanh: bool, fault: str) -> torch.Tensor:
    dy2, x2 = _rows(dy), _rows(x)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        flags = dict(TANH=tanh, FAULT=fault, BLOCK=triton.next_power_of_2(x2.shape[1]))
        _bwd_kernel[(x2.shape[0],)](dy2, x2, dx, x2.shape[1], dy2.stride(0), x2.stride(0), **flags)
    return dx


@_bwd.register_fake
def _(dy, x, tanh, fault):
    return x.new_empty(x.shape)


def _save(ctx, inputs, output) -> None:
    x, ctx.tanh, ctx.fault = inputs
    ctx.save_for_backward(x)


def _backward(ctx, dy):
    (x,) = ctx.saved_tensors
    return _bwd(dy, x, ctx.tanh, ctx.fault), None, None


_fwd.register_autograd(_backward, setup_context=_save)


def gelu(x, approximate="none", fault=""):
    """The public op's signature and checks, and a fault."""
    if fault != "no checks":
        check(x, approximate)
    return _fwd(x, approximate == "tanh", fault)


def check(x, approximate) -> None:
    """Raises TypeError or ValueError naming the argument."""
    if x.dtype not in DTYPES:
        raise TypeError(f"x must be fp32, fp16 or bf16, got {x.dtype}")
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")

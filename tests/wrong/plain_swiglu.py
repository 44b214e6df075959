"""A plain Triton SwiGLU, one program a row, that is right unless it is told which fault to have.

Every fault is one line that says `FAULT == "..."` or `fault == "..."`; "" is the control.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ACTIVATIONS = ("silu", "gelu")


@triton.jit
def _value_and_slope(x, GELU: tl.constexpr, FAULT: tl.constexpr):
    if GELU and FAULT != "silu for gelu":
        cdf = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        return x * cdf, cdf + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    if FAULT == "exponential that overflows":
        s = tl.exp(x) / (1.0 + tl.exp(x))
    else:
        s = 1.0 / (1.0 + tl.exp(-x))
    if FAULT == "sigmoid for silu":
        return s, s * (1.0 - s)
    if FAULT == "slope of the sigmoid alone":
        return x * s, s
    return x * s, s * (1.0 + x * (1.0 - s))


@triton.jit
def _fwd_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    dim,
    stride_gate,
    stride_up,
    GELU: tl.constexpr,
    FAULT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    if FAULT == "up read with the strides of gate":
        stride_up = stride_gate
    if FAULT == "row stride of one half":
        stride_gate, stride_up = dim, dim
    gate = tl.load(gate_ptr + row * stride_gate + cols, mask=cols < dim).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + cols, mask=cols < dim).to(tl.float32)
    if FAULT == "gate and up swapped":
        gate, up = up, gate
    value, _ = _value_and_slope(gate, GELU, FAULT)
    y = value if FAULT == "up dropped" else value * up
    write = cols < dim
    if FAULT == "odd last column not written":
        write = cols < dim // 2 * 2
    if FAULT == "writes past the end":
        write = cols < BLOCK
    tl.store(y_ptr + row * dim + cols, y.to(y_ptr.dtype.element_ty), mask=write)


@triton.jit
def _bwd_kernel(
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    dim,
    stride_dy,
    stride_gate,
    stride_up,
    stride_dgate,
    stride_dup,
    GELU: tl.constexpr,
    FAULT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    in_row = cols < dim
    if FAULT == "gradient read with the strides of gate":
        stride_dy = stride_gate
    dy = tl.load(dy_ptr + row * stride_dy + cols, mask=in_row).to(tl.float32)
    gate = tl.load(gate_ptr + row * stride_gate + cols, mask=in_row).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + cols, mask=in_row).to(tl.float32)
    value, slope = _value_and_slope(gate, GELU, FAULT)
    dgate = dy * slope if FAULT == "dgate without up" else dy * up * slope
    dup = dy * gate if FAULT == "dup without the activation" else dy * value
    if FAULT == "dgate and dup swapped":
        dgate, dup = dup, dgate
    tl.store(dgate_ptr + row * stride_dgate + cols, dgate.to(dgate_ptr.dtype.element_ty), mask=in_row)
    if FAULT != "second half of the gradient not written":
        tl.store(dup_ptr + row * stride_dup + cols, dup.to(dup_ptr.dtype.element_ty), mask=in_row)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.reshape(-1, tensor.shape[-1])
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def _halves(gate: torch.Tensor, up: torch.Tensor | None, fault: str) -> tuple[torch.Tensor, torch.Tensor]:
    """gate and up as rows."""
    if up is not None:
        return _rows(gate), _rows(up)
    packed = _rows(gate)
    if fault == "halves taken for neighbours":
        return packed[:, ::2].contiguous(), packed[:, 1::2].contiguous()
    dim = packed.shape[1] // 2
    return packed[:, :dim], packed[:, dim:]


@torch.library.custom_op("plain_swiglu::fwd", mutates_args=())
def _fwd(gate: torch.Tensor, up: torch.Tensor | None, activation: str, fault: str) -> torch.Tensor:
    g, u = _halves(gate, up, fault)
    y = torch.empty((*gate.shape[:-1], g.shape[1]), dtype=gate.dtype, device=gate.device)
    if y.numel():
        flags = dict(GELU=activation == "gelu", FAULT=fault, BLOCK=triton.next_power_of_2(g.shape[1]))
        _fwd_kernel[(g.shape[0],)](g, u, y, g.shape[1], g.stride(0), u.stride(0), **flags)
    return y


@_fwd.register_fake
def _(gate, up, activation, fault):
    halved = up is None and fault != "shape of the fake result"
    return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2 if halved else gate.shape[-1]))


@torch.library.custom_op("plain_swiglu::bwd", mutates_args=())
def _bwd(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, activation: str, fault: str
) -> tuple[torch.Tensor, torch.Tensor]:
    g, u = _halves(gate, up, fault)
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    dup = dgate.new_empty(0) if up is None else torch.empty_like(dgate)
    dg, du = _halves(dgate, None if up is None else dup, "")
    if g.numel():
        dy2 = _rows(dy)
        strides = (t.stride(0) for t in (dy2, g, u, dg, du))
        flags = dict(GELU=activation == "gelu", FAULT=fault, BLOCK=triton.next_power_of_2(g.shape[1]))
        _bwd_kernel[(g.shape[0],)](dy2, g, u, dg, du, g.shape[1], *strides, **flags)
    return dgate, dup


@_bwd.register_fake
def _(dy, gate, up, activation, fault):
    return gate.new_empty(gate.shape), gate.new_empty(0 if up is None else gate.shape)


def _save(ctx, inputs, output) -> None:
    gate, up, ctx.activation, ctx.fault = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx, dy):
    gate, up = ctx.saved_tensors
    dgate, dup = _bwd(dy, gate, up, ctx.activation, ctx.fault)
    if ctx.fault == "no gradient of up alone" and not ctx.needs_input_grad[0]:
        dup = torch.zeros_like(dup)
    return dgate, None if up is None else dup, None, None


_fwd.register_autograd(_backward, setup_context=_save)


def swiglu(gate, up=None, *, activation="silu", fault=""):
    """The public op's signature and checks, and a fault."""
    if fault != "no checks":
        check(gate, up, activation)
    return _fwd(gate, up, activation, fault)


def check(gate, up, activation) -> None:
    """Raises TypeError or ValueError naming the argument."""
    if gate.dtype not in DTYPES:
        raise TypeError(f"gate must be fp32, fp16 or bf16, got {gate.dtype}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")
    if up is None:
        if gate.shape[-1] % 2:
            raise ValueError(f"gate must have an even last dimension, got {tuple(gate.shape)}")
        return
    if up.dtype != gate.dtype:
        raise TypeError(f"up must be {gate.dtype}, got {up.dtype}")
    if up.device != gate.device:
        raise ValueError(f"up must be on {gate.device}, got {up.device}")
    if up.shape != gate.shape:
        raise ValueError(f"up must be {tuple(gate.shape)}, got {tuple(up.shape)}")

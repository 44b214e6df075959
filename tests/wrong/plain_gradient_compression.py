"""A plain gradient compression of one rank, in PyTorch, that is right unless it is told which fault to have.

Every fault is one line that says `fault == "..."`; "" is the control.
"""

from __future__ import annotations

import torch

BLOCK = 256
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST = {"int8": 127.0, "int4": 7.0}


def gradient_compression(tensor, residual=None, kind="int8", average=True, fault=""):
    """The public op's signature and checks, and a fault. Returns what it updates."""
    if fault != "no checks":
        check(tensor, residual)
    x = tensor.reshape(-1).float()
    if residual is not None and fault != "residual dropped":
        x = x + residual.reshape(-1).float()
    y = roundtrip(x, kind, fault)
    z = roundtrip(y, kind, fault)
    z = torch.where(x.isnan(), 0.0, z) if fault == "nan taken for zero" else z
    z = z.to(tensor.dtype).view(tensor.shape)
    if fault == "not in place":
        tensor = z
    elif fault == "strides ignored":
        tensor.as_strided((tensor.numel(),), (1,)).copy_(z.view(-1))
    else:
        tensor.copy_(z)
    if residual is None:
        return tensor
    if fault != "residual as it was":
        first, second = x - y, y - roundtrip(y, kind, fault)
        if fault != "nan kept in the residual":
            first = torch.where(first.isnan(), 0.0, first)
        lost = first.to(residual.dtype).float() + torch.where(second.isnan(), 0.0, second)
        residual.copy_((-lost if fault == "residual of the wrong sign" else lost).view(residual.shape))
    return tensor, residual


def roundtrip(x, kind, fault):
    """Flat x, quantised and dequantised."""
    numel = x.numel()
    rest = -numel % BLOCK
    blocks = torch.cat((x, x.new_zeros(rest))).view(-1, BLOCK)
    if fault != "infinities saturate":
        blocks = blocks + 0 * blocks
    magnitude = blocks.abs()
    if fault == "nan spoils its block":
        amax = magnitude.amax(1, keepdim=True) if numel else magnitude[:, :1]
    else:
        amax = torch.where(magnitude.isfinite(), magnitude, 0.0).amax(1, keepdim=True)
    if fault == "one scale for all":
        amax = amax.max().expand_as(amax) if numel else amax
    largest = LARGEST[kind] + (1 if fault == "a code too many" else 0)
    scale = torch.where(amax > 0, (amax * (1 / largest)).clamp(min=2.0**-126), 1.0)
    if fault == "nan spoils its block":
        scale = torch.where(amax.isnan(), amax, scale)
    if fault == "scale in half precision":
        scale = scale.half().float()
    codes = blocks * (1 / scale)
    codes = codes.trunc() if fault == "rounded towards zero" else codes.round()
    codes = codes.clamp(-largest, largest)
    y = (codes * scale).view(-1)[:numel]
    if fault == "last full block alone":
        full = numel // BLOCK * BLOCK
        y = torch.cat((y[:full], x[full:]))
    return y


def check(tensor, residual) -> None:
    """Raises TypeError or ValueError naming the argument."""
    for name, value in (("tensor", tensor), ("residual", residual)):
        if value is not None and value.dtype not in DTYPES:
            raise TypeError(f"{name} must be fp32, fp16 or bf16, got {value.dtype}")
    if residual is not None and (residual.shape != tensor.shape or residual.device != tensor.device):
        raise ValueError("residual must have the shape and device of tensor")

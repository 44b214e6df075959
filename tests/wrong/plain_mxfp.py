"""A plain quantisation by blocks of 32, one program a block, that is right unless it is told which fault to have.

The kernel finds the scale and divides; PyTorch rounds, by a table, and packs. Every fault is one line that says
`FAULT == "..."` or `fault == "..."`; "" is the control.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3 = tuple(torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist())


@triton.jit
def _block_kernel(x_ptr, y_ptr, scale_ptr, dim, blocks, stride_x, EMAX: tl.constexpr, FAULT: tl.constexpr):
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    cols = block * 32 + tl.arange(0, 32)
    in_row = cols < dim
    if FAULT == "row stride ignored":
        stride_x = dim
    padding = 1e3 if FAULT == "padding counted" else 0.0
    x = tl.load(x_ptr + row * stride_x + cols, mask=in_row, other=padding).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    amax = tl.max(bits & 0x7FFFFFFF)
    if FAULT == "smallest of the block":
        amax = tl.min(bits & 0x7FFFFFFF)
    if FAULT == "inf saturates":
        amax = tl.where(amax == 0x7F800000, 0x7F7FFFFF, amax)
    finite = amax < 0x7F800000
    if FAULT == "scale rounded up":
        amax = amax + 0x7FFFFF
    scale = (amax >> 23) - EMAX
    if FAULT == "exponent of the other format":
        scale = (amax >> 23) - 15
    scale = tl.maximum(scale, 1 if FAULT == "smallest scale is 2^-126" else 0)
    inverse = ((254 - scale) << 23).to(tl.float32, bitcast=True)
    x = tl.where(finite, tl.where(in_row, x, 0.0), 0.0)
    if FAULT == "inf saturates":
        x = tl.minimum(tl.maximum(x, -3.4028234663852886e38), 3.4028234663852886e38)
    scale = tl.where(finite, scale, 0 if FAULT == "nan forgotten" else 255)
    if FAULT == "not divided by the scale":
        inverse = 1.0
    at = row * blocks * 32 + cols
    write = cols < (dim // 32 * 32 if FAULT == "last block not written" else blocks * 32)
    if FAULT == "writes past the end":
        tl.store(scale_ptr + tl.program_id(0) + 1, scale.to(tl.uint8))
    tl.store(y_ptr + at, x * inverse, mask=write)
    shift = 1 if FAULT == "scale of the block before" else 0
    tl.store(scale_ptr + row * blocks + (block + shift) % blocks, scale.to(tl.uint8))


def _codes(y: torch.Tensor, format: str, fault: str) -> torch.Tensor:
    values = E2M1 if format == "mxfp4" else E4M3
    table = torch.tensor(values, device=y.device)
    middles = (table[1:] + table[:-1]) / 2
    low, high = (torch.searchsorted(middles, y.abs(), right=right) for right in (False, True))
    code = torch.where(low % 2 == 0, low, high)
    if fault == "ties away from zero":
        code = high
    if fault == "rounded towards zero":
        code = torch.searchsorted(table, y.abs(), right=True) - 1
    if fault == "subnormals flushed":
        code = torch.where(code < (2 if format == "mxfp4" else 8), 0, code)
    if fault == "does not saturate":
        code = torch.where(y.abs() > 1.05 * values[-1], code + 1, code)
    negative = y.signbit()
    if fault == "zero without a sign":
        negative = negative & (code > 0)
    return torch.where(negative, code + (8 if format == "mxfp4" else 128), code)


@torch.library.custom_op("plain_mxfp::quantize", mutates_args=())
def _quantize(x: torch.Tensor, format: str, fault: str) -> list[torch.Tensor]:
    x2 = x.reshape(-1, x.shape[-1])
    x2 = x2 if x2.stride(1) == 1 else x2.contiguous()
    rows, dim = x2.shape
    blocks = (dim + 31) // 32
    y = torch.empty(*x.shape[:-1], blocks * 32, dtype=torch.float32, device=x.device)
    scale = torch.empty(*x.shape[:-1], blocks, dtype=torch.uint8, device=x.device)
    if rows * blocks:
        emax = 2 if format == "mxfp4" else 8
        _block_kernel[(rows * blocks,)](x2, y, scale, dim, blocks, x2.stride(0), EMAX=emax, FAULT=fault)
    codes = _codes(y, format, fault)
    if format == "mxfp4":
        first, second = (1, 0) if fault == "halves of a byte swapped" else (0, 1)
        codes = codes[..., first::2] + 16 * codes[..., second::2]
    return [codes.to(torch.uint8), scale]


@_quantize.register_fake
def _(x, format, fault):
    blocks = (x.shape[-1] + 31) // 32
    lead = (1,) if fault == "shape of the fake result" else x.shape[:-1]
    columns = blocks * (16 if format == "mxfp4" else 32)
    return [x.new_empty((*x.shape[:-1], columns), dtype=torch.uint8), x.new_empty((*lead, blocks), dtype=torch.uint8)]


def mxfp(x, format="mxfp8_e4m3", *, fault=""):
    """The public op's signature and checks, as far as the cases here need them, and a fault."""
    if fault != "no checks":
        check(x)
    return tuple(_quantize(x.detach(), format, fault))


def check(x) -> None:
    """Raises TypeError or ValueError naming the argument."""
    if x.dtype not in DTYPES:
        raise TypeError(f"x must be fp32, fp16 or bf16, got {x.dtype}")
    if x.dim() == 0:
        raise ValueError("x must be [..., D]")

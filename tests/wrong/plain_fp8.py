"""A plain quantisation by 1x128 blocks, one program a block, that is right unless it is told which fault to have.

The kernel finds the scale and divides; the conversion to 8 bits is PyTorch's. Every fault is one line that says
`FAULT == "..."` or `fault == "..."`; "" is the control.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl

_CALLS = itertools.count()
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@triton.jit
def _block_kernel(x_ptr, y_ptr, scale_ptr, dim, blocks, stride_x, largest, POW2: tl.constexpr, FAULT: tl.constexpr):
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    cols = block * 128 + tl.arange(0, 128)
    in_row = cols < dim
    if FAULT == "row stride ignored":
        stride_x = dim
    padding = 1e3 if FAULT == "padding counted" else 0.0
    x = tl.load(x_ptr + row * stride_x + cols, mask=in_row, other=padding).to(tl.float32)
    finite = x if FAULT == "inf counted" else x * 0.0 + x
    magnitude = tl.where(finite == finite, tl.abs(finite), 0.0)
    if FAULT == "nan counted":
        magnitude = tl.where(tl.sum((finite != finite).to(tl.int32)) > 0, float("nan"), magnitude)
    amax = tl.max(magnitude)
    scale = amax / largest
    if FAULT == "largest of the other format":
        scale = amax * (1 / 57344)
    if POW2:
        bits = scale.to(tl.int32, bitcast=True)
        up = 0 if FAULT == "power of two rounded down" else 0x7FFFFF
        scale = ((bits + up) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.maximum(scale, 1.1754943508222875e-38)
    if FAULT == "no smallest scale":
        scale = amax / largest
    elif FAULT != "nan counted":
        scale = tl.where(amax > 0, scale, 1.0)
    y = finite * (1 / scale)
    if FAULT == "not divided by the scale":
        y = finite
    if FAULT == "inf saturates":
        y = x * (1 / scale)
    stored = 1 / scale if FAULT == "scale upside down" else scale
    write = in_row
    if FAULT == "last block not written":
        write = in_row & (block < dim // 128)
    if FAULT == "writes past the end":
        write = cols < blocks * 128
    tl.store(y_ptr + row * dim + cols, y, mask=write)
    tl.store(scale_ptr + row * blocks + (block + 1) % blocks, stored, mask=FAULT == "scale of the block before")
    tl.store(scale_ptr + tl.program_id(0), stored, mask=FAULT != "scale of the block before")


def _blocks(x: torch.Tensor, dtype: torch.dtype, scale_format: str, fault: str) -> tuple[torch.Tensor, torch.Tensor]:
    x2 = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    x2 = x2 if x2.stride(1) == 1 else x2.contiguous()
    rows, dim = x2.shape
    blocks = (dim + 127) // 128
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    scale = torch.empty(*x.shape[:-1], blocks, dtype=torch.float32, device=x.device)
    if rows * blocks:
        largest, pow2 = LARGEST[dtype], scale_format == "pow2"
        _block_kernel[(rows * blocks,)](x2, y, scale, dim, blocks, x2.stride(0), largest, POW2=pow2, FAULT=fault)
    return _cast(y, dtype, fault).view(torch.uint8), scale


def _cast(y: torch.Tensor, dtype: torch.dtype, fault: str) -> torch.Tensor:
    mantissa = 20 if dtype == torch.float8_e4m3fn else 21
    if fault == "rounded towards zero":
        y = ((y.view(torch.int32) >> mantissa) << mantissa).view(torch.float32)
    if fault == "rounded at random":
        y = y * (1 + 0.005 * (next(_CALLS) % 2))  # too little for the rule on errors
    if fault == "saturates at half":
        return y.clamp(-LARGEST[dtype] / 2, LARGEST[dtype] / 2).to(dtype)
    return y.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


@torch.library.custom_op("plain_fp8::quantize", mutates_args=())
def _quantize(
    x: torch.Tensor, dtype: torch.dtype, scale_format: str, transpose: bool, fault: str
) -> list[torch.Tensor]:
    data, scale = _blocks(x, dtype, scale_format, fault)
    if not transpose:
        return [data, scale]
    x_t = x.reshape(x.shape[:-1].numel(), x.shape[-1]).t().contiguous()
    data_t, scale_t = _blocks(x_t, dtype, scale_format, fault)
    if fault == "data_t with the scales of data" and x.numel():
        wide = x_t.float() / scale.reshape(x_t.shape[1], -1).repeat_interleave(128, 1)[:, : len(x_t)].t()
        data_t = _cast(wide, dtype, fault).view(torch.uint8)
    if fault == "data_t not transposed":
        data_t = data.reshape(data_t.shape).clone()
    return [data, scale, data_t, scale_t]


@_quantize.register_fake
def _(x, dtype, scale_format, transpose, fault):
    rows, dim = x.shape[:-1].numel(), x.shape[-1]
    lead = (1,) if fault == "shape of the fake result" else x.shape[:-1]
    fake = [x.new_empty(x.shape, dtype=torch.uint8), x.new_empty((*lead, (dim + 127) // 128), dtype=torch.float32)]
    if transpose:
        fake.append(x.new_empty((dim, rows), dtype=torch.uint8))
        fake.append(x.new_empty((dim, (rows + 127) // 128), dtype=torch.float32))
    return fake


def fp8(x, dtype=torch.float8_e4m3fn, granularity="1x128", *, scale_format="fp32", transpose=False, fault=""):
    """The public op's signature and checks, as far as the cases here need them, and a fault."""
    if fault != "no checks":
        check(x)
    out = _quantize(x.detach(), dtype, scale_format, transpose, fault)
    return tuple(t.view(dtype) if t.dtype == torch.uint8 else t for t in out)


def check(x) -> None:
    """Raises TypeError or ValueError naming the argument."""
    if x.dtype not in DTYPES:
        raise TypeError(f"x must be fp32, fp16 or bf16, got {x.dtype}")
    if x.dim() == 0:
        raise ValueError("x must be [..., D]")

"""A plain product with MXFP4 weights, one program for a row of x and 16 columns, that is right unless it is told which
fault to have. Every fault is one line that says `FAULT == "..."` or `fault == "..."`; "" is the control."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _element(code, FAULT: tl.constexpr):
    magnitude = code & 7
    normal = (2 + (magnitude & 1)) << (magnitude >> 1)  # four times the number, from 1.0 on
    quarters = tl.where(magnitude < 2, 2 * magnitude, normal)
    if FAULT == "subnormal weight lost":
        quarters = tl.where(magnitude < 2, 0, normal)
    sign = 1 if FAULT == "sign ignored" else tl.where(code < 8, 1, -1)
    return (sign * quarters).to(tl.float32) / 4


@triton.jit
def _codes(words, tile, n, j, FAULT: tl.constexpr):
    """Of row n and column j of a chunk; `tile` is the number of the row's tile among those of all chunks."""
    upper = 1 - n // 8 % 2 if FAULT == "halves swapped" else n // 8 % 2
    at = tile * 256 + j // 64 * 128 + n % 8 * 16 + j % 8 // 2 * 4 + j // 16 % 4
    q, pair = tl.load(words + at), 2 * (j // 8 % 2) + upper
    later = tl.where(pair == 2, (q << 3) ^ (q << 5), (q >> 6) ^ (q << 4))
    bits = tl.where(pair == 0, q, tl.where(pair == 1, q << 6, later)) >> (j % 2 * 16)
    return (bits >> 6 & 7) | (bits >> 12 & 8)


@triton.jit
def _product_kernel(x_ptr, w_ptr, scale_ptr, y_ptr, depth, columns, chunks, stride_x, FAULT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n, j = tl.program_id(1) * 16 + tl.arange(0, 16), tl.arange(0, 128)
    there = n < columns
    words, tiles = w_ptr.to(tl.pointer_type(tl.int32)), tl.cdiv(columns, 16)
    if FAULT == "row stride ignored":
        stride_x = depth
    acc = tl.zeros([16], dtype=tl.float32)
    last = chunks - 1 if FAULT == "last chunk forgotten" else chunks
    for chunk in range(last):
        at = chunk * columns + n
        codes = _codes(words, chunk * tiles + tl.program_id(1), n[:, None], j[None, :], FAULT)
        k = chunk * 128 + j
        within = k < (depth + 1 if FAULT == "one column too many" else depth)
        x = tl.load(x_ptr + row * stride_x + k, mask=within, other=0.0).to(tl.float32)
        block = j // 32 % 2 if FAULT == "scales of the lower half" else j // 32
        if FAULT == "scale of the next row":
            at = chunk * columns + (n + 1) % columns
        exponent = tl.load(scale_ptr + at[:, None] * 4 + block[None, :], mask=there[:, None], other=127)
        bits = exponent.to(tl.int32) << 23
        if FAULT == "scale dropped":
            bits = bits * 0 + (121 << 23)
        acc += tl.sum(_element(codes, FAULT) * bits.to(tl.float32, bitcast=True) * x[None, :], axis=1)
    tl.store(y_ptr + row * columns + n, acc, mask=there if FAULT != "writes past the end" else n < columns + 1)


@torch.library.custom_op("plain_mxfp_matmul::product", mutates_args=())
def _product(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, fault: str) -> torch.Tensor:
    x2 = x.reshape(-1, x.shape[-1])
    x2 = x2 if x2.stride(1) == 1 else x2.contiguous()
    w, scales = w.clone(memory_format=torch.contiguous_format), scales.contiguous()  # words on their boundary
    (rows, depth), (chunks, columns, _) = x2.shape, scales.shape
    y = torch.empty(*x.shape[:-1], columns, dtype=x.dtype, device=x.device)
    if rows * columns:
        grid = (rows, (columns + 15) // 16)
        _product_kernel[grid](x2, w, scales, y, depth, columns, chunks, x2.stride(0), FAULT=fault)
    return y


@_product.register_fake
def _(x, w, scales, fault):
    columns = scales.shape[0] if fault == "shape of the fake result" else scales.shape[1]
    return x.new_empty((*x.shape[:-1], columns))


def mxfp_matmul(x, w, scales, format="mxfp4", *, fault=""):
    """The public op's signature and checks, as far as the cases here need them, and a fault."""
    if fault != "no checks":
        check(x, w, scales)
    return _product(x.detach(), w, scales, fault)


def check(x, w, scales) -> None:
    """Raises TypeError or ValueError naming the argument."""
    if x.dtype not in DTYPES:
        raise TypeError(f"x must be fp32, fp16 or bf16, got {x.dtype}")
    if not x.device == w.device == scales.device:
        raise ValueError("x, w and scales must be on one device")
    if scales.dim() != 3 or scales.shape[0] != (x.shape[-1] + 127) // 128 or scales.shape[2] != 4:
        raise ValueError(f"scales must be [chunks, N, 4], got {list(scales.shape)}")
    if w.shape != (scales.shape[0], (scales.shape[1] + 15) // 16, 1024):
        raise ValueError(f"w must be [chunks, tiles, 1024], got {list(w.shape)}")

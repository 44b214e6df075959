"""A plain scaled product in PyTorch, block by block of k, that is right unless it is told which fault to have.

Codes are bytes, as SPEC's callables take them. Every fault is one line that says `fault == "..."`; "" is the control.
"""

from __future__ import annotations

import itertools

import torch

_CALLS = itertools.count()
FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
BLOCK = 128


def _dense(tensor: torch.Tensor, ignored: bool) -> torch.Tensor:
    """The tensor; or what one reads there who takes it for contiguous."""
    end = tensor.storage_offset() + tensor.numel()
    if not ignored or tensor.untyped_storage().nbytes() < end * tensor.element_size():
        return tensor
    return torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset()).view(tensor.shape)


def _numbers(codes: torch.Tensor, e4m3: bool, fault: str) -> torch.Tensor:
    if fault == "e5m2 read as e4m3":
        e4m3 = True
    numbers = _dense(codes, fault == "strides ignored").contiguous().view(FORMATS[not e4m3]).float()
    if fault == "sign ignored":
        numbers = numbers.abs()
    return torch.where(numbers.abs() < 32, 0.0, numbers) if fault == "small codes flushed" else numbers


def _spread(scale: torch.Tensor, count: int, blocks: int, fault: str) -> torch.Tensor:
    """A scale for each row and block of k: [count, blocks]."""
    scale = _dense(scale, fault == "strides of scales ignored")
    if scale.dim() == 0:
        return scale.expand(count, blocks)
    if fault == "scale of the row before":
        scale = scale.roll(1, 0)
    if scale.shape[0] != count:
        height = 64 if fault == "blocks of 64 rows" else BLOCK
        scale = scale.repeat_interleave(height, 0)
        scale = torch.nn.functional.pad(scale, (0, 0, 0, max(0, count - len(scale))), value=1.0)[:count]
    if scale.shape[1] != blocks:
        scale = scale.expand(count, blocks)
    if fault == "scale of the block before":
        scale = scale.roll(1, 1)
    return scale[:, :1].expand(count, blocks) if fault == "scale of the first block" else scale


@torch.library.custom_op("plain_fp8_matmul::product", mutates_args=())
def _product(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    a_e4m3: bool,
    b_e4m3: bool,
    fault: str,
) -> torch.Tensor:
    (rows, depth), cols = a.shape, b.shape[0]
    blocked = scale_a.dim() and scale_a.shape[1] != 1
    step = BLOCK if blocked or fault == "tail of k dropped" else max(depth, 1)
    blocks = (depth + step - 1) // step
    a_wide, b_wide = _numbers(a, a_e4m3, fault), _numbers(b, b_e4m3, fault)
    scales_a = _spread(scale_a, rows, blocks, fault)
    scales_b = _spread(scale_b, cols, blocks, fault)
    if fault == "scale of b dropped":
        scales_b = torch.full_like(scales_b, 1 / 96)
    y = torch.zeros(rows, cols, device=a.device)
    if fault == "order of the blocks by chance" and next(_CALLS) % 2:
        y = y + 1e-3  # as if a block's sum had been rounded elsewhere
    for block in range(blocks):
        k = slice(block * step, (block + 1) * step)
        if fault == "tail of k dropped" and k.stop > depth:
            continue
        y += (a_wide[:, k] @ b_wide[:, k].t()) * (scales_a[:, block, None] * scales_b[None, :, block])
    if bias is not None and fault != "bias dropped":
        y = y + bias.float()
    y = y.half()
    if fault == "last row not written" and rows:
        y[-1] = torch.empty_like(y[-1])
    return y


@_product.register_fake
def _(a, b, scale_a, scale_b, bias, a_e4m3, b_e4m3, fault):
    dtype = torch.float32 if fault == "dtype of the fake result" else torch.float16
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


def fp8_matmul(scale_a, scale_b, a, b, formats, bias=None, out_dtype=torch.float16, *, fault=""):
    """The signature of SPEC's callables and the public op's checks, as far as the cases here need them."""
    if fault != "no checks":
        check(scale_a, scale_b, a, b, bias)
    return _product(a, b, scale_a, scale_b, bias, *(f == FORMATS[0] for f in formats), fault)


def check(scale_a, scale_b, a, b, bias=None) -> None:
    """Raises TypeError or ValueError naming the argument."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"a must be [M, K] and b [N, K], got {list(a.shape)} and {list(b.shape)}")
    (rows, depth), cols = a.shape, b.shape[0]
    lines, lines_n = ((size + BLOCK - 1) // BLOCK for size in (depth, cols))
    of_rows = scale_a.shape == (rows, 1) and scale_b.shape == (cols, 1)
    of_blocks = scale_a.shape == (rows, lines) and scale_b.shape in ((lines_n, lines), (cols, lines))
    if scale_a.dim() + scale_b.dim() and not of_rows and not of_blocks:
        raise ValueError(f"scale_a and scale_b do not fit: {list(scale_a.shape)} and {list(scale_b.shape)}")
    if bias is not None and bias.shape != (cols,):
        raise ValueError(f"bias must be [{cols}], got {list(bias.shape)}")
    for name, tensor in (("scale_a", scale_a), ("scale_b", scale_b), ("bias", bias)):
        if tensor is not None and tensor.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"{name} must be float32, got {tensor.dtype}")
        if tensor is not None and tensor.device != a.device:
            raise ValueError(f"{name} must be on a's device {a.device}, got {tensor.device}")
    if b.device != a.device:
        raise ValueError(f"b must be on a's device {a.device}, got {b.device}")

"""A plain grouped product in PyTorch, by the group of each row, that is right unless it is told which fault to have.

Every fault is one line that says `fault == "..."`; "" is the control. As the kernel, it never reads the offsets on the
host.
"""

from __future__ import annotations

import itertools

import torch

_CALLS = itertools.count()
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TILE, BLOCK_K = 4, 3


def _dense(tensor: torch.Tensor, fault: str) -> torch.Tensor:
    """The tensor; or what one reads there who takes it for contiguous."""
    end = tensor.storage_offset() + tensor.numel()
    if fault != "strides ignored" or tensor.untyped_storage().nbytes() < end * tensor.element_size():
        return tensor
    return torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset()).view(tensor.shape)


def _groups(offsets: torch.Tensor, rows: int, fault: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The group of each row, that of the rows behind the last being one more; then first row and end of each group."""
    offsets = _dense(offsets, "strides ignored" if fault == "stride of offsets ignored" else "")
    ends = offsets.clamp(0, rows).cummax(0).values
    row = torch.arange(rows, device=offsets.device)
    group = (row[:, None] >= ends + (fault == "offsets taken for the last row")).sum(1)
    return group, torch.cat([ends.new_zeros(1), ends[:-1]]), ends


@torch.library.custom_op("plain_grouped_gemm::fwd", mutates_args=())
def _fwd(
    x: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None, fault: str
) -> torch.Tensor:
    group, starts, ends = _groups(offsets, x.shape[0], fault)
    last = weights.shape[0] - 1
    known = group.clamp(max=last)
    if fault == "weight of the group before":
        known = (known - 1).clamp(min=0)
    a, b = _dense(x, fault).float(), _dense(weights, fault).float()[known]
    y = x.new_zeros(x.shape[0], weights.shape[1], dtype=torch.float32)
    for k in range(0, x.shape[1], BLOCK_K):
        if fault == "last block of k dropped" and k and k + BLOCK_K > x.shape[1]:
            continue
        y += (b[:, :, k : k + BLOCK_K] @ a[:, k : k + BLOCK_K, None])[..., 0]
        if fault == "sum rounded at each block of k":
            y = y.half().float()
    if bias is not None and fault != "bias dropped":
        y = y + bias.float()[known]
    if fault == "tail of a group dropped":
        inside = torch.arange(x.shape[0], device=x.device) - starts[known]
        y = torch.where((inside < (ends - starts)[known] // TILE * TILE)[:, None], y, 0)
    if fault != "rows behind the last offset multiplied":
        y = torch.where((group <= last)[:, None], y, 0)
    return y.to(x.dtype)


@_fwd.register_fake
def _(x, weights, offsets, bias, fault):
    dtype = torch.float64 if fault == "dtype of the fake result" else x.dtype
    return x.new_empty((x.shape[0], weights.shape[1]), dtype=dtype)


@torch.library.custom_op("plain_grouped_gemm::bwd", mutates_args=())
def _bwd(
    dy: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor, fault: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    group, starts, ends = _groups(offsets, x.shape[0], fault)
    last, row = weights.shape[0] - 1, torch.arange(x.shape[0], device=x.device)
    g = torch.ones_like(dy).float() if fault == "incoming gradient taken for one" else dy.float()
    dx = (g[:, None, :] @ weights.float()[group.clamp(max=last)])[:, 0]
    if fault != "gradient of rows behind the last offset":
        dx = torch.where((group <= last)[:, None], dx, 0)
    dweights = torch.zeros(weights.shape, dtype=torch.float32, device=x.device)
    dbias = torch.zeros(weights.shape[:2], dtype=torch.float32, device=x.device)
    order = [slice(first, first + TILE) for first in range(0, x.shape[0], TILE)]
    if fault == "rows in the order of arrival" and next(_CALLS) % 2:
        order.reverse()
    for index in range(last + 1):
        end = ends[index]
        if fault == "tail of the sum not masked":
            end = starts[index] + (end - starts[index] + TILE - 1) // TILE * TILE
        mine = ((row >= starts[index]) & (row < end))[:, None]
        d, a = torch.where(mine, g, 0), torch.where(mine, x.float(), 0)
        for rows in order:
            dweights[index] += d[rows].T @ a[rows]
            if fault == "gradient of weights rounded at each block of rows":
                dweights[index] = dweights[index].half().float()
        dbias[index] = (g if fault == "gradient of bias over all rows" else d).sum(0)
    if fault == "gradient of an empty group left as it was":
        dweights = torch.where((ends > starts)[:, None, None], dweights, torch.empty_like(dweights))
    return dx.to(x.dtype), dweights.to(x.dtype), dbias.to(x.dtype)


@_bwd.register_fake
def _(dy, x, weights, offsets, fault):
    return x.new_empty(x.shape), weights.new_empty(weights.shape), weights.new_empty(weights.shape[:2])


def _save(ctx, inputs, output) -> None:
    x, weights, offsets, bias, ctx.fault = inputs
    ctx.biased = bias is not None
    ctx.save_for_backward(x, weights, offsets)


def _backward(ctx, dy):
    dx, dweights, dbias = _bwd(dy, *ctx.saved_tensors, ctx.fault)
    return dx, dweights, None, dbias if ctx.biased else None, None


_fwd.register_autograd(_backward, setup_context=_save)


def grouped_gemm(x, weights, offsets, *, bias=None, fault=""):
    """The public op's signature and checks, and a fault."""
    if fault != "no checks":
        check(x, weights, offsets, bias)
    return _fwd(x, weights, offsets, bias, fault)


def check(x, weights, offsets, bias) -> None:
    """Raises TypeError or ValueError naming the argument."""
    for name, tensor in (("x", x), ("weights", weights), ("bias", bias)):
        if tensor is not None and tensor.dtype not in DTYPES:
            raise TypeError(f"{name} must be fp32, fp16 or bf16, got {tensor.dtype}")
        if tensor is not None and tensor.device != offsets.device:
            raise ValueError(f"{name} must be on offsets' device {offsets.device}, got {tensor.device}")
    if weights.shape[2:] != x.shape[1:]:
        raise ValueError(f"weights must be [G, N, {x.shape[1]}], got {tuple(weights.shape)}")
    if offsets.shape != weights.shape[:1]:
        raise ValueError(f"offsets must be [{weights.shape[0]}], got {tuple(offsets.shape)}")
    if bias is not None and bias.shape != weights.shape[:2]:
        raise ValueError(f"bias must be {tuple(weights.shape[:2])}, got {tuple(bias.shape)}")

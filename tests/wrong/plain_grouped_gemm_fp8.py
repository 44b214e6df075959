"""Plain grouped products of fp8 in PyTorch, by masks of rows, that are right unless they are told which fault to have.

Codes are bytes, as SPEC's callables take them. Every fault is one line that says `fault == "..."`; "" is the control.
As the kernels, they never read the offsets on the host.
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
    return _dense(codes, fault == "strides ignored").contiguous().view(FORMATS[not e4m3]).float()


def _ends(offsets: torch.Tensor, rows: int, fault: str) -> tuple[torch.Tensor, torch.Tensor]:
    """First row and end of each group."""
    offsets = _dense(offsets, fault == "stride of offsets ignored")
    ends = offsets.clamp(0, rows).cummax(0).values
    if fault == "offsets taken for the last row":
        ends = (ends + 1).clamp(max=rows)
    return torch.cat([ends.new_zeros(1), ends[:-1]]), ends


def _slices(size: int) -> list[tuple[int, slice]]:
    return [(index, slice(first, first + BLOCK)) for index, first in enumerate(range(0, size, BLOCK))]


@torch.library.custom_op("plain_grouped_gemm_fp8::rows", mutates_args=())
def _rows(
    x: torch.Tensor,
    weights: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    offsets: torch.Tensor,
    x_e4m3: bool,
    w_e4m3: bool,
    fault: str,
) -> torch.Tensor:
    (rows, depth), (groups, cols, _) = x.shape, weights.shape
    starts, ends = _ends(offsets, rows, fault)
    a, b = _numbers(x, x_e4m3, fault), _numbers(weights, w_e4m3, fault)
    scale_x = _dense(scale_x, fault == "strides of scales ignored")
    if fault == "scale of the row before":
        scale_x = scale_x.roll(1, 0)
    if fault == "scale of weights of the first group":
        scale_w = scale_w[:1].expand(scale_w.shape)
    if fault == "scale of weights of the first columns":
        scale_w = scale_w[:, :1].expand(scale_w.shape)
    row, y = torch.arange(rows, device=x.device)[:, None], torch.zeros(rows, cols, device=x.device)
    if fault == "order of the blocks by chance" and next(_CALLS) % 2:
        y = y + 1e-3  # as if a block's sum had been rounded elsewhere
    for group in range(groups):
        weight = b[group - 1 if fault == "weight of the group before" else group]
        of_columns, total = scale_w[group].repeat_interleave(BLOCK, 0)[:cols], torch.zeros_like(y)
        for block, k in _slices(depth):
            if fault == "tail of k dropped" and k.stop > depth:
                continue
            scale = scale_x[:, 0 if fault == "scale of the first block" else block]
            total += (a[:, k] @ weight[:, k].t()) * (scale[:, None] * of_columns[None, :, block])
        y = torch.where((row >= starts[group]) & (row < ends[group]), y + total, y)
        if fault == "rows behind the last offset multiplied" and group == groups - 1:
            y = torch.where(row >= ends[group], total, y)
    y = y.half()
    if fault == "last row not written" and rows:
        y[-1] = torch.empty_like(y[-1])
    return y


@_rows.register_fake
def _(x, weights, scale_x, scale_w, offsets, x_e4m3, w_e4m3, fault):
    dtype = torch.float32 if fault == "dtype of the fake result" else torch.float16
    return x.new_empty((x.shape[0], weights.shape[1]), dtype=dtype)


@torch.library.custom_op("plain_grouped_gemm_fp8::weights", mutates_args=())
def _weights(
    dy_t: torch.Tensor,
    x_t: torch.Tensor,
    scale_dy: torch.Tensor,
    scale_x: torch.Tensor,
    offsets: torch.Tensor,
    dy_e4m3: bool,
    x_e4m3: bool,
    fault: str,
) -> torch.Tensor:
    (cols, rows), depth, groups = dy_t.shape, x_t.shape[0], offsets.shape[0]
    starts, ends = _ends(offsets, rows, fault)
    if fault == "a group's rows in whole blocks":
        starts, ends = starts // BLOCK * BLOCK, (ends + BLOCK - 1) // BLOCK * BLOCK
    a, b = _numbers(dy_t, dy_e4m3, fault), _numbers(x_t, x_e4m3, fault)
    row, results = torch.arange(rows, device=dy_t.device), []
    for group in range(groups):
        inside = (row >= starts[group]) & (row < ends[group])
        dy, x = torch.where(inside, a, 0), torch.where(inside, b, 0)
        total = torch.zeros(cols, depth, device=dy_t.device)
        for block, r in _slices(rows):
            index = 0 if fault == "scale of the first block" else block
            scales = scale_dy[:, index, None] * scale_x[None, :, index]
            used = inside[r].any() if fault != "scales of blocks without rows" else True
            total += torch.where(torch.as_tensor(used), (dy[:, r] @ x[:, r].t()) * scales, 0)
        if fault == "gradient of an empty group left as it was":
            total = torch.where(ends[group] > starts[group], total, torch.full_like(total, torch.nan))
        results.append(total)
    return torch.stack(results).half() if results else a.new_zeros((0, cols, depth), dtype=torch.float16)


@_weights.register_fake
def _(dy_t, x_t, scale_dy, scale_x, offsets, dy_e4m3, x_e4m3, fault):
    return dy_t.new_empty((offsets.shape[0], dy_t.shape[0], x_t.shape[0]), dtype=torch.float16)


def grouped_gemm_fp8(offsets, formats, out_dtype=torch.float16, *, fault="", **inputs):
    """The signature of SPEC's callables and the public ops' checks, as far as the cases here need them."""
    if fault != "no checks":
        check(offsets, **inputs)
    e4m3 = [f == FORMATS[0] for f in formats]
    if "dy_t" in inputs:
        return _weights(*(inputs[n] for n in ("dy_t", "x_t", "scale_dy", "scale_x")), offsets, *e4m3, fault)
    return _rows(*(inputs[n] for n in ("x", "weights", "scale_x", "scale_w")), offsets, *e4m3, fault)


def check(offsets, **inputs) -> None:
    """Raises TypeError or ValueError naming the argument."""

    def blocks(size: int) -> int:
        return (size + BLOCK - 1) // BLOCK

    if "dy_t" in inputs:
        (cols, rows), depth = inputs["dy_t"].shape, inputs["x_t"].shape[0]
        shapes = {
            "x_t": (depth, rows),
            "scale_dy": (cols, blocks(rows)),
            "scale_x": (depth, blocks(rows)),
        }
    else:
        (rows, depth), (groups, cols, _) = inputs["x"].shape, inputs["weights"].shape
        shapes = {
            "weights": (groups, cols, depth),
            "scale_x": (rows, blocks(depth)),
            "scale_w": (groups, blocks(cols), blocks(depth)),
            "offsets": (groups,),
        }
    for name, tensor in {**inputs, "offsets": offsets}.items():
        if name in shapes and tensor.shape != shapes[name]:
            raise ValueError(f"{name} must be {list(shapes[name])}, got {list(tensor.shape)}")
        if name.startswith("scale_") and tensor.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, got {tensor.dtype}")
        if tensor.device != offsets.device:
            raise ValueError(f"{name} must be on offsets' device {offsets.device}, got {tensor.device}")

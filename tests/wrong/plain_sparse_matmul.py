"""A plain product with a 2:4 weight in PyTorch that is right unless it is told which fault to have.

Every fault is one line that says `fault == "..."`; "" is the control.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

_CALLS = itertools.count()
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)


def _columns(metadata: torch.Tensor, rows: int, depth: int, fault: str, eight: bool = False) -> torch.Tensor:
    """The column of each value, by the place of its code; [rows, depth / 2]. `eight`: in the order of 8 bits."""
    n = torch.arange(rows, device=metadata.device)[:, None]
    chunk = torch.arange(depth // 4, device=metadata.device)[None, :]
    if fault == "rows 8 apart exchanged":
        n = n ^ 8
    half, row = n % 16 // 8, n % 8
    sixteenth = chunk % 16 // 4
    if fault == "metadata of the first 16 of k":
        sixteenth = 0 * sixteenth
    n = n.clamp(max=16 * metadata.shape[1] - 1)
    place = sixteenth * 2 + half
    if eight and fault != "order of 16 bits":
        place = sixteenth // 2 * 4 + half * 2 + sixteenth % 2
    if fault == "rows and columns of a word exchanged":
        place = half * 4 + sixteenth
    block = 0 * chunk if fault == "metadata of the first 64 of k" else chunk // 16
    words = metadata.contiguous()[block, n // 16, row * 8 + place].long()
    code = words >> 4 * (chunk % 4)
    i, j = code & 3, code >> 2 & 3
    if fault == "positions exchanged":
        i, j = j, i
    if fault == "second position counted from the first":
        j = (i + j) % 4
    if fault == "sparsity ignored":
        i, j = 0 * i, 0 * j + 1
    return (torch.stack([i, j], -1) + 4 * chunk[..., None]).flatten(1)


def _weight(values: torch.Tensor, metadata: torch.Tensor, fault: str) -> torch.Tensor:
    rows, depth = values.shape[0], 2 * values.shape[1]
    columns = _columns(metadata, rows, depth, fault)
    return torch.zeros(rows, depth, device=values.device).scatter(1, columns, values.float())


def _act(z: torch.Tensor, activation: str | None, fault: str) -> torch.Tensor:
    if activation is None:
        return z
    return F.gelu(z, approximate="none" if fault == "exact gelu" else "tanh")


@torch.library.custom_op("plain_sparse_matmul::fwd", mutates_args=())
def _fwd(
    x: torch.Tensor,
    values: torch.Tensor,
    metadata: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    fault: str,
) -> torch.Tensor:
    weight = _weight(values, metadata, fault)
    if fault == "last chunk dropped":
        weight[:, -4:] = 0
    if fault == "products of zero skipped":
        x = torch.where(x.isfinite(), x, 0)
    z = F.linear(x.float(), weight)
    if bias is not None and fault != "bias dropped":
        z = z + bias.float()
    y = _act(z, activation, fault)
    if fault == "another order at each call" and next(_CALLS) % 2:
        y = y * (1 + 2.0**-23)
    return y.to(x.dtype)


@_fwd.register_fake
def _(x, values, metadata, bias, activation, fault):
    return x.new_empty((*x.shape[:-1], values.shape[0]))


@torch.library.custom_op("plain_sparse_matmul::bwd", mutates_args=())
def _bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    values: torch.Tensor,
    metadata: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    fault: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight, dz = _weight(values, metadata, fault), dy.float()
    if activation is not None and fault != "derivative of the activation dropped":
        z = F.linear(x.float(), weight, None if bias is None else bias.float())
        dz = torch.ops.aten.gelu_backward(dz, z, approximate="tanh")
    dx = dz @ weight
    dense = dz.flatten(0, -2).T @ x.float().flatten(0, -2)
    columns = _columns(metadata, values.shape[0], 2 * values.shape[1], fault)
    if fault == "gradient of the first two of each chunk":
        columns = _columns(metadata, values.shape[0], 2 * values.shape[1], "sparsity ignored")
    dbias = dz.flatten(0, -2).sum(0)
    if fault == "gradient of the bias a mean":
        dbias = dbias / max(1, dz.numel() // max(1, dz.shape[-1]))
    return dx.to(x.dtype), dense.gather(1, columns).to(x.dtype), dbias.to(x.dtype)


@_bwd.register_fake
def _(dy, x, values, metadata, bias, activation, fault):
    return x.new_empty(x.shape), values.new_empty(values.shape), values.new_empty(values.shape[:1])


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.activation, ctx.fault = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, dy):
    bias = ctx.saved_tensors[3]
    dx, dvalues, dbias = _bwd(dy, *ctx.saved_tensors, ctx.activation, ctx.fault)
    return dx, dvalues, None, None if bias is None else dbias, None, None


_fwd.register_autograd(_backward, setup_context=_save)


def _numbers(codes: torch.Tensor, e4m3: bool, fault: str) -> torch.Tensor:
    return codes.contiguous().view(FORMATS[not (e4m3 or fault == "e5m2 read as e4m3")]).float()


@torch.library.custom_op("plain_sparse_matmul::scaled", mutates_args=())
def _scaled(
    x: torch.Tensor,
    values: torch.Tensor,
    metadata: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    activation: str | None,
    x_e4m3: bool,
    w_e4m3: bool,
    fault: str,
) -> torch.Tensor:
    rows, depth = values.shape[0], 2 * values.shape[1]
    columns = _columns(metadata, rows, depth, fault, eight=True)
    weight = torch.zeros(rows, depth, device=x.device).scatter(1, columns, _numbers(values, w_e4m3, fault))
    of_x, of_w = scale_x.reshape(-1, 1), scale_w.reshape(1, -1)
    if fault == "scale of the weight dropped":
        of_w = torch.full_like(of_w, 1 / 768)
    if fault == "scale of the row before":
        of_x = of_x.roll(1, 0)
    z = (_numbers(x, x_e4m3, fault) @ weight.t()) * (of_x * of_w)
    return _act(z, activation, fault).half()


@_scaled.register_fake
def _(x, values, metadata, scale_x, scale_w, activation, x_e4m3, w_e4m3, fault):
    return x.new_empty((x.shape[0], values.shape[0]), dtype=torch.float16)


def sparse_matmul(
    x,
    values,
    metadata,
    bias=None,
    activation=None,
    scale_x=None,
    scale_w=None,
    formats=None,
    out_dtype=torch.float16,
    fault="",
):
    """The public op on the tensors of a compressed weight, its checks, and a fault. With `formats` x and values are
    bytes, and the result is in fp16."""
    if formats is not None:
        check8(x, values, metadata, scale_x, scale_w)
        of = (format_ == FORMATS[0] for format_ in formats)
        return _scaled(x, values, metadata, scale_x, scale_w, activation, *of, fault)
    if fault != "no checks":
        check(x, values, metadata, bias)
    return _fwd(x, values, metadata, bias, activation, fault)


def check(x, values, metadata, bias) -> None:
    """Raises TypeError or ValueError naming the argument."""
    for name, tensor in (("x", x), ("values", values), ("bias", bias)):
        if tensor is not None and (tensor.dtype not in DTYPES or tensor.dtype != x.dtype):
            raise TypeError(f"{name} must be fp32, fp16 or bf16, and all of one dtype, got {tensor.dtype}")
        if tensor is not None and tensor.device != metadata.device:
            raise ValueError(f"{name} must be on metadata's device {metadata.device}, got {tensor.device}")
    if metadata.dtype != torch.int16:
        raise TypeError(f"metadata must be int16, got {metadata.dtype}")
    if values.dim() != 2 or 2 * values.shape[1] != x.shape[-1]:
        raise ValueError(f"values must be [N, {x.shape[-1] // 2}], got {tuple(values.shape)}")
    rows, depth = values.shape[0], x.shape[-1]
    wanted = -(-depth // 64), -(-rows // 16), 64
    if metadata.shape != wanted:
        raise ValueError(f"metadata must be {wanted}, got {tuple(metadata.shape)}")
    if bias is not None and bias.shape != values.shape[:1]:
        raise ValueError(f"bias must be {tuple(values.shape[:1])}, got {tuple(bias.shape)}")


def check8(x, values, metadata, scale_x, scale_w) -> None:
    """As `check`, of numbers of 8 bits."""
    rows, depth = values.shape[0], 2 * values.shape[1]
    if x.dim() != 2 or x.shape[1] != depth or metadata.shape != (-(-depth // 64), -(-rows // 16), 64):
        raise ValueError(
            f"x must be [M, {depth}] and metadata of values, got {tuple(x.shape)}, {tuple(metadata.shape)}"
        )
    for name, scale, count in (("scale_x", scale_x, x.shape[0]), ("scale_w", scale_w, rows)):
        if scale.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, got {scale.dtype}")
        if scale.shape not in ((), (count,), (count, 1)) or (scale.dim() == 0) != (scale_x.dim() == 0):
            raise ValueError(f"{name} must be [] or [{count}], got {tuple(scale.shape)}")
    for name, tensor in (("values", values), ("metadata", metadata), ("scale_x", scale_x), ("scale_w", scale_w)):
        if tensor.device != x.device:
            raise ValueError(f"{name} must be on x's device {x.device}, got {tensor.device}")

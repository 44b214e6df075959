"""The product with a compressed weight in plain PyTorch: the oracle."""

from __future__ import annotations

import torch
import torch.nn.functional as F

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


def sparse_matmul_reference(
    x: torch.Tensor,
    compressed: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    scale_x: torch.Tensor | None = None,
    scale_w: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    values, metadata = compressed
    if x.dtype in EIGHT_BITS:
        return _scaled(x, values, metadata, bias, activation, scale_x, scale_w, out_dtype or torch.bfloat16)
    weight = decompressed(values, metadata).to(x.dtype)
    for name, tensor, shape in (("x", x, (*x.shape[:-1], weight.shape[1])), ("bias", bias, weight.shape[:1])):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must be {tuple(shape)}, got {tuple(tensor.shape)}")
    return activated(F.linear(x, weight, bias), activation)


def _scaled(x, values, metadata, bias, activation, scale_x, scale_w, out_dtype) -> torch.Tensor:
    """Of numbers of 8 bits, which PyTorch decodes exactly. Computes in fp32 or, given anything in fp64, in fp64, which
    the result is in then."""
    given = [t for t in (scale_x, scale_w, bias) if t is not None]
    wide = torch.float64 if any(t.dtype == torch.float64 for t in given) else torch.float32
    weight = decompressed(values, metadata).to(wide)
    (rows, depth), cols = x.shape, weight.shape[0]
    if depth != weight.shape[1] or (bias is not None and bias.shape != (cols,)):
        raise ValueError(f"x must be [M, {weight.shape[1]}] and bias [{cols}], got {list(x.shape)} and bias")
    shapes = scale_x.shape, scale_w.shape
    if shapes != ((), ()) and not (shapes[0] in ((rows,), (rows, 1)) and shapes[1] in ((cols,), (cols, 1))):
        raise ValueError(f"scale_x and scale_w must be of the tensor or of {rows} and {cols} rows, got {shapes}")
    z = (x.to(wide) @ weight.t()) * (scale_x.to(wide).reshape(-1, 1) * scale_w.to(wide).reshape(1, -1))
    y = activated(z if bias is None else z + bias.to(wide), activation)
    return y if wide == torch.float64 else y.to(out_dtype)


def decompressed(values: torch.Tensor, metadata: torch.Tensor) -> torch.Tensor:
    """The weight [N, K], differentiable in values unless they have 8 bits."""
    rows, half = values.shape
    if values.dtype in EIGHT_BITS:
        codes = values.view(torch.uint8)
        columns = kept(metadata, rows, 2 * half, eight=True)
        return codes.new_zeros(rows, 2 * half).scatter(1, columns, codes).view(values.dtype)
    return values.new_zeros(rows, 2 * half).scatter(1, kept(metadata, rows, 2 * half), values)


def kept(metadata: torch.Tensor, rows: int, depth: int, eight: bool = False) -> torch.Tensor:
    """The column of each value: int64 [rows, depth / 2]. `eight`: in the order of values of 8 bits."""
    blocks_k, blocks_n, _ = metadata.shape
    if eight:  # [k block, n block, row of 8, 32 of k, half of the rows, half of the 32]
        words = metadata.reshape(blocks_k, blocks_n, 8, 2, 2, 2).permute(1, 4, 2, 0, 3, 5)
        words = words.reshape(16 * blocks_n, 4 * blocks_k)
    else:  # [k block, n block, row of 8, 16 of k, half of the rows] -> [N, 16 of k]
        words = metadata.view(blocks_k, blocks_n, 8, 4, 2).permute(1, 4, 2, 0, 3).reshape(16 * blocks_n, 4 * blocks_k)
    bits = words[:rows].long().unsqueeze(-1) >> torch.arange(0, 16, 2, device=words.device)
    chunk = torch.arange(0, depth, 4, device=words.device).repeat_interleave(2)
    return (bits & 3).flatten(1)[:, : depth // 2] + chunk


def activated(z: torch.Tensor, name: str | None) -> torch.Tensor:
    if name is None:
        return z
    if name.startswith("gelu"):
        return F.gelu(z, approximate="tanh" if name == "gelu_tanh" else "none")
    if name == "relu_sq":
        return F.relu(z).square()
    return {"silu": F.silu, "relu": F.relu}[name](z)

"""The linear layer with a compressed weight in plain PyTorch: the oracle."""

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
    """The fp8 case; PyTorch decodes fp8 exactly. Computes in fp32 or, if a scale or the bias is fp64, in fp64, and then
    returns fp64."""
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


def compressed(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and metadata of a weight [N, K] of 16 or 32 bits: the first two non-zeros of each chunk, completed by
    zeros at the lowest other positions, in order. Codes out of bounds are those of zeros."""
    rows, depth = w.shape
    there = (w != 0).unflatten(1, (-1, 4)) if depth else w.new_zeros(rows, 0, 4, dtype=torch.bool)
    pair = there.int().sort(dim=-1, descending=True, stable=True).indices[..., :2].sort(dim=-1).values
    values = w.gather(1, (pair + torch.arange(0, depth, 4, device=w.device)[:, None]).flatten(1))
    blocks_n, blocks_k = -(-rows // 16), -(-depth // 64)
    codes = pair.new_full((16 * blocks_n, 16 * blocks_k), 4)
    codes[:rows, : depth // 4] = pair[..., 0] + 4 * pair[..., 1]
    words = (codes.view(16 * blocks_n, 4 * blocks_k, 4) << torch.arange(0, 16, 4, device=w.device)).sum(-1)
    words = words.view(blocks_n, 2, 8, blocks_k, 4).permute(3, 0, 2, 4, 1).reshape(blocks_k, blocks_n, 64)
    return values, (words - 65536 * (words >> 15)).to(torch.int16)


def pruned(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keeps the two largest magnitudes of each chunk; returns the result and the mask. An element is kept if fewer than
    two precede it: larger, or equal at a lower position. NaN is the largest."""
    sizes, wrong = w.abs(), w.isnan()
    sizes, wrong = sizes.masked_fill(wrong, 0).unflatten(-1, (-1, 4)), wrong.unflatten(-1, (-1, 4))
    a, b, nan_a, nan_b = (t.unsqueeze(axis) for t in (sizes, wrong) for axis in (-1, -2))
    larger = (nan_b & ~nan_a) | ((nan_a == nan_b) & (b > a))
    lower = torch.ones(4, 4, dtype=torch.bool, device=w.device).tril(-1)
    ahead = larger | ((nan_a == nan_b) & (a == b) & lower)
    mask = (ahead.sum(-1) < 2).flatten(-2)
    return torch.where(mask, w, 0), mask


def decompressed(values: torch.Tensor, metadata: torch.Tensor) -> torch.Tensor:
    """The dense weight [N, K], differentiable in values unless they are fp8."""
    rows, half = values.shape
    if values.dtype in EIGHT_BITS:
        codes = values.view(torch.uint8)
        columns = kept(metadata, rows, 2 * half, eight=True)
        return codes.new_zeros(rows, 2 * half).scatter(1, columns, codes).view(values.dtype)
    return values.new_zeros(rows, 2 * half).scatter(1, kept(metadata, rows, 2 * half), values)


def kept(metadata: torch.Tensor, rows: int, depth: int, eight: bool = False) -> torch.Tensor:
    """The column of each value: int64 [rows, depth / 2]. `eight`: metadata in the order for 8-bit values."""
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

"""The grouped fp8 GEMMs in plain PyTorch, the reference of the tests. The host reads the offsets. PyTorch decodes
float8 exactly. Computes in fp32 or, given fp64, in fp64."""

from __future__ import annotations

import torch

BLOCK = 128


def grouped_gemm_fp8_reference(
    x: torch.Tensor,
    weights: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    offsets: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """x [T, K] and weights [G, N, K] in float8, or the same values in a wider dtype. The result is fp64 if any operand
    is."""
    (rows, depth), (groups, cols, _) = x.shape, weights.shape
    lines = _blocks(depth)
    _expect(weights, (groups, cols, depth))
    _expect(scale_x, (rows, lines))
    _expect(scale_w, (groups, _blocks(cols), lines))
    _expect(offsets, (groups,))
    wide = _wide(x, weights, scale_x, scale_w)
    x, weights, scale_x, scale_w = (t.to(wide) for t in (x, weights, scale_x, scale_w))
    pieces, last = [], 0
    for group, (start, end) in enumerate(_rows(offsets, rows)):
        of_columns = scale_w[group].repeat_interleave(BLOCK, 0)[:cols]
        y, last = x.new_zeros(end - start, cols), end
        for block in range(lines):
            k = slice(block * BLOCK, (block + 1) * BLOCK)
            scales = scale_x[start:end, block, None] * of_columns[None, :, block]
            y = y + (x[start:end, k] @ weights[group, :, k].t()) * scales
        pieces.append(y)
    y = torch.cat([*pieces, x.new_zeros(rows - last, cols)])
    return y if wide == torch.float64 else y.to(out_dtype)


def grouped_gemm_fp8_wgrad_reference(
    dy_t: torch.Tensor,
    x_t: torch.Tensor,
    scale_dy: torch.Tensor,
    scale_x: torch.Tensor,
    offsets: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """dy_t [N, T] and x_t [K, T], as above. Blocks of rows are counted from row 0 of the tensor, and cut at the ends of
    a group."""
    (cols, rows), depth, groups = dy_t.shape, x_t.shape[0], offsets.shape[0]
    _expect(x_t, (depth, rows))
    _expect(scale_dy, (cols, _blocks(rows)))
    _expect(scale_x, (depth, _blocks(rows)))
    _expect(offsets, (groups,))
    wide = _wide(dy_t, x_t, scale_dy, scale_x)
    dy_t, x_t, scale_dy, scale_x = (t.to(wide) for t in (dy_t, x_t, scale_dy, scale_x))
    results = [dy_t.new_zeros(0, cols, depth)]
    for start, end in _rows(offsets, rows):
        dw = dy_t.new_zeros(cols, depth)
        for block in range(start // BLOCK, _blocks(end) if end > start else 0):
            r = slice(max(start, block * BLOCK), min(end, (block + 1) * BLOCK))
            dw = dw + (dy_t[:, r] @ x_t[:, r].t()) * (scale_dy[:, block, None] * scale_x[None, :, block])
        results.append(dw[None])
    dw = torch.cat(results)
    return dw if wide == torch.float64 else dw.to(out_dtype)


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


def _rows(offsets: torch.Tensor, rows: int) -> list[tuple[int, int]]:
    """First row and end of each group, from offsets that are clamped to be monotonic and within the rows."""
    if not offsets.numel():
        return []
    ends = offsets.clamp(0, rows).cummax(0).values.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _expect(tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"expected a tensor of shape {shape}, got {tuple(tensor.shape)}")


def _wide(*tensors: torch.Tensor) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32

"""fp8_matmul in plain PyTorch, the reference of the tests. PyTorch decodes float8 exactly. Computes in fp32 or, given
fp64, in fp64."""

from __future__ import annotations

import torch

BLOCK = 128


def fp8_matmul_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """a [M, K] and b [N, K] in float8, or the same values in a wider dtype. The result is fp64 if any operand is."""
    wide = torch.float64 if torch.float64 in (a.dtype, b.dtype, scale_a.dtype, scale_b.dtype) else torch.float32
    (rows, depth), (cols, _) = a.shape, b.shape
    if b.shape[1] != depth or (bias is not None and bias.shape != (cols,)):
        raise ValueError(f"expected b [N, {depth}] and bias [N], got {list(b.shape)} and bias")
    a, b, scale_a, scale_b = (t.to(wide) for t in (a, b, scale_a, scale_b))
    if scale_a.shape == () and scale_b.shape == ():
        y = (a @ b.t()) * (scale_a * scale_b)
    elif scale_a.shape in ((rows,), (rows, 1)) and scale_b.shape in ((cols,), (cols, 1)):
        y = (a @ b.t()) * (scale_a.reshape(rows, 1) * scale_b.reshape(1, cols))
    else:
        y = _by_blocks(a, b, scale_a, scale_b)
    if bias is not None:
        y = y + bias.to(wide)
    return y if wide == torch.float64 else y.to(out_dtype)


def _by_blocks(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
    """The sum over K-blocks of 128, each times the scales of its rows and columns."""
    (rows, depth), cols = a.shape, b.shape[0]
    blocks = -(-depth // BLOCK)
    of_blocks = (-(-cols // BLOCK), blocks)
    if scale_a.shape != (rows, blocks) or scale_b.shape not in (of_blocks, (cols, blocks)):
        raise ValueError(f"scale_a and scale_b must fit a and b, got {list(scale_a.shape)} and {list(scale_b.shape)}")
    if scale_b.shape == of_blocks:
        scale_b = scale_b.repeat_interleave(BLOCK, 0)[:cols]
    y = a.new_zeros(rows, cols)
    for block in range(blocks):
        k = slice(block * BLOCK, (block + 1) * BLOCK)
        y = y + (a[:, k] @ b[:, k].t()) * (scale_a[:, block, None] * scale_b[None, :, block])
    return y

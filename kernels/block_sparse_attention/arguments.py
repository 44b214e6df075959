"""Checks of the arguments of the public functions, and normalisation of the shapes of masks and biases."""

from __future__ import annotations

import math

import torch

from .checks import FLOATS, kind, runnable
from .index import BlockIndex
from .versions import BACKWARD, FORWARD

MAX_DIM = 256
MAX_OFFSET = 2**31 - 1
BLOCK_SIZES = (64, 128)

# Normal fp32 numbers, also times log2(e): a smaller scale is 0 in a kernel, and 0 times a masked score of −inf is NaN.
LEAST_SCALE, MOST_SCALE = 2.0**-126, 2.0**126


def checked(q, k, v, block_mask, block_bias, block_size, scale, causal, forward, backward):
    """Checks the arguments of a call. Returns (table of an index or None, mask in four dimensions or None, bias
    expanded to all blocks, the op's options: scale, block, causal, backward, forward)."""
    _check(q, k, v, block_size)
    if scale is None:
        scale = 1 / math.sqrt(q.shape[3])
    elif not LEAST_SCALE <= scale <= MOST_SCALE:
        raise ValueError(f"block_sparse_attention: scale must be a positive number in the range of fp32, got {scale}")
    for name, version, versions in (("forward", forward, FORWARD), ("backward", backward, BACKWARD)):
        if version not in versions:
            raise ValueError(f"block_sparse_attention: {name} must be one of {', '.join(versions)}, got {version!r}")
    queries, keys = q.shape[2], k.shape[2]
    shape = (q.shape[0], q.shape[1], -(-queries // block_size), -(-keys // block_size))
    check_blocks(*shape[2:], block_size)
    if block_bias is not None:
        block_bias = _blocks("block_bias", block_bias, torch.float32, q, shape).expand(shape)
    options = (float(scale), block_size, causal, backward, forward)
    if isinstance(block_mask, BlockIndex):
        return _table(block_mask, q, keys, block_size, causal), None, block_bias, options
    mask = distinct(_blocks("block_mask", block_mask, torch.bool, q, shape))
    return None, mask, block_bias, options


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_size: int) -> None:
    name = "block_sparse_attention"
    if not isinstance(q, torch.Tensor) or q.dtype not in FLOATS:
        raise TypeError(f"{name}: q must be a tensor of float32, float16 or bfloat16, got {kind(q)}")
    if q.dim() != 4 or not 1 <= q.shape[3] <= MAX_DIM:
        raise ValueError(f"{name}: q must be [B, H, S, D] with 1 <= D <= {MAX_DIM}, got shape {tuple(q.shape)}")
    for other, tensor in (("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != q.dtype:
            raise TypeError(f"{name}: {other} must be a tensor of q's dtype {q.dtype}, got {kind(tensor)}")
        if tensor.device != q.device:
            raise ValueError(f"{name}: {other} must be on q's device {q.device}, got {tensor.device}")
        if tensor.dim() != 4 or tensor.shape[0] != q.shape[0] or tensor.shape[3] != q.shape[3]:
            wanted = f"[{q.shape[0]}, Hkv, Sk, {q.shape[3]}] like q"
            raise ValueError(f"{name}: {other} must be {wanted}, got shape {tuple(tensor.shape)}")
    if v.shape != k.shape:
        raise ValueError(f"{name}: v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{name}: q must have a multiple of k's {k.shape[1]} heads, got {q.shape[1]}")
    check_block_size(block_size)
    runnable(name, "q", q)


def check_blocks(rows: int, columns: int, block_size: int) -> None:
    """Raises ValueError for a mask that 32-bit offsets in its lists, or 32-bit indices of queries and keys, do not
    hold."""
    if max(rows * (columns + 3), columns * (rows + 3), (rows + columns) * block_size) > MAX_OFFSET:
        raise ValueError(
            f"block_sparse_attention: a mask of {rows} by {columns} blocks is too large for 32-bit offsets"
        )


def check_block_size(block_size: int) -> None:
    """Raises ValueError for a block size that no kernel supports."""
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_sparse_attention: block_size must be 64 or 128, got {block_size}")


def _blocks(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, q: torch.Tensor, shape: tuple[int, int, int, int]
) -> torch.Tensor:
    """Checks a tensor with one element per block, and returns it in four dimensions."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype:
        raise TypeError(f"block_sparse_attention: {name} must be a tensor of {dtype}, got {kind(tensor)}")
    if tensor.device != q.device:
        raise ValueError(f"block_sparse_attention: {name} must be on q's device {q.device}, got {tensor.device}")
    leading = tensor.shape[:-2]
    fits = all(size in (1, whole) for size, whole in zip(reversed(leading), (shape[1], shape[0]), strict=False))
    if not 2 <= tensor.dim() <= 4 or tensor.shape[-2:] != shape[2:] or not fits:
        wanted = f"[{shape[0]} or 1, {shape[1]} or 1, {shape[2]}, {shape[3]}], or without the first of them"
        raise ValueError(f"block_sparse_attention: {name} must be {wanted}, got shape {tuple(tensor.shape)}")
    return four(tensor)


def four(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor in four dimensions, with leading ones of size 1."""
    return tensor[(None,) * (4 - tensor.dim())]


def distinct(mask: torch.Tensor) -> torch.Tensor:
    """Returns the mask with expanded dimensions (stride 0) reduced to size 1."""
    for axis in (0, 1):
        if mask.shape[axis] > 1 and mask.stride(axis) == 0:
            mask = mask.narrow(axis, 0, 1)
    return mask


def _table(index: BlockIndex, q: torch.Tensor, keys: int, block_size: int, causal: bool) -> torch.Tensor:
    """Returns the table of an index. Raises ValueError if the index was made for other sizes or options."""
    made, wanted = index[1:], (q.shape[2], keys, block_size, causal)
    if made != wanted:
        raise ValueError(
            f"block_sparse_attention: block_mask must be an index for (queries, keys, block_size, causal) = "
            f"{wanted}, got one for {made}"
        )
    table = index.table
    if table.device != q.device:
        raise ValueError(f"block_sparse_attention: block_mask must be on q's device {q.device}, got {table.device}")
    if table.shape[0] not in (1, q.shape[0]) or table.shape[1] not in (1, q.shape[1]):
        raise ValueError(
            f"block_sparse_attention: block_mask must be an index for {q.shape[0]} or 1 batches and {q.shape[1]} or 1 "
            f"heads, got one for {table.shape[0]} and {table.shape[1]}"
        )
    return table

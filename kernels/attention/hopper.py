"""What the versions for Hopper have in common: the problems that TMA and wgmma take."""

from __future__ import annotations

import math

import torch

from .problem import Problem

ROWS = 64  # of queries for each warp group: one wgmma is 64 rows high
L2_BYTES = 32e6  # what the keys and values of the heads in flight may take up of an H100's or H200's 50 MB


def hopper_refuses(problem: Problem, *others: torch.Tensor) -> str | None:
    """Why no version for Hopper can read a problem and these other tensors of its layout by TMA, or None."""
    refused = hopper_lacks(problem)
    if refused is None and problem.unit(*others) != 8:
        refused = "TMA wants rows, heads and batches on 16-byte boundaries"
    return refused


def hopper_lacks(problem: Problem) -> str | None:
    """The same, wherever the tensors lie."""
    if problem.capability() != (9, 0):
        return "it needs a GPU of compute capability 9.0 (Hopper)"
    if problem.q.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {problem.q.dtype}"
    if problem.left >= 0 or problem.right > 0:
        return "it has no window"
    tiles = problem.all_heads * -(-problem.queries // ROWS)
    if max(tiles, problem.queries + problem.k.shape[2]) >= 2**31:
        return "it counts tiles in 32 bits"
    return None


def section(problem: Problem) -> int:
    """How many heads go at a time where the longest row blocks of each come first: as their keys and values fit L2."""
    fitting = L2_BYTES / (4 * problem.keys * problem.dim)
    return min(problem.all_heads, problem.group * 2 ** int(math.log2(max(1.0, fitting))))


def whole(x: torch.Tensor) -> torch.Tensor:
    """x, copied if it is expanded (a stride of 0): CUDA's documentation leaves open what TMA makes of that."""
    expanded = any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.contiguous() if expanded else x

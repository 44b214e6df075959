"""How the kernels are launched: every choice is a pure function of the problem and the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True)
class Config:
    """Each CTA has a tile of `block_m` rows by `block_n` columns."""

    block_m: int
    block_n: int
    num_warps: int


def pick_config(rows: int, dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    """Configuration of both kernels. Pure. The numbers are a start: `tune` says what to put here."""
    block_n = min(triton.next_power_of_2(dim), 2048)
    return Config(block_m=max(1, 2048 // block_n), block_n=block_n, num_warps=4)

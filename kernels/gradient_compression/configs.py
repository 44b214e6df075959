"""How gradient_compression's kernels are launched: pure functions of the problem and the GPU."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 256  # elements that share a scale: 4 bytes of 256, 512 or 1024


@dataclass(frozen=True)
class Config:
    """Each CTA has `rows` blocks of BLOCK elements."""

    rows: int
    num_warps: int


def pick_config(blocks: int, capability: tuple[int, int]) -> Config:
    """Configuration of all three kernels, of `blocks` blocks in a chunk. Pure.

    A warp has whole blocks, so that the maximum of one never crosses warps: 8 elements a lane. Eight blocks a CTA of 4
    warps are 16 elements a thread, two 16-byte loads of bf16 in flight. Small chunks take smaller CTAs, to fill more
    SMs. Not tuned by measurement yet.
    """
    if blocks < 8 * 132:
        return Config(4, 4)
    return Config(8, 4)

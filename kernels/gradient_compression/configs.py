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

    A warp has whole blocks, so that the maximum of one never crosses warps: 8 elements a lane. Sixteen blocks a CTA of
    4 warps are 32 elements a thread: four 16-byte loads of bf16 in flight, 16 bytes of 4-bit codes to store. Small
    chunks take smaller CTAs, to fill more SMs. Of 256 MiB in 4 bits on two H200 sixteen take 266 us; with codes that
    stay with their lane, and so stores of 4 bytes over NVLink, eight take 302 and sixteen 384 (EXPERIMENTS.md).
    """
    if blocks < 8 * 132:
        return Config(4, 4)
    if blocks < 64 * 132:
        return Config(8, 4)
    return Config(16, 4)

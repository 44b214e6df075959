"""How gradient_compression's kernels are launched: pure functions of the problem and the GPU."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 256  # elements that share a scale: 4 bytes of 256, 512 or 1024


@dataclass(frozen=True)
class Config:
    """Each CTA processes `rows` blocks of BLOCK elements."""

    rows: int
    num_warps: int


def pick_config(blocks: int, capability: tuple[int, int]) -> Config:
    """Configuration of all kernels, for chunks of `blocks` blocks. Pure.

    A warp processes entire blocks, so that the maximum of a block needs one warp only: 8 elements per lane. Sixteen
    blocks per CTA of 4 warps are 32 elements per thread: four 16-byte loads of bf16 in flight, 16 bytes of 4-bit codes
    to store. Small chunks use smaller CTAs, to fill more SMs. For 256 MiB in 4 bits on two H200, sixteen blocks take
    266 us. If codes stay in their lane, so that stores over NVLink have 4 bytes, eight blocks take 302 us and sixteen
    384 (EXPERIMENTS.md).
    """
    if blocks < 8 * 132:
        return Config(4, 4)
    if blocks < 64 * 132:
        return Config(8, 4)
    return Config(16, 4)

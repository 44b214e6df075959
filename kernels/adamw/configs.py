"""How the kernels of adamw are launched: a pure function of the problem and the GPU."""

from __future__ import annotations

from dataclasses import dataclass

STEP_BLOCK = 1024  # parameters per CTA of _adamw_step_kernel
SUMS_BLOCK = 2048  # partial sums of squares per iteration of _adamw_clip_kernel
EVICT_LAST_ELEMENTS = 4_000_000  # about 110 MB, twice the L2 of an H100 or H200


@dataclass(frozen=True)
class Config:
    """One CTA per `block` elements of a tensor. `eviction` is the L2 policy of the loads."""

    block: int
    num_warps: int
    eviction: str


def pick_config(elements: int, capability: tuple[int, int]) -> Config:
    """Configuration for parameters of that many elements in total. Pure.

    Always 1024 elements and 8 warps per CTA. So a thread has four elements, one access of 16 bytes to each fp32 tensor,
    and with 32 registers occupancy is full. evict_last above 4 million elements; smaller sizes were not measured with
    it.

    Record: `reports/h200` (bench and tune of adamw); the comparisons are in EXPERIMENTS.md.
    """
    return Config(1024, 8, "evict_last" if elements > EVICT_LAST_ELEMENTS else "")


#: Config of _adamw_norm_kernel: 16 KB of bf16 per CTA, four accesses of 16 bytes per thread. Reckoned, not measured.
NORM = Config(block=8192, num_warps=8, eviction="")

"""How the kernels of adamw are launched: a pure function of the problem and the GPU."""

from __future__ import annotations

from dataclasses import dataclass

STEP_BLOCK = 1024  # steps that one CTA of the counting kernel advances
EVICT_LAST_ELEMENTS = 4_000_000  # about 110 MB, twice the L2 of an H100 or H200


@dataclass(frozen=True)
class Config:
    """A CTA for each `block` elements of a tensor. `eviction` is the L2 policy of the loads."""

    block: int
    num_warps: int
    eviction: str


def pick_config(elements: int, capability: tuple[int, int]) -> Config:
    """Configuration for that many elements in all. Pure.

    Four elements a thread: one access of 16 bytes to each fp32 tensor, and 32 registers, which is full occupancy.
    evict_last from 4 million elements on; the least size at which it is a gain was not measured.

    Record: `reports/h200` (bench and tune of adamw); the comparisons are in EXPERIMENTS.md.
    """
    return Config(1024, 8, "evict_last" if elements > EVICT_LAST_ELEMENTS else "")

"""Launch configurations of the forward of heads that share their input, in CUDA C++ (sm90/heads.cuh). Every choice is a
pure function of the problem and the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import triton

BLOCK = 128  # rows of a CTA, and columns of the hidden at a time
MAX_DIM = 512  # columns of x that a consumer warpgroup keeps in registers
MAX_OUT = 8  # N of mma.sync: columns of y of a head
MIN_ROWS = 256


@dataclass(frozen=True)
class CudaConfig:
    """A unit of work is a tile of rows and `heads` heads. `cluster` CTAs share their loads of w1, in a circular buffer
    of `stages` pipeline stages of 64 columns."""

    heads: int
    cluster: int
    stages: int


def pick_backend(backend: str, rows: int, possible: bool) -> str:
    """The version that runs, "triton" or "cuda". `possible`: CUDA C++ supports the problem. Pure. In an exploration on
    one H200, ten heads with layers of 512, 1365 and 3: 564 rows take 43 us with "cuda" and 59 us with "triton", 5000
    rows 154 and 215 us, 205 000 rows 4.6 and 8.1 ms. "auto" selects "cuda" from 257 rows on, where its units of work
    are as large as for 564 rows. With fewer rows Triton's smaller tiles may be faster: not measured."""
    if backend == "auto":
        return "cuda" if possible and rows > MIN_ROWS else "triton"
    return backend


def pick_cuda_config(rows: int, heads: int, hidden: int, sms: int) -> CudaConfig:
    """Configuration of the forward in CUDA C++. Pure.

    Two CTAs share w1, which each SM then reads from L2 at 16 bytes a cycle instead of 32. The number of heads a unit
    minimises the time of all waves: a unit costs its blocks of the hidden, and about half a block more to load x. For
    ten heads of 1365 on 132 SMs, 205 000 rows are 61 waves of two heads, 99 % of the SMs' time (13 waves of ten heads
    are 93 %), and 5000 rows are one wave of four. Among equal times the one with the most heads is chosen. Shared
    memory holds 13 stages in addition to w2. Estimated, 3.8 to 4.4 ms and 115 us; not searched.
    """
    cluster = 2 if rows > BLOCK else 1
    bands, blocks = triton.cdiv(rows, cluster * BLOCK), triton.cdiv(hidden, BLOCK)

    def time(count: int) -> tuple[int, int]:
        rounds = triton.cdiv(bands * triton.cdiv(heads, count), max(1, sms // cluster))
        return rounds * (2 * count * blocks + 1), -count

    return CudaConfig(min(range(1, heads + 1), key=time), cluster, stages=13)

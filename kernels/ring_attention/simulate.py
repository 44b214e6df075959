"""A model of ring attention on many GPUs, from rates that were measured on few. Its results are not measurements."""

from __future__ import annotations

from dataclasses import dataclass

from .layout import even_lengths
from .schedule import Call, Problem, Step, schedule

RANKS = 16  # most ranks that are simulated; with more ranks a sample, which includes the first


@dataclass(frozen=True)
class Rates:
    """Rates of one GPU: flops of the kernel in FLOP/s, link in bytes/s per direction, latency of a step in s (launches
    and the start of a transfer)."""

    flops: float
    link: float
    latency: float = 20e-6


@dataclass(frozen=True)
class Simulated:
    """Seconds of the slowest rank, the part of them that is `exposed` transfers, and efficiency: the time of one GPU at
    the same rate divided by world times these seconds. A model: see `simulate`."""

    world: int
    seconds: float
    exposed: float
    efficiency: float


def simulate(
    world: int,
    queries: int,
    keys: int,
    rates: Rates,
    *,
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    size: int = 2,
    batch: int = 1,
    causal: bool = True,
    layout: str = "zigzag",
    backward: bool = False,
) -> Simulated:
    """Returns the result of a model, not a measurement, of ring attention that fetches keys.

    Each rank runs the steps of its own schedule. A step takes the longer of its GEMMs and of the transfers that overlap
    with it, plus `latency`. All links run at `rates.link` at the same time, in both directions. The first step computes
    with the rank's own block and overlaps the transfers for the second. In the backward, fp32 gradients are sent one
    step later, and nothing overlaps the last of them. With many ranks only some are simulated. The rates are constants,
    so the speed of a rank is overestimated if its blocks are too short to fill its GPU.

    Raises ValueError for a world or lengths below 1.
    """
    if min(world, queries, keys) < 1:
        raise ValueError(f"simulate: world, queries and keys must be at least 1, got {world}, {queries}, {keys}")
    problem = Problem(layout, causal, even_lengths(queries, world, layout), even_lengths(keys, world, layout))
    flops = batch * heads * dim * (10 if backward else 4)
    row = batch * kv_heads * dim * 2

    def seconds(moved: int) -> float:
        return moved / rates.link

    slowest = (0.0, 0.0)
    for rank in range(0, world, -(-world // RANKS)):
        steps = schedule(problem, rank, "keys")
        lasts = exposed = 0.0
        for s, step in enumerate(steps):
            mine = sum(call.pairs for call in step.calls)
            busy = mine * flops / rates.flops
            moved = seconds(row * size * _moved(steps[s + 1])) if s + 1 < world else 0.0
            moved += seconds(row * 4 * _moved(steps[s - 1])) if backward and s > 1 else 0.0
            lasts += max(busy, moved) + rates.latency
            exposed += max(0.0, moved - busy)
        if backward and world > 1:
            last = seconds(row * 4 * _moved(steps[-1]))
            lasts, exposed = lasts + last, exposed + last
        slowest = max(slowest, (lasts, exposed))
    pairs = Call((0, queries), (0, keys), keys - queries, 0, causal).pairs
    alone = pairs * flops / rates.flops + rates.latency
    return Simulated(world, *slowest, alone / (world * slowest[0]))


def _moved(step: Step) -> int:
    """Returns the larger of the rows that a rank fetches at a step and of those fetched from it: links are duplex."""
    return max(step.rows[1] - step.rows[0], step.to_rows[1] - step.to_rows[0])

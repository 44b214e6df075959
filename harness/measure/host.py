"""Host time: how long the calling thread is busy with one call, whatever the device does.

A sample is the wall time of a loop of calls over their number. The inputs are so small that the device finishes long
before the next call, and the launch queue is empty when a loop begins. If the device was nevertheless the bottleneck,
the samples say so (`device_bound`). In forward + backward the caller waits for autograd's own thread, so that its work
is included, as it is for a user. Implementations are interleaved, in a new random order each round.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .timing import blamed_on

WARM_UP = 30  # calls, after those that compile: fills the caches of plans and of memory
BOUND = 1.2  # if waiting for the device makes a loop this many times longer, the device is the bottleneck


@dataclass
class Contender:
    """`call` is one call; its result is dropped at once, as in a user's loop."""

    name: str
    call: Callable[[], object]
    samples_us: list[float] = field(default_factory=list)
    synchronised_us: list[float] = field(default_factory=list)

    @property
    def device_bound(self) -> bool:
        """Whether the device was the bottleneck in most rounds."""
        pairs = zip(self.samples_us, self.synchronised_us, strict=True)
        return 2 * sum(waited > BOUND * alone for alone, waited in pairs) > len(self.samples_us)


def measure(
    contenders: Sequence[Contender],
    synchronise: Callable[[], None],
    rounds: int = 21,
    calls: int = 40,
    seed: int | None = None,
) -> None:
    """Fills the contenders' samples: one per round, of `calls` calls each. Raises ContenderFailed for the first that
    fails."""
    order, shuffle = list(contenders), random.Random(seed).shuffle
    for contender in order:
        contender.samples_us, contender.synchronised_us = [], []
        with blamed_on(contender.name):
            for _ in range(WARM_UP):
                contender.call()
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            shuffle(order)
            for contender in order:
                with blamed_on(contender.name):
                    alone, waited = _loop(contender.call, calls, synchronise)
                contender.samples_us.append(alone)
                contender.synchronised_us.append(waited)
            gc.collect()
    finally:
        if collecting:
            gc.enable()


def _loop(call: Callable[[], object], calls: int, synchronise: Callable[[], None]) -> tuple[float, float]:
    """Microseconds per call: of the calls alone, and including the final wait for the device."""
    call()  # warms the processor's caches, which earlier code has filled with other data
    synchronise()
    start = time.perf_counter_ns()
    for _ in range(calls):
        call()
    end = time.perf_counter_ns()
    synchronise()
    return (end - start) / calls / 1e3, (time.perf_counter_ns() - start) / calls / 1e3

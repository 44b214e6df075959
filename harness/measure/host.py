"""Host time: how long the calling thread is busy with one call, whatever the device does.

A sample is the wall time of a loop of calls over their number. The inputs are so small that the device is done long
before the next call, and the queue of launches is empty when a loop begins; where the device was the slower one all the
same, the samples say so (`device_bound`). In forward + backward the caller waits for autograd's own thread, so that its
work is in the time as a user pays it. Implementations take turns, in a fresh random order each round.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

WARM_UP = 30  # calls, after those that compile: caches of plans and of memory are full
BOUND = 1.2  # a loop with the wait for the device takes that many times as long as without: the device was the limit


@dataclass
class Contender:
    """`call` is one call; its result is dropped at once, as in a user's loop."""

    name: str
    call: Callable[[], object]
    samples_us: list[float] = field(default_factory=list)
    synchronised_us: list[float] = field(default_factory=list)

    @property
    def device_bound(self) -> bool:
        """Whether the device was the limit in most rounds."""
        pairs = zip(self.samples_us, self.synchronised_us, strict=True)
        return 2 * sum(waited > BOUND * alone for alone, waited in pairs) > len(self.samples_us)


def measure(
    contenders: Sequence[Contender],
    synchronise: Callable[[], None],
    rounds: int = 21,
    calls: int = 40,
    seed: int | None = None,
) -> None:
    """Fills the contenders' samples: one a round, of `calls` calls each. What a call raises is raised."""
    order, shuffle = list(contenders), random.Random(seed).shuffle
    for contender in order:
        for _ in range(WARM_UP):
            contender.call()
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            shuffle(order)
            for contender in order:
                alone, waited = _loop(contender.call, calls, synchronise)
                contender.samples_us.append(alone)
                contender.synchronised_us.append(waited)
            gc.collect()
    finally:
        if collecting:
            gc.enable()


def _loop(call: Callable[[], object], calls: int, synchronise: Callable[[], None]) -> tuple[float, float]:
    """Microseconds a call: of the calls alone, and with the wait for the device behind them."""
    call()  # what ran before this left the caches of the processor with something else
    synchronise()
    start = time.perf_counter_ns()
    for _ in range(calls):
        call()
    end = time.perf_counter_ns()
    synchronise()
    return (end - start) / calls / 1e3, (time.perf_counter_ns() - start) / calls / 1e3

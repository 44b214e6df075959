"""Time of a collective call: the longest of the ranks' own times.

Every rank runs the contenders in the same random order. Before each sample, outside the timed interval, inputs that
are updated in place are restored, L2 is flushed and all ranks synchronise. Times are exchanged after a whole round.

cold    on GPUs. CUDA events around the call, on each rank. The ranks synchronise on the device: an all-reduce of one
        element is queued before the first event, so that the events of all ranks begin within microseconds of each
        other. A spinning kernel precedes it, for as long as the host takes to queue the call, so that no launch waits
        for the host.
wall    on CPUs: wall-clock time after a barrier. It says nothing about a GPU.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import distributed

from ..measure import stats
from ..measure.gpu_state import Monitor, Reading, by_round, worst
from ..measure.timing import Budget
from .launch import Rank

COLD, WALL = "cold", "wall"
SEED = 20261123
SPIN_HZ = 2e9  # cycles that torch.cuda._sleep takes per second; at a lower clock it only spins longer
SPIN_SECONDS = (5e-4, 2e-2)
#: A call of this many seconds needs no second warm-up call, and no A/A pair: its scatter is small.
LONG_CALL = 0.5
#: Rounds of such long calls take many minutes: after this many seconds, this number of rounds suffices.
LONG_ROUNDS, FEWEST_ROUNDS = 10.0, 3
#: The largest fraction of a single sample that the host may take to queue it. It takes longer if it compiles.
HOST_SHARE = 0.02


@dataclass(frozen=True)
class Call:
    """One call: seconds until it returned and until it was complete, and bytes that it allocated above its inputs."""

    returned: float = 0.0
    took: float = 0.0
    peak: int = 0


@dataclass(frozen=True)
class Contender:
    """One callable to be timed. `run` is None on ranks that take no part. `first`: its first call, if it was made.
    `once`: it takes so long that it has only one sample, after the rounds of the others, without a warm-up. `restore`
    runs before each call: it resets the inputs that a previous call updated in place."""

    name: str
    run: Callable[[], object] | None
    first: Call | None = None
    once: bool = False
    restore: Callable[[], object] = lambda: None


@dataclass
class Samples:
    """Results of a group of contenders, the same on every rank: µs by contender; `slowest` has the slowest rank's."""

    column: str
    stop: str = "rounds"
    looks: int = 1  # planned number of looks
    slowest: dict[str, list[float]] = field(default_factory=dict)
    of_ranks: dict[str, list[list[float]]] = field(default_factory=dict)
    clocks: dict[str, Any] = field(default_factory=dict)
    peaks: dict[str, list[int]] = field(default_factory=dict)  # peak bytes of a call above its inputs, of each rank

    def add(self, names: Sequence[str], times: Sequence[Sequence[float]]) -> None:
        """Adds one round: the times of each rank in the order of `names`."""
        for place, name in enumerate(names):
            of_ranks = [rank[place] for rank in times]
            self.slowest.setdefault(name, []).append(max(of_ranks))
            self.of_ranks.setdefault(name, [[] for _ in times])
            for kept, sample in zip(self.of_ranks[name], of_ranks, strict=True):
                kept.append(sample)

    def columns(self) -> dict[str, dict[str, Any]]:
        """A COLUMN of the record for each contender."""
        return {name: stats.column(samples, self.stop, self.looks) for name, samples in self.slowest.items()}

    def medians_of_ranks(self, name: str) -> list[float]:
        """The median µs of each rank."""
        return [stats.quantile(sorted(samples), 0.5) for samples in self.of_ranks[name]]


class Clock:
    """The clock of one rank. Its methods are collective: all ranks must make the same calls."""

    def __init__(self, rank: Rank, budget: Budget) -> None:
        self.rank, self.budget = rank, budget
        self.on_gpu = rank.device.type == "cuda"
        self._order = random.Random(SEED)
        self._token = torch.zeros(1, device=rank.device)
        if self.on_gpu:
            l2_bytes = torch.cuda.get_device_properties(rank.device).L2_cache_size
            self._flush = torch.empty(2 * l2_bytes // 4, dtype=torch.int32, device=rank.device)
            self._monitor = Monitor(rank.device)
        self._peaks: dict[str, int] = {}

    def measure(self, contenders: Sequence[Contender], label: str) -> Samples:
        """Warms up, then samples until all intervals are narrow enough, or for as long as the budget allows."""
        found = Samples(COLD if self.on_gpu else WALL, looks=len(self.budget.looks))
        self._peaks.clear()
        repeated = [c for c in contenders if not c.once]
        spins = {c.name: self.warm_up(c, f"{label} {c.name}: warm-up") for c in repeated}
        names, begin = [c.name for c in repeated], time.perf_counter()
        readings: list[Reading] = []
        if self.on_gpu:
            self._monitor.readings.clear()
        for index in itertools.count() if repeated else ():
            times: dict[str, float] = {}
            for contender in self._order.sample(repeated, len(repeated)):
                self.rank.beat.step(f"{label} {contender.name}: sample {index + 1}")
                times[contender.name] = self._sample(contender, spins[contender.name])
            self.rank.beat.step(f"{label}: exchange of the times of round {index + 1}")
            rows = self._exchange([*(times[name] for name in names), time.perf_counter() - begin])
            found.add(names, [row[:-1] for row in rows])
            if self.on_gpu:
                readings.append(worst(self._monitor.readings[-len(repeated) :]))
            # Rank 0's clock decides for all: they must stop after the same round.
            if stop := self._stop(found, index + 1, rows[0][-1]):
                found.stop = stop
                break
        for contender in (c for c in contenders if c.once):
            found.add([contender.name], self._once(contender, f"{label} {contender.name}: its one sample"))
            if self.on_gpu and not repeated:
                readings = [self._monitor.readings[-1]]
        found.clocks = self._clocks(found.column, readings)
        of_ranks = gathered(self._peaks, self.rank)
        found.peaks = {c.name: [peaks[c.name] for peaks in of_ranks] for c in contenders}
        return found

    def warm_up(self, contender: Contender, step: str) -> float:
        """Calls it twice, or once if that takes long; its first call counts. Returns how many seconds the device is to
        spin, so that it does not wait for the host."""
        call = contender.first or self._warm_call(contender, step)
        if max(row[0] for row in self._exchange([call.took])) < LONG_CALL:
            call = self._warm_call(contender, step)
        self._peaks[contender.name] = call.peak
        low, high = SPIN_SECONDS
        return min(high, max(low, 1.5 * call.returned))

    def _warm_call(self, contender: Contender, step: str) -> Call:
        self.rank.beat.step(step)
        self.meet()
        return self.call(contender.run, contender.restore)

    def call(self, run: Callable[[], object] | None, restore: Callable[[], object] = lambda: None) -> Call:
        """Calls it on this rank, after `restore`, and waits for its completion."""
        restore()
        self.synchronize()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        before, begin = self._allocated(), time.perf_counter()
        if run is not None:
            run()
        returned = time.perf_counter() - begin
        self.synchronize()
        peak = torch.cuda.max_memory_allocated() - before if self.on_gpu else 0
        return Call(returned, time.perf_counter() - begin, peak)

    def _once(self, contender: Contender, step: str) -> list[list[float]]:
        """µs of one call on each rank: of the first one, or of a second one if the host was slow to queue the first."""
        found: list[list[float]] = []
        for _ in range(2):
            self.rank.beat.step(step)
            returned = 0.0

            def run() -> None:
                nonlocal returned
                begin = time.perf_counter()
                assert contender.run is not None
                contender.run()
                returned = time.perf_counter() - begin

            if self.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            before = self._allocated()
            took = self._sample(replace(contender, run=run if contender.run is not None else None), SPIN_SECONDS[1])
            self._peaks[contender.name] = torch.cuda.max_memory_allocated() - before if self.on_gpu else 0
            rows = self._exchange([took, returned * 1e6])
            found = [row[:1] for row in rows]
            if not self.on_gpu or max(row[1] for row in rows) <= HOST_SHARE * max(row[0] for row in rows):
                break
        return found

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.on_gpu else 0

    def _sample(self, contender: Contender, spin: float) -> float:
        """µs on this rank; 0 if it takes no part."""
        run = contender.run
        contender.restore()
        if not self.on_gpu:
            self.meet()
            begin = time.perf_counter()
            if run is not None:
                run()
            return (time.perf_counter() - begin) * 1e6 if run is not None else 0.0
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        torch.cuda._sleep(int(spin * SPIN_HZ))
        distributed.all_reduce(self._token)
        start.record()
        if run is not None:
            run()
        stop.record()
        self._monitor.read()
        torch.cuda.synchronize()  # also other streams, whose work must not overlap the next sample
        return start.elapsed_time(stop) * 1e3 if run is not None else 0.0

    def _stop(self, found: Samples, rounds: int, elapsed: float) -> str | None:
        """Why sampling ends after so many rounds and seconds, or None."""
        if elapsed > LONG_ROUNDS and rounds >= FEWEST_ROUNDS:
            return "time"
        return self.budget.done(rounds, elapsed, found.slowest.values())

    def meet(self) -> None:
        """A barrier: returns when all ranks have called it."""
        if self.on_gpu:
            distributed.all_reduce(self._token)
            torch.cuda.synchronize()
        else:
            distributed.barrier()

    def synchronize(self) -> None:
        """Waits for this rank's device."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def _exchange(self, figures: Sequence[float]) -> list[list[float]]:
        mine = torch.tensor(figures, dtype=torch.float64, device=self.rank.device)
        rows = [torch.empty_like(mine) for _ in range(self.rank.size)]
        distributed.all_gather(rows, mine)
        return [row.tolist() for row in rows]

    def _clocks(self, column: str, readings: Sequence[Reading]) -> dict[str, Any]:
        """The `clocks` of a row, over all ranks; `readings` are of this rank, one per round."""
        if not self.on_gpu:
            return {}
        rounds = [worst(of_ranks) for of_ranks in zip(*gathered(list(readings), self.rank), strict=True)]
        return {**merged(gathered(self._monitor.summary(), self.rank)), "rounds": {column: by_round(rounds)}}


def gathered(mine: Any, rank: Rank) -> list[Any]:
    """Gathers each rank's value, on every rank."""
    found: list[Any] = [None] * rank.size
    distributed.all_gather_object(found, mine)
    return found


def merged(clocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combines the `clocks` objects of several GPUs into one."""

    def span(name: str) -> list[float]:
        return [min(c[name][0] for c in clocks), max(c[name][1] for c in clocks)]

    return {
        **{name: span(name) for name in ("sm_mhz", "temperature_c", "power_w")},
        "throttle": sorted({reason for c in clocks for reason in c["throttle"]}),
        "throttled_samples": sum(c["throttled_samples"] for c in clocks),
        "samples": sum(c["samples"] for c in clocks),
    }


def differences(numerator: Sequence[float], denominator: Sequence[float], looks: int) -> dict[str, Any]:
    """Median and 95 % interval of the differences of samples taken in the same round."""
    return stats.paired([a - b for a, b in zip(numerator, denominator, strict=True)], looks)

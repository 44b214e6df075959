"""Device time of kernels: cold, warm, in a CUDA graph, by CUPTI, and sustained.

cold    L2 holds nothing of the inputs. CUDA events around the call. The flush before it writes twice the size of L2, so
        that the cache is full of dirty lines, as after any kernel of a real program: each line that the call loads or
        writes evicts one of them, and the traffic is that of the steady state. (After a flush that leaves L2 clean
        a call ends with up to 50 MB of its output not yet written back, and can seem faster than a copy.) The pair of
        events itself costs about 2 µs, which are never subtracted.
warm    called again at once on the same inputs; what fits in L2 stays there. Not measured where each call takes a tenth
        of a second, in which the 15 µs that L2 takes to fill are negligible.
graph   N calls on N sets of inputs, together larger than twice the L2, captured in one CUDA graph; the time of a replay
        divided by N. It has no host time and no event overhead, so it is the headline for calls under 50 µs, and for
        those that cannot be queued before they run, such as a training step of a thousand launches. The gap between two
        dependent kernels of a graph (about 1 µs) is part of it, as it is in any training step.
cupti   the sum of the durations of the kernels that a cold call launched, as CUPTI reports them.

Rules for all columns: implementations are interleaved, in a new random order each round, so that clock drift affects
all equally and ratios can be paired by round. Each round (or each call of it, if the queue does not hold a whole round)
is queued while the stream is blocked (`driver.Gate`), so that no launch waits for the host. NVTX ranges, allocations by
the harness and synchronisation stay outside the events. The data are random, never zeros.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..capture import capture
from ..execute import Run, first_line
from . import memory, stats
from .driver import Gate, evict_persisting_lines
from .gpu_state import Monitor, Reading, by_round

GRAPH_HEADLINE_US = 50.0
NEVER_WARM_US = 1e5
MAX_GRAPH_CALLS = 256
PROBE_SECONDS = 0.5  # within which the host queues, many times over, any call that the queue can hold
FRESH_SETS = 2  # sets of inputs, at different addresses, between which the cold and warm columns alternate
AA = "#again"  # the second instance of an implementation, for the A/A pair


@dataclass(frozen=True)
class Budget:
    """When sampling stops: every interval of a median is narrower than `width` at one of the `looks`, or a bound on
    rounds or seconds is reached.

    `few_rounds` suffice where `min_rounds` take longer than `patience` seconds: runs of a tenth of a second have
    little variance, and each is as long as many short ones. `warmup_rounds` replaces `warmup_seconds`.
    """

    min_rounds: int = 20
    few_rounds: int = 7
    patience: float = 8.0
    max_rounds: int = 300
    seconds: float = 1.5
    width: float = 0.01
    warmup_seconds: float = 0.05
    warmup_rounds: int | None = None

    @property
    def looks(self) -> tuple[int, ...]:
        """The numbers of rounds after which the intervals are checked."""
        return stats.looks_at(self.min_rounds, self.max_rounds)

    def done(self, rounds: int, elapsed: float, samples: Collection[Sequence[float]]) -> str | None:
        """Why sampling ends after so many rounds and seconds, or None."""
        looks = self.looks
        if rounds < (min(self.few_rounds, self.min_rounds) if elapsed > self.patience else self.min_rounds):
            return None
        if rounds in looks and all(stats.converged(s, self.width, len(looks)) for s in samples):
            return "converged"
        return "time" if elapsed > self.seconds else "rounds" if rounds >= self.max_rounds else None

    def fixed(self, samples: int | None = None, warmup: int | None = None) -> Budget:
        """The same budget with exactly `samples` samples, whatever their scatter, after `warmup` rounds of warm-up.
        None leaves either unchanged. ValueError below 1 sample or 0 rounds."""
        if (samples is not None and samples < 1) or (warmup is not None and warmup < 0):
            raise ValueError(f"at least 1 sample and 0 rounds of warm-up, got {samples} and {warmup}")
        fixed = self if warmup is None else replace(self, warmup_rounds=warmup)
        if samples is None:
            return fixed
        bounds = replace(fixed, min_rounds=samples, few_rounds=samples, max_rounds=samples)
        return replace(bounds, seconds=math.inf, width=0.0)


QUICK = Budget(min_rounds=7, max_rounds=20, seconds=0.25, width=0.05, warmup_seconds=0.02)


def budget(arguments: argparse.Namespace) -> Budget:
    """The budget that --quick, --samples and --warmup ask for."""
    usual = QUICK if arguments.quick else Budget()
    return usual.fixed(getattr(arguments, "samples", None), getattr(arguments, "warmup", None))


@dataclass(frozen=True)
class Contender:
    """One implementation in one mode. `bind` makes a callable for a set of inputs; all contenders share the sets."""

    name: str
    bind: Callable[[int], Run]


@dataclass(frozen=True)
class Data:
    """Operations on a set of inputs, given by its number, outside the events. `restore` runs before each call: it
    resets what the previous call updated in place. `stir` runs before each round: it changes a few elements, so that a
    cached result would be wrong."""

    restore: Callable[[int], object] = lambda index: None
    stir: Callable[[int], object] = lambda index: None


@dataclass
class Measurement:
    """Results of a group of contenders; columns[contender][column] is a COLUMN of the record."""

    columns: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    clocks: dict[str, Any] = field(default_factory=dict)
    warnings: dict[str, list[str]] = field(default_factory=dict)
    unheld: frozenset[str] = frozenset()  # contenders whose times include host time, except in a graph

    def headline(self, ours: str, timer: str = "auto") -> str:
        """The column that ratios and the summary use: cupti if that was requested; graph for short calls and those
        whose other columns include host time; else cold."""
        columns = self.columns[ours]
        if timer == "cupti":
            return "cupti"
        hosts = columns["cold"]["median_us"] < GRAPH_HEADLINE_US or ours in self.unheld
        if timer == "graph" or (timer == "auto" and hosts):
            return "graph" if "graph" in columns else "cold"
        return "cold"

    def ratios(self, name: str, column: str) -> dict[str, dict[str, Any]]:
        """For every other contender its time over that of `name`, paired by round."""
        throttled = frozenset(self.clocks.get("rounds", {}).get(column, {}).get("throttled", ()))
        return {
            other: stats.ratio_of_columns(columns[column], self.columns[name][column], throttled)
            for other, columns in self.columns.items()
            if other != name and column in columns
        }


def order_of(names: Sequence[str], index: int) -> list[str]:
    """The execution order within a round: random, new in each round, and the same in every run. So no contender always
    follows the same neighbour, and no periodic disturbance can coincide with the rounds."""
    return random.Random(index).sample(list(names), len(names))


@dataclass
class Sampled:
    """One column of all contenders: their samples in µs, why sampling stopped, the planned number of looks, and the GPU
    state in each round."""

    samples: dict[str, list[float]]
    stop: str
    looks: int
    readings: list[Reading]


class ContenderFailed(Exception):
    """One contender could not be bound or run; the others can be measured without it."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(f"{name}: {error}")
        self.name, self.error = name, error


@contextmanager
def blamed_on(name: str) -> Iterator[None]:
    """Context for calls of one contender, whose exception becomes ContenderFailed. A lost context is blamed on none: an
    earlier call may have lost it."""
    try:
        yield
    except torch.AcceleratorError:
        raise
    except Exception as error:
        raise ContenderFailed(name, error) from error


class Clock:
    """Measures on one stream of one device. Bind contenders inside `with clock.stream():`, because a backward runs on
    the stream of its forward, and a graph can only be captured on that stream."""

    def __init__(self, device: torch.device, budget: Budget = Budget()) -> None:
        self.device = device
        self.budget = budget
        self.monitor = Monitor(device)
        self._stream = torch.cuda.Stream(device)
        self._gate = Gate()
        self._unheld: set[str] = set()  # contenders that run while the stream is not blocked
        self._apart = False  # whether the stream is blocked for each call separately
        self.l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush_buffer = torch.empty(2 * self.l2_bytes // 4, dtype=torch.int32, device=device)
        evict_persisting_lines()

    @contextmanager
    def stream(self) -> Iterator[torch.cuda.Stream]:
        """Makes the timed stream current, ordered after what the surrounding stream has queued."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield self._stream
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def flush(self) -> None:
        """Evicts L2 by writing twice its size."""
        self._flush_buffer.zero_()

    def measure(
        self,
        contenders: Sequence[Contender],
        timer: str = "auto",
        sets: int = 1,
        data: Data = Data(),
        held: bool = True,
    ) -> Measurement:
        """Measures every column of every contender, ours first. `sets` is the number of sets of inputs to rotate
        through. With `held=False` the stream is not blocked: for calls so long that host time is negligible.

        Raises ContenderFailed for the first contender that cannot be bound or run.
        """
        result = Measurement(warnings={c.name: [] for c in contenders})
        free = set() if held else {c.name for c in contenders}
        self._unheld, self._apart = set(free), False
        self.monitor.settle()  # a sustained run before this one leaves the GPU at its power limit
        with self.stream():
            fresh = min(sets, FRESH_SETS)
            runs: list[dict[str, Run]] = [{} for _ in range(fresh)]
            for contender in contenders:
                try:
                    for index in range(fresh):
                        runs[index][contender.name] = contender.bind(index)
                        runs[index][contender.name]()
                    self._stream.synchronize()
                except Exception as error:
                    raise ContenderFailed(contender.name, error) from error
            self._warm_up(runs)
            self.monitor.readings.clear()
            self._add(result, "cold", self._events(runs, data, cold=True))
            shortest = min(c["cold"]["median_us"] for c in result.columns.values())
            if shortest < NEVER_WARM_US:
                self._add(result, "warm", self._events(runs, data, cold=False))
            for name in self._unheld - free:
                result.warnings[name].append("cannot be queued ahead of the GPU: its times may include host time")
            result.unheld = frozenset(self._unheld - free)
            self._unheld, self._apart = set(free), False  # replays can be queued while the stream is blocked
            hosts = shortest < GRAPH_HEADLINE_US or contenders[0].name in result.unheld
            if timer == "graph" or (timer == "auto" and hosts):
                self._add(result, "graph", self._graphs(contenders, sets, data, result))
            if timer == "cupti":
                from .cupti import kernel_times

                def restore_and_flush() -> None:
                    data.restore(0)
                    self.flush()

                orders = [order_of(list(runs[0]), index) for index in range(min(self.budget.max_rounds, 50))]
                found = kernel_times(runs[0], restore_and_flush, orders, self.monitor)
                self._add(result, "cupti", Sampled(found, "rounds", 1, self.monitor.readings[-len(orders) :]))
        result.clocks.update(self.monitor.summary())
        return result

    def sustained(self, run: Run, seconds: float) -> dict[str, Any] | None:
        """Back-to-back time over `seconds`, under the sustained power and thermal limits instead of in a burst.

        It replays a CUDA graph of some calls, since the host cannot keep up with short calls; None if `run` cannot be
        captured.
        """
        with self.stream():
            calls = calls_within(seconds / 20, run)
            graph = torch.cuda.CUDAGraph()
            try:
                with capture(graph, stream=self._stream):
                    for _ in range(calls):
                        run()
            except Exception:  # of whatever kind: its other columns are measured
                return None
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            replays, deadline = 0, time.perf_counter() + seconds
            start.record()
            while time.perf_counter() < deadline:
                graph.replay()
                graph.replay()
                replays += 2
                self.monitor.readings.clear()
                self.monitor.read()
                if replays % 8 == 0:  # a long queue would run past the deadline
                    self._stream.synchronize()
            stop.record()
            stop.synchronize()
        elapsed = start.elapsed_time(stop) * 1e3
        clocks = self.monitor.summary()
        return {
            "median_us": elapsed / (replays * calls),
            "seconds": elapsed / 1e6,
            "sm_mhz": clocks["sm_mhz"][0],
            "power_w": clocks["power_w"][0],
        }

    def _warm_up(self, runs: Sequence[Mapping[str, Run]]) -> None:
        """Runs until the clocks have had time to rise; compilation happened before. The flush is called too: its kernel
        is loaded at its first launch, which waits for the device and would never return while the gate is closed."""
        self.flush()
        every = [entry for on_one_set in runs for entry in on_one_set.items()]
        rounds, deadline = self.budget.warmup_rounds, time.perf_counter() + self.budget.warmup_seconds
        done = 0
        while (time.perf_counter() < deadline) if rounds is None else (done < rounds):
            for name, run in every:
                with blamed_on(name):
                    run()
            self._stream.synchronize()
            done += 1

    def _events(self, sets_of_runs: Sequence[Mapping[str, Run]], data: Data, cold: bool) -> Sampled:
        names = list(sets_of_runs[0])

        def one_round(index: int) -> dict[str, float]:
            which = index % len(sets_of_runs)
            data.stir(which)

            def call(name: str) -> object:
                return sets_of_runs[which][name]()

            def before(name: str) -> None:
                if not cold:
                    call(name)
                data.restore(which)
                if cold:
                    self.flush()

            return self._round(names, index, call, before)

        return self._sample(names, one_round)

    def _graphs(self, contenders: Sequence[Contender], sets: int, data: Data, result: Measurement) -> Sampled:
        graphs: dict[str, tuple[torch.cuda.CUDAGraph, list[Any]]] = {}
        pool = torch.cuda.graph_pool_handle()
        for contender in contenders:
            try:
                graphs[contender.name] = self._capture(contender, sets, pool)
            except Exception as error:  # a peer may raise anything while it is captured
                result.warnings[contender.name].append(f"no CUDA graph: {first_line(error)}")
        names = list(graphs)

        def one_round(index: int) -> dict[str, float]:
            def restore(name: str) -> None:
                for which in range(sets):
                    data.restore(which)

            data.stir(index % sets)
            times = self._round(names, index, lambda name: graphs[name][0].replay(), restore)
            return {name: us / sets for name, us in times.items()}

        return self._sample(names, one_round) if names else Sampled({}, "none", 1, [])

    def _round(
        self,
        names: Sequence[str],
        index: int,
        call: Callable[[str], object],
        before: Callable[[str], object] = lambda name: None,
    ) -> dict[str, float]:
        """One sample of each in µs: `before` outside and `call` inside a pair of events, all queued before any runs.

        The gate opens by timeout if something cannot be queued before it runs. The first time, the reason may be that
        the launches of a whole round exceed the queue: from then on the stream is blocked for each call separately. A
        call that waits for the host, or alone exceeds the queue, then runs last, while the stream is not blocked.
        """
        order = order_of(names, index)
        seconds = None
        while True:
            times, culprits = self._attempt(order, call, before, seconds)
            if not culprits:
                return times
            seconds = None
            if self._apart:
                self._unheld |= culprits
            else:
                self._apart, seconds = True, PROBE_SECONDS

    def _attempt(
        self,
        order: Sequence[str],
        call: Callable[[str], object],
        before: Callable[[str], object],
        seconds: float | None,
    ) -> tuple[dict[str, float], set[str]]:
        """The times of a round, and the contenders during whose queueing the gate opened by timeout, after `seconds`
        (by default the gate's own)."""
        events = {n: (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for n in order}

        def queue(name: str) -> None:
            with blamed_on(name):
                before(name)
                events[name][0].record(self._stream)
                call(name)
                events[name][1].record(self._stream)

        culprits: set[str] = set()
        held = [n for n in order if n not in self._unheld]
        for together in [[n] for n in held] if self._apart else [held]:
            with self._gate.hold(self._stream, seconds):
                for name in together:
                    queue(name)
                    if self._gate.forced:
                        culprits.add(name)
        for name in (n for n in order if n in self._unheld):
            queue(name)
        self.monitor.read()
        self._stream.synchronize()
        return {n: start.elapsed_time(stop) * 1e3 for n, (start, stop) in events.items()}, culprits

    def _capture(self, contender: Contender, sets: int, pool: Any) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
        """Captures one graph over all sets. Graphs share one pool for all memory except results: those of training
        steps would not fit side by side. This is safe since replays follow each other on one stream."""
        runs = [contender.bind(index) for index in range(sets)]
        for run in runs:
            run()
        self._stream.synchronize()
        memory.make_room(self.device)
        graph = torch.cuda.CUDAGraph()
        with capture(graph, pool=pool, stream=self._stream):
            kept = [run() for run in runs]  # kept alive, so that every call writes to memory of its own
        graph.replay()
        self._stream.synchronize()
        return graph, [runs, kept]

    def _sample(self, names: Sequence[str], one_round: Callable[[int], dict[str, float]]) -> Sampled:
        found = Sampled({name: [] for name in names}, "", len(self.budget.looks), [])
        begin = time.perf_counter()
        for index in itertools.count():
            for name, sample in one_round(index).items():
                found.samples[name].append(sample)
            found.readings.append(self.monitor.readings[-1])
            if stop := self.budget.done(index + 1, time.perf_counter() - begin, found.samples.values()):
                found.stop = stop
                break
        return found

    @staticmethod
    def _add(result: Measurement, column: str, found: Sampled) -> None:
        for name, values in found.samples.items():
            result.columns.setdefault(name, {})[column] = stats.column(values, found.stop, found.looks)
        if found.samples:
            result.clocks.setdefault("rounds", {})[column] = by_round(found.readings)


def input_sets(moved_bytes: int, l2_bytes: int, free_bytes: int, in_place: bool = False) -> int:
    """How many sets of inputs a graph rotates through: together over twice the L2, in a quarter of free memory.

    `moved_bytes` are the compulsory reads and writes of a call. What is updated `in_place` is read and written at the
    same addresses, so a set may be only half as large. The other half is needed for its copy (`Data.restore`).
    """
    moved_bytes = max(moved_bytes, 1)
    wanted = -(-2 * l2_bytes * (2 if in_place else 1) // moved_bytes) + 1
    return max(2, min(wanted, MAX_GRAPH_CALLS, free_bytes // (4 * moved_bytes) or 2))


def calls_within(seconds: float, run: Run, most: int = 20) -> int:
    """The number of calls, at most `most`, that take `seconds`; 1 if one takes longer."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return max(1, min(most, int(seconds / (time.perf_counter() - began))))


def share_on_stream(run: Run, stream: torch.cuda.Stream) -> float:
    """Fraction of the wall time of some back-to-back calls that events on the stream account for.

    About 1 for correct implementations, whose work is complete at the stream's last event. Near 0 when the work runs on
    another stream that this one does not wait for, and continues after its last event.
    """
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    calls = calls_within(0.5, run)
    began = time.perf_counter()
    start.record(stream)
    for _ in range(calls):
        run()
    stop.record(stream)
    torch.cuda.synchronize()
    wall = time.perf_counter() - began
    return start.elapsed_time(stop) / 1e3 / wall

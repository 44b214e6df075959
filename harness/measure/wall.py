"""Wall-clock time of calls on a CPU, in a column named "wall". It says nothing about a GPU.

A sample is the time of a loop of calls that takes SAMPLE_SECONDS, over their number; or of a single call if the inputs
that it updates in place are restored before it. A few elements of the inputs change before each round, so that a cached
result would be wrong. Contenders run in a new random order each round, so that drift affects all alike and ratios can
be paired by round.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Mapping, Sequence

from ..execute import Run
from . import stats
from .timing import Budget, Contender, Data, Measurement, blamed_on

WALL = "wall"
SAMPLE_SECONDS = 2e-4
MOST_CALLS = 1000


def measure(
    contenders: Sequence[Contender],
    budget: Budget,
    sets: int = 1,
    seed: int | None = None,
    data: Data | None = None,
    one_call: bool = False,
) -> Measurement:
    """Measures the "wall" column of every contender, bound to `sets` sets of inputs between which the rounds alternate.
    `one_call`: a sample is one call, before which `data` restores what the previous one has updated.

    Raises ContenderFailed for the first contender that cannot be bound or run.
    """
    runs: dict[str, list[Run]] = {}
    for contender in contenders:
        with blamed_on(contender.name):
            runs[contender.name] = [contender.bind(index) for index in range(sets)]
            for run in runs[contender.name]:
                run()
    _warm_up(runs, budget)
    calls = {}
    for name, of_sets in runs.items():
        with blamed_on(name):
            calls[name] = 1 if one_call else _calls(of_sets[0])
    collecting = gc.isenabled()
    gc.disable()
    try:
        samples, stop = _sample(runs, calls, budget, random.Random(seed), data or Data())
    finally:
        if collecting:
            gc.enable()
    columns = {name: {WALL: stats.column(values, stop)} for name, values in samples.items()}
    return Measurement(columns, {}, {name: [] for name in runs})


def _warm_up(runs: Mapping[str, Sequence[Run]], budget: Budget) -> None:
    every = [(name, run) for name, of_sets in runs.items() for run in of_sets]
    rounds, deadline = budget.warmup_rounds, time.perf_counter() + budget.warmup_seconds
    done = 0
    while (time.perf_counter() < deadline) if rounds is None else (done < rounds):
        for name, run in every:
            with blamed_on(name):
                run()
        done += 1


def _calls(run: Run) -> int:
    begin = time.perf_counter()
    run()
    return min(MOST_CALLS, math.ceil(SAMPLE_SECONDS / max(time.perf_counter() - begin, 1e-7)))


def _sample(
    runs: Mapping[str, Sequence[Run]], calls: Mapping[str, int], budget: Budget, order: random.Random, data: Data
) -> tuple[dict[str, list[float]], str]:
    samples: dict[str, list[float]] = {name: [] for name in runs}
    begin = time.perf_counter()
    for index in range(budget.max_rounds):
        which = index % min(map(len, runs.values()), default=1)
        data.stir(which)
        for name in order.sample(list(runs), len(runs)):
            run = runs[name][which]
            data.restore(which)
            with blamed_on(name):
                start = time.perf_counter()
                for _ in range(calls[name]):
                    run()
                samples[name].append((time.perf_counter() - start) * 1e6 / calls[name])
        gc.collect(0)
        elapsed = time.perf_counter() - begin
        if index + 1 < (budget.few_rounds if elapsed > budget.patience else budget.min_rounds):
            continue
        if elapsed > budget.seconds:
            return samples, "time"
    return samples, "rounds"

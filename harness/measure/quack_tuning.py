"""QuACK's autotuner in two rounds: a short one over all configurations, and its own over the fastest of them.

QuACK times each configuration over 200 calls after 200 ms of warm-up. For the 44 configurations of a GEMM that takes
5 ms this is a minute of GPU time, and the backward of an MLP has five GEMMs. A few calls suffice to find the
configurations that may be the fastest; only the choice among those needs many.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..capture import capture

FINALISTS = 4
FEWEST, MOST, SHORT_MS = 5, 50, 10.0  # calls that the first round times: as many as take SHORT_MS, within these bounds
_BENCH = "_bench_cuda_graph_l2_rotate"


@contextmanager
def two_rounds() -> Iterator[None]:
    """Context in which QuACK's autotuner, if it has been imported by then, works in two rounds."""
    module: Any = sys.modules.get("quack.autotuner")
    if module is None:
        yield
        return
    tuner = module.Autotuner
    prune, bench = tuner.prune_configs, getattr(module, _BENCH)

    def finalists(self: Any, arguments: Mapping[str, Any]) -> list[Any]:
        found = prune(self, arguments)
        # A custom bench function, or hooks that restore what a call updates, would not apply to the first round.
        if len(found) <= FINALISTS or self._do_bench is not None or self.pre_hook is not None:
            return found
        first = copy.copy(self)
        first.cache, first.cache_results = {}, False
        first.prune_configs = lambda _: found
        setattr(module, _BENCH, short_bench)
        try:
            first(**self.nargs, **arguments)
        finally:
            setattr(module, _BENCH, bench)
        return sorted(found, key=lambda config: first.configs_timings[config][0])[:FINALISTS]

    tuner.prune_configs = finalists
    try:
        yield
    finally:
        tuner.prune_configs = prune


def short_bench(
    fn: Callable[..., Any],
    arg_sets: Sequence[Sequence[Any]],
    kwarg_sets: Sequence[Mapping[str, Any]],
    extra_kwargs: Mapping[str, Any],
    quantiles: Sequence[float] | None = None,
) -> list[float] | float:
    """Milliseconds per call, over a few calls in a CUDA graph. As in QuACK's own bench, calls rotate through several
    sets of inputs, together larger than the L2 cache. Raises what `fn` raises; QuACK catches it where a kernel is not
    compiled yet, and retries."""
    sets = list(zip(arg_sets, kwarg_sets, strict=True))

    def calls(count: int) -> None:
        for args, kwargs in (sets[i % len(sets)] for i in range(count)):
            fn(*args, **kwargs, **extra_kwargs)

    calls(1)
    once = _milliseconds(lambda: calls(1))
    count = max(FEWEST, min(MOST, int(SHORT_MS / once)))
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        calls(count)
    graph.replay()
    time = _milliseconds(graph.replay) / count
    return time if quantiles is None else [time] * len(quantiles)


def _milliseconds(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return max(start.elapsed_time(end), 1e-3)

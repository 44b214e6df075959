"""Kernel durations from CUPTI's activity records, through NVIDIA's cupti-python: no event overhead, no gaps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ..execute import Run
from .gpu_state import Monitor


def kernel_times(
    runs: Mapping[str, Run], flush: Callable[[], None], orders: Sequence[Sequence[str]], monitor: Monitor
) -> dict[str, list[float]]:
    """For each run, the total duration in µs of its kernels, copies and memsets per cold call. `orders` has the names
    of the runs in execution order, once for each round.

    Raises ValueError if cupti-python is not installed, or if it reports nothing for a call.
    """
    try:
        from cupti import cupti
    except ImportError as error:
        raise ValueError(f"--timer cupti needs the package cupti-python ({error})") from error

    kinds = (cupti.ActivityKind.CONCURRENT_KERNEL, cupti.ActivityKind.MEMCPY, cupti.ActivityKind.MEMSET)
    records: list[tuple[int, int]] = []
    cupti.activity_register_callbacks(
        lambda: (8 * 2**20, 0), lambda activities: records.extend((a.start, a.end) for a in activities)
    )
    for kind in kinds:
        cupti.activity_enable(kind)
    samples: dict[str, list[float]] = {name: [] for name in runs}
    try:
        for order in orders:
            for name in order:
                flush()
                torch.cuda.synchronize()
                cupti.activity_flush_all(1)
                records.clear()
                runs[name]()
                torch.cuda.synchronize()
                cupti.activity_flush_all(1)
                if not records:
                    raise ValueError(f"--timer cupti: CUPTI reported no kernel, copy or memset of {name}")
                samples[name].append(sum(end - start for start, end in records) / 1e3)
            monitor.read()
    finally:
        for kind in kinds:
            cupti.activity_disable(kind)
    return samples

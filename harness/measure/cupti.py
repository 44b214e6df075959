"""Kernel durations from CUPTI's activity records, through NVIDIA's cupti-python: no event overhead, no gaps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ..execute import Run


def kernel_times(runs: Mapping[str, Run], flush: Callable[[], None], rounds: int) -> dict[str, list[float]]:
    """For each run, µs that its kernels, copies and memsets took, summed per cold call. Implementations take turns.

    Raises ValueError where cupti-python is not installed.
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
        for _ in range(rounds):
            for name, run in runs.items():
                flush()
                torch.cuda.synchronize()
                cupti.activity_flush_all(1)
                records.clear()
                run()
                torch.cuda.synchronize()
                cupti.activity_flush_all(1)
                samples[name].append(sum(end - start for start, end in records) / 1e3)
    finally:
        for kind in kinds:
            cupti.activity_disable(kind)
    return samples

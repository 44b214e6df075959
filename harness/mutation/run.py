"""Runs the mutants of some kernels: workers, each with a checkout of its own, take them from the kernels in turn."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from .kernel import Kernel
from .mutant_queue import Done, Queue
from .team import Team

# Of a GPU's memory, what all its workers may take with tensors. The rest is for contexts: three of each worker where a
# process has mutants of CUDA C++ beside one that has a mutant of Python and one that is being prepared.
GPU_SHARE = 0.7
PROCESSES = {"cpu": 1, "cuda": 2}  # of a worker that need a core: on a GPU the next one may be starting CUDA


def run(
    kernels: Sequence[Kernel],
    device: str,
    workers: int,
    deadline: float,
    done: Done,
    say: Callable[[str], None],
    quick: bool = False,
    seconds: float | None = None,
    gpus: Sequence[str] = (),
    originals: bool = True,
) -> None:
    """Calls `done` with each mutant and its answer, until `deadline` by the monotonic clock: none is begun that should
    take longer than what is left, and those that do are "unfinished". A quick run makes the checks of all originals
    first; without `originals` it makes one when it first rejects a mutant, as other runs do."""
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as scratch:
        team = Team(device, Path(scratch), workers, gpus)
        try:
            shared = -(-workers // max(1, len(gpus)))
            crowd = max(1.0, PROCESSES[device] * workers / (os.cpu_count() or 1))
            given = {"device": device, "quick": quick, "memory": GPU_SHARE / shared, "crowd": crowd}
            queue = Queue(kernels, given, deadline, done, say)
            if quick and originals:
                queue.originals_first(seconds)
            queue.served_by(team.workers)
        finally:
            team.close()

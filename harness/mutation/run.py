"""Runs the mutants of some kernels: workers, each with its own checkout, take them from the kernels in turn."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from .kernel import Kernel
from .mutant_queue import Done, Queue
from .team import Team

# Fraction of a GPU's memory for the tensors of all its workers. The rest is for contexts: three per worker if it has a
# process for mutants of CUDA C++, one with a mutant of Python and one that is being prepared.
GPU_SHARE = 0.7
PROCESSES = {"cpu": 1, "cuda": 2}  # processes of a worker that need a core: on a GPU the next one may be starting CUDA


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
    """Calls `done` with each mutant and its answer, until `deadline` on the monotonic clock. No mutant is begun whose
    expected duration exceeds the time left; one that exceeds it nevertheless is "unfinished". A quick run makes the
    checks of all originals first; without `originals` it makes a check of the original when it first rejects a mutant,
    as other runs do."""
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

"""How long a check of a mutant may take, and the alarm that ends a process where one takes longer.

What a check may take does not include the time of a compiler, which has a limit of its own.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from .messages import PHASES, say

# A check may take FACTOR times as long as where it passed, and SLACK seconds more. On a GPU the first check of a
# process loads what PyTorch launches, and others may start CUDA meanwhile, which holds up all that use the driver.
SLACK, FACTOR = {"cpu": 10.0, "cuda": 40.0}, 10.0
UNSEEN = {"cpu": 300.0, "cuda": 90.0}  # seconds of a check that has not passed yet
ORIGINAL_SECONDS, COMPILER_SECONDS = 900.0, 120.0
USED = 0.25  # of these limits, in a process that has run another mutant: what takes longer is judged again in a new one


def limit_of(task: Mapping[str, Any], name: str) -> float:
    """How long a check may take on a mutant, in seconds."""
    if not task.get("file"):
        return ORIGINAL_SECONDS
    seconds = None if name in PHASES else task.get("seconds", {}).get(name)
    limit = UNSEEN[task["device"]] if seconds is None else SLACK[task["device"]] + FACTOR * seconds
    return task.get("crowd", 1.0) * (USED if task.get("used") else 1.0) * limit


class Clock:
    """The time of the checks, less that of the compilers. A check that takes longer than it may ends the process:
    SIGALRM's default action does so in C code too, and where a kernel never ends. As the alarm, the time of the
    compilers is that of the process: what watches them keeps the clock of the first task."""

    _compiled = 0.0

    def __init__(self) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def limit(self, seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def now(self) -> float:
        return time.monotonic() - self._compiled

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """While a compiler runs, which has COMPILER_SECONDS."""
        left, start = signal.getitimer(signal.ITIMER_REAL)[0], time.monotonic()
        self.limit(COMPILER_SECONDS)
        try:
            yield
        finally:
            Clock._compiled += time.monotonic() - start
            self.limit(left)


def begin(name: str, task: Mapping[str, Any], clock: Clock, report: TextIO) -> None:
    """Gives a check its time from now on, and says that it begins."""
    limit = limit_of(task, name)
    clock.limit(limit)
    say(report, at=name, limit=limit)

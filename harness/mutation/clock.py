"""Time limits of a mutant's checks, and the alarm that ends a process where a check exceeds its limit.

The time of a check does not include that of a compiler, which has a limit of its own.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from .messages import PHASES, say

# A check may take FACTOR times as long as when it passed, plus SLACK seconds. On a GPU the first check of a process
# loads the kernels that PyTorch launches, and others may be starting CUDA, which blocks all users of the driver.
SLACK, FACTOR = {"cpu": 10.0, "cuda": 40.0}, 10.0
UNSEEN = {"cpu": 300.0, "cuda": 90.0}  # limit in seconds for a check that has not passed yet
ORIGINAL_SECONDS, COMPILER_SECONDS = 900.0, 120.0
USED = 0.25  # factor on these limits in a process that has run another mutant: a timeout leads to a retry in a new one


def limit_of(task: Mapping[str, Any], name: str) -> float:
    """The time limit of a check on a mutant, in seconds."""
    if not task.get("file"):
        return ORIGINAL_SECONDS
    seconds = None if name in PHASES else task.get("seconds", {}).get(name)
    limit = UNSEEN[task["device"]] if seconds is None else SLACK[task["device"]] + FACTOR * seconds
    return task.get("crowd", 1.0) * (USED if task.get("used") else 1.0) * limit


class Clock:
    """The time of the checks, without that of the compilers. A check that exceeds its limit ends the process: the
    default action of SIGALRM works in C code too, and while a kernel hangs. The alarm and the compilers' time are those
    of the process: the compiler wrappers keep the clock of the first task."""

    _compiled = 0.0

    def __init__(self) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def limit(self, seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def now(self) -> float:
        return time.monotonic() - self._compiled

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Context for a compiler, which has COMPILER_SECONDS."""
        left, start = signal.getitimer(signal.ITIMER_REAL)[0], time.monotonic()
        self.limit(COMPILER_SECONDS)
        try:
            yield
        finally:
            Clock._compiled += time.monotonic() - start
            self.limit(left)


def begin(name: str, task: Mapping[str, Any], clock: Clock, report: TextIO) -> None:
    """Starts the time limit of a check, and reports that it begins."""
    limit = limit_of(task, name)
    clock.limit(limit)
    say(report, at=name, limit=limit)

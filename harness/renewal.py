"""A bench goes on in another process where its own dies, as of a peer whose kernel reads beyond its tensors.

After an illegal access every call of CUDA fails in that process, and a destructor that meets such a failure ends it. So
`python -m harness bench` runs in a process of its own. In a journal this says what it is at; when it dies, the next one
goes on from there, and leaves out what it died of.

The journal is a file of JSON lines: {"run": id of a run that began}, {"at": [kernel, case, mode, implementation or null
for all of them at once] or null}, {"failures": rows of our own that failed}, {"complete": kernel}, {"lost": why no call
of CUDA succeeds any more}, and from the process that waits {"died": what is said of the last "at"}.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

#: the variable that names the journal to the process that benches
VARIABLE = "RIDGELINE_BENCH_JOURNAL"
LOST = 75  # exit code of a process that has lost its context
DEATHS = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV})
FORWARDED = signal.SIGHUP, signal.SIGINT, signal.SIGTERM
AT_ONCE = 1.0  # seconds: signals no further apart are one
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG

Place = tuple[str, str, str, "str | None"]


class Crashed(Exception):
    """What an earlier process died of is not tried again; the message says how it died."""


class Journal:
    """What the processes of one bench have said, this one's words included. Without a path nothing is kept."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.at: Place | None = None
        self.crashed: dict[Place, str] = {}
        self.runs: set[str] = set()
        self.complete: set[str] = set()  # kernels
        self.failures = 0
        self._lost: str | None = None
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                self._take(json.loads(line))

    @property
    def renewed(self) -> bool:
        """Whether a process died before this one."""
        return bool(self.crashed)

    def note(self, **entry: Any) -> None:
        self._take(entry)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    def begin(self, kernel: str, case: str, mode: str, implementation: str | None = None) -> None:
        """Says what is begun, None for all implementations at once. Raises Crashed where a process died of that."""
        place = kernel, case, mode, implementation
        if place in self.crashed:
            raise Crashed(self.crashed[place])
        self.note(at=place)

    def knows(self, kernel: str, case: str, mode: str) -> bool:
        """Whether a process died in that group."""
        return any(place[:3] == (kernel, case, mode) for place in self.crashed)

    def lost(self, reason: str) -> None:
        """Ends this process where another one follows it: no call of CUDA succeeds any more. Destructors do not run,
        which would meet the same failure."""
        if self._path is not None:
            self.note(lost=reason)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(LOST)

    def died(self, how: str) -> bool:
        """Notes that the process died of what it was at. False where another one would do no better."""
        if self.at is None or self.at in self.crashed:
            return False
        self.note(died=f"{self._lost or f'the process died of it ({how})'}; not tried again")
        return True

    def _take(self, entry: dict[str, Any]) -> None:
        (kind, value), *_ = entry.items()
        if kind == "run":
            self.runs.add(value)
        elif kind == "at":
            self.at = None if value is None else tuple(value)
        elif kind == "failures":
            self.failures += value
        elif kind == "complete":
            self.complete.add(value)
        elif kind == "lost":
            self._lost = value
        elif kind == "died" and self.at is not None:
            self.crashed[self.at] = value
            self.at = self._lost = None


def journal() -> Journal:
    """Of the process that benches. Processes that it starts have none, and it ends with the one that waits for it."""
    path = os.environ.pop(VARIABLE, None)
    if path is None:
        return Journal()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    return Journal(Path(path))


def supervised(main: Callable[[], int]) -> int:
    """`main`, which reads the command line; a bench in processes of its own, one after the other as long as they die.
    Returns the exit code."""
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    if command != "bench" or VARIABLE in os.environ:
        return main()
    with tempfile.TemporaryDirectory(prefix="ridgeline-") as folder:
        path = Path(folder) / "journal"
        while True:
            code = _run([sys.executable, *sys.orig_argv[1:]], {**os.environ, VARIABLE: str(path)})
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            said = Journal(path)
            if (code != LOST and -code not in DEATHS) or not said.died(how):
                return code if code >= 0 else 128 - code
            place, reason = list(said.crashed.items())[-1]
            where = " ".join(word for word in place if word)
            print(f"{where}: {reason}. The bench goes on in another process", file=sys.stderr, flush=True)


def _run(command: list[str], environment: dict[str, str]) -> int:
    """The exit code of a command, negative for a signal. It is a process group of its own. What a terminal or a time
    limit sends to this one's, and perhaps to this process besides, reaches it once."""
    process = subprocess.Popen(command, env=environment, preexec_fn=os.setpgrp)
    sent = -math.inf

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal sent
        if time.monotonic() > sent + AT_ONCE:
            process.send_signal(number)
        sent = time.monotonic()

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

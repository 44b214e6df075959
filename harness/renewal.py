"""Continues a bench in another process if its own dies, for example because a peer's kernel reads out of bounds.

After an illegal access every CUDA call of that process fails, and a destructor that meets such a failure ends it. So
`python -m harness bench` runs in a child process. That process notes its current implementation in a journal; if it
dies, the next one continues from there and skips what the former died of.

The journal is a file of JSON lines: {"run": id of a run that began}, {"at": [kernel, case, mode, implementation or null
for all of them at once] or null}, {"failures": rows of our own that failed}, {"complete": kernel}, {"lost": why no CUDA
call succeeds any more}, and from the waiting parent {"died": the reason recorded for the last "at"}.
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

#: the environment variable by which the benching process finds the journal
VARIABLE = "RIDGELINE_BENCH_JOURNAL"
LOST = 75  # exit code of a process that has lost its CUDA context
DEATHS = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV})
FORWARDED = signal.SIGHUP, signal.SIGINT, signal.SIGTERM
AT_ONCE = 1.0  # seconds: signals no further apart count as one
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG

Place = tuple[str, str, str, "str | None"]


class Crashed(Exception):
    """An earlier process died of this item, so it is not tried again; the message says how it died."""


class Journal:
    """The entries of all processes of one bench, this one's included. Without a path they are only kept in memory."""

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
        """Notes what begins; None: all implementations at once. Raises Crashed if an earlier process died of it."""
        place = kernel, case, mode, implementation
        if place in self.crashed:
            raise Crashed(self.crashed[place])
        self.note(at=place)

    def knows(self, kernel: str, case: str, mode: str) -> bool:
        """Whether a process died in that group."""
        return any(place[:3] == (kernel, case, mode) for place in self.crashed)

    def lost(self, reason: str) -> None:
        """Ends this process if another one follows it, since no CUDA call succeeds any more. Destructors do not run,
        as they would meet the same failure."""
        if self._path is not None:
            self.note(lost=reason)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(LOST)

    def died(self, how: str) -> bool:
        """Notes that the process died of its current item. False if another process would fail in the same way."""
        if self.at is None or self.at in self.crashed:
            return False
        self.note(died=f"{self._lost or f'the process crashed ({how})'}; not tried again")
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
    """The journal of the benching process. Its children get none, and it is killed when its waiting parent ends."""
    path = os.environ.pop(VARIABLE, None)
    if path is None:
        return Journal()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    return Journal(Path(path))


def supervised(main: Callable[[], int]) -> int:
    """Runs `main`, which reads the command line. A bench runs in child processes, each of which continues after the
    death of the one before. Returns the exit code."""
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
            print(f"{where}: {reason}. The bench continues in another process", file=sys.stderr, flush=True)


def _run(command: list[str], environment: dict[str, str]) -> int:
    """The exit code of a command, negative for a signal. The command is a process group of its own. A signal that a
    terminal or a time limit sends to this group, and perhaps to this process besides, is forwarded once."""
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

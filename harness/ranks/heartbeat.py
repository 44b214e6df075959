"""The current step of each rank, in one file per rank that the launcher reads: a rank that hangs cannot report it.

A rank counts its steps. The one that blocks the others has failed alone, has the lowest count, or is not inside a
waiting call while they are: `behind` sorts it first.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: makes a rank write the stack of its Python code, even while it waits inside a library
STACK_SIGNAL = signal.SIGUSR1
#: the last step of every rank, after which its process unloads PyTorch
END = "end of the process"
#: delay before a rank that raised exits: if the cause is another rank that died, the launcher sees that one first
EXIT_DELAY_SECONDS = 0.5
FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+) in ')
WAITING = re.compile(r"\b(wait|synchronize|barrier)\(")


class Heartbeat:
    """The side of a rank: writes its steps."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path, self._count, self._doing = _beat_file(folder, rank), 0, "start"
        self._stack = _stack_file(folder, rank).open("w")
        faulthandler.register(STACK_SIGNAL, file=self._stack, all_threads=False)
        self.step(self._doing)

    def step(self, doing: str, failed: bool = False) -> None:
        """Notes that the rank begins this step; `failed` if it failed at something that the others may still be doing.
        Takes about 50 µs, so it is not called in timed code."""
        self._count, self._doing = self._count + 1, doing
        scratch = self._path.with_suffix(".new")
        entry = {"pid": os.getpid(), "count": self._count, "doing": doing, "failed": failed}
        scratch.write_text(json.dumps(entry), encoding="utf-8")
        os.replace(scratch, self._path)

    @contextmanager
    def named_if_it_raises(self) -> Iterator[None]:
        """Adds an exception to the step, for the launcher's message, and re-raises it."""
        try:
            yield
        except BaseException as error:
            said = (str(error).strip().splitlines() or [""])[0]
            self.step(f"{self._doing}: raised {type(error).__name__}: {said[:300]}")
            time.sleep(EXIT_DELAY_SECONDS)
            raise


@dataclass(frozen=True)
class Beat:
    """The progress of a rank; a count of 0 means that nothing is known."""

    rank: int
    pid: int = 0
    count: int = 0
    doing: str = "start of the process"
    failed: bool = False

    @property
    def at_work(self) -> bool:
        """Whether its process has begun and is not ending yet."""
        return self.count > 0 and self.doing != END


def read(folder: Path, ranks: int) -> list[Beat]:
    """The latest beat of every rank."""
    return [_read(folder, rank) for rank in range(ranks)]


def _read(folder: Path, rank: int) -> Beat:
    path = _beat_file(folder, rank)
    if not path.is_file():
        return Beat(rank)
    entry: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return Beat(rank, **entry)


def behind(folder: Path, beats: list[Beat]) -> list[Beat]:
    """The ranks, from the one that blocks the others to the most advanced."""
    return sorted(beats, key=lambda beat: (not beat.failed, beat.count, _waits(_calls(folder, beat.rank))))


def report(folder: Path, beats: list[Beat]) -> str:
    """A line per rank, in the order of `behind`, with the innermost calls if its stack was requested."""
    lines = []
    for beat in behind(folder, beats):
        calls = _calls(folder, beat.rank)
        stack = " ← ".join(call.removeprefix("File ") for call in calls[:3])
        lines.append(f"  rank {beat.rank}, step {beat.count}: {beat.doing}{f' (in {stack})' if stack else ''}")
    return "\n".join(lines)


def _calls(folder: Path, rank: int) -> list[str]:
    """The frames of a rank's Python code, the innermost first."""
    path = _stack_file(folder, rank)
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    return [line.strip() for line in lines if FRAME.match(line.strip())]


def _waits(calls: list[str]) -> bool:
    """Whether the innermost call is one that waits for other ranks or for the device."""
    frame = FRAME.match(calls[0]) if calls else None
    if frame is None:
        return False
    code = linecache.getline(frame["file"], int(frame["line"]))
    return "torch/distributed" in frame["file"] or WAITING.search(code) is not None


def _beat_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.stack"

"""What each rank is doing, in a file a rank that the launcher reads: a rank that hangs can no longer say so itself.

A rank counts its steps. One that holds up the others has failed alone, has the lowest count, or is not in a call that
waits as they are: `behind` has it first.
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

#: asks a rank for the stack of its Python code; it answers even while it waits inside of a library
STACK_SIGNAL = signal.SIGUSR1
#: the last step of every rank, after which its process unloads PyTorch
END = "end of the process"
#: a rank that raises exits so much later: where the cause is another rank that died, the launcher sees that one first
EXIT_DELAY_SECONDS = 0.5
FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+) in ')
WAITING = re.compile(r"\b(wait|synchronize|barrier)\(")


class Heartbeat:
    """A rank's side."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path, self._count, self._doing = _beat_file(folder, rank), 0, "start"
        self._stack = _stack_file(folder, rank).open("w")
        faulthandler.register(STACK_SIGNAL, file=self._stack, all_threads=False)
        self.step(self._doing)

    def step(self, doing: str, failed: bool = False) -> None:
        """The rank begins with this; `failed` where it could not do what the others may still be at. Takes some 50 µs:
        it stays out of what is timed."""
        self._count, self._doing = self._count + 1, doing
        scratch = self._path.with_suffix(".new")
        entry = {"pid": os.getpid(), "count": self._count, "doing": doing, "failed": failed}
        scratch.write_text(json.dumps(entry), encoding="utf-8")
        os.replace(scratch, self._path)

    @contextmanager
    def named_if_it_raises(self) -> Iterator[None]:
        """What is raised becomes part of the step, for the launcher's message."""
        try:
            yield
        except BaseException as error:
            said = (str(error).strip().splitlines() or [""])[0]
            self.step(f"{self._doing}: raised {type(error).__name__}: {said[:300]}")
            time.sleep(EXIT_DELAY_SECONDS)
            raise


@dataclass(frozen=True)
class Beat:
    """How far a rank has come; nothing is known of one whose count is 0."""

    rank: int
    pid: int = 0
    count: int = 0
    doing: str = "start of the process"
    failed: bool = False

    @property
    def at_work(self) -> bool:
        """Whether its process has begun and does not end yet."""
        return self.count > 0 and self.doing != END


def read(folder: Path, ranks: int) -> list[Beat]:
    """The latest of every rank."""
    return [_read(folder, rank) for rank in range(ranks)]


def _read(folder: Path, rank: int) -> Beat:
    path = _beat_file(folder, rank)
    if not path.is_file():
        return Beat(rank)
    entry: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return Beat(rank, **entry)


def behind(folder: Path, beats: list[Beat]) -> list[Beat]:
    """The ranks from the one that holds up the others to those that are furthest."""
    return sorted(beats, key=lambda beat: (not beat.failed, beat.count, _waits(_calls(folder, beat.rank))))


def report(folder: Path, beats: list[Beat]) -> str:
    """A line a rank, in the order of `behind`; with the innermost calls where it was asked for them."""
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

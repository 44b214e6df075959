"""A process that is forked for tasks, and the reading of its messages until a task is complete.

It is forked before there is a task, so that it can prepare itself meanwhile, and has its own process group, with which
it is killed. It ends by itself after a task if it cannot take another. It is ended by SIGALRM if a check takes too long
(`clock`), or killed if it sends no message for long.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TextIO

from . import messages, verdict

# Executes a task, writes messages to a stream, and returns whether the process can take another.
Work = Callable[[Mapping[str, Any], TextIO], bool | None]
Ahead = Callable[[TextIO], bool]  # prepares the process, and returns whether it can execute a task

SILENCE, UNWILLING = 1200.0, 30.0  # seconds without a message until a process is killed; then, until it is abandoned
LIVES = 86400.0  # default lifetime of a process in seconds, if its task has none
_PR_SET_PDEATHSIG = 1


class Process:
    """A forked process that calls `ahead`, waits for tasks and calls `work` with each.

    tasks, mutants    the number of tasks it was given, and how many of these were mutants
    ended             whether it can take no more
    """

    def __init__(self, work: Work, ahead: Ahead | None = None) -> None:
        self.work, self.ahead = work, ahead
        self.tasks, self.mutants, self.ended = 0, 0, False
        self._reader, writer = os.pipe()
        given, self._given = os.pipe()
        self._started, started = os.pipe()
        # The text of the task, which may exceed a pipe's buffer. Unbuffered, so that no text of the last task remains.
        self._text = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self._process = os.fork()
        if self._process == 0:
            for descriptor in (self._reader, self._given, self._started):
                os.close(descriptor)
            self._do(os.fdopen(writer, "w", buffering=1), given, started)
        for descriptor in (writer, given, started):
            os.close(descriptor)

    def wait(self, seconds: float) -> None:
        """Waits until it has completed `ahead`, or has ended, for at most `seconds`."""
        select.select([self._started], [], [], seconds)

    def send(self, task: Mapping[str, Any]) -> None:
        """Sends it a task."""
        self._task, self._start = task, time.monotonic()
        self.tasks += 1
        self.mutants += bool(task.get("file"))
        self._text.seek(0)
        self._text.truncate()
        self._text.write(json.dumps(task).encode())
        with contextlib.suppress(BrokenPipeError):  # one that has ended: `answer` reports why
            os.write(self._given, b"\n")

    def answer(self) -> dict[str, Any]:
        """The result of the checks of the source as it is on disk."""
        end = self._start + self._task.get("life", LIVES)
        said, status, late = _listen(self._reader, self._process, end)
        if status is not None:
            self._end()
        return verdict.of_process(self._task, said, status or 0, self._start, time.monotonic(), late)

    def kill(self) -> None:
        """Ends the process and its children."""
        if not self.ended:
            os.kill(self._process, signal.SIGKILL)  # it may not lead a group yet
            self._end()

    def _end(self) -> None:
        """Ends its children."""
        _kill_group(self._process)
        self.ended = True
        self._text.close()
        for descriptor in (self._reader, self._given, self._started):
            os.close(descriptor)

    def _do(self, report: TextIO, given: int, started: int) -> NoReturn:
        """Runs in the forked process."""
        code = 1
        try:
            end_with_parent()
            os.setsid()  # so that its children can be ended with it
            if self.ahead is None or self.ahead(report):
                os.close(started)
                while os.read(given, 1):
                    self._text.seek(0)
                    if not self.work(json.loads(self._text.read()), report):
                        break
                    messages.say(report, idle=True)
            code = 0
        except BaseException as error:
            with contextlib.suppress(OSError):
                messages.say(report, failed=f"{type(error).__name__}: {str(error)[:300]}")
        finally:
            with contextlib.suppress(OSError):  # nobody reads any more
                report.flush()
            os._exit(code)


def end_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends for any reason: no mutant may outlive its run."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill_group(process: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


def _listen(
    reader: int, process: int, end: float, silence: float = SILENCE
) -> tuple[list[dict[str, Any]], int | None, bool]:
    """A process's messages until it can take another task or ends, how it ended (None if it has not), and whether it
    was killed because `end` has come. It need not close the pipe: its children may hold it open. A process that sends
    no message for `silence` seconds is killed too."""
    text, heard, ended, killed, late = b"", time.monotonic(), None, False, False
    while ended is None:
        if not late and time.monotonic() > end:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)  # it may not lead a group yet
            _kill_group(process)
            late = killed = True
            heard = time.monotonic()
        if select.select([reader], [], [], 0.2)[0]:
            if piece := os.read(reader, 1 << 16):
                text, heard = text + piece, time.monotonic()
                if not killed and messages.is_idle(text):
                    return messages.read(text), None, late
            else:
                _, ended = os.waitpid(process, 0)
            continue
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            ended = status
        elif time.monotonic() - heard > (UNWILLING if killed else silence):
            if killed:  # inside a driver call that never returns: it is abandoned
                ended = signal.SIGALRM
            else:
                os.kill(process, signal.SIGALRM)
                killed, heard = True, time.monotonic()
    while select.select([reader], [], [], 0)[0] and (piece := os.read(reader, 1 << 16)):
        text += piece
    return messages.read(text), ended, late

"""The next job of a worker: a mutant of one of the kernels, in turn, or in a quick run first a part of the checks of an
original.

A quick run first makes the checks of all originals, in parts that all workers share. This takes at most the fraction
ORIGINALS of the time that is left when the first worker is ready (but at least LEAST if the run is longer than LONG). A
kernel's mutants begin when its parts are complete.

A mutant whose process cannot begin is tried once more. A worker that is lost, or that cannot begin tasks any more, gets
no more.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import results, verdict
from .kernel import Broken, Kernel
from .mutants import Mutant
from .team import Late, Lost, Worker
from .verdict import Answer

ORIGINALS = 0.3  # fraction of the time of a quick run that the originals may take
LONG, LEAST = 300.0, 120.0  # seconds: in runs longer than LONG they may take LEAST
ERRORS = 3  # consecutive tasks that a worker cannot begin, after which it gets no more
MARGIN = 1.25  # safety factor on the expected duration of the next mutant

Done = Callable[[Mutant, Answer], None]
Job = Callable[[Worker], None]


def time_of_originals(left: float, whole: float) -> float:
    """The seconds that originals may take, when `left` of the `whole` seconds of a run remain."""
    return min(left, max(ORIGINALS * left, LEAST if whole > LONG else 0.0))


class Queue:
    """The mutants of all kernels, served in equal shares, and before them the checks of originals."""

    def __init__(
        self,
        kernels: Sequence[Kernel],
        given: Mapping[str, Any],
        deadline: float,
        done: Done,
        say: Callable[[str], None],
    ) -> None:
        self._kernels, self._given, self._deadline = kernels, given, deadline
        self._done, self._say = done, say
        self._changed = threading.Condition()
        self._originals_end, self._originals = deadline, False
        self._start, self._ready, self._team = time.monotonic(), 0, 0
        self._seconds: float | None = None
        self._errors: list[Exception] = []
        self._unable = Counter[str]()  # by worker: consecutive tasks that it could not begin
        self._again: set[str] = set()  # mutants that are tried once more

    def originals_first(self, seconds: float | None) -> None:
        """Makes the checks of originals first; mutants then get those that take `seconds`."""
        self._originals, self._seconds = True, seconds
        for kernel in self._kernels:
            kernel.ready = False

    def served_by(self, team: Sequence[Worker]) -> None:
        """Returns when all workers have finished, or cannot continue. Raises if none can and mutants are left."""
        self._team = len(team)
        threads = [threading.Thread(target=self._serve, args=(worker,), daemon=True) for worker in team]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in self._errors[:3]:
            self._say(f"a worker could not go on: {error}")
        if self._errors and len(self._errors) == len(team):
            raise self._errors[0]

    def _serve(self, worker: Worker) -> None:
        try:
            try:
                worker.begin(max(0.0, self._deadline - time.monotonic()))
            except Late:
                if time.monotonic() < self._deadline:
                    raise
                return  # time is up, which is no failure of the worker
            self._begun()
            while (job := self._next()) is not None:
                job(worker)
        except Exception as error:
            with self._changed:
                self._errors.append(error)
                self._changed.notify_all()

    def _begun(self) -> None:
        """Notes that a worker is ready. The time of the originals begins with the first."""
        with self._changed:
            self._ready += 1
            now = time.monotonic()
            if self._ready == 1 and self._originals:
                self._originals_end = now + time_of_originals(self._deadline - now, self._deadline - self._start)
            if self._ready in (1, self._team):
                self._say(f"{self._ready} of {self._team} workers ready after {now - self._start:.0f} s")

    def _next(self) -> Job | None:
        """The next job; waits if another worker must first finish. None if nothing is left."""
        with self._changed:
            while True:
                if time.monotonic() >= self._deadline:
                    return None
                if job := self._original() or self._mutant():
                    return job
                if not any(k.making for k in self._kernels if not k.ready):
                    return None
                self._changed.wait(1.0)

    def _original(self) -> Job | None:
        """A part of the checks of the original with the fewest parts begun."""
        if time.monotonic() >= self._originals_end:
            for kernel in self._kernels:
                if not kernel.ready and not kernel.making:
                    self._choose(kernel)
            return None
        unlisted = (k for k in self._kernels if k.pieces is None and not k.making)
        able = [k for k in (*unlisted, *(k for k in self._kernels if k.pieces)) if not k.ready and not k.broken]
        if not able:
            return None
        kernel = min(able, key=lambda k: k.made)
        kernel.making += 1
        kernel.made += 1
        names = kernel.pieces.pop(0) if kernel.pieces is not None else None
        return lambda worker: self._make(kernel, names, worker)

    def _make(self, kernel: Kernel, names: list[str] | None, worker: Worker) -> None:
        given = {**self._given, "life": max(0.0, self._originals_end - time.monotonic())}
        try:
            answer = kernel.prepare(worker, given) if names is None else kernel.check_original(names, worker, given)
            if answer["status"] == results.ERROR and names is not None and kernel.pieces is not None:
                kernel.pieces.append(names)
            self._count(worker, answer)
        except Broken as broken:
            self._give_up(kernel, str(broken))
        finally:
            with self._changed:
                kernel.making -= 1
                if not kernel.making and kernel.pieces == [] and not kernel.ready:
                    self._choose(kernel)
                self._changed.notify_all()

    def _count(self, worker: Worker, answer: Answer) -> None:
        """Counts consecutive failures to begin a task; raises Lost after ERRORS, e.g. with a defective GPU."""
        with self._changed:
            self._unable[worker.name] = self._unable[worker.name] + 1 if answer["status"] == results.ERROR else 0
            if self._unable[worker.name] >= ERRORS:
                raise Lost(f"{worker.name} begins nothing: {answer['reason']}")

    def _choose(self, kernel: Kernel) -> None:
        if not kernel.broken:
            try:
                kernel.choose(self._seconds)
                assert kernel.only is not None
                self._say(f"{kernel.name}: {len(kernel.only)} checks, {kernel.lasts():.0f} s on the original")
            except Broken as broken:
                self._give_up(kernel, str(broken))
        kernel.ready = True

    def _mutant(self) -> Job | None:
        """The next mutant that can finish in time, of the kernel with the fewest mutants begun."""
        left = self._deadline - time.monotonic()
        able = [k for k in self._kernels if k.ready and k.left and not k.broken and MARGIN * k.lasts() < left]
        if not able:
            return None
        kernel = min(able, key=lambda k: k.begun)
        kernel.begun += 1
        mutant = kernel.left.pop()
        return lambda worker: self._judge(kernel, mutant, worker)

    def _judge(self, kernel: Kernel, mutant: Mutant, worker: Worker) -> None:
        try:
            answer = kernel.judge(mutant, worker, {**self._given, "deadline": self._deadline})
        except Broken as broken:
            self._give_up(kernel, str(broken))
            return
        except Lost as lost:
            with self._changed:
                self._done(mutant, verdict.not_begun(str(lost)))
            raise
        with self._changed:
            if answer["status"] == results.ERROR and mutant.key not in self._again:
                self._again.add(mutant.key)
                kernel.left.append(mutant)
                kernel.begun -= 1
            else:
                self._done(mutant, answer)
            if answer["status"] not in (results.ERROR, results.UNFINISHED):
                kernel.ended(answer["seconds"])
        self._count(worker, answer)

    def _give_up(self, kernel: Kernel, reason: str) -> None:
        with self._changed:
            if not kernel.broken:
                kernel.broken = reason
                self._say(reason)

"""A kernel in a run: its remaining mutants, the knowledge about its checks, and the verdict on each mutant.

A check rejects a mutant only if the original passes it. A full run tests the original when a check first rejects a
mutant; a check that the original fails or skips is left out from then on. If the check was repeated on the original in
the same process (`leftovers`), the answer contains the result; otherwise the original gets a task for it. A quick run
makes all checks of the original before the first mutant; so their durations are known from the first mutant on, and on
a GPU the kernels that the originals launch are compiled.

A mutant that exceeds the time limit of a check counts as rejected only if the original, which then runs once more in a
new process, takes less than half as long.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .. import registry
from . import launched_code, results
from .clock import limit_of
from .messages import IMPORT
from .mutants import Mutant
from .near import Near
from .selection import cheapest, pieces
from .team import Worker
from .verdict import Answer

IN_FILE = 3  # weight of a check's rejections in the same file, relative to those in others


class Broken(RuntimeError):
    """This kernel cannot be evaluated."""


class Kernel:
    """The remaining mutants of a kernel, in their order, and the knowledge about its checks.

    pieces            the checks of its original that no worker has started; None before they are listed
    making, made      the number of tasks of the original that are running, and that were started
    only              the checks that are made; None for all
    """

    def __init__(self, name: str, mutants: Sequence[Mutant], near: Near | None = None) -> None:
        self.name, self.begun = name, 0
        self._near = near or {}
        self.left = list(reversed(mutants))
        self.broken: str | None = None
        self.pieces: list[list[str]] | None = None
        self.making, self.made, self.ready = 0, 0, True
        self.only: list[str] | None = None
        self._survivor, self._lasted = 0.0, list[float]()  # expected seconds of a survivor, durations of mutants
        self._kinds: dict[str, tuple[str, ...]] = {}  # implementation, case, mode, check
        self._took: dict[str, float] = {}
        self._lock = threading.Lock()
        self._sources: dict[str, str] = {}
        self._seconds: dict[str, float] = {}
        self._sound: set[str] = set()
        self.unsound: set[str] = set()  # checks that the original fails or skips
        self.failing: dict[str, str] = {}  # those that it fails, with the reason of the first
        self._kills = Counter[tuple[str, str]]()  # by file and check
        self._codes: dict[str, tuple[str, str]] = {}  # variant → its source and its code

    def prepare(self, worker: Worker, given: Mapping[str, Any]) -> Answer:
        """Lists the checks. Raises Broken if the original cannot be imported."""
        answer = worker.ask({**given, "kernel": self.name, "list": True})
        if answer["status"] == results.ERROR:
            return answer
        if "checks" not in answer:
            raise Broken(f"{self.name}: the original cannot be checked: {answer['status']}, {answer['reason']}")
        with self._lock:
            self._sound.add(IMPORT)
            self._survivor = answer["seconds"]
            self._kinds = {name: tuple(kind) for name, kind in answer["checks"]}
            self.pieces = list(pieces(self._kinds))
        return answer

    def check_original(self, names: Sequence[str], worker: Worker, given: Mapping[str, Any]) -> Answer:
        """Makes these checks on the original, as many as time permits."""
        answer = worker.ask({**given, "kernel": self.name, "only": names})
        if answer["status"] == results.ERROR:
            return answer
        made = {*answer["passed"], *answer["skipped"], *answer.get("failed", ()), answer["by"]}
        complete = answer["status"] in ("survived", "killed")
        self._note(answer, [name for name in names if complete or name in made])
        return answer

    def choose(self, seconds: float | None) -> None:
        """Ends the phase of the originals. Mutants get the checks that passed, or a subset that takes the original
        `seconds`, the cheapest of each kind first. Raises Broken if none passed."""
        with self._lock:
            known = {name: self._took.get(name, 0.0) for name in self._kinds if name in self._sound}
            self.only = cheapest(known, self._kinds, seconds)
            self._survivor += sum(known[name] for name in self.only)
            self.ready, self.pieces = True, []
            if not self.only:
                said = "; ".join(f"{name}: {why}" for name, why in [*self.failing.items()][:1])
                raise Broken(f"{self.name}: no check of the original passed in time. {said}".strip())

    def lasts(self) -> float:
        """Expected seconds of a mutant: the original's for its checks, or the 90th percentile of mutants so far."""
        with self._lock:
            lasted = sorted(self._lasted)
        return max(self._survivor, lasted[len(lasted) * 9 // 10] if lasted else 0.0)

    def ended(self, seconds: float) -> None:
        """Records the duration of a mutant."""
        with self._lock:
            self._lasted.append(seconds)

    def judge(self, mutant: Mutant, worker: Worker, given: Mapping[str, Any]) -> Answer:
        """The answer of a worker to a mutant, after all of its checks that the original also passes. Raises Broken if
        the original cannot be imported. `given` are the fields common to all tasks."""
        start, spent = time.monotonic(), defaultdict[str, float](float)
        answer = self._judged(mutant, worker, given, spent)
        spent["original"] += max(0.0, time.monotonic() - start - sum(spent.values()))
        return {**answer, "spent": {part: round(seconds, 2) for part, seconds in spent.items()}}

    def _judged(self, mutant: Mutant, worker: Worker, given: Mapping[str, Any], spent: dict[str, float]) -> Answer:
        """`judge`, which adds the time of the mutant's tasks by part to `spent`."""
        passed: set[str] = set()
        codes: set[tuple[str, str, str]] = set()
        while True:
            task = {**_alive(given), **self._task(mutant), "without": sorted(passed | self.unsound)}
            answer = worker.ask(task)
            for part, seconds in answer.get("spent", {}).items():
                spent[part] += seconds
            if answer["status"] in (results.INVALID, results.ERROR, results.UNFINISHED):
                return answer
            self._learn(answer["passed"])
            codes |= {(variant, source, code) for variant, source, code in answer.get("codes", ())}
            suspects = [answer["by"]] if answer["by"] else answer["skipped"]
            if original := answer.get("original"):
                self._note(original, [n for n in suspects if n in original["passed"] or n in original["skipped"]])
            if reason := self._verify([n for n in suspects if n not in self._sound | self.unsound], worker, given):
                return {**answer, "status": results.UNFINISHED, "by": "", "reason": f"the original: {reason}"}
            sound = [name for name in suspects if name in self._sound]
            if IMPORT in self.unsound:
                raise Broken(f"{self.name}: the original cannot be imported: {self.failing.get(IMPORT)}")
            if sound and answer["status"] == "survived":
                return {**answer, "status": "killed", "by": sound[0], "reason": "[skip] the original does not skip it"}
            is_hang = answer["status"] == "hang"
            reason = self._doubt(sound[0], answer["limit"], worker, given) if sound and is_hang else ""
            if reason:
                return {**answer, "status": results.UNFINISHED, "by": "", "reason": reason}
            if sound and not (is_hang and answer["limit"] < limit_of({**task, "seconds": self._seconds}, sound[0])):
                self._count(mutant, sound[0])
                return answer
            if answer["status"] == "survived":
                return self._if_same(mutant, answer, codes)
            passed |= set(answer["passed"])

    def _if_same(self, mutant: Mutant, answer: Answer, codes: Collection[tuple[str, str, str]]) -> Answer:
        """The answer, changed for a survivor whose machine code equals the original's in every compiled variant."""
        with self._lock:
            changed = launched_code.changed_to_the_same(codes, self._codes)
        if not (changed and launched_code.is_all_of(mutant, self._source(mutant.file))):
            return answer
        return {**answer, "status": results.SAME, "reason": f"the same machine code in all {changed} variants launched"}

    def _verify(self, names: Sequence[str], worker: Worker, given: Mapping[str, Any]) -> str:
        """Tests whether the original passes these checks; returns why not, or ""."""
        if names:
            answer = worker.ask({**_alive(given), "kernel": self.name, "only": names})
            if answer["status"] in (results.ERROR, results.UNFINISHED):
                return answer["reason"]
            self._note(answer, names)
        return ""

    def _doubt(self, name: str, limit: float, worker: Worker, given: Mapping[str, Any]) -> str:
        """Why a mutant that took longer than `limit` in a check need not hang; "" if the original, also now and in a
        new process, takes less than half as long."""
        answer = worker.ask({**_alive(given), "kernel": self.name, "only": [name]})
        self._learn(answer["passed"])
        if name not in answer["passed"]:
            return f"the original, after a mutant that hangs: {answer['reason'] or 'skipped'}"
        took = answer["seconds"]
        return f"the original took {took:.0f} s too" if 2 * took > limit else ""

    def _note(self, answer: Answer, names: Sequence[str]) -> None:
        """Notes which of these checks the original passes."""
        self._learn(answer["passed"])
        with self._lock:
            self._took |= answer.get("took", {})
            self._codes |= {variant: (source, code) for variant, source, code in answer.get("codes", ())}
            self._sound |= set(names) & set(answer["passed"])
            self.unsound |= set(names) - set(answer["passed"])
            failing = set(names) - set(answer["passed"]) - set(answer["skipped"])
            self.failing |= {name: answer.get("failed", {}).get(name, answer["reason"]) for name in failing}

    def _learn(self, passed: Mapping[str, float]) -> None:
        with self._lock:
            for name, seconds in passed.items():
                self._seconds[name] = max(seconds, self._seconds.get(name, 0.0))

    def _count(self, mutant: Mutant, check: str) -> None:
        with self._lock:
            self._kills[mutant.file, check] += 1

    def _source(self, file: str) -> str:
        if file not in self._sources:
            self._sources[file] = (registry.folder(self.name) / file).read_text(encoding="utf-8")
        return self._sources[file]

    def _task(self, mutant: Mutant) -> dict[str, Any]:
        with self._lock:
            weights = Counter[str]()
            for (file, check), kills in self._kills.items():
                weights[check] += kills * (1 + IN_FILE * (file == mutant.file))
            seconds = {name: seconds for name, seconds in self._seconds.items() if name not in self.unsound}
            task: dict[str, Any] = {
                "cases": self._near.get(mutant.key, []),
                "kernel": self.name,
                "file": mutant.file,
                "source": mutant.applied(self._source(mutant.file)),
                "seconds": seconds,
                "weights": weights,
            }
            return task if self.only is None else {**task, "only": self.only}


def _alive(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same with the seconds until the deadline."""
    left = {"life": max(0.0, given["deadline"] - time.monotonic())} if "deadline" in given else {}
    return {**{key: value for key, value in given.items() if key != "deadline"}, **left}

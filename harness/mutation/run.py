"""Runs the mutants of some kernels: workers, each with a checkout of its own, take them from the kernels in turn.

A check rejects a mutant only if the original passes it. A run of all checks finds that out when a check first rejects
one: one that the original fails or skips is left out from then on. A quick run first makes the checks of all originals,
in pieces that all workers share, for at most ORIGINALS of the time that is left when the first worker is ready (LEAST
at least where the run is longer than LONG); a kernel's mutants begin when its pieces are done. Then how long each check
takes is known from the first mutant on, and on a GPU what the originals launch is compiled.

A mutant that takes too long in a check counts as rejected only if the original, which is then run once more in a
process of its own, takes less than half as long.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from .. import registry
from . import results
from .mutants import Mutant
from .worker import CUDA_SOURCES, IMPORT, limit_of

GPU_SHARE = 0.7  # of a GPU's memory that all its workers may take with tensors; the rest is for two contexts of each
IN_FILE = 3  # what a check rejected of the same file weighs more than what it rejected elsewhere
ORIGINALS = 0.3  # of the time of a quick run that the originals may take
LONG, LEAST = 300.0, 120.0  # seconds of a run beyond which they may take so many
PIECE = 24  # checks of an original that one process makes
ERRORS = 3  # tasks one after the other that a worker cannot begin, after which it gets none
PROCESSES = {"cpu": 1, "cuda": 2}  # of a worker that need a core: on a GPU the next one starts CUDA
MARGIN, PATIENCE = 1.25, 40.0  # how much longer the next mutant may take; seconds that a worker may be late

Answer = Mapping[str, Any]
Done = Callable[[Mutant, Answer], None]


class Broken(RuntimeError):
    """Of this kernel nothing can be said."""


class Lost(RuntimeError):
    """A worker has ended, or does not answer."""


class Late(Lost):
    """A worker does not answer in time."""


class Worker:
    """A process that takes one task at a time. `name` says which it is."""

    def __init__(self, name: str, tasks: int, answers: int) -> None:
        self.name = name
        self._tasks, self._answers = tasks, answers
        self._text = b""

    def begin(self, seconds: float) -> None:
        """Waits until it is ready. Late where it is not within these seconds, Lost where it cannot be."""
        first = self._answer(seconds)
        if "broken" in first:
            raise Lost(f"{self.name} cannot begin: {first['broken']}")

    def ask(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a task. Lost where there is none within PATIENCE of the life of the task."""
        patience = task["life"] + PATIENCE if "life" in task else None
        text = (json.dumps(task) + "\n").encode()
        try:
            while text:
                text = text[os.write(self._tasks, text) :]
        except OSError as error:
            raise Lost(f"{self.name} has ended") from error
        return self._answer(patience)

    def _answer(self, patience: float | None) -> dict[str, Any]:
        end = None if patience is None else time.monotonic() + patience
        while b"\n" not in self._text:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self._answers], [], [], left)[0]:
                raise Late(f"{self.name} does not answer")
            piece = os.read(self._answers, 1 << 16)
            if not piece:
                raise Lost(f"{self.name} has ended")
            self._text += piece
        line, _, self._text = self._text.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        os.close(self._tasks)
        os.close(self._answers)


class Team:
    """Workers forked from one process, on the CPU or in turn on each of `gpus` (values of CUDA_VISIBLE_DEVICES)."""

    def __init__(self, device: str, scratch: Path, count: int, gpus: Sequence[str]) -> None:
        self.workers: list[Worker] = []
        theirs, listed = [], []
        for number in range(count):
            gpu = gpus[number % len(gpus)] if device == "cuda" else None
            tasks, answers = os.pipe(), os.pipe()
            name = f"worker {number}" + (f" on GPU {gpu}" if gpu is not None else "")
            self.workers.append(Worker(name, tasks[1], answers[0]))
            theirs += [tasks[0], answers[1]]
            listed.append({"root": f"{scratch / str(number)}", "gpu": gpu, "tasks": tasks[0], "answers": answers[1]})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.mutation.worker"],
            cwd=registry.ROOT,
            env=_environment(device, scratch),
            stdin=subprocess.PIPE,
            pass_fds=theirs,
        )
        for descriptor in theirs:
            os.close(descriptor)
        assert self._process.stdin is not None
        self._process.stdin.write((json.dumps(listed) + "\n").encode())
        self._process.stdin.flush()

    def close(self) -> None:
        """Ends all workers, and with them what they run."""
        for worker in self.workers:
            worker.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _environment(device: str, scratch: Path) -> dict[str, str]:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    # Without this, a look for a GPU before the fork would start CUDA, which the forked process could not use.
    environment |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    # What Inductor has compiled it finds again by the code that it saw, which need not be all that a mutant changed.
    environment |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    if device == "cpu":
        return environment | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    # The keys of Triton's cache, in which cubins of CUDA C++ are too, are made from all of the source: what no mutant
    # changes is compiled once for all workers. Without lines in it, machine code can be compared.
    return environment | {"TRITON_CACHE_DIR": str(scratch / "triton"), "TRITON_DISABLE_LINE_INFO": "1"}


class Kernel:
    """The mutants of a kernel that are left, in their order, and what is known of its checks.

    pieces            the checks of its original that no worker makes yet; None before it is known which there are
    making, made      how many tasks of the original are being done, and were begun
    only              the checks that are made; None for all
    """

    def __init__(self, name: str, mutants: Sequence[Mutant]) -> None:
        self.name, self.begun = name, 0
        self.left = list(reversed(mutants))
        self.broken: str | None = None
        self.pieces: list[list[str]] | None = None
        self.making, self.made, self.ready = 0, 0, True
        self.only: list[str] | None = None
        self._survivor, self._lasted = 0.0, list[float]()  # seconds that one should take, and that mutants have taken
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
        """Finds out which checks there are. Broken where the original cannot be imported."""
        answer = worker.ask({**given, "kernel": self.name, "list": True})
        if answer["status"] == results.ERROR:
            return answer
        if "checks" not in answer:
            raise Broken(f"{self.name}: the original cannot be checked: {answer['status']}, {answer['reason']}")
        with self._lock:
            self._sound.add(IMPORT)
            self._survivor = answer["seconds"]
            self._kinds = {name: tuple(kind) for name, kind in answer["checks"]}
            self.pieces = list(_pieces(self._kinds))
        return answer

    def check_original(self, names: Sequence[str], worker: Worker, given: Mapping[str, Any]) -> Answer:
        """Makes these checks of the original, as many as there is time for."""
        answer = worker.ask({**given, "kernel": self.name, "only": names})
        if answer["status"] == results.ERROR:
            return answer
        made = {*answer["passed"], *answer["skipped"], *answer.get("failed", ()), answer["by"]}
        complete = answer["status"] in ("survived", "killed")
        self._note(answer, [name for name in names if complete or name in made])
        return answer

    def choose(self, seconds: float | None) -> None:
        """Ends the part of the originals: the mutants have the checks that passed, or so many of them that the
        original takes `seconds`, the cheapest of each kind first. Broken where none passed."""
        with self._lock:
            known = {name: self._took.get(name, 0.0) for name in self._kinds if name in self._sound}
            self.only = _chosen(known, self._kinds, seconds)
            self._survivor += sum(known[name] for name in self.only)
            self.ready, self.pieces = True, []
            if not self.only:
                said = "; ".join(f"{name}: {why}" for name, why in [*self.failing.items()][:1])
                raise Broken(f"{self.name}: no check of the original passed in time. {said}".strip())

    def lasts(self) -> float:
        """The seconds that a mutant may take: the originals' for its checks, or more than nine of ten have taken."""
        with self._lock:
            lasted = sorted(self._lasted)
        return max(self._survivor, lasted[len(lasted) * 9 // 10] if lasted else 0.0)

    def ended(self, seconds: float) -> None:
        """A mutant has taken so long."""
        with self._lock:
            self._lasted.append(seconds)

    def judge(self, mutant: Mutant, worker: Worker, given: Mapping[str, Any]) -> Answer:
        """The answer of a worker to a mutant, after all of its checks that the original passes too. Broken where the
        original cannot be imported. `given` is what all tasks have."""
        passed: set[str] = set()
        codes: set[tuple[str, str, str]] = set()
        while True:
            task = {**_alive(given), **self._task(mutant), "without": sorted(passed | self.unsound)}
            answer = worker.ask(task)
            if answer["status"] in ("invalid", results.ERROR, results.UNFINISHED):
                return answer
            self._learn(answer["passed"])
            codes |= {(variant, source, code) for variant, source, code in answer.get("codes", ())}
            suspects = [answer["by"]] if answer["by"] else answer["skipped"]
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
        """The answer, but for a survivor that was compiled in every variant to the machine code of the original."""
        with self._lock:
            known = [(self._codes.get(variant, ("", "")), source, code) for variant, source, code in codes]
        same = all(code and code == original for (_, original), _, code in known)
        changed = sum(source != original for (original, _), source, _ in known)
        if not (changed and same and _is_compiled(mutant, self._source(mutant.file))):
            return answer
        return {**answer, "status": results.SAME, "reason": f"the same machine code in all {changed} variants launched"}

    def _verify(self, names: Sequence[str], worker: Worker, given: Mapping[str, Any]) -> str:
        """Finds out whether the original passes these checks; why not, or ""."""
        if names:
            answer = worker.ask({**_alive(given), "kernel": self.name, "only": names})
            if answer["status"] in (results.ERROR, results.UNFINISHED):
                return answer["reason"]
            self._note(answer, names)
        return ""

    def _doubt(self, name: str, limit: float, worker: Worker, given: Mapping[str, Any]) -> str:
        """Why a mutant that took longer than `limit` in a check may not hang; "" where the original, now and in a
        process of its own as well, takes less than half as long."""
        answer = worker.ask({**_alive(given), "kernel": self.name, "only": [name]})
        self._learn(answer["passed"])
        if name not in answer["passed"]:
            return f"the original, after a mutant that hangs: {answer['reason'] or 'skipped'}"
        took = answer["seconds"]
        return f"the original took {took:.0f} s too" if 2 * took > limit else ""

    def _note(self, answer: Answer, names: Sequence[str]) -> None:
        """What the original passes of these checks."""
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
            task = {
                "kernel": self.name,
                "file": mutant.file,
                "source": mutant.applied(self._source(mutant.file)),
                "seconds": seconds,
                "weights": weights,
            }
            return task if self.only is None else {**task, "only": self.only}


def _alive(given: Mapping[str, Any]) -> dict[str, Any]:
    """With the seconds until the deadline."""
    left = {"life": max(0.0, given["deadline"] - time.monotonic())} if "deadline" in given else {}
    return {**{key: value for key, value in given.items() if key != "deadline"}, **left}


def _pieces(kinds: Mapping[str, tuple[str, ...]]) -> Iterator[list[str]]:
    """The checks in parts of at most PIECE, in an order by chance. Those of one case stay together: they launch the
    same kernels."""
    cases = defaultdict(list)
    for name, kind in kinds.items():
        cases[kind[:2]].append(name)
    for case in sorted(cases, key=lambda case: hashlib.sha256(repr(case).encode()).digest()):
        yield from (cases[case][at : at + PIECE] for at in range(0, len(cases[case]), PIECE))


def _chosen(took: Mapping[str, float], kinds: Mapping[str, tuple[str, ...]], seconds: float | None) -> list[str]:
    """The cheapest check of each kind (implementation, mode and check), then the second of each, and so on, as long as
    they take less than `seconds`."""
    groups = defaultdict(list)
    for name in sorted(took, key=lambda name: (took[name], name)):
        implementation, _, mode, check = kinds[name]
        groups[implementation, mode, check].append(name)
    chosen, spent = [], 0.0
    for rank in itertools.zip_longest(*groups.values()):
        for name in sorted(filter(None, rank), key=lambda name: (took[name], name)):
            if seconds is None or spent + took[name] <= seconds:
                chosen.append(name)
                spent += took[name]
    return chosen


def _is_compiled(mutant: Mutant, source: str) -> bool:
    """Whether all that a mutant changes is compiled for the GPU: CUDA C++, or a function of Triton. Then lines must
    stay where they are, as Triton's functions below would be others else."""
    if mutant.file.endswith(CUDA_SOURCES):
        return True
    name = mutant.function.partition(".")[0]
    return name in _jitted(source) and mutant.applied(source).count("\n") == source.count("\n")


@cache
def _jitted(source: str) -> frozenset[str]:
    """The functions of a module that Triton compiles."""
    found = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return frozenset(f.name for f in found if any("jit" in ast.unparse(d).split("(")[0] for d in f.decorator_list))


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
) -> None:
    """Calls `done` with each mutant and its answer, until `deadline` by the monotonic clock: none is begun that should
    take longer than what is left, and those that do are "unfinished"."""
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as scratch:
        team = Team(device, Path(scratch), workers, gpus)
        try:
            shared = -(-workers // max(1, len(gpus)))
            crowd = max(1.0, PROCESSES[device] * workers / (os.cpu_count() or 1))
            given = {"device": device, "quick": quick, "memory": GPU_SHARE / shared, "crowd": crowd}
            queue = Queue(kernels, given, deadline, done, say)
            if quick:
                queue.originals_first(seconds)
            queue.served_by(team.workers)
        finally:
            team.close()


def time_of_originals(left: float, whole: float) -> float:
    """The seconds that originals may take of those that are left of a run."""
    return min(left, max(ORIGINALS * left, LEAST if whole > LONG else 0.0))


Job = Callable[[Worker], None]


class Queue:
    """The mutants of all kernels, of which each kernel has the same share, and before them the checks of originals."""

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
        self._unable = Counter[str]()  # by worker: the tasks that it could not begin since it last could
        self._again: set[str] = set()  # mutants that another worker tries

    def originals_first(self, seconds: float | None) -> None:
        """First the checks of originals are made, of which mutants then have those that take `seconds`."""
        self._originals, self._seconds = True, seconds
        for kernel in self._kernels:
            kernel.ready = False

    def served_by(self, team: Sequence[Worker]) -> None:
        """Returns when all workers have finished, or cannot go on. Raises where none can and mutants are left."""
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
                return  # the time is up, and nothing is wrong
            self._begun()
            while (job := self._next()) is not None:
                job(worker)
        except Exception as error:
            with self._changed:
                self._errors.append(error)
                self._changed.notify_all()

    def _begun(self) -> None:
        """A worker is ready. The time of the originals begins with the first."""
        with self._changed:
            self._ready += 1
            now = time.monotonic()
            if self._ready == 1 and self._originals:
                self._originals_end = now + time_of_originals(self._deadline - now, self._deadline - self._start)
            if self._ready in (1, self._team):
                self._say(f"{self._ready} of {self._team} workers ready after {now - self._start:.0f} s")

    def _next(self) -> Job | None:
        """What is to do next; waits where another worker must first finish. None where nothing is left."""
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
        """A part of the original of which the fewest were begun."""
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
        """Lost where this worker begins nothing any more, as with a GPU that is out of order."""
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
        """The next mutant of the kernel of which the fewest were begun, of those that can be done in time."""
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
            empty = {"status": results.ERROR, "by": "", "seconds": 0.0}
            with self._changed:
                self._done(mutant, {**empty, "reason": str(lost)})
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

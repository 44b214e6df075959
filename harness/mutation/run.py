"""Runs the mutants of some kernels: workers, each in a copy of the checkout, take them from the kernels in turn.

Nothing is known of a kernel's checks at the beginning. A check rejects a mutant only if the original passes it, which
is found out when it first rejects one: a check that the original fails or skips is left out from then on. How long a
check takes is known from where it passed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import registry
from .mutants import Mutant
from .worker import IMPORT, limit_of

COPIED = ("harness", "kernels", "workloads", "parts", "tests", "examples", "conftest.py", "pyproject.toml")
LEAST = 60  # of mutants, where not all are run
GPU_SHARE = 0.8  # of the GPU's memory that all workers may take with tensors; the rest is for their contexts
IN_FILE = 3  # what a check rejected of the same file weighs more than what it rejected elsewhere

Answer = Mapping[str, Any]
Done = Callable[[Mutant, Answer], None]


class Broken(RuntimeError):
    """Of this kernel nothing can be said."""


class Worker:
    """A process that takes one task at a time, in a copy of the checkout."""

    def __init__(self, device: str, root: Path) -> None:
        self.root = root
        for name in COPIED:
            source = registry.ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.svg"))
            elif source.is_file():
                shutil.copy(source, root / name)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "harness.mutation.worker"],
            cwd=root,
            env=_environment(device, root),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._ready = False

    def ask(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a task. RuntimeError where the process has ended."""
        assert self.process.stdin is not None
        if not self._ready:
            self._ready = bool(self._answer())
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        if not text:
            raise RuntimeError(f"the worker in {self.root} ended with {self.process.wait()}")
        return json.loads(text)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self.process.kill()


def _environment(device: str, root: Path) -> dict[str, str]:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    # Without this, a look for a GPU before the fork would start CUDA, which the forked process could not use.
    environment |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    # What Inductor has compiled it finds again by the code that it saw, which need not be all that a mutant changed.
    environment |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(root / "inductor")
    if device == "cpu":
        return environment | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    # The keys of Triton's cache, in which cubins of CUDA C++ are too, are made from all of the source: what no mutant
    # changes is compiled once for all workers.
    return environment | {"TRITON_CACHE_DIR": str(root.parent / "triton")}


class Kernel:
    """The mutants of a kernel that are left, in their order, and what is known of its checks. `least` are begun
    however late it is."""

    def __init__(self, name: str, mutants: Sequence[Mutant], least: int) -> None:
        self.name, self.least, self.begun = name, least, 0
        self.left = list(reversed(mutants))
        self.broken: str | None = None
        self._lock = threading.Lock()
        self._sources: dict[str, str] = {}
        self._seconds: dict[str, float] = {}
        self._sound: set[str] = set()
        self.unsound: set[str] = set()  # checks that the original fails or skips
        self.failing: set[str] = set()  # those that it fails
        self._kills = Counter[tuple[str, str]]()  # by file and check

    def judge(self, mutant: Mutant, worker: Worker, given: Mapping[str, Any]) -> Answer:
        """The answer of a worker to a mutant, after all of its checks that the original passes too. Broken where the
        original cannot be imported. `given` is what all tasks have."""
        passed: set[str] = set()
        while True:
            task = {**given, **self._task(mutant, worker.root), "without": sorted(passed | self.unsound)}
            answer = worker.ask(task)
            if answer["status"] == "invalid":
                return answer
            self._learn(answer["passed"])
            suspects = [answer["by"]] if answer["by"] else answer["skipped"]
            self._verify([name for name in suspects if name not in self._sound | self.unsound], worker, given)
            sound = [name for name in suspects if name in self._sound]
            if IMPORT in self.unsound:
                raise Broken(f"{self.name}: the original cannot be imported")
            if sound and answer["status"] == "survived":
                return {**answer, "status": "killed", "by": sound[0], "reason": "[skip] the original does not skip it"}
            late = {**task, "seconds": self._seconds}
            if sound and (answer["status"] != "hang" or answer["limit"] >= limit_of(late, sound[0])):
                self._count(mutant, sound[0])
                return answer
            if answer["status"] == "survived":
                return answer
            passed |= set(answer["passed"])

    def _verify(self, names: Sequence[str], worker: Worker, given: Mapping[str, Any]) -> None:
        """Finds out whether the original passes these checks."""
        if names:
            answer = worker.ask({**given, "kernel": self.name, "only": names})
            self._learn(answer["passed"])
            with self._lock:
                self._sound |= set(names) & set(answer["passed"])
                self.unsound |= set(names) - set(answer["passed"])
                self.failing |= set(names) - set(answer["passed"]) - set(answer["skipped"])

    def _learn(self, passed: Mapping[str, float]) -> None:
        with self._lock:
            for name, seconds in passed.items():
                self._seconds[name] = max(seconds, self._seconds.get(name, 0.0))

    def _count(self, mutant: Mutant, check: str) -> None:
        with self._lock:
            self._kills[mutant.file, check] += 1

    def _task(self, mutant: Mutant, root: Path) -> dict[str, Any]:
        inside = registry.package(self.name).replace(".", "/")
        with self._lock:
            if mutant.file not in self._sources:
                path = registry.folder(self.name) / mutant.file
                self._sources[mutant.file] = path.read_text(encoding="utf-8")
            weights = Counter[str]()
            for (file, check), kills in self._kills.items():
                weights[check] += kills * (1 + IN_FILE * (file == mutant.file))
            return {
                "kernel": self.name,
                "path": str(root / inside / mutant.file),
                "source": mutant.applied(self._sources[mutant.file]),
                "seconds": {name: seconds for name, seconds in self._seconds.items() if name not in self.unsound},
                "weights": weights,
            }


def run(
    kernels: Sequence[Kernel],
    device: str,
    workers: int,
    minutes: float,
    done: Done,
    say: Callable[[str], None],
    quick: bool = False,
) -> None:
    """Calls `done` with each mutant and its answer. After `minutes` none is begun but the `least` of each kernel;
    those that were begun are run to their end, so that what is known is a sample by no result."""
    deadline = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as scratch:
        team: list[Worker] = []
        try:
            team += (Worker(device, Path(scratch, f"{number}")) for number in range(workers))
            given = {"device": device, "quick": quick, "memory": GPU_SHARE / workers}
            Queue(kernels, given, deadline, done, say).served_by(team)
        finally:
            for worker in team:
                worker.close()


class Queue:
    """The mutants of all kernels, of which each kernel has the same share."""

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
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def served_by(self, team: Sequence[Worker]) -> None:
        """Returns when all workers have finished; raises what one of them raised."""
        threads = [threading.Thread(target=self._serve, args=(worker,), daemon=True) for worker in team]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error:
            raise self._error

    def _serve(self, worker: Worker) -> None:
        try:
            while (found := self._next()) is not None:
                kernel, mutant = found
                try:
                    answer = kernel.judge(mutant, worker, self._given)
                except Broken as broken:
                    self._give_up(kernel, str(broken))
                    continue
                with self._lock:
                    self._done(mutant, answer)
        except Exception as error:
            self._error = error

    def _next(self) -> tuple[Kernel, Mutant] | None:
        """The next mutant of the kernel of which the fewest were begun; None where there is none to begin."""
        with self._lock:
            late = time.monotonic() > self._deadline
            able = [k for k in self._kernels if k.left and not k.broken and not (late and k.begun >= k.least)]
            if not able or self._error:
                return None
            kernel = min(able, key=lambda k: k.begun)
            kernel.begun += 1
            return kernel, kernel.left.pop()

    def _give_up(self, kernel: Kernel, reason: str) -> None:
        with self._lock:
            if not kernel.broken:
                kernel.broken = reason
                self._say(reason)

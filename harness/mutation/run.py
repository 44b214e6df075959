"""Runs the mutants of one kernel: some workers, each in a copy of the checkout, the cheapest checks first."""

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import registry
from .mutants import Mutant

COPIED = ("harness", "kernels", "workloads", "parts", "tests", "examples", "conftest.py", "pyproject.toml")
SLACK, FACTOR = 10.0, 10.0  # a check may take FACTOR times as long as on the original, and SLACK seconds more
LEAST = 60  # of mutants, where not all are run


@dataclass
class Baseline:
    """The checks and tests that the original passes, with their seconds, and the tests that it fails."""

    checks: dict[str, float]
    tests: dict[str, float]
    failing: list[str] = field(default_factory=list)


class Worker:
    """A process that takes one task at a time, in a copy of the checkout."""

    def __init__(self, kernel: str, device: str, root: Path) -> None:
        self.root = root
        for name in COPIED:
            source = registry.ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.svg"))
            elif source.is_file():
                shutil.copy(source, root / name)
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        # Without this, a look for a GPU before the fork would start CUDA, which the forked process could not use.
        environment |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        if device == "cpu":
            environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        else:
            environment["TRITON_CACHE_DIR"] = str(root.parent / "triton")
        command = [sys.executable, "-m", "harness.mutation.worker", kernel, device]
        self.process = subprocess.Popen(
            command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def ask(self, task: Mapping[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
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


def baseline(worker: Worker) -> Baseline:
    """What the original passes. RuntimeError where a check of SPEC fails on it."""
    answer = worker.ask({"workers": 1})
    passed = answer["passed"]
    if not passed:
        raise RuntimeError(f"the original passes no check: {answer['by']}: {answer['reason']}")
    tests = {name: seconds for name, seconds in passed.items() if "::" in name}
    failing = [answer["by"]] if answer["status"] != "survived" else []
    return Baseline({name: s for name, s in passed.items() if name not in tests}, tests, failing)


def run(
    kernel: str,
    device: str,
    mutants: Sequence[Mutant],
    workers: int,
    minutes: float,
    enough: int,
    done: Callable[[Mutant, Mapping[str, Any]], None],
    say: Callable[[str], None],
    known: Baseline | None = None,
    found: Callable[[Baseline], None] = lambda original: None,
) -> None:
    """Calls `done` with each mutant and its answer. After `minutes`, none is begun once `enough` were run. What the
    original passes is found out where it is not `known`, and `found` called with it."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        team = [Worker(kernel, device, Path(scratch, f"{number}")) for number in range(workers)]
        try:
            start = time.monotonic()
            original = known or baseline(team[0])
            if original.failing:
                raise RuntimeError(f"the original fails {original.failing[0]}: nothing can be said of mutants")
            say(
                f"{kernel}: the original passes {len(original.checks)} checks and {len(original.tests)} tests, "
                + ("as before" if known else f"in {time.monotonic() - start:.0f} s")
            )
            if known is None:
                found(original)
            _Queue(kernel, mutants, original, minutes, enough, done).served_by(team)
        finally:
            for worker in team:
                worker.close()


class _Queue:
    """The mutants that are left, and what the workers have found so far."""

    def __init__(
        self,
        kernel: str,
        mutants: Sequence[Mutant],
        original: Baseline,
        minutes: float,
        enough: int,
        done: Callable[[Mutant, Mapping[str, Any]], None],
    ) -> None:
        self._kernel, self._left, self._original = kernel, list(reversed(mutants)), original
        self._done, self._enough = done, enough
        self._deadline = time.monotonic() + 60 * minutes
        self._begun, self._kills = 0, Counter[str]()
        self._lock = threading.Lock()
        self._sources: dict[str, str] = {}
        self._error: Exception | None = None

    def served_by(self, team: Sequence[Worker]) -> None:
        threads = [threading.Thread(target=self._serve, args=(worker, len(team)), daemon=True) for worker in team]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error:
            raise self._error

    def _serve(self, worker: Worker, workers: int) -> None:
        try:
            while (mutant := self._next()) is not None:
                answer = worker.ask({**self._task(mutant, worker), "workers": workers})
                with self._lock:
                    if answer["status"] != "survived":
                        self._kills[answer["by"]] += 1
                    self._done(mutant, answer)
        except Exception as error:
            self._error = error

    def _next(self) -> Mutant | None:
        with self._lock:
            late = time.monotonic() > self._deadline and self._begun >= self._enough
            if not self._left or late or self._error:
                return None
            self._begun += 1
            return self._left.pop()

    def _task(self, mutant: Mutant, worker: Worker) -> dict[str, Any]:
        inside = registry.package(self._kernel).replace(".", "/")
        with self._lock:
            if mutant.file not in self._sources:
                self._sources[mutant.file] = (registry.folder(self._kernel) / mutant.file).read_text(encoding="utf-8")
            source = self._sources[mutant.file]
        checks, tests = self._original.checks, self._original.tests
        return {
            "path": str(worker.root / inside / mutant.file),
            "source": mutant.applied(source),
            "checks": self._in_order(checks),
            "tests": self._in_order(tests),
            "test_seconds": SLACK + FACTOR * max(tests.values(), default=0.0),
        }

    def _in_order(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """How long each may take, the cheapest first, and before them those that have rejected much."""
        order = sorted(seconds, key=lambda name: (0.02 + seconds[name]) / (1 + self._kills[name]))
        return {name: SLACK + FACTOR * seconds[name] for name in order}

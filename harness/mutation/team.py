"""The workers of a run, for the process that gives them tasks. `worker` describes a task, `verdict` an answer."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import registry

PATIENCE = 40.0  # seconds that a worker may be late


class Lost(RuntimeError):
    """A worker has ended, or does not answer."""


class Late(Lost):
    """A worker does not answer in time."""


class Worker:
    """A process that takes one task at a time; `name` identifies it."""

    def __init__(self, name: str, tasks: int, answers: int) -> None:
        self.name = name
        self._tasks, self._answers = tasks, answers
        self._text = b""

    def begin(self, seconds: float) -> None:
        """Waits until it is ready. Raises Late if it is not within `seconds`, Lost if it cannot become ready."""
        first = self._answer(seconds)
        if "broken" in first:
            raise Lost(f"{self.name} cannot begin: {first['broken']}")

    def ask(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a task. Raises Lost if there is none within PATIENCE after the lifetime of the task."""
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
    """Workers forked from one process, on the CPU or alternating over `gpus` (values of CUDA_VISIBLE_DEVICES)."""

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
            env=environment(device, scratch),
            stdin=subprocess.PIPE,
            pass_fds=theirs,
        )
        for descriptor in theirs:
            os.close(descriptor)
        assert self._process.stdin is not None
        self._process.stdin.write((json.dumps(listed) + "\n").encode())
        self._process.stdin.flush()

    def close(self) -> None:
        """Ends all workers and their processes."""
        for worker in self.workers:
            worker.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def environment(device: str, scratch: Path) -> dict[str, str]:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    # Without this, querying for a GPU before the fork would start CUDA, which the forked process could not use.
    environment |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    # Inductor's caches are keyed by the code that it saw, which need not include everything that a mutant changed.
    environment |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    if device == "cpu":
        return environment | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    # The keys of Triton's cache, which also holds cubins of CUDA C++, are computed from the whole source: unchanged
    # kernels are compiled once for all workers. Without line information machine code can be compared.
    return environment | {"TRITON_CACHE_DIR": str(scratch / "triton"), "TRITON_DISABLE_LINE_INFO": "1"}

"""Runs the checks on one mutant after another, in processes that are forked after the imports.

`python -m harness.mutation.worker` reads a JSON list of workers from one line of standard input. It imports what all
mutants need, once, and forks the workers. A worker reports that it is ready when its first process is. A mutant of
Python or Triton has its own process. The process of the next task is forked ahead: on a GPU it starts CUDA while the
checks of the preceding mutant run. On a GPU one process runs mutants of CUDA C++, and originals, one after another; a
failure caused by leftovers of a mutant does not count for the next (`leftovers`). A worker has

root              its own folder, its checkout (`checkout`)
gpu               the value of CUDA_VISIBLE_DEVICES; None without
tasks, answers    the file descriptors from which it reads tasks, one JSON object per line, and to which it writes
                  answers (`verdict`)

A task has

kernel, device    whose checks are made, and where: "cpu" or "cuda"
list              only to list the checks and the duration of the import; nothing is run
file, source      a file of the kernel's folder and its new text; without them the original is checked. The worker
                  adds the old one, `original`, and whether the process has had another mutant, `used`
only              the names of the checks and tests that are made; without it all of them
without           names that are not made
cases             the pairs of implementation and case whose checks are made; without it those of all
quick             neither checks that compile with PyTorch nor tests
seconds           name → its duration when it passed
weights           name → how much it has rejected; checks that have rejected much, or are cheap, come first
memory            the fraction of the GPU's memory that the process may use
crowd             factor on a check's time limit, since processes share the cores
life              the seconds after which the process is killed, and has the status "unfinished"
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import checkout, checks, cuda, leftovers, results, verdict
from .process import UNWILLING, Ahead, Process, Work, end_with_parent

NVRTC = "cupy.cuda.nvrtc"


def main() -> None:
    """Forks the workers, and ends when they have ended."""
    end_with_parent()
    workers = json.loads(sys.stdin.readline())
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        _imports()
    except BaseException:
        for worker in workers:
            _write(worker["answers"], {"broken": traceback.format_exc()[-2000:]})
        return
    gc.collect()
    gc.freeze()  # pages that the collector does not visit stay shared with the forked processes
    for worker in workers:
        if os.fork() == 0:
            code = 1
            try:
                end_with_parent()
                _close(other for other in workers if other is not worker)
                _serve(worker)
                code = 0
            finally:
                os._exit(code)
    _close(workers)
    for _ in workers:
        os.wait()


def _imports() -> None:
    """Imports what every mutant needs and none changes. RuntimeError if an import starts CUDA, which does not survive a
    fork."""
    import torch

    torch.set_num_threads(1)
    for name in ("harness.commands.check", "hypothesis", "pytest", "torch._dynamo", "torch.export", "torch._inductor"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
        if cuda.is_started():
            raise RuntimeError(f"the import of {name} has started CUDA, which a forked process cannot use")
    if not cuda.is_started_by(NVRTC):  # otherwise each process imports it for itself
        with contextlib.suppress(Exception):  # without a driver CuPy raises more than ImportError
            importlib.import_module(NVRTC)
    if early := [name for name in sys.modules if name.startswith("kernels.")]:
        raise RuntimeError(f"{early[0]} was imported before the fork: no mutant of it would be seen")


def _close(workers: Iterator[Mapping[str, Any]] | Sequence[Mapping[str, Any]]) -> None:
    for worker in workers:
        os.close(worker["tasks"])
        os.close(worker["answers"])


def _write(descriptor: int, answer: Mapping[str, Any]) -> None:
    text = (json.dumps(answer) + "\n").encode()
    while text:
        text = text[os.write(descriptor, text) :]


def _serve(worker: Mapping[str, Any]) -> None:
    """Answers tasks until there are no more."""
    try:
        _settle(Path(worker["root"]), worker["gpu"])
    except BaseException:
        _write(worker["answers"], {"broken": traceback.format_exc()[-2000:]})
        raise
    processes = Processes(checks.make, None if worker["gpu"] is None else cuda.start_ahead)
    processes.prepare()
    _write(worker["answers"], {"ready": True})
    with os.fdopen(worker["tasks"], encoding="utf-8") as tasks:
        for line in tasks:
            _write(worker["answers"], processes.answer(json.loads(line)))


def _settle(root: Path, gpu: str | None) -> None:
    """Gives this process its checkout and its GPU."""
    checkout.enter(root)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu


class Processes:
    """The processes of a worker: a new one that waits for its first task, and a used one. Either may be missing."""

    def __init__(self, work: Work, ahead: Ahead | None = None) -> None:
        self._work, self._ahead = work, ahead
        self._new: Process | None = None
        self._used: Process | None = None

    def prepare(self) -> None:
        """Waits until a new process can take a task."""
        self._new = Process(self._work, self._ahead)
        self._new.wait(cuda.START_SECONDS + UNWILLING)

    def answer(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a task, also if it cannot be executed."""
        try:
            if not task.get("file"):
                return self._answer(task)
            with checkout.with_mutant(task) as original:
                return self._answer({**task, "original": original})
        except Exception:
            return verdict.not_begun(traceback.format_exc()[-1000:])

    def _answer(self, task: Mapping[str, Any]) -> dict[str, Any]:
        if not leftovers.is_for_used(task):
            return self._alone(task)
        process, self._used = self._used or self._take(), None
        used = process.mutants > 0
        process.send({**task, "used": used})
        answer = process.answer()
        holds = not used or verdict.holds(task, answer)
        if not holds or process.tasks >= leftovers.TASKS:
            process.kill()
        if process.ended:
            self._fork()
        else:  # no other is forked ahead: its start of CUDA would block this one and all others
            self._used = process
        return answer if holds else self._again(task, answer)

    def _again(self, task: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
        """The answer of a new process, if that of a used one may be caused by another mutant."""
        lost = first["seconds"]
        left = {"life": task["life"] - lost} if "life" in task else {}
        if left and left["life"] <= 0:
            nothing = {"by": "", "failed": {}, "reason": "time was up before it could be judged again"}
            return {**first, **nothing, "status": results.UNFINISHED}
        if task.get("file"):
            checkout.write(task, task["source"])
        answer = self._alone({**task, **left})
        return {**answer, "seconds": round(lost + answer["seconds"], 2), "spent": {"again": lost, **answer["spent"]}}

    def _alone(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """The answer of a new process. The next is forked meanwhile, since this one will rarely take another task."""
        process = self._take()
        process.send(task)
        self._fork()
        answer = process.answer()
        if not process.ended:
            self._used = process
        return answer

    def _take(self) -> Process:
        process, self._new = self._new or Process(self._work, self._ahead), None
        return process

    def _fork(self) -> None:
        self._new = self._new or Process(self._work, self._ahead)


if __name__ == "__main__":
    main()

"""Runs the checks on one mutant after another, each in a process of its own that is forked after the imports.

`python -m harness.mutation.worker` reads a JSON list of workers, a line of standard input. It imports what all mutants
need, once, and forks the workers. A worker says that it is ready when the process of its first task is. The process of
the next task is always forked before it is needed: on a GPU it starts CUDA while the checks of the mutant before it
run. No process has two mutants: what one writes out of bounds would be found by the checks of the next. A worker has

root              a folder of its own, its checkout (`checkout`)
gpu               the value of CUDA_VISIBLE_DEVICES; None without
tasks, answers    the file descriptors from which it reads tasks, a JSON object a line, and to which it writes answers
                  (`verdict`)

A task has

kernel, device    whose checks are made, and where: "cpu" or "cuda"
list              only to list the checks and how long the import took; nothing is run
file, source      a file of the kernel's folder and its new text; without them the original is checked
only              the names of the checks and tests that are made; without it all of them
without           names that are not
cases             the pairs of implementation and case whose checks are made; without them of all
quick             neither those that compile with PyTorch nor the tests
seconds           name → how long it took where it passed
weights           name → how much it has rejected; what has rejected much, or is cheap, comes first
memory            the part of the GPU's memory that the process may take
crowd             how many times longer a check may take, as processes share the cores
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

from . import checkout, checks, cuda, verdict
from .process import UNWILLING, Process, end_with_parent


def main() -> None:
    """Forks the workers, and ends when they have."""
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
    gc.freeze()  # what is not visited by the collector stays shared with the forked processes
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
    """What every mutant needs and none changes. RuntimeError where an import starts CUDA, which does not survive a
    fork."""
    import torch

    torch.set_num_threads(1)
    for name in ("harness.commands.check", "hypothesis", "pytest", "torch._dynamo", "torch.export", "torch._inductor"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
        if cuda.is_started():
            raise RuntimeError(f"the import of {name} has started CUDA, which a forked process cannot use")
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
    process = Process(checks.make, None if worker["gpu"] is None else cuda.start_ahead)
    process.wait(cuda.START_SECONDS + UNWILLING)
    _write(worker["answers"], {"ready": True})
    with os.fdopen(worker["tasks"], encoding="utf-8") as tasks:
        for line in tasks:
            answer, process = answered(json.loads(line), process)
            _write(worker["answers"], answer)


def _settle(root: Path, gpu: str | None) -> None:
    """Gives this process its checkout and its GPU."""
    checkout.enter(root)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu


def answered(task: Mapping[str, Any], process: Process) -> tuple[dict[str, Any], Process]:
    """The answer of a process to a task, also where it cannot be done, and the process of the next one."""
    following = process
    try:
        with checkout.with_mutant(task) if task.get("file") else contextlib.nullcontext():
            process.send(task)
            following = Process(process.work, process.ahead)
            return process.answer(), following
    except Exception:
        return verdict.not_begun(traceback.format_exc()[-1000:]), following


if __name__ == "__main__":
    main()

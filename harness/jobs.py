"""`bench --jobs N`: N concurrent benches per GPU, which use it one at a time (`harness/measure/turns.py`).

Most of a bench's time is compilation of peers on the host, during which a GPU idles. So the groups of the selection are
distributed, a few of one kernel and mode at a time, over processes that are benches of their own. The rows of each are
added to the records as soon as it ends, or is ended: they equal those of sequential processes. Cases that run out of
memory on a shared GPU are repeated at the end, one at a time per GPU. Host time is not measured, because the host is
busy.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
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

from . import options, record
from .options import Selection
from .reporting.findings import findings

BATCH = 3  # groups per process, at most: a process starts in some 15 seconds
ROUNDS = 4  # processes per slot, at least, one after the other, so that none runs long after the others end
LOOK_SECONDS = 0.1
BUSY = 2  # compiler processes per core: at any time most benches wait for the GPU, or use it
PATIENCE_SECONDS = 2.0  # for a terminal's Ctrl-C, which every process gets, to take effect
GRACE_SECONDS = 15.0  # from an interrupt to a kill
INTERRUPTED = 130
#: Variables for the number of compiler processes of a bench: Inductor's, and those of QuACK's autotuner.
COMPILERS = ("TORCHINDUCTOR_COMPILE_THREADS", "QUACK_COMPILE_WORKERS")
PASSED = ("impl", "timer", "samples", "warmup")  # options that are passed on to each process

Group = tuple[str, str, str]  # kernel, case, mode


@dataclass(frozen=True)
class Task:
    """Cases of one kernel in one mode, for one process."""

    kernel: str
    mode: str
    cases: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kernel} {self.mode} {' '.join(self.cases)}"


def batch(groups: int, places: int) -> int:
    """The number of groups per process, for `groups` groups and `places` concurrent processes."""
    return max(1, min(BATCH, groups // (ROUNDS * places)))


def tasks(groups: Sequence[Group], size: int) -> list[Task]:
    """Splits the groups, in order, into tasks of at most `size` groups of one kernel and mode."""
    cases: dict[tuple[str, str], list[str]] = {}
    for kernel, case, mode in groups:
        cases.setdefault((kernel, mode), []).append(case)
    return [
        Task(kernel, mode, tuple(names[first : first + size]))
        for (kernel, mode), names in cases.items()
        for first in range(0, len(names), size)
    ]


def unmeasured(out: Path, groups: Sequence[Group], implementations: Mapping[str, Sequence[str]]) -> list[Group]:
    """The groups without a row of ours in the records, those that lack a row of one of their kernel's
    `implementations`, those whose run lacked a peer that is declared now, and those with a row that was withdrawn."""
    found = findings(record.load(out)) if out.is_dir() and record.files(out) else []
    measured = {
        (f.kernel, f.case, f.mode)
        for f in found
        if f.best is not None
        and not f.absent
        and {row["implementation"] for row in f.rows}.issuperset(implementations.get(f.kernel, ()))
        and not any(row.withdrawn for row in f.rows)
    }
    return [group for group in groups if group not in measured]


def of_selections(selections: Sequence[Selection]) -> list[Group]:
    """The groups whose cases use one GPU."""
    return [(s.spec.name, case.name, mode) for s in selections for case, mode in s.groups() if case.world_size == 1]


def command(task: Task, gpu: str, out: Path, turns: Path | None, passed: Sequence[str]) -> list[str]:
    """The command line of a task's process. `turns`: the file by which processes share a GPU; None if alone on it."""
    chosen = options.words({"kernel": [task.kernel], "mode": [task.mode], "case": task.cases})
    where = ["--gpu", gpu, "--out", str(out), "--host", "no", *(["--turns", str(turns)] if turns else [])]
    return [sys.executable, "-m", "harness", "bench", *chosen, *passed, *where]


def take_over(source: Path, out: Path, shared: bool) -> tuple[int, tuple[str, ...]]:
    """Adds the records under `source`, of one kernel and mode, to those under `out`. Returns the number of rows added,
    and the cases left out: on a GPU that others `shared`, those that ran out of memory, since it may suffice for them
    alone. A torn last line is left out too."""
    rows, left_out = 0, list[str]()
    for path in record.files(source):
        record.mend(path)
        lines = [json.loads(line) for line in path.open(encoding="utf-8")]
        short = {_group(line): line["case"] for line in lines if shared and line.get("status") == "oom"}
        kept = [line for line in lines if _group(line) not in short]
        measured = _rows(kept)
        rows += measured
        left_out += short.values()
        if not measured:
            continue
        target = out / "records" / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        record.mend(target)
        with target.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in kept)
    return rows, tuple(dict.fromkeys(left_out))


def _rows(lines: Sequence[Mapping[str, Any]]) -> int:
    return sum(line["type"] == "row" for line in lines)


def _group(line: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Run, case and mode of a line of a record; None for a line that belongs to no group."""
    return (line["run"], line["case"], line["mode"]) if "case" in line else None


@dataclass
class Crew:
    """Runs the tasks in processes. `start` begins one, given a task, a GPU's number, a folder of its own, and whether
    other processes use the GPU."""

    waiting: list[Task]
    out: Path
    folder: Path
    start: Callable[[Task, int, Path, bool], subprocess.Popen[bytes]]
    shared: bool  # whether several processes run on a GPU concurrently
    say: Callable[[str], object] = print
    failed: list[Task] = field(default_factory=list)
    look: Callable[[float], object] = time.sleep  # called between two polls of the processes

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._over = False
        self._number, self._done, self._all = 0, 0, len(self.waiting)
        self._alone: list[Task] = []  # tasks for a GPU that no other process uses
        self._workers: Counter[int] = Counter()  # those of each GPU that have not run out of tasks
        self._kernels = {task.kernel for task in self.waiting}

    def work(self, gpus: int, each: int, seconds: float | None) -> bool:
        """Runs the tasks, `each` concurrently on each GPU, and then those that lacked memory, one at a time per GPU.
        Returns whether all completed. After `seconds`, or on a KeyboardInterrupt, running tasks are interrupted, and
        keep the rows that they have."""
        self._workers = Counter(dict.fromkeys(range(gpus), each))
        workers = [threading.Thread(target=self._serve, args=(gpu,)) for _ in range(each) for gpu in range(gpus)]
        end = None if seconds is None else time.monotonic() + seconds
        for worker in workers:
            worker.start()
        patience = 0.0
        try:
            # Not one long join: a signal may arrive in another thread, and takes effect only when this one runs again.
            while any(worker.is_alive() for worker in workers) and (end is None or time.monotonic() < end):
                self.look(LOOK_SECONDS)
        except KeyboardInterrupt:
            patience = PATIENCE_SECONDS
            raise
        finally:
            self._interrupt(patience)
            for worker in workers:
                worker.join()
            for path in record.files(self.out) if self.out.is_dir() else []:
                if path.stem in self._kernels:
                    record.compact(path)
        return self._done == self._all

    def _serve(self, gpu: int) -> None:
        self._run(gpu, self.waiting, self.shared)
        with self._lock:
            self._workers[gpu] -= 1
            last = not self._workers[gpu]
        if last:
            self._run(gpu, self._alone, shared=False)

    def _run(self, gpu: int, tasks: list[Task], shared: bool) -> None:
        """Runs one task after another, until there are no more or time is up."""
        while True:
            with self._lock:
                if self._over or not tasks:
                    return
                task = tasks.pop(0)
                self._number += 1
                folder = self.folder / str(self._number)
                folder.mkdir()
                process = self.start(task, gpu, folder, shared)
                self._running.add(process)
            begun = time.monotonic()
            code = process.wait()
            with self._lock:
                self._running.discard(process)
                self._done += code in (0, 1)
                if code not in (0, INTERRUPTED) and not (self._over and code < 0):
                    self.failed.append(task)
                rows, left_out = take_over(folder, self.out, shared)
                said = f"{rows} rows" + (
                    f", {len(left_out)} cases out of memory, to be repeated alone" if left_out else ""
                )
                if left_out:
                    self._alone.append(Task(task.kernel, task.mode, left_out))
                    self._all += 1
                took = f"{time.monotonic() - begun:.0f} s"
                self.say(
                    f"{self._done} of {self._all}: {task}: exit {code} after {took}, {said}, log in {folder / 'log'}"
                )

    def _interrupt(self, patience: float) -> None:
        """Ends the running processes. Waits `patience` seconds, in which a terminal's Ctrl-C may end them by itself;
        then interrupts the others, and kills those that do not end."""
        with self._lock:
            self._over = True
            running = list(self._running)
        running = _left(running, patience)
        for process in running:
            process.send_signal(signal.SIGINT)
        for process in _left(running, GRACE_SECONDS):
            process.kill()


def _left(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[subprocess.Popen[bytes]]:
    """The processes that have not ended within `seconds`."""
    end, left = time.monotonic() + seconds, []
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            left.append(process)
    return left


def main(arguments: argparse.Namespace, selections: Sequence[Selection], out: Path) -> int:
    """Runs the whole command; returns its exit code."""
    groups, devices = of_selections(selections), options.visible_gpus()
    asked = len(groups)
    if arguments.missing:
        groups = unmeasured(out, groups, {s.spec.name: s.implementations for s in selections})
    folder = Path(tempfile.mkdtemp(prefix="ridgeline-jobs-"))
    threads = max(1, BUSY * len(os.sched_getaffinity(0)) // (len(devices) * arguments.jobs))
    passed = [word for name in PASSED for word in _words(name, getattr(arguments, name))]

    def start(task: Task, number: int, own: Path, shared: bool) -> subprocess.Popen[bytes]:
        compilers = {name: str(threads) for name in COMPILERS}
        environment = {**compilers, **os.environ, "CUDA_VISIBLE_DEVICES": devices[number]}
        words = command(task, arguments.gpu, own, folder / f"turns-{number}" if shared else None, passed)
        with (own / "log").open("wb") as log:
            return subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT)

    size = batch(len(groups), len(devices) * arguments.jobs)
    crew = Crew(tasks(groups, size), out, folder, start, arguments.jobs > 1, lambda text: print(text, flush=True))
    print(
        f"{len(groups)} of {asked} cases × modes, {arguments.jobs} processes on each of {len(devices)} GPUs", flush=True
    )
    seconds = None if arguments.minutes is None else 60 * arguments.minutes
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that finished measurements are kept
    try:
        whole = crew.work(len(devices), arguments.jobs, seconds)
    except KeyboardInterrupt:
        return INTERRUPTED
    if not whole:
        print("not everything was measured: --missing measures the rest", flush=True)
    print(f"records in {out / 'records'}, logs in {folder}")
    return 1 if crew.failed else 0


def _words(name: str, value: object) -> list[str]:
    if isinstance(value, list):
        return options.words({name: value})
    return [] if value is None else [f"--{name}", str(value)]

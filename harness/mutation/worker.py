"""Runs the checks on one mutant after another, each in a process of its own that is forked after the imports.

`python -m harness.mutation.worker KERNEL DEVICE` stands in a copy of the checkout that belongs to it alone. It reads
tasks, a JSON object a line, from standard input, and answers each with a line on standard output. A task names a file
of the kernel, its new text, and the checks to be made in order with the seconds that each may take; the answer says
which one failed first and how. The kernel is imported after the fork, so each process has the mutant alone: its ops,
its plans, its CUDA context. The process ends at the first failure, by an exception in it, by a signal (SIGALRM where a
check took too long), or with all checks passed.

A check fails where it does not pass; one that is skipped but passes on the original fails too. The tests of the kernel
and its share of EVERY_KERNEL come after the checks of SPEC.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MEMORY = 6 << 30  # bytes that a mutant may take beyond what is there after the imports; the CPU alone is bounded so
IMPORT = "import"
_PR_SET_PDEATHSIG = 1
IMPORT_SECONDS, BASELINE_SECONDS = 60.0, 900.0
EVERY_KERNEL = ("tests/test_addresses.py", "tests/test_call.py")  # each has a share for every kernel
NOT_SLOW = ("-m", "not slow")


def main(kernel: str, device: str) -> None:
    """Answers tasks until standard input ends."""
    _end_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    _imports()
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        task = json.loads(line)
        path = Path(task["path"]) if task.get("path") else None
        original = path.read_bytes() if path else b""
        try:
            if path:
                path.write_text(task["source"], encoding="utf-8")
            answer = _forked(kernel, device, task)
        finally:
            if path:
                path.write_bytes(original)
        answers.write(json.dumps(answer) + "\n")


def _end_with_parent() -> None:
    """The kernel kills this process when its parent ends, however that ends: no mutant may outlive its run."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _imports() -> None:
    """What every mutant needs and none changes; nothing here may start CUDA, which does not survive a fork."""
    import torch

    torch.set_num_threads(1)
    for name in ("harness.commands.check", "hypothesis", "pytest", "torch._dynamo", "torch.export", "torch._inductor"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if torch.cuda.is_initialized():
        raise RuntimeError("an import has started CUDA, which a forked process cannot use")


def _forked(kernel: str, device: str, task: Mapping[str, Any]) -> dict[str, Any]:
    """What the checks said of the source as it is on disk."""
    reader, writer = os.pipe()
    start = time.monotonic()
    process = os.fork()
    if process == 0:
        _end_with_parent()
        os.close(reader)
        os.setsid()  # so that what it starts can be ended with it
        report = os.fdopen(writer, "w", buffering=1)
        code = 1
        try:
            _checks(kernel, device, task, report)
            code = 0
        except BaseException as error:
            _say(report, failed=f"{type(error).__name__}: {str(error)[:300]}")
        finally:
            report.flush()
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8", errors="replace") as lines:
        said = [json.loads(line) for line in lines if line.endswith("}\n")]
    _, status = os.waitpid(process, 0)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
    return _answer(said, status, round(time.monotonic() - start, 2))


def _answer(said: Sequence[Mapping[str, Any]], status: int, seconds: float) -> dict[str, Any]:
    at = next((s["at"] for s in reversed(said) if "at" in s), IMPORT)
    passed = {s["passed"]: s["seconds"] for s in said if "passed" in s}
    failures = [s for s in said if "failed" in s]
    answer = {"seconds": seconds, "by": at, "passed": passed}
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGALRM:
            return {**answer, "status": "hang", "reason": "took longer than allowed"}
        return {**answer, "status": "crash", "reason": signal.Signals(number).name}
    if failures:
        failed = failures[0]
        return {**answer, "status": "killed", "by": failed.get("by", at), "reason": failed["failed"]}
    if os.WEXITSTATUS(status):
        return {**answer, "status": "crash", "reason": f"exit code {os.WEXITSTATUS(status)}"}
    return {**answer, "status": "survived", "by": "", "reason": ""}


def _say(report: Any, **fields: Any) -> None:
    report.write(json.dumps(fields) + "\n")


def _limit(seconds: float) -> None:
    """SIGALRM's default action ends the process, in C code too."""
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _checks(kernel: str, device: str, task: Mapping[str, Any], report: Any) -> None:
    """Every check of the task, in its order; with no `checks` all there are, as for the original."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if device == "cpu":
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    with contextlib.suppress(ImportError):
        import hypothesis

        # One example that fails is enough: no search for the smallest.
        phases = tuple(phase for phase in hypothesis.Phase if phase.name != "shrink")
        hypothesis.settings.register_profile("mutants", phases=phases)
        hypothesis.settings.load_profile("mutants")
    _limit(IMPORT_SECONDS if task.get("checks") else BASELINE_SECONDS)
    _say(report, at=IMPORT)
    from harness import registry
    from harness.commands import check

    spec = registry.load(kernel)
    if device == "cuda":
        import torch

        torch.cuda.set_per_process_memory_fraction(1 / (1 + task["workers"]))
    items = {item.name: item for item in check.plan(spec, device, [c for c in spec.cases if not c.bench])}
    wanted = task.get("checks") or {name: BASELINE_SECONDS for name, item in items.items() if item.skip is None}
    for name, seconds in wanted.items():
        _limit(seconds)
        _say(report, at=name)
        if name not in items:
            _say(report, failed="the case or the implementation is gone")
            return
        start = time.monotonic()
        outcome = check.run(items[name], device)
        if outcome.status == "pass":
            _say(report, passed=name, seconds=round(time.monotonic() - start, 3))
        elif task.get("checks"):
            _say(report, failed=f"[{outcome.cause or outcome.status}] {' '.join(outcome.reason.split())[:300]}")
            return
    _tests(kernel, task, report)


def _tests(kernel: str, task: Mapping[str, Any], report: Any) -> None:
    """The kernel's own tests, and its share of those that every kernel has."""
    import pytest

    from harness import registry

    class Watch:
        """Says which test runs, gives each its time, and puts them in the order of the task."""

        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            place = {name: number for number, name in enumerate(task.get("tests", ()))}
            items.sort(key=lambda item: place.get(item.nodeid, len(place)))

        def pytest_runtest_logstart(self, nodeid: str) -> None:
            _limit(task.get("tests", {}).get(nodeid, task.get("test_seconds", BASELINE_SECONDS)))
            _say(report, at=nodeid)

        def pytest_runtest_logreport(self, report: Any) -> None:  # pytest passes it by this name
            if report.failed:
                reason = " ".join(str(getattr(report.longrepr, "reprcrash", report.longrepr)).split())
                _say(stream, failed=reason[-300:], by=report.nodeid)
            elif report.when == "call" and report.passed:
                _say(stream, passed=report.nodeid, seconds=round(report.duration, 3))

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                _say(stream, failed=" ".join(str(report.longrepr).split())[-300:], by=f"{report.nodeid} (import)")

    stream = report
    folder = registry.folder(kernel).relative_to(registry.ROOT).as_posix()
    stop = ["-x"] if task.get("checks") else []
    skipped = [f"--deselect={test}" for test in task.get("deselect", ())]
    files = [path for path in (folder, *EVERY_KERNEL) if (registry.ROOT / path).exists()]
    plugins = ("-p", "no:cacheprovider", "-p", "no:xdist")
    pytest.main([*files, "--kernel", kernel, "-q", *NOT_SLOW, *plugins, *stop, *skipped], plugins=[Watch()])


if __name__ == "__main__":
    main(*sys.argv[1:])

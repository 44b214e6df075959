"""What runs inside the process of a mutant: the import of its kernel, the checks of SPEC, and after them the tests.

The kernel is imported here, after the fork, so each process has the mutant alone: its ops, its plans, its CUDA context.
The process ends at the first check that does not pass, by an exception in it, by a signal (SIGALRM where a check took
too long), or with all checks made. On an original all are made.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from .. import registry
from . import compilers, cuda, kernel_tests
from .clock import Clock, begin
from .messages import COLLECTION, IMPORT, PHASES, say
from .selection import is_wanted, of_cases, place, unlikely

MEMORY = 6 << 30  # bytes that a mutant may take beyond what is there after the imports; the CPU alone is bounded so


def make(task: Mapping[str, Any], report: TextIO) -> None:
    """Every check and test of the task, those that are likely to reject first; what is found is said to `report`."""
    clock, device = Clock(), task["device"]
    if device == "cpu":
        _bound_memory()
    _shrink_no_example()
    if device == "cuda" and not cuda.start_for(task, report):
        return
    begin(IMPORT, task, clock, report)
    from ..commands import check

    start = clock.now()
    spec = registry.load(task["kernel"])
    say(report, passed=IMPORT, seconds=0.0, took=round(clock.now() - start, 3))
    if device == "cuda":
        compilers.watch(registry.package(task["kernel"]), clock, report)
    items = {item.name: item for item in check.plan(spec, device, [c for c in spec.cases if not c.bench])}
    wanted = [name for name, item in items.items() if item.skip is None and is_wanted(task, name, item.check)]
    wanted = of_cases(task, {name: (items[name].implementation, items[name].case.name) for name in wanted})
    if task.get("list"):
        chosen = [(name, items[name]) for name in wanted]
        say(report, checks=[(name, (i.implementation, i.case.name, i.mode, i.check)) for name, i in chosen])
    elif _make_checks(items, wanted, task, clock, report) and _has_tests(task):
        kernel_tests.make(task, clock, report)


def _bound_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))


def _shrink_no_example() -> None:
    """For hypothesis one example that fails is enough: no search for the smallest."""
    with contextlib.suppress(ImportError):
        import hypothesis

        phases = tuple(phase for phase in hypothesis.Phase if phase.name != "shrink")
        hypothesis.settings.register_profile("mutants", phases=phases)
        hypothesis.settings.load_profile("mutants")


def _make_checks(
    items: Mapping[str, Any], wanted: list[str], task: Mapping[str, Any], clock: Clock, report: TextIO
) -> bool:
    """False where no tests are to follow: a check of a mutant failed, or one that passed before is gone."""
    from ..commands import check

    device = task["device"]
    known = [
        name for name in task.get("seconds", {}) if "::" not in name and name not in PHASES and is_wanted(task, name)
    ]

    def order(name: str) -> float:
        return place(task, name) * (unlikely(task, items[name].implementation) if name in items else 1.0)

    for name in sorted((*wanted, *(n for n in known if n not in items)), key=order):
        begin(name, task, clock, report)
        if name not in items:
            say(report, failed="the case or the implementation is gone")
            return False
        start, began = clock.now(), time.monotonic()
        outcome = check.run(items[name], device)
        reason = f"[{outcome.cause or outcome.status}] {' '.join(outcome.reason.split())[:300]}"
        if outcome.status == "pass":
            took = round(time.monotonic() - began, 3)
            say(report, passed=name, seconds=round(clock.now() - start, 3), took=took)
        elif outcome.status == "skip":
            if device == "cpu" or "out of memory" not in outcome.reason:  # others take a GPU's memory too
                say(report, skipped=name)
        else:
            say(report, failed=reason, by=name)
            if task.get("file"):
                return False
    return True


def _has_tests(task: Mapping[str, Any]) -> bool:
    if task.get("quick"):
        return False
    return not task.get("only") or any("::" in name or name == COLLECTION for name in task["only"])

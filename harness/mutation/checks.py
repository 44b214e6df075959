"""The work in the process of a mutant: the import of its kernel, the checks of SPEC, and then the tests.

The kernel is imported here, after the fork, so each process has only the mutant: its ops, its plans, its CUDA context.
An exception are mutants of CUDA C++ on a GPU, which run one after another in one process (`leftovers`). There, checks
that a mutant did not pass are repeated on the original, which is restored for that. Only if they pass is the process
used again.
A task ends at the first check that does not pass, or when all checks are made. An exception, or a signal (SIGALRM if a
check took too long), ends the process. On an original all checks are made.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from .. import registry
from . import checkout, compilers, cuda, kernel_tests, leftovers
from .clock import Clock, begin
from .messages import COLLECTION, IMPORT, PHASES, say
from .selection import is_wanted, of_cases, place, unlikely

MEMORY = 6 << 30  # bytes that a mutant may use beyond the memory after the imports; on a CPU only


def make(task: Mapping[str, Any], report: TextIO) -> bool:
    """Makes every check and test of the task, those that are likely to reject first, and writes messages to `report`.
    Returns whether the process can run another task."""
    clock, device = Clock(), task["device"]
    if device == "cpu":
        _bound_memory()
    _shrink_no_example()
    if device == "cuda" and not cuda.start_for(task, report):
        return False
    begin(IMPORT, task, clock, report)
    from ..commands import check

    start = clock.now()
    spec = registry.load(task["kernel"])
    say(report, passed=IMPORT, seconds=0.0, took=round(clock.now() - start, 3))
    if device == "cuda":
        compilers.watch(registry.package(task["kernel"]), clock, report)
    items = {item.name: item for item in check.plan(spec, device, [c for c in spec.cases if not c.bench])}
    wanted = [name for name, item in items.items() if item.skip is None and is_wanted(task, name, item.check)]
    wanted = of_cases(task, {name: _kind(items[name]) for name in wanted})
    if task.get("list"):
        chosen = [(name, items[name]) for name in wanted]
        say(report, checks=[(name, (i.implementation, i.case.name, i.mode, i.check)) for name, i in chosen])
        return _is_fit([], items, task, clock, report)
    failed, skipped = _make_checks(items, wanted, task, clock, report)
    if _has_tests(task) and not (failed and task.get("file")):
        kernel_tests.make(task, clock, report)
    return _is_fit(failed or (skipped if task.get("file") else []), items, task, clock, report)


def _kind(item: Any) -> tuple[str, str, str]:
    return item.implementation, item.case.name, item.check


def _bound_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))


def _shrink_no_example() -> None:
    """For hypothesis one failing example is enough: skips the search for the smallest."""
    with contextlib.suppress(ImportError):
        import hypothesis

        phases = tuple(phase for phase in hypothesis.Phase if phase.name != "shrink")
        hypothesis.settings.register_profile("mutants", phases=phases)
        hypothesis.settings.load_profile("mutants")


def _make_checks(
    items: Mapping[str, Any], wanted: list[str], task: Mapping[str, Any], clock: Clock, report: TextIO
) -> tuple[list[str], list[str]]:
    """The failed checks (of a mutant only the first; one that used to pass but is gone counts), and the skipped."""
    failed, skipped = list[str](), list[str]()
    known = [
        name for name in task.get("seconds", {}) if "::" not in name and name not in PHASES and is_wanted(task, name)
    ]

    def order(name: str) -> float:
        return place(task, name) * (
            unlikely(task, items[name].implementation, items[name].check) if name in items else 1.0
        )

    for name in sorted((*wanted, *(n for n in known if n not in items)), key=order):
        status = _make_check(items.get(name), name, task, clock, report)
        if status == "skip":
            skipped.append(name)
        if status == "fail":
            failed.append(name)
            if task.get("file"):
                break
    return failed, skipped


def _make_check(item: Any, name: str, task: Mapping[str, Any], clock: Clock, report: TextIO) -> str:
    """pass, fail or skip; "" if memory did not suffice, which is inconclusive: others use the GPU's memory too."""
    from ..commands import check

    begin(name, task, clock, report)
    if item is None:
        say(report, failed="the case or the implementation is gone")
        return "fail"
    start, began = clock.now(), time.monotonic()
    outcome = check.run(item, task["device"])
    if outcome.status == "pass":
        took = round(time.monotonic() - began, 3)
        say(report, passed=name, seconds=round(clock.now() - start, 3), took=took)
    elif outcome.status == "skip":
        if task["device"] != "cpu" and "out of memory" in outcome.reason:
            return ""
        say(report, skipped=name)
    else:
        reason = f"[{outcome.cause or outcome.status}] {' '.join(outcome.reason.split())[:300]}"
        say(report, failed=reason, by=name)
    return outcome.status


def _is_fit(
    suspects: list[str], items: Mapping[str, Any], task: Mapping[str, Any], clock: Clock, report: TextIO
) -> bool:
    """Whether the process can run another task: no known state of this task is left, and the original, which is
    restored after a mutant, passes or skips the checks that did not pass (`suspects`)."""
    if not leftovers.is_for_used(task) or (suspects and not task.get("file")):
        return False
    say(report, over=True)
    try:
        if suspects:
            leftovers.forget()
            checkout.write(task, task["original"])
        made = [_make_check(items.get(name), name, task, clock, report) for name in suspects]
        leftovers.forget()
    except Exception:  # CUDA has failed
        return False
    clock.limit(0)
    return {*made} <= {"pass", "skip"}


def _has_tests(task: Mapping[str, Any]) -> bool:
    if task.get("quick"):
        return False
    return not task.get("only") or any("::" in name or name == COLLECTION for name in task["only"])

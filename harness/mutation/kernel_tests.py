"""The pytest part in the process of a mutant: the kernel's own tests, and its share of those that every kernel has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

from .. import registry
from .clock import Clock, begin
from .messages import COLLECTION, say
from .selection import is_wanted, place

EVERY_KERNEL = ("tests/test_addresses.py", "tests/test_call.py")  # each has a share for every kernel
NOT_SLOW = ("-m", "not slow")


def make(task: Mapping[str, Any], clock: Clock, report: TextIO) -> None:
    """Runs the tests, for a mutant up to the first failure; writes messages to `report`."""
    import pytest

    stream = report

    class Watch:
        """Reports which test runs, sets its time limit, and selects and orders the tests of the task."""

        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            say(stream, passed=COLLECTION, seconds=0.0)
            items[:] = [item for item in items if is_wanted(task, item.nodeid)]
            items.sort(key=lambda item: place(task, item.nodeid))

        def pytest_runtest_logstart(self, nodeid: str) -> None:
            begin(nodeid, task, clock, stream)

        def pytest_runtest_logreport(self, report: Any) -> None:  # pytest passes it by this name
            if report.failed:
                reason = " ".join(str(getattr(report.longrepr, "reprcrash", report.longrepr)).split())
                say(stream, failed=reason[-300:], by=report.nodeid)
            elif report.when == "call" and report.passed:
                say(stream, passed=report.nodeid, seconds=round(report.duration, 3))

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                say(stream, failed=" ".join(str(report.longrepr).split())[-300:], by=COLLECTION)

    begin(COLLECTION, task, clock, report)
    folder = registry.folder(task["kernel"]).relative_to(registry.ROOT).as_posix()
    stop = ["-x"] if task.get("file") else ["--continue-on-collection-errors"]
    if not is_wanted({**task, "only": ()}, COLLECTION):  # a test of the original cannot be collected
        stop.append("--continue-on-collection-errors")
    files = [path for path in (folder, *EVERY_KERNEL) if (registry.ROOT / path).exists()]
    plugins = ("-p", "no:cacheprovider", "-p", "no:xdist")
    pytest.main([*files, "--kernel", task["kernel"], "-q", *NOT_SLOW, *plugins, *stop], plugins=[Watch()])

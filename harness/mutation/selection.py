"""Which checks and tests are made, and in which order: those that are likely to reject, or cheap, come first.

`worker` describes a task: its `only` and `without` name checks. A quick run makes the checks of the originals in parts,
and may make only the cheapest checks of each kind on a mutant. The kind of a check is (implementation, case, mode,
check).
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from .mutants import is_cuda

SLOW_CHECKS = ("opcheck", "compile")  # omitted in a quick run, as are the tests
ALWAYS = ("accuracy", "replay")  # which reject nearly all mutants of CUDA C++ that are rejected
PIECE = 24  # checks of an original that one process makes


def is_wanted(task: Mapping[str, Any], name: str, check: str = "") -> bool:
    """Whether a task includes this check (`check` is its last part) or test."""
    if task.get("quick") and check in SLOW_CHECKS:
        return False
    return name not in task.get("without", ()) and (not task.get("only") or name in task["only"])


def of_cases(task: Mapping[str, Any], names: Mapping[str, tuple[str, str, str]]) -> list[str]:
    """The checks, given the implementation, the case and the check of each, that are of the task's cases: all of the
    first case, and ALWAYS of the others; all checks of all cases if the task names none that exists."""
    cases = {tuple(pair): place for place, pair in enumerate(task.get("cases", ()))}
    found = {name: cases[own[:2]] for name, own in names.items() if own[:2] in cases}
    first = min(found.values(), default=0)
    return [name for name, place in found.items() if place == first or names[name][2] in ALWAYS] or list(names)


def place(task: Mapping[str, Any], name: str) -> float:
    """Sort key of a check, lowest first: its seconds per mutant that it rejects."""
    return (0.02 + task.get("seconds", {}).get(name, 1.0)) / (1 + task.get("weights", {}).get(name, 0))


def unlikely(task: Mapping[str, Any], implementation: str, check: str) -> float:
    """Factor on `place`: below 1 for the accuracy check of a near case, which executes what the mutant changes. Else
    above 1 for an implementation that hardly uses the file, below 1 for one that does. Triton implementations
    never use CUDA C++, "auto" does for some shapes, and one named after it does for everything that it supports."""
    if not is_cuda(task.get("file")):
        return 1.0
    if task.get("cases") and check == "accuracy":
        return 0.01
    return 10.0 if implementation.startswith("triton") else 1.0 if implementation == "auto" else 0.1


def pieces(kinds: Mapping[str, tuple[str, ...]]) -> Iterator[list[str]]:
    """Yields the checks in parts of at most PIECE, in random order. Those of one case stay together, since they launch
    the same kernels."""
    cases = defaultdict(list)
    for name, kind in kinds.items():
        cases[kind[:2]].append(name)
    for case in sorted(cases, key=lambda case: hashlib.sha256(repr(case).encode()).digest()):
        yield from (cases[case][at : at + PIECE] for at in range(0, len(cases[case]), PIECE))


def cheapest(took: Mapping[str, float], kinds: Mapping[str, tuple[str, ...]], seconds: float | None) -> list[str]:
    """The cheapest check of each implementation, mode and check, then the second of each, and so on, as long as their
    sum is below `seconds`."""
    groups = defaultdict(list)
    for name in sorted(took, key=lambda name: (took[name], name)):
        implementation, _, mode, check = kinds[name]
        groups[implementation, mode, check].append(name)
    chosen, spent = [], 0.0
    for rank in itertools.zip_longest(*groups.values()):
        for name in sorted(filter(None, rank), key=lambda name: (took[name], name)):
            if seconds is None or spent + took[name] <= seconds:
                chosen.append(name)
                spent += took[name]
    return chosen

"""Which checks and tests are made, and in which order: those first that are likely to reject, or cheap.

For a task, see `worker`: its `only` and `without` name checks. A quick run makes the checks of the originals in pieces,
and may make of a mutant only the cheapest of each kind. The kind of a check is (implementation, case, mode, check).
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from .mutants import is_cuda

SLOW_CHECKS = ("opcheck", "compile")  # left out of a quick run, with the tests
PIECE = 24  # checks of an original that one process makes


def is_wanted(task: Mapping[str, Any], name: str, check: str = "") -> bool:
    """Whether a task has this check (`check` is its last part) or test."""
    if task.get("quick") and check in SLOW_CHECKS:
        return False
    return name not in task.get("without", ()) and (not task.get("only") or name in task["only"])


def of_cases(task: Mapping[str, Any], names: Mapping[str, tuple[str, str]]) -> list[str]:
    """The checks, given the implementation and the case of each, that are of the task's cases; all, where none is."""
    cases = [tuple(pair) for pair in task.get("cases", ())]
    return [name for name, own in names.items() if own in cases] or list(names)


def place(task: Mapping[str, Any], name: str) -> float:
    """What comes first has the least: the seconds that it takes for each mutant that it rejects."""
    return (0.02 + task.get("seconds", {}).get(name, 1.0)) / (1 + task.get("weights", {}).get(name, 0))


def unlikely(task: Mapping[str, Any], implementation: str) -> float:
    """More than 1 for an implementation that hardly reaches the file, less for one that does: of CUDA C++, Triton's
    never does, "auto" does for some shapes, and what is named for it does for all that it takes."""
    if not is_cuda(task.get("file")):
        return 1.0
    return 10.0 if implementation.startswith("triton") else 1.0 if implementation == "auto" else 0.1


def pieces(kinds: Mapping[str, tuple[str, ...]]) -> Iterator[list[str]]:
    """The checks in parts of at most PIECE, in an order by chance. Those of one case stay together: they launch the
    same kernels."""
    cases = defaultdict(list)
    for name, kind in kinds.items():
        cases[kind[:2]].append(name)
    for case in sorted(cases, key=lambda case: hashlib.sha256(repr(case).encode()).digest()):
        yield from (cases[case][at : at + PIECE] for at in range(0, len(cases[case]), PIECE))


def cheapest(took: Mapping[str, float], kinds: Mapping[str, tuple[str, ...]], seconds: float | None) -> list[str]:
    """The cheapest check of each implementation, mode and check, then the second of each, and so on, as long as they
    take less than `seconds`."""
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

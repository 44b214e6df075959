"""Which cases are *near* a mutant of CUDA C++: those whose accuracy check executes the mutated statement. Only such
checks can reject it. A run on a GPU that makes only a few of these saves the seconds that NVRTC takes for each variant
that a check launches.

`mutate --coverage` finds up to FEW for each mutant on a GPU (`coverage`), and `mutate --near` reads them. For a mutant
outside of all statements, for example of a constant, `mutate --machine-code` finds cases that launch a variant of the
source whose machine code the mutant changes. They are stored as a JSON object for each kernel: key of the mutant →
[[implementation, case], ...]. No case at all means that no accuracy check executes the statement. The key changes with
the mutant's line, not with the cases; if none of the cases exists any more, all checks are made.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..spec import Case
from .mutants import Mutant

Launcher = tuple[str, str]  # implementation, case
FEW = 3  # near cases of a mutant, at most
Near = Mapping[str, list[list[str]]]  # key of a mutant → launchers, in JSON form


def size(case: Case) -> int:
    return math.prod(value for value in case.dims.values() if value)


def few(launchers: Sequence[Sequence[Launcher]]) -> tuple[Launcher, ...]:
    """FEW launchers in total, taken in turn from sequences of some, each ordered by size: of each first the largest
    case, which is the most likely to fail, then from the smallest on. A case is taken once."""
    ordered = [[*own[-1:], *own[:-1]] for own in launchers]
    chosen: dict[str, Launcher] = {}
    for launcher in itertools.chain.from_iterable(itertools.zip_longest(*ordered)):
        if launcher:
            chosen.setdefault(launcher[1], launcher)
    return tuple(chosen.values())[:FEW]


def path(kernel: str, folder: Path) -> Path:
    return folder / "near" / f"{kernel}.json"


def load(kernel: str, folder: Path) -> Near:
    """The cases of each mutant; empty if there is no file."""
    file = path(kernel, folder)
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def store(kernel: str, found: Near, every: Iterable[Mutant], folder: Path) -> None:
    """Replaces the file, without mutants that are no longer among `every`."""
    there = {mutant.key for mutant in every}
    lines = [f"{json.dumps(key)}: {json.dumps(found[key])}" for key in sorted(found) if key in there]
    file = path(kernel, folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

"""Which cases are *near* a mutant of CUDA C++: those that launch a variant of the source whose machine code the mutant
changes. Only their checks can reject it. A run on a GPU that makes only these saves the seconds that NVRTC takes for
each variant that a check launches.

`mutate --machine-code` finds up to three for each mutant, without a GPU, and `mutate --near` reads them. They are
stored as a JSON object for each kernel: key of the mutant → [[implementation, case], ...]. The key changes with the
mutant's line, not with the cases; if none of the cases exists any more, all checks are made.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from .mutants import Mutant

Launcher = tuple[str, str]  # implementation, case
Near = Mapping[str, list[list[str]]]  # key of a mutant → launchers, in JSON form


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

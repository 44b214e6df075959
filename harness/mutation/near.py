"""Which cases launch machine code that a mutant of CUDA C++ changes. On a GPU their checks are the ones that can reject
it, and they are few, while each variant of a source that a check launches takes NVRTC seconds.

`--machine-code` finds them without a GPU and writes them: a JSON object for each kernel, key of the mutant →
[[implementation, case], ...].
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from .mutants import Mutant

Launcher = tuple[str, str]  # implementation, case
Near = Mapping[str, list[list[str]]]


def path(kernel: str, folder: Path) -> Path:
    return folder / "near" / f"{kernel}.json"


def load(kernel: str, folder: Path) -> Near:
    """Of a kernel without a file nothing is known."""
    file = path(kernel, folder)
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def store(kernel: str, found: Near, every: Iterable[Mutant], folder: Path) -> None:
    """Of mutants that there are, a line each."""
    there = {mutant.key for mutant in every}
    lines = [f"{json.dumps(key)}: {json.dumps(found[key])}" for key in sorted(found) if key in there]
    file = path(kernel, folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

"""Finds kernels and workloads by their folders. The only place that imports them."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .spec import KernelSpec

ROOT = Path(__file__).resolve().parent.parent
COLLECTIONS = ("kernels", "workloads")


def names() -> list[str]:
    """Every folder of `kernels/` and `workloads/` that holds a bench.py, in alphabetical order. Imports nothing."""
    return sorted(path.parent.name for kind in COLLECTIONS for path in (ROOT / kind).glob("*/bench.py"))


def package(name: str) -> str:
    """Import path of the folder `name`. Raises ValueError listing the known names."""
    for kind in COLLECTIONS:
        if (ROOT / kind / name / "bench.py").is_file():
            return f"{kind}.{name}"
    raise ValueError(f"unknown kernel {name!r}; known: {', '.join(names())}")


@cache
def load(name: str) -> KernelSpec:
    """Imports the folder's bench.py and returns its SPEC."""
    spec = importlib.import_module(f"{package(name)}.bench").SPEC
    if spec.name != name:
        raise ValueError(f"{package(name)}: SPEC.name is {spec.name!r}, the folder is {name!r}")
    return spec


def folder(name: str) -> Path:
    """The directory of the folder `name`."""
    return ROOT.joinpath(*package(name).split("."))

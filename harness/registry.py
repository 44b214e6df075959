"""Finds kernels and workloads by their folders. Only this module imports them.

Besides those of the checkout there are kernels from outside it, named PATH[:SPEC]: a folder with a bench.py, or a
Python file, and the name of the declaration in it, a `KernelSpec` or a `harness.Benchmark`. Such a file may use
relative imports of its folder. Processes that are started later find it under the name of its SPEC, through an
environment variable.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import zlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import interpreter

if TYPE_CHECKING:
    from .spec import KernelSpec

ROOT = Path(__file__).resolve().parent.parent
COLLECTIONS = ("kernels", "workloads")
OUTSIDE = "RIDGELINE_OUTSIDE"  # the environment variable: JSON of `outside()`


def names() -> list[str]:
    """Every folder of `kernels/` and `workloads/` that holds a bench.py, in alphabetical order. Imports nothing."""
    return sorted(path.parent.name for kind in COLLECTIONS for path in (ROOT / kind).glob("*/bench.py"))


def package(name: str) -> str:
    """Import path of the folder `name`. Raises ValueError listing the known names."""
    if name in outside():
        return _package_of(_file(outside()[name].rpartition(":")[0]).parent)
    for kind in COLLECTIONS:
        if (ROOT / kind / name / "bench.py").is_file():
            return f"{kind}.{name}"
    raise ValueError(f"unknown kernel {name!r}; known: {', '.join(names())}")


def load(name: str) -> KernelSpec:
    """The SPEC of a folder of the checkout, or that of PATH[:SPEC] outside it.

    Raises ValueError for an unknown name, with the known ones, and for a file without such a declaration;
    FileNotFoundError for a path that does not exist.
    """
    if is_path(name):
        spec = _load_outside(name)
    elif name in outside():
        spec = _load_outside(outside()[name])
    else:
        spec = _load_own(name)
    interpreter.ignore_nan()
    interpreter.spoil_masked()
    return spec


@cache
def _load_own(name: str) -> KernelSpec:
    spec = importlib.import_module(f"{package(name)}.bench").SPEC
    if spec.name != name:
        raise ValueError(f"{package(name)}: SPEC.name is {spec.name!r}, the folder is {name!r}")
    return spec


def module(name: str) -> ModuleType:
    """The bench.py of the folder `name`, imported."""
    return importlib.import_module(f"{package(name)}.bench")


def folder(name: str) -> Path:
    """The directory of the folder `name`."""
    if name in outside():
        return _file(outside()[name].rpartition(":")[0]).parent
    return ROOT.joinpath(*package(name).split("."))


def is_path(name: str) -> bool:
    """Whether a kernel's name is PATH[:SPEC]: it has a separator, names a Python file or a folder here with a bench.py,
    or begins with a dot."""
    path = name.rpartition(":")[0] or name
    if os.sep in path or path.endswith(".py") or path.startswith("."):
        return True
    return name not in outside() and Path(path, "bench.py").is_file()


def outside() -> dict[str, str]:
    """The kernels from outside the checkout that were loaded: name -> absolute path and declaration."""
    return json.loads(os.environ.get(OUTSIDE, "{}"))


def results(names: Iterable[str], committed: bool = True) -> Path:
    """The folder of the results of these kernels: .out/ in the current folder if one of them is from outside, else the
    checkout's reports/, or its .out/ if the results are not to be committed."""
    if set(names) & outside().keys():
        return Path.cwd() / ".out"
    return ROOT / ("reports" if committed else ".out")


def _load_outside(name: str) -> KernelSpec:
    path, _, declared = name.rpartition(":") if ":" in name else (name, "", "SPEC")
    file = _file(path)
    spec = _declared(file, declared)
    os.environ[OUTSIDE] = json.dumps({**outside(), spec.name: f"{file}:{declared}"})
    return spec


@cache
def _declared(file: Path, declared: str) -> KernelSpec:
    package = _package_of(file.parent)
    _make_package(package, file.parent)
    found: Any = getattr(importlib.import_module(f"{package}.{file.stem}"), declared, None)
    spec = found.spec() if hasattr(found, "spec") else found
    if spec is None or not hasattr(spec, "implementations"):
        raise ValueError(f"{file} has no {declared}: a KernelSpec (harness/spec.py) or a harness.Benchmark is expected")
    return spec


def _file(path: str) -> Path:
    """The Python file behind a path from the command line."""
    found = Path(path).expanduser().resolve()
    found = found / "bench.py" if found.is_dir() else found
    if not found.is_file():
        raise FileNotFoundError(f"no bench.py or Python file at {path}")
    return found


def _package_of(folder: Path) -> str:
    """A unique package name for a folder, so that two folders of one name do not collide. Its parent package stands for
    the parent folder, where a composed kernel finds those that it needs."""
    return f"outside_{zlib.crc32(str(folder.parent).encode()):08x}.{folder.name.replace('.', '_').replace('-', '_')}"


def _make_package(package: str, folder: Path) -> None:
    """Makes a folder importable under that name, with or without an __init__.py."""
    above = package.partition(".")[0]
    if above not in sys.modules:
        parent = ModuleType(above)
        parent.__path__ = [str(folder.parent)]
        sys.modules[above] = parent
    if package in sys.modules:
        return
    init = folder / "__init__.py"
    if init.is_file():
        spec = importlib.util.spec_from_file_location(package, init, submodule_search_locations=[str(folder)])
        assert spec is not None and spec.loader is not None
        sys.modules[package] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[package])
    else:
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(folder)]
    sys.path.append(str(folder))  # for sibling imports as in a script; last, so it shadows nothing

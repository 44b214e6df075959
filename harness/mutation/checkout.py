"""The checkout of a worker: links to the original. A kernel's folder is copied when the worker first gets a mutant of
it, and contains the mutant only while its checks run.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import registry

LINKED = ("harness", "workloads", "parts", "tests", "examples")
COPIED = ("conftest.py", "pyproject.toml")
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.svg")


def enter(root: Path) -> None:
    """Makes a new folder the checkout of this process."""
    (root / "kernels").mkdir(parents=True)
    for name in LINKED:
        (root / name).symlink_to(registry.ROOT / name)
    for name in COPIED:
        shutil.copy(registry.ROOT / name, root / name)
    for path in (registry.ROOT / "kernels").iterdir():
        if path.name != "__pycache__":
            (root / "kernels" / path.name).symlink_to(path)
    os.chdir(root)
    sys.path[:] = [str(root), *(p for p in sys.path if Path(p or ".").resolve() not in (registry.ROOT, root.resolve()))]
    importlib.invalidate_caches()
    registry.ROOT = root
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(root / "inductor")


def copied(kernel: str) -> Path:
    """The kernel's folder in this checkout, as a copy that may be changed."""
    folder = registry.folder(kernel)
    if folder.is_symlink():
        source = folder.resolve()
        folder.unlink()
        shutil.copytree(source, folder, ignore=_LEFT_OUT)
    return folder


@contextlib.contextmanager
def with_mutant(task: Mapping[str, Any]) -> Iterator[str]:
    """Context in which the file of a task has the mutant's text; yields the original's. The mutant's own cache is
    deleted afterwards."""
    folder = copied(task["kernel"])
    original = (folder / task["file"]).read_bytes().decode()
    write(task, task["source"])
    try:
        yield original
    finally:
        write(task, original)
        shutil.rmtree(cache_of_mutant(), ignore_errors=True)


def write(task: Mapping[str, Any], text: str) -> None:
    """Writes this text to the file of a task."""
    (registry.folder(task["kernel"]) / task["file"]).write_bytes(text.encode())


def cache_of_mutant() -> Path:
    """Triton's cache for what a mutant has changed."""
    return registry.ROOT / ".triton-of-the-mutant"

"""The results of a kernel's mutants: a file of JSON lines, one a mutant, in reports/mutants.

A line with "original" says what the kernel itself passes, so that this is not found out again at each call.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .. import registry
from .mutants import Mutant

FOLDER = registry.ROOT / "reports" / "mutants"
KILLED = ("killed", "hang", "crash")
_FOLDERS = re.compile(r"\S*/(?=[\w.-]+\.py\b)")  # in front of a file's name: they are those of one machine


def path(kernel: str, folder: Path = FOLDER) -> Path:
    return folder / f"{kernel}.jsonl"


def line(mutant: Mutant, device: str, checks: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    """One result. `checks` is the digest of the checks that were made."""
    return {
        "key": mutant.key,
        "device": device,
        "status": answer["status"],
        "by": answer["by"],
        "reason": _FOLDERS.sub("", answer["reason"]),
        "seconds": answer["seconds"],
        "file": mutant.file,
        "function": mutant.function,
        "line": mutant.line,
        "operator": mutant.operator,
        "ordinal": mutant.ordinal,
        "digest": mutant.digest,
        "checks": checks,
    }


def load(kernel: str, folder: Path = FOLDER) -> list[dict[str, Any]]:
    """The line of each mutant in a kernel's file."""
    return [found for found in _lines(kernel, folder) if "key" in found]


def original(kernel: str, device: str, folder: Path = FOLDER) -> dict[str, Any] | None:
    """What the kernel passes, as `keep_original` wrote it; None where source, checks, tests, PyTorch or the machine are
    others than then."""
    digest = _digest_of_original(kernel)
    lines = [found for found in _lines(kernel, folder) if (found.get("original"), found["device"]) == (digest, device)]
    return lines[-1] if lines else None


def keep_original(kernel: str, device: str, passed: Mapping[str, Any], folder: Path = FOLDER) -> None:
    """Appends a line with the seconds of each check and test that the kernel passes."""
    entry = {"original": _digest_of_original(kernel), "device": device, **passed}
    with path(kernel, folder).open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def _digest_of_original(kernel: str) -> str:
    """Of all that decides what the original passes, and how long it takes there."""
    files = [*registry.folder(kernel).rglob("*.py"), *registry.folder(kernel).rglob("*.cu*")]
    files += registry.ROOT.glob("harness/*.py")
    text = b"".join(file.read_bytes() for file in sorted(files))
    about = (digest_of_checks(kernel), version("torch"), version("triton"), platform.node())
    return hashlib.sha256(text + repr(about).encode()).hexdigest()[:12]


def _lines(kernel: str, folder: Path) -> list[dict[str, Any]]:
    """Every line of a kernel's file; a last one that was cut off is left out."""
    file = path(kernel, folder)
    found = []
    for text in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return found


def current(lines: Iterable[Mapping[str, Any]], mutants: Iterable[Mutant], device: str) -> dict[str, Mapping[str, Any]]:
    """Key → the last result on this device that still holds: the mutant is there and its function has not changed."""
    digests = {mutant.key: mutant.digest for mutant in mutants}
    return {r["key"]: r for r in lines if r["device"] == device and digests.get(r["key"]) == r["digest"]}


def tidy(kernel: str, mutants: Iterable[Mutant], folder: Path = FOLDER) -> None:
    """Rewrites the file with the lines that still hold, the last of each mutant and device, sorted by key."""
    lines, every = load(kernel, folder), list(mutants)
    originals = {found["device"]: found for found in _lines(kernel, folder) if "original" in found}
    kept = [r for device in sorted({r["device"] for r in lines}) for r in current(lines, every, device).values()]
    if lines:
        kept.sort(key=lambda r: (r["device"], r["key"]))
        kept = [*originals.values(), *kept]
        path(kernel, folder).write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in kept), "utf-8")


def digest_of_checks(kernel: str) -> str:
    """Of all that decides whether a mutant survives: when it changes, survivors are tried again."""
    root = registry.ROOT
    folder = registry.folder(kernel)
    files = [*root.glob("harness/correctness/*.py"), root / "harness/commands/check.py"]
    files += [root / "tests/test_addresses.py", root / "tests/test_call.py"]
    files += [*folder.rglob("test_*.py"), folder / "bench.py", folder / "reference.py"]
    text = b"".join(file.read_bytes() for file in sorted(files) if file.is_file())
    return hashlib.sha256(text).hexdigest()[:12]

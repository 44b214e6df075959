"""The results of a kernel's mutants: a file of JSON lines, one per mutant, in reports/mutants."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from .. import registry
from . import plain
from .mutants import Mutant, is_cuda

FOLDER = registry.ROOT / "reports" / "mutants"
QUICK = "-quick"
KILLED = ("killed", "hang", "crash")
INVALID, SAME = "invalid", "same"  # CUDA C++ that does not compile, or that NVRTC compiles to the same machine code
UNFINISHED, ERROR = "unfinished", "error"  # time was up; it could not begin. Neither says anything about the checks
_FOLDERS = re.compile(r"\S*/(?=[\w.-]+\.(?:py|cuh?)\b)")  # folders before a file's name, which depend on the machine


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
    """The lines of a kernel's file, without a truncated last one."""
    file = path(kernel, folder)
    found = []
    for text in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return found


def current(lines: Iterable[Mapping[str, Any]], mutants: Iterable[Mutant], device: str) -> dict[str, Mapping[str, Any]]:
    """Key → the last result on this device that is still valid: the mutant exists and its function has not changed. A
    result "same" also requires that nothing which affects the compilation has changed. An incomplete result replaces no
    other."""
    there = {mutant.key: mutant for mutant in mutants}
    found: dict[str, Mapping[str, Any]] = {}
    for r in lines:
        holds = r["device"] == device and r["key"] in there and _holds(r, there[r["key"]])
        if holds and (r["key"] not in found or r["status"] not in (UNFINISHED, ERROR)):
            found[r["key"]] = r
    return found


def _holds(line: Mapping[str, Any], mutant: Mutant) -> bool:
    same = line["status"] != SAME or line["checks"].removesuffix(QUICK) == digest_of_source(mutant.kernel, mutant.file)
    return same and line["digest"] == mutant.digest


def merge(kernel: str, mutants: Iterable[Mutant], source: Path, folder: Path = FOLDER) -> int:
    """Adds the results of a kernel in `source` to those in `folder`, except survivors that were killed here, as their
    function still is. Returns the number of results added."""
    mutants = list(mutants)
    tidy(kernel, mutants, folder)
    killed = {(r["key"], r["device"]) for r in load(kernel, folder) if r["status"] in KILLED}
    there = load(kernel, source)
    lines = [r for r in there if r["status"] != "survived" or (r["key"], r["device"]) not in killed]
    with path(kernel, folder).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    tidy(kernel, mutants, folder)
    return len(lines)


def tidy(kernel: str, mutants: Iterable[Mutant], folder: Path = FOLDER) -> None:
    """Rewrites the file with the valid lines, the last of each mutant and device, sorted by key."""
    lines, every = load(kernel, folder), list(mutants)
    kept = [r for device in sorted({r["device"] for r in lines}) for r in current(lines, every, device).values()]
    if lines:
        kept.sort(key=lambda r: (r["device"], r["key"]))
        path(kernel, folder).write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in kept), "utf-8")


def digest_of_checks(kernel: str, quick: bool = False) -> str:
    """Digest of everything that decides whether a mutant survives. When it changes, survivors are tried again. Comments
    and docstrings do not count."""
    root = registry.ROOT
    folder = registry.folder(kernel)
    files = [*root.glob("harness/correctness/*.py"), root / "harness/commands/check.py"]
    files += [root / "harness" / f"{name}.py" for name in ("execute", "interpreter", "sampling", "spec")]
    files += [root / "tests/test_addresses.py", root / "tests/test_call.py"]
    files += [*folder.rglob("test_*.py"), folder / "bench.py", folder / "reference.py"]
    text = "\n".join(plain.python(file.read_text(encoding="utf-8")) for file in sorted(files) if file.is_file())
    return plain.digest(text) + QUICK * quick


@cache
def digest_of_source(kernel: str, file: str) -> str:
    """Digest of everything that decides how a file is compiled for the cases of SPEC. For CUDA C++ these are all CUDA
    C++ files, their launchers, the configurations and the cases; for Triton the whole folder except its tests. Comments
    and docstrings do not count."""
    folder = registry.folder(kernel)
    kept = []
    for path in sorted(folder.rglob("*")):
        if is_cuda(path.name):
            kept.append(plain.cuda(path.read_text(encoding="utf-8")))
        elif path.suffix == ".py" and not path.name.startswith("test_"):
            text = path.read_text(encoding="utf-8")
            decides = "config" in path.as_posix() or path.name == "bench.py" or "cuda_driver" in text
            if decides or file.endswith(".py"):
                kept.append(plain.python(text))
    return plain.digest("\n".join(kept))


def is_quick(line: Mapping[str, Any]) -> bool:
    """Whether a result is that of a quick run, which makes fewer checks."""
    return str(line["checks"]).endswith(QUICK)

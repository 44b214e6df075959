"""compute-sanitizer: finding it, its command lines, and the findings in its output.

A finding is {"what", "kernel", "where", "count"}: the tool's own words, the function and the source line that it
names, and how many threads or accesses had the same finding.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import registry

TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")
FOUND = 99  # the exit code that we request for findings

INSTALLATIONS = (
    "/usr/local/cuda/bin/compute-sanitizer",
    "/usr/local/cuda-*/bin/compute-sanitizer",
    "/opt/nvidia/compute-sanitizer/compute-sanitizer",
)
MISSING = (
    "compute-sanitizer was not found on PATH, in /usr/local/cuda*/bin or in this Python's packages. It is part of the "
    "CUDA toolkit, and there is a package of it for pip: nvidia-cuda-sanitizer-api."
)

_PREFIX = "========="
_AT = re.compile(r"\b(?:at |Device Frame: ?)(?P<function>\S.*?)\+0x[0-9a-f]+(?: in (?P<where>\S+:\d+))?")
#: Functions that Triton compiles, and kernels of CUDA C++.
_JITTED = re.compile(r"^@(?:\w+\.)*\w*jit\b(?:.*\n)+?(?:async )?def (\w+)\(", re.MULTILINE)
_GLOBAL = re.compile(r"\b__global__\s+void\s+(?:__\w+__\s*\([^()]*\)\s*)*(\w+)\s*\(")
#: The tool's lines about itself; all other lines that are not indented begin a finding.
_ABOUT = (
    "COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "LEAK SUMMARY", "Target application", "Program hit",
    "This tool is", "Warning: Detected overflow",
)  # fmt: skip
#: racecheck names functions, which may be inlined, and not kernels; but it only instruments ours.
_RACES = ("Error: Race reported", "Warning: Race reported")
_FAILURES = (
    "Internal Sanitizer Error", "Error: process didn't terminate", "Error: couldn't find exit code", "Error: Target",
)  # fmt: skip


@dataclass
class Findings:
    """`ours` are of the kernels that were named, `others` of any other; `failures` are of the tool itself."""

    ours: list[dict[str, Any]] = field(default_factory=list)
    others: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def find() -> Path:
    """compute-sanitizer of PATH, else of the usual folders, else of pip's package. Raises FileNotFoundError."""
    if found := shutil.which("compute-sanitizer"):
        return Path(found)
    candidates = [path for pattern in INSTALLATIONS for path in Path("/").glob(pattern.removeprefix("/"))]
    nvidia = importlib.util.find_spec("nvidia")
    for folder in nvidia.submodule_search_locations or () if nvidia else ():
        for pattern in ("*/bin/compute-sanitizer", "*/compute-sanitizer/compute-sanitizer"):
            candidates += [path for path in Path(folder).glob(pattern) if os.access(path, os.X_OK)]
    if not candidates:
        raise FileNotFoundError(MISSING)
    return candidates[0]


def version(tool: Path) -> str:
    """The tool's version, such as '2025.3.1.0'."""
    text = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"Version ([\d.]+)", text)
    return found.group(1) if found else "unknown"


def own_kernels(names: Iterable[str]) -> list[str]:
    """The folders `names`, and the kernels in them that do not have their folder's name in theirs: those of a part,
    which several folders have. In a folder outside the checkout every function that Triton compiles may be a kernel."""
    found = []
    for name in names:
        found.append(name)
        folder, suffix = registry.folder(name), "" if name in registry.outside() else "_kernel"
        for path in sorted((*folder.glob("*"), *folder.glob("*/*"))):
            pattern = {".py": _JITTED, ".cu": _GLOBAL, ".cuh": _GLOBAL}.get(path.suffix)
            if pattern and not path.name.startswith("test_"):
                kernels = pattern.findall(path.read_text(encoding="utf-8"))
                found += [k for k in kernels if name not in k and (pattern is _GLOBAL or k.endswith(suffix))]
    return list(dict.fromkeys(found))


def command(sanitizer: Path, tool: str, kernels: Iterable[str], program: Sequence[str]) -> list[str]:
    """Command line that runs `program` under one tool.

    Only kernels whose names contain one of `kernels` are instrumented, which skips PyTorch's. initcheck must see every
    kernel, because memory that is written by a kernel which is not instrumented counts as uninitialised. Its findings
    in other kernels are separated afterwards.

    Only `program` itself is instrumented, not its child processes.
    """
    filters = [word for name in kernels for word in ("--kernel-name", f"kernel_substring={name}")]
    if tool == "initcheck":
        filters = []
    specific = {
        # PyTorch provokes API errors on purpose, to find out what a driver supports. The padding is a gap between
        # neighbouring allocations: without it an access past the end of one is inside the next.
        "memcheck": ["--report-api-errors", "no", "--destroy-on-device-error", "kernel", "--padding", "4096"],
        "racecheck": ["--racecheck-report", "analysis"],
    }.get(tool, [])
    return [
        str(sanitizer), "--tool", tool, *specific, *filters, "--error-exitcode", str(FOUND), "--print-limit", "0",
        "--show-backtrace", "device", "--launch-timeout", "300", "--target-processes", "application-only",
        *program,
    ]  # fmt: skip


_running: set[subprocess.Popen] = set()


def stop() -> None:
    """Ends the processes that `run` has started and waits for in other threads."""
    for process in tuple(_running):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(process.pid, signal.SIGTERM)  # the tool and the program under it


def run(command_line: Sequence[str], echo: bool = True) -> tuple[int, str]:
    """Exit code and output; with `echo` the program's own lines are printed as they come.

    It disables the caching allocator, so that each tensor is a separate allocation. Inside a cached block an access
    past the end of one tensor would be inside another, and memory that was ever written would count as initialised.
    """
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    output = []
    with subprocess.Popen(
        command_line,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=registry.ROOT,
        start_new_session=True,
    ) as process:
        _running.add(process)
        try:
            for line in process.stdout or ():
                output.append(line)
                if echo and not line.startswith(_PREFIX):
                    print(line, end="", flush=True)
        finally:
            _running.discard(process)
    return process.returncode, "".join(output)


def parse(output: str, kernels: Iterable[str]) -> Findings:
    """Sorts the tool's messages into findings in the named kernels, findings in others, and failures of the tool."""
    result = Findings()
    counted: Counter[tuple[bool, str, str, str]] = Counter()
    # "void" precedes the name of a template. PyTorch's kernels are in namespaces.
    names = [re.compile(rf"(?:void )?_?{re.escape(name)}\w*(?:[<(].*)?") for name in kernels]
    for record in _records(output):
        if record[0].startswith(_FAILURES):
            result.failures.append(record[0])
        elif not record[0].startswith(_ABOUT):
            places = [found for line in record for found in _AT.finditer(line)]
            functions = [found["function"][:200] for found in places]
            named = any(name.fullmatch(function) for name in names for function in functions)
            ours = named or record[0].startswith(_RACES)
            where = next((found["where"] for found in places if found["where"]), "")
            counted[ours, _what(record[0]), functions[0] if functions else "", where or ""] += 1
    for (ours, what, kernel, where), count in sorted(counted.items()):
        finding = {"what": what, "kernel": kernel, "where": where, "count": count}
        (result.ours if ours else result.others).append(finding)
    result.failures = sorted(set(result.failures))
    return result


def _records(output: str) -> list[list[str]]:
    """The tool's messages, one list of lines each: its first line, and those indented under it."""
    records: list[list[str]] = []
    for line in output.splitlines():
        if not line.lstrip().startswith(_PREFIX):
            continue
        text = line.lstrip().removeprefix(_PREFIX)
        if text.startswith("   ") and records:
            records[-1].append(text.strip())
        elif text.strip():
            records.append([text.strip()])
    return records


def _what(line: str) -> str:
    """The first line of a finding without the parts that differ from thread to thread."""
    line = _AT.sub("", line)
    line = re.sub(r"\b(?:at )?__(\w+)__ 0x[0-9a-f]+|\(\d+,\d+,\d+\)|0x[0-9a-f]+|\[\d+ hazards?\]", r"\1", line)
    return re.sub(r"\s+", " ", line).strip(" :.,")

"""`python -m harness COMMAND …`: one command line for everything the nox sessions do.

A command is a module of `harness.commands` with `configure(parser)` and `main(arguments) -> exit code`.
It is imported on demand, so `report` and `compare` work where torch is not installed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

DESCRIPTION = "Check, benchmark, profile and report GPU kernels. `COMMAND --help` lists the options of a command."

COMMANDS = {
    "list": "list kernels, cases, modes, implementations and peers",
    "check": "check the correctness of kernels against their fp64 reference (the oracle)",
    "bench": "check kernels and time them against peers and roofline; without a GPU: check, compile, roofline bounds",
    "calibrate": "measure this GPU's peak rates: memory bandwidth and GEMM throughput by dtype",
    "build": "compile every JIT kernel ahead of time; tables of registers, spills, shared memory, tensor-core use",
    "profile": "profile each case with Nsight Compute: utilisation, stall reasons, and DRAM traffic",
    "sanitize": "run compute-sanitizer on the small cases",
    "stress": "repeat calls in several processes on one GPU; their results must be bit-wise equal",
    "tune": "time every candidate configuration and compare the best with the one that the kernel selects",
    "mutate": "mutation testing: how many small faults in a kernel's source its checks reject",
    "plan": "predict a case's time on many GPUs with a performance model, from rates measured on few",
    "report": "generate the reports (Markdown and SVG) from the records",
    "compare": "compare two sets of records row by row: FASTER, SAME, SLOWER or UNSURE; exit code 1 on --fail-on",
    "trend": "write a page per kernel on how its times changed, from the records in the git history",
    "new": "create the folder of a new kernel from a template",
    "vendor": "update the copies of parts/ in the kernels' folders",
    "support": "write docs/SUPPORT.md: dtypes, modes, GPUs, implementations and determinism of each kernel",
}


#: exceptions of a wrong option or declaration, or of a path that cannot be read or written
MISUSE = (ValueError, FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    argv = list(sys.argv[1:] if argv is None else argv)
    chosen = next((a for a in argv if not a.startswith("-")), None)
    for name, help_line in COMMANDS.items():
        command = commands.add_parser(name, help=help_line, description=help_line)
        if name == chosen:
            module = importlib.import_module(f".commands.{'listing' if name == 'list' else name}", __package__)
            module.configure(command)
            command.set_defaults(main=module.main)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:  # argparse itself would show the usage of `parser`, which lacks the options of the command
        commands.choices[arguments.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        code = arguments.main(arguments)
        sys.stdout.flush()
        return code
    except MISUSE as error:
        print(f"error: {_place(error)}{error}", file=sys.stderr)
        return 2
    except Exception as error:  # any exception, since a declaration may be at fault and not the harness
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            return 1
        place = _place(error)
        if not _declares(place, argv):
            raise
        traceback.print_exc()
        print(f"error: {place}{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _reader_is_gone() -> bool:
    """Whether the reader of standard output has ended, as in `list | head`. Then no more is written, also at exit."""
    try:
        print(flush=True)  # a flush alone succeeds if the failed write left nothing in the buffer
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _place(error: BaseException) -> str:
    """'FILE:LINE: ' if an error came through a file that is neither ours nor installed, such as a bench.py: then the
    fault is in that file, not in the use of an option."""
    if isinstance(error, SyntaxError) and error.filename:  # a file that cannot be parsed has no frame
        return f"{error.filename}:{error.lineno}: "
    harness = Path(__file__).parent
    installed = {Path(path) for path in (*sysconfig.get_paths().values(), *site.getsitepackages())}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_file() and not {harness, *installed} & set(file.parents):
            return f"{file}:{frame.lineno}: "
    return ""


def _declares(place: str, argv: Sequence[str]) -> bool:
    """Whether a place is in a bench.py, or in another file whose path was given."""
    file = place.rpartition(":")[0].rpartition(":")[0]
    asked = {Path(path).resolve() for argument in argv for path in (argument, argument.rpartition(":")[0])}
    return Path(file).name == "bench.py" or Path(file) in asked

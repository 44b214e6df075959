"""`python -m harness sanitize`: compute-sanitizer over the small cases of our own implementations, on a GPU.

For each kernel each tool runs this module again as a worker, which does every small case forward and backward and
checks nothing: that is the tools' work. Some of these processes run side by side. Exit code 1 on a finding in one of
our kernels, or where a tool could not do its work; what a tool says of other kernels, PyTorch's for example, is listed
and no more.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from . import environment, execute, options
from .nsight import sanitizer
from .nvtx import range_name
from .on_gpu import Place, place
from .reporting import rows_json, tables
from .spec import Case, KernelSpec

SCHEMA = 2
SEED = 20261121
DEFAULT_TOOLS = ("memcheck", "initcheck")
MOST_JOBS = 8


def configure(parser: argparse.ArgumentParser) -> None:
    options.add_selection(parser)
    options.add_target(parser)
    options.add_output(parser)
    group = parser.add_argument_group("how")
    help_line = "may be given more than once (default: memcheck and initcheck)"
    group.add_argument("--tool", action="append", choices=sanitizer.TOOLS, help=help_line)
    group.add_argument(
        "--jobs", type=int, metavar="N", help="processes side by side (default: one for two cores, 8 at most)"
    )
    group.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)


def main(arguments: argparse.Namespace) -> int:
    """0, or 1 where one of our kernels has a finding or a tool failed."""
    selections = options.select(arguments)
    where = place("sanitize", arguments)
    if arguments.worker:
        return _work(selections, arguments, where)
    program, kernels = sanitizer.find(), [selection.spec.name for selection in selections]
    pairs = [(tool, kernel) for tool in arguments.tool or DEFAULT_TOOLS for kernel in kernels]
    with ThreadPoolExecutor(arguments.jobs or max(1, min(MOST_JOBS, (os.cpu_count() or 1) // 2))) as pool:
        rows = list(pool.map(lambda pair: check(program, pair[0], pair[1], arguments), pairs))
    captured = {**environment.capture(where.device), "compute-sanitizer": sanitizer.version(program)}
    path = where.out / "sanitize.json"
    document = {"schema": SCHEMA, "gpu": where.folder, "environment": captured, "rows": rows}
    rows_json.merge(path, document, SCHEMA, key=lambda row: (row["tool"], row["kernel"]))
    show(rows)
    print(f"written: {path}")
    return 0 if all(row["status"] == "ok" for row in rows) else 1


def worker_command(arguments: argparse.Namespace, kernel: str) -> list[str]:
    """The program that a tool runs: this command as a worker, on the same selection."""
    command = [sys.executable, "-m", "harness", "sanitize", "--worker", "--gpu", arguments.gpu]
    chosen = (
        ("--kernel", [kernel]),
        ("--case", arguments.case),
        ("--mode", arguments.mode),
        ("--impl", arguments.impl),
    )
    return command + [word for option, values in chosen for value in values or () for word in (option, value)]


def check(program: Path, tool: str, kernel: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One tool over one kernel: its row. "findings" are ours, "others" are of kernels that are not."""
    print(f"{tool} {kernel} …", flush=True)
    code, output = sanitizer.run(sanitizer.command(program, tool, [kernel], worker_command(arguments, kernel)))
    found = sanitizer.parse(output, [kernel])
    ran = sum(line.startswith("ran ") for line in output.splitlines())
    reasons = list(found.failures)
    if code not in (0, sanitizer.FOUND):
        lines = [line for line in output.splitlines() if line.strip() and not line.startswith("=========")]
        reasons.append(f"exit code {code}: {lines[-1] if lines else 'no output'}")
    elif code == sanitizer.FOUND and not (found.ours or found.others):
        reasons.append("the tool counts errors that its output does not name")
    if not ran:
        reasons.append("no case was run")
    status = "findings" if found.ours else "failed" if reasons else "ok"
    return {
        "tool": tool,
        "kernel": kernel,
        "status": status,
        "reason": "; ".join(reasons) or None,
        "cases": ran,
        "findings": found.ours,
        "others": found.others,
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A line per tool, then every finding."""
    head = ("tool", "kernel", "status", ">cases", ">findings", ">in other kernels", "reason")
    cells = [
        (r["tool"], r["kernel"], r["status"], r["cases"], len(r["findings"]), len(r["others"]), r["reason"])
        for r in rows
    ]
    tables.show("compute-sanitizer", head, cells)
    for row in rows:
        for finding in row["findings"]:
            place_of = f"{finding['kernel']} {finding['where']}".strip()
            print(f"{row['tool']} {row['kernel']}: {finding['what']} in {place_of}, {finding['count']} times")


def _work(selections: Sequence[options.Selection], arguments: argparse.Namespace, where: Place) -> int:
    """Under a tool: every small case, or those named, of our implementations. 1 where one raises."""
    failed = 0
    with torch.cuda.device(where.device):
        for selection in selections:
            spec = selection.spec
            wanted = arguments.case or [case.name for case in spec.cases if not case.bench]
            chosen = dataclasses.replace(selection, cases=tuple(c for c in spec.cases if c.name in wanted))
            for case, mode in chosen.groups():
                for name in selection.implementations:
                    if name not in spec.implementations or spec.repeats(name, case, mode):
                        continue
                    failed += not _run(spec, case, mode, name, where.device)
    return 1 if failed else 0


def _run(spec: KernelSpec, case: Case, mode: str, name: str, device: torch.device) -> bool:
    label = range_name(spec.name, mode, case.name, name)
    if reason := execute.unfit(case, torch.cuda.get_device_capability(device)):
        print(f"skipped {label}: {reason}", flush=True)
        return True
    try:
        generator = torch.Generator(device).manual_seed(SEED)
        inputs = spec.make_inputs(case, device, generator)
        execute.bind(spec, execute.load(spec, name, case, mode), inputs, mode)()
        torch.cuda.synchronize()
    except execute.Unavailable as error:
        print(f"skipped {label}: {error}", flush=True)
    except Exception as error:  # the other cases are still worth a look
        print(f"failed {label}: {type(error).__name__}: {execute.first_line(error)}", flush=True)
        return False
    else:
        print(f"ran {label}", flush=True)
    return True

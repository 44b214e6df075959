"""`python -m harness sanitize`: compute-sanitizer over the small cases of our own implementations, on a GPU.

For each kernel each tool runs this module again as a worker. The worker runs every small case forward and backward and
does not check results: the tools do the checking. The cases of a kernel may be distributed over several such processes,
some of which run concurrently. Exit code 1 on a finding in one of our kernels, or if a tool failed. Findings in other
kernels, PyTorch's for example, are only listed, and so are those that the SPEC declares to be false alarms, with its
reason. The file is written incrementally, so that an interrupted run keeps its findings.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import environment, execute, options
from ..nsight import sanitizer
from ..nsight.plain_products import plain_products
from ..nvtx import range_name
from ..on_gpu import Place, place
from ..reporting import rows_json, tables
from ..spec import Case, KernelSpec, Yardstick

SCHEMA = 3
SEED = 20261121
DEFAULT_TOOLS = ("memcheck", "initcheck")
MOST_JOBS = 4  # more of them on one GPU took longer in total
RUNS_A_PROCESS = 12


def configure(parser: argparse.ArgumentParser) -> None:
    options.add_selection(parser, "the small ones, which are not benched", "all but peers")
    options.add_target(parser)
    options.add_output(parser)
    group = parser.add_argument_group("sanitizer")
    help_line = "tool of compute-sanitizer; may be given more than once (default: memcheck and initcheck)"
    group.add_argument("--tool", action="append", choices=sanitizer.TOOLS, help=help_line)
    group.add_argument(
        "--jobs", type=int, metavar="N", help="concurrent processes (default: one per two cores, at most 4)"
    )
    group.add_argument("--worker", metavar="PART/PARTS", help=argparse.SUPPRESS)


def main(arguments: argparse.Namespace) -> int:
    """0, or 1 where one of our kernels has a finding or a tool failed."""
    selections = options.select(arguments)
    where = place("sanitize", arguments, selections)
    if arguments.worker:
        return _work(selections, arguments, where)
    program = sanitizer.find()
    captured = {**environment.capture(where.device), "compute-sanitizer": sanitizer.version(program)}
    path, head = where.out / "sanitize.json", {"schema": SCHEMA, "gpu": where.folder}
    wanted = [(tool, selection) for tool in arguments.tool or DEFAULT_TOOLS for selection in selections]
    jobs = arguments.jobs or max(1, min(MOST_JOBS, (os.cpu_count() or 1) // 2))
    runs = [len(_runs(selection, arguments)) for _, selection in wanted]
    shares = [parts(count, sum(runs), jobs) for count in runs]
    found: list[list[Inspection]] = [[] for _ in wanted]
    rows: dict[int, dict[str, Any]] = {}
    with ThreadPoolExecutor(jobs) as pool:
        # First without a tool, so that kernels get compiled: tools that ran concurrently over programs with kernels to
        # compile were seen to hang. The pool starts jobs in the order of submission, so no job waits forever.
        alone: dict[tuple[str, str], Future[tuple[int, str]]] = {}
        for i, (_, selection) in enumerate(wanted):
            for part in shares[i]:
                if (key := (selection.spec.name, part)) not in alone:
                    alone[key] = pool.submit(sanitizer.run, worker_command(arguments, None, *key), echo=False)
        under_way = {
            pool.submit(inspect, program, tool, selection.spec, part, arguments, alone[selection.spec.name, part]): i
            for i, (tool, selection) in enumerate(wanted)
            for part in shares[i]
        }
        try:
            for inspection in as_completed(under_way):
                i = under_way[inspection]
                tool, selection = wanted[i]
                found[i].append(inspection.result())
                rows[i] = judge(tool, selection.spec, found[i], len(shares[i]))
                rows_json.merge(path, head, captured, [rows[i]], lambda row: (row["tool"], row["kernel"]))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            sanitizer.stop()
            raise
    show([rows[i] for i in range(len(wanted))])
    print(f"written: {path}")
    return 0 if all(row["status"] == "ok" for row in rows.values()) else 1


def parts(runs: int, of_all: int, jobs: int) -> list[str]:
    """Names of the parts into which `runs` runs are divided: "1/3", "2/3", "3/3". No process has more than
    RUNS_A_PROCESS runs, and there are enough parts for each job to have one."""
    a_process = min(RUNS_A_PROCESS, max(1, -(-of_all // jobs)))
    count = max(1, -(-runs // a_process))
    return [f"{part}/{count}" for part in range(1, count + 1)]


def worker_command(arguments: argparse.Namespace, tool: str | None, kernel: str, part: str) -> list[str]:
    """The program that a tool runs, or that runs without one: this command as a worker, on a part of the selection."""
    command = [sys.executable, "-m", "harness", "sanitize", "--worker", part, "--gpu", arguments.gpu]
    chosen = {"case": arguments.case, "mode": arguments.mode, "impl": arguments.impl}
    return command + options.words({"tool": [tool] if tool else None, "kernel": [kernel], **chosen})


@dataclass(frozen=True)
class Inspection:
    """The result of a tool for one process: findings in our kernels and in others, why it failed, and the number of
    runs that completed."""

    findings: list[dict[str, Any]]
    others: list[dict[str, Any]]
    reasons: list[str]
    runs: int


def inspect(
    program: Path, tool: str, spec: KernelSpec, part: str, arguments: argparse.Namespace, alone: Future[tuple[int, str]]
) -> Inspection:
    """Runs one tool on one process, whose exit code and output without the tool are `alone`. The kernels that a
    composed one needs are its own too."""
    code, output = alone.result()
    if code:
        return Inspection([], [], [f"without {tool} exit code {code}: {_last_line(output)}"], 0)
    print(f"{tool} {spec.name} {part} …", flush=True)
    worker = worker_command(arguments, tool, spec.name, part)
    own = sanitizer.own_kernels((spec.name, *spec.needs))
    code, output = sanitizer.run(sanitizer.command(program, tool, own, worker))
    found = sanitizer.parse(output, own)
    reasons = list(found.failures)
    if code not in (0, sanitizer.FOUND):
        reasons.append(f"exit code {code}: {_last_line(output)}")
    elif code == sanitizer.FOUND and not (found.ours or found.others):
        reasons.append("the tool reported errors, but none could be parsed from its output")
    return Inspection(found.ours, found.others, reasons, sum(line.startswith("ran ") for line in output.splitlines()))


def _last_line(output: str) -> str:
    """The last line printed by the program, not by the tool."""
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith("=========")]
    return lines[-1] if lines else "no output"


def judge(tool: str, spec: KernelSpec, inspections: Sequence[Inspection], parts: int) -> dict[str, Any]:
    """The row of one tool and kernel, whose runs were divided into `parts` parts. "findings" are in our kernels,
    "others" in any other, "false_alarms" have the SPEC's reason."""
    findings, alarms = [], []
    for finding in _together(finding for inspection in inspections for finding in inspection.findings):
        why = spec.false_alarms.get((tool, finding["kernel"].split("(")[0]))
        findings.append(finding) if why is None else alarms.append({**finding, "why": why})
    reasons = list(dict.fromkeys(reason for inspection in inspections for reason in inspection.reasons))
    if len(inspections) < parts:
        reasons.append(f"only {len(inspections)} of {parts} parts were completed")
    ran = sum(inspection.runs for inspection in inspections)
    if not ran:
        reasons.append("no case was run")
    return {
        "tool": tool,
        "kernel": spec.name,
        "status": "findings" if findings else "failed" if reasons else "ok",
        "reason": "; ".join(reasons) or None,
        "cases": ran,
        "findings": findings,
        "false_alarms": alarms,
        "others": _together(finding for inspection in inspections for finding in inspection.others),
    }


def _together(findings: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merges findings of the same kind and place, and adds their counts."""
    counts: dict[tuple[tuple[str, Any], ...], int] = {}
    for finding in findings:
        key = tuple((name, value) for name, value in finding.items() if name != "count")
        counts[key] = counts.get(key, 0) + finding["count"]
    return [{**dict(key), "count": count} for key, count in counts.items()]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints a line per tool, then every finding."""
    head = ("tool", "kernel", "status", ">cases", ">findings", ">false alarms", ">in other kernels", "reason")
    counted = ("findings", "false_alarms", "others")
    cells = [
        (r["tool"], r["kernel"], r["status"], r["cases"], *(len(r[which]) for which in counted), r["reason"])
        for r in rows
    ]
    tables.show("compute-sanitizer", head, cells)
    for row in rows:
        for finding in (*row["findings"], *row["false_alarms"]):
            place_of = f"{finding['kernel']} {finding['where']}".strip()
            why = f"; a false alarm: {finding['why']}" if "why" in finding else ""
            print(f"{row['tool']} {row['kernel']}: {finding['what']} in {place_of}, {finding['count']} times{why}")


def _runs(selection: options.Selection, arguments: argparse.Namespace) -> list[tuple[Case, str, str]]:
    """(case, mode, implementation): every small case, or those named, of our implementations and of yardsticks that are
    ours."""
    spec = selection.spec
    others = {b.name: b for b in spec.baselines if isinstance(b, Yardstick) and b.ours}
    wanted = arguments.case or [case.name for case in spec.cases if not case.bench]
    chosen = dataclasses.replace(selection, cases=tuple(c for c in spec.cases if c.name in wanted))
    return [
        (case, mode, name)
        for case, mode in chosen.groups()
        for name in selection.implementations
        if (name in spec.implementations and not spec.skip_reason(name, case, mode))
        or (name in others and not others[name].supports(case, mode))
    ]


def _work(selections: Sequence[options.Selection], arguments: argparse.Namespace, where: Place) -> int:
    """Runs a part of the runs under a tool. 1 if one raises."""
    part, count = (int(word) for word in arguments.worker.split("/"))
    failed = 0
    with torch.cuda.device(where.device), plain_products() if arguments.tool == ["initcheck"] else nullcontext():
        for selection in selections:
            for case, mode, name in _runs(selection, arguments)[part - 1 :: count]:
                failed += not _run(selection.spec, case, mode, name, where.device)
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
    except (Exception, SystemExit) as error:  # the other cases are still worth running
        print(f"failed {label}: {type(error).__name__}: {execute.first_line(error)}", flush=True)
        return False
    else:
        print(f"ran {label}", flush=True)
    return True

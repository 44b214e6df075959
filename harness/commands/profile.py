"""`python -m harness profile`: Nsight Compute over each case; the bytes moved in DRAM against the bytes in `cost`.

One ncu process per kernel runs this module again as a worker. The worker calls every implementation twice to warm up
(compilation, library handles, first use of memory), then once inside its NVTX range. Only launches inside a range are
profiled. In mode bwd the forward ran before the range.

Cases of several GPUs cannot run under ncu, which replays kernels: with --gpus N every rank runs once what the bench
times, in its NVTX range, under PyTorch's profiler or Nsight Systems.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import environment, execute, nvtx, options, record
from ..nsight import ncu, profile_report
from ..on_gpu import Place, place
from ..ranks import command as ranks
from ..spec import Case, KernelSpec

SEED = 20261121


@dataclass(frozen=True)
class Target:
    """One implementation in one case and mode, to be profiled."""

    spec: KernelSpec
    mode: str
    case: Case
    implementation: str

    @property
    def name(self) -> str:
        return nvtx.range_name(self.spec.name, self.mode, self.case.name, self.implementation)


def configure(parser: argparse.ArgumentParser) -> None:
    options.add_selection(parser, implementations="all but peers")
    options.add_target(parser)
    options.add_output(parser)
    group = parser.add_argument_group("profiling")
    group.add_argument(
        "--full", action="store_true", help="all sections of Nsight Compute; takes several times as long"
    )
    group.add_argument("--keep", type=Path, metavar="DIR", help="keep the .ncu-rep files (for ncu-ui) or traces in DIR")
    group.add_argument(
        "--gpus",
        type=int,
        default=1,
        metavar="N",
        help="trace the cases for N GPUs with PyTorch's profiler, or mark them for Nsight Systems",
    )
    group.add_argument("--worker", type=Path, help=argparse.SUPPRESS)


def main(arguments: argparse.Namespace) -> int:
    """0, or 1 if a target could not be profiled. Peers are included only with --impl."""
    if arguments.gpus > 1:
        return ranks.profile(arguments)
    selections = options.select(arguments)
    where = place("profile", arguments, selections)
    if arguments.worker:
        return _work(selections, where, arguments.worker)
    tool = ncu.find()
    captured = {**environment.capture(where.device), "ncu": ncu.version(tool)}
    records = where.out / "records"
    measured = profile_report.medians(record.load(records).rows if records.is_dir() else [])
    failed = 0
    for selection in selections:
        targets = list(_targets(selection, arguments))
        if not targets:
            continue
        name, rows = selection.spec.name, _profile(tool, selection.spec, targets, where, arguments)
        profile_report.write(where.out / "profile", name, where.folder, captured, rows, measured)
        profile_report.show(name, profile_report.compared(rows, measured), captured)
        failed += sum(row["status"] not in ("ok", "skipped") for row in rows)
    print(f"written: {where.out / 'profile'}")
    return 1 if failed else 0


def _targets(selection: options.Selection, arguments: argparse.Namespace) -> Iterator[Target]:
    for case, mode in selection.groups():
        for implementation in selection.implementations:
            if arguments.impl or implementation in selection.spec.implementations:
                yield Target(selection.spec, mode, case, implementation)


def _profile(
    tool: Path, spec: KernelSpec, targets: Sequence[Target], where: Place, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """The rows of one kernel. If ncu gives no result at all, every row says why."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        status_file = Path(scratch, "status.json")
        names = [target.name for target in targets]
        try:
            program = worker_command(targets, arguments, status_file)
            text = ncu.profile(tool, folder / f"{spec.name}.ncu-rep", names, program, arguments.full)
            launches, failure = ncu.parse(text, names), None
        except ncu.NcuError as error:
            launches, failure = {}, str(error)
        statuses = json.loads(status_file.read_text(encoding="utf-8")) if status_file.is_file() else {}
    return [row(target, launches.get(target.name, []), statuses, failure) for target in targets]


def worker_command(targets: Sequence[Target], arguments: argparse.Namespace, status: Path) -> list[str]:
    """The program that ncu runs: this command as a worker, on the same selection."""
    command = [sys.executable, "-m", "harness", "profile", "--worker", str(status), "--kernel", targets[0].spec.name]
    for option, chosen in (
        ("--case", [target.case.name for target in targets]),
        ("--mode", [target.mode for target in targets]),
        ("--impl", [target.implementation for target in targets]),
    ):
        for value in dict.fromkeys(chosen):
            command += [option, value]
    return [*command, "--gpu", arguments.gpu]


def row(
    target: Target,
    launches: list[dict[str, Any]],
    statuses: dict[str, list[str]],
    failure: str | None,
) -> dict[str, Any]:
    """One row of the file: status, launches, their sums, and the measured bytes next to those of the cost."""
    status, reason = statuses.get(target.name, ["error", failure or "the profiled process ended before this case"])
    if status == "ok" and not launches:
        status, reason = "error", failure or "no kernel launch in its NVTX range was profiled"
    duration, moved = _total(launches, "duration_us"), _total(launches, "dram_bytes")
    cost = target.spec.cost(target.case, target.mode).bytes
    return {
        "kernel": target.spec.name,
        "mode": target.mode,
        "case": target.case.name,
        "implementation": target.implementation,
        "status": status,
        "reason": reason or None,
        "launches": launches,
        "duration_us": duration,
        "dram_bytes": moved,
        "cost_bytes": cost,
        "bytes_ratio": moved / cost if moved is not None and cost else None,
    }


def _total(launches: Sequence[dict[str, Any]], field: str) -> float | None:
    values = [launch[field] for launch in launches]
    return None if not values or None in values else sum(values)


def _work(selections: Sequence[options.Selection], where: Place, status: Path) -> int:
    """Runs inside ncu: warms up every target, then calls it once in its range. Writes the status of each to the file
    `status`."""
    statuses: dict[str, tuple[str, str | None]] = {}
    # An NVTX range belongs to a thread, and by default the backward of CUDA tensors runs in another one.
    with torch.cuda.device(where.device), torch.autograd.set_multithreading_enabled(False):
        for selection in selections:
            for case, mode in selection.groups():
                for name in selection.implementations:
                    target = Target(selection.spec, mode, case, name)
                    print(f"profiling {target.name}", flush=True)
                    statuses[target.name] = _run(target, where.device)
                    status.write_text(json.dumps(statuses), encoding="utf-8")
                    gc.collect()
                    torch.cuda.empty_cache()
    return 0


def _run(target: Target, device: torch.device) -> tuple[str, str | None]:
    """Status and reason of one target."""
    spec, case, mode = target.spec, target.case, target.mode
    if reason := execute.unfit(case, torch.cuda.get_device_capability(device)):
        return "skipped", reason
    ours = target.implementation in spec.implementations
    if ours and (reason := spec.skip_reason(target.implementation, case, mode)):
        return "skipped", reason
    try:
        fn = execute.load(spec, target.implementation, case, mode)
        generator = torch.Generator(device).manual_seed(SEED)
        run = execute.bind(spec, fn, spec.make_inputs(case, device, generator), mode)
        run()
        run()
        torch.cuda.synchronize()
        with spec.stage_ranges(nvtx.stage), nvtx.range(target.name):
            run()
            torch.cuda.synchronize()
    except execute.Unavailable as error:
        return "skipped", str(error)
    except Exception as error:  # a peer may raise anything; the other targets still run
        if execute.out_of_memory(error):
            return "oom", execute.first_line(error)
        return "error", f"{type(error).__name__}: {execute.first_line(error)}"
    return "ok", None

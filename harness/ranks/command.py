"""`bench --gpus N` and `profile --gpus N`: the launcher's part, which measures nothing itself.

With enough GPUs the ranks bench the cases of that world size. Without any GPU, gloo ranks check the small cases and the
floors are printed; `--device cpu` times them too, in wall-clock time, into a separate folder. Fewer GPUs than requested
are an error.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from .. import environment, options, plan, record, registry, roofline, rows
from ..measure.timing import Budget
from ..on_gpu import folder
from ..reporting import tables
from ..reporting.entries import of_several
from ..spec import Case, KernelSpec
from . import session
from .launch import TIMEOUT, RanksFailed, launch
from .session import Orders

CHECK_HEAD = ("kernel", "case", "mode", "implementation", "status", "reason")

Load = Callable[[], KernelSpec]
Group = tuple[Case, str]


def main(arguments: argparse.Namespace) -> int:
    """1 if a row of our own failed, or a rank did."""
    on_gpu = arguments.device != "cpu" and torch.cuda.is_available()
    found = torch.cuda.device_count() if on_gpu else 0
    if on_gpu and found < arguments.gpus:
        raise ValueError(f"--gpus {arguments.gpus}: {found} GPUs found")
    if not on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: set it before any is imported
    device, key = environment.target(arguments.gpu, arguments.device)
    selections = list(_chosen(arguments, on_gpu))
    if not on_gpu and arguments.device != "cpu":
        return without_gpus(selections, key or "h200", arguments)
    name = folder(device, key, arguments.gpus) if on_gpu else of_several("cpu", arguments.gpus)
    root = registry.results((s.spec.name for s in selections), committed=on_gpu and not arguments.quick)
    out = arguments.out or root / name
    failures = 0
    if arguments.quick and not arguments.case:
        selections = [replace(s, cases=s.cases[:1]) for s in selections]
    for selection in (s for s in selections if s.cases):
        path = out / "records" / f"{selection.spec.name}.jsonl"
        failures += bench(partial(registry.load, selection.spec.name), selection, path, arguments, device.type)
    print(f"records in {out / 'records'}")
    return 1 if failures else 0


def _chosen(arguments: argparse.Namespace, on_gpu: bool) -> Iterator[options.Selection]:
    """The selected part of every kernel that has cases of that world size: bench cases, or on CPUs the small ones, of
    which there may be none. ValueError if no kernel has any."""
    some = False
    for selection in options.select(arguments):
        spec = selection.spec
        named = selection.cases if arguments.case else tuple(case for case in spec.cases if case.bench == on_gpu)
        cases = tuple(case for case in named if case.world_size == arguments.gpus)
        if cases if arguments.case else cases or _benched(spec, arguments.gpus):
            if spec.sharding is None:
                raise ValueError(f"{spec.name}: its SPEC has cases for several GPUs, but no `sharding`")
            some = True
            yield options.Selection(spec, cases, selection.modes, selection.implementations)
    if not some:
        raise ValueError(f"--gpus {arguments.gpus}: no selected case is for that number of GPUs")


def bench(
    load: Load,
    selection: options.Selection,
    path: Path,
    arguments: argparse.Namespace,
    device: str,
    budget: Budget | None = None,
) -> int:
    """Benches one kernel into its record. Returns how many rows of our own failed. A rank that dies or hangs counts as
    one more, and ends the kernel. Finished rows are kept."""
    finished, failures = record.Finished(), 0
    if arguments.resume:
        gpu = torch.cuda.get_device_name() if device == "cuda" else environment.CPU
        finished = record.finished(path, options=rows.asked(arguments), gpu=gpu, **environment.commit())
    groups = [(case, mode) for case, mode in selection.groups() if (case.name, mode) not in finished.done]
    launches = by_environment(selection.spec, groups)
    for place, (variables, of_these) in enumerate(launches.items(), 1):
        orders = Orders(
            load,
            record.new_run_id(),
            path,
            tuple((case.name, mode) for case, mode in of_these),
            selection.implementations,
            rows.asked(arguments),
            finished.died,
            arguments.quick,
            budget,
        )
        reason = "complete" if place == len(launches) else "part"
        try:
            results = launch(
                of_these[0][0].world_size,
                session.bench,
                orders,
                device=device,
                timeout=arguments.rank_timeout or TIMEOUT,
                environment=dict(variables),
            )
            failures += results[0]
        except RanksFailed as failed:
            reason, failures = f"failed: {str(failed).splitlines()[0]}", failures + 1
            print(f"{selection.spec.name}: {failed}\nfinished rows are kept", file=sys.stderr)
        except KeyboardInterrupt:
            _stop(path, orders, "interrupted")
            print("\ninterrupted: finished rows are kept, --resume continues", file=sys.stderr)
            raise SystemExit(130) from None
        _stop(path, orders, reason)
        if reason.startswith("failed"):
            break
    return failures


def by_environment(spec: KernelSpec, groups: Sequence[Group]) -> dict[tuple[tuple[str, str], ...], list[Group]]:
    """Groups by the environment variables that their ranks start with."""
    assert spec.sharding is not None
    found: dict[tuple[tuple[str, str], ...], list[Group]] = {}
    for case, mode in groups:
        found.setdefault(tuple(sorted(spec.sharding.environment(case).items())), []).append((case, mode))
    return found


def _stop(path: Path, orders: Orders, reason: str) -> None:
    """Writes the last line of a run, after its ranks have ended."""
    if not path.is_file() or orders.run_id not in record.load(path).runs:
        return  # they ended before they had begun to write
    with record.Writer(path) as writer:
        writer.write({"type": "stop", "run": orders.run_id, "kernel": path.stem, "reason": reason})
    if reason in ("complete", "part"):  # otherwise --resume would not find what was started and never finished
        record.compact(path)


def profile(arguments: argparse.Namespace) -> int:
    """Runs everything once in NVTX ranges for a profiler. 1 if something that should have run did not.

    Under Nsight Systems (`nsys profile python -m harness profile --gpus 2 …`) only the NVTX ranges are made; otherwise
    PyTorch's profiler writes a trace of each case and rank.
    """
    device, key = environment.target(arguments.gpu, arguments.device)
    if (found := torch.cuda.device_count() if device.type == "cuda" else 0) < arguments.gpus:
        raise ValueError(f"--gpus {arguments.gpus}: {found} GPUs found")
    traces = arguments.keep or registry.ROOT / ".out" / folder(device, key, arguments.gpus) / "traces"
    failed = 0
    for selection in _chosen(arguments, on_gpu=True):
        spec = selection.spec
        named = tuple(name for name in selection.implementations if arguments.impl or name in spec.implementations)
        for variables, of_these in by_environment(spec, selection.groups()).items():
            groups = tuple((case.name, mode) for case, mode in of_these)
            orders = Orders(partial(registry.load, spec.name), "", Path(), groups, named)
            into = None if "NSYS_PROFILING_SESSION_ID" in os.environ else traces
            try:
                found_here = launch(arguments.gpus, session.mark, orders, into, environment=dict(variables))[0]
            except RanksFailed as error:
                print(f"{spec.name}: {error}", file=sys.stderr)
                failed += 1
                continue
            tables.show(spec.name, ("range", "status", "reason"), found_here)
            failed += sum(status not in ("ok", "skipped") for _, status, _ in found_here)
    print(f"traces in {traces}, for https://ui.perfetto.dev")
    return 1 if failed else 0


def without_gpus(selections: Sequence[options.Selection], key: str, arguments: argparse.Namespace) -> int:
    """Checks correctness with gloo ranks, and prints the floor of each case. 1 if one of our own is wrong."""
    gpu = roofline.get(key)
    checks = f"Correctness checks with {arguments.gpus} gloo ranks on the CPU"
    print(f"No GPU found: nothing is timed. {checks}, and roofline bounds for {gpu.title}.")
    wrong = 0
    for selection in (s for s in selections if s.cases):
        try:
            found = checked(partial(registry.load, selection.spec.name), selection, arguments.rank_timeout or TIMEOUT)
        except RanksFailed as error:
            print(f"{selection.spec.name}: {error}", file=sys.stderr)
            wrong += 1
            continue
        tables.show("check", CHECK_HEAD, [(selection.spec.name, *row) for row in found])
        wrong += sum(row[2] in selection.spec.implementations and row[3] not in ("ok", "skipped") for row in found)
    floors = [options.Selection(s.spec, _benched(s.spec, arguments.gpus), s.modes, ()) for s in selections]
    tables.show(
        f"roofline bounds of {arguments.gpus} × {gpu.title} (datasheet)", plan.FLOORS_HEAD, plan.floors(floors, gpu)
    )
    return 1 if wrong else 0


def _benched(spec: KernelSpec, size: int) -> tuple[Case, ...]:
    return tuple(case for case in spec.cases if case.bench and case.world_size == size)


def checked(load: Load, selection: options.Selection, timeout: float) -> list[tuple[str, str, str, str, str | None]]:
    """(case, mode, implementation, status, reason) of every check, by gloo ranks."""
    groups = tuple((case.name, mode) for case, mode in selection.groups())
    orders = Orders(load, "", Path(), groups, selection.implementations)
    size = selection.cases[0].world_size
    return launch(size, session.check, orders, device="cpu", timeout=timeout)[0]

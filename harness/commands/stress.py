"""`python -m harness stress`: several processes share a GPU and repeat calls whose results must be bit-wise equal.

A data race may need an order of events that hardly ever occurs on a GPU with one program. With several programs the
driver time-slices the SMs, in the middle of kernels: warps of a CTA, and CTAs of a cluster, drift apart as they never
do otherwise. A kernel that was correct only by timing then gives results that differ from the first ones on the same
inputs. All our implementations run whose SPEC promises equal repeats ("run-to-run"), in each process in an order of its
own. Exit code 1 if a repeat differed, a process failed or nothing was repeated.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from .. import environment, execute, options, registry
from ..correctness.accuracy import bits, same_bits
from ..on_gpu import place
from ..reporting import rows_json, tables
from ..spec import Case, KernelSpec

SCHEMA = 1
SEED = 20261124
FEWEST_CALLS = 3
ROOM = 8  # a process may need this many times the bytes that a call moves

Group = tuple[KernelSpec, Case, str, str]


@dataclasses.dataclass
class Tally:
    """For one case, mode and implementation: calls, those whose results differed from the first, and what differed."""

    kernel: str
    case: str
    mode: str
    implementation: str
    calls: int = 0
    wrong: int = 0
    what: str | None = None


def _key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(row[name] for name in ("kernel", "case", "mode", "implementation"))


def configure(parser: argparse.ArgumentParser) -> None:
    options.add_selection(parser, "all one-GPU cases that fit in memory together", "all but peers")
    options.add_target(parser)
    options.add_output(parser)
    group = parser.add_argument_group("load")
    group.add_argument("--processes", type=int, default=12, metavar="N", help="concurrent processes (default: 12)")
    group.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="minimum time for all cases together (default: 60)"
    )
    group.add_argument("--worker", type=int, metavar="NUMBER", help=argparse.SUPPRESS)


def main(arguments: argparse.Namespace) -> int:
    """0, or 1 if a repeat differed, a process failed or nothing was repeated."""
    if arguments.processes < 1 or arguments.seconds < 0:
        raise ValueError("--processes must be at least 1 and --seconds at least 0")
    selections = options.select(arguments)
    where = place("stress", arguments, selections)
    if arguments.worker is not None:
        with torch.cuda.device(where.device):
            return _work(groups(selections, arguments, where.device), arguments, where.device)
    if not groups(selections, arguments, where.device):
        raise ValueError("nothing to repeat: no selected implementation is declared deterministic (run-to-run)")
    print("first in one process, to compile the kernels …", flush=True)
    found, failures = _together([_start(arguments, 0, seconds=0)])
    print(f"{arguments.processes} processes for {arguments.seconds:g} s …", flush=True)
    more, failed = _together([_start(arguments, number, arguments.seconds) for number in range(arguments.processes)])
    rows = summed((*found, *more))
    show(rows)
    captured = {**environment.capture(where.device), "processes": arguments.processes, "seconds": arguments.seconds}
    path, head = where.out / "stress.json", {"schema": SCHEMA, "gpu": where.folder}
    rows_json.merge(path, head, captured, [dataclasses.asdict(row) for row in rows], key=_key)
    print(f"written: {path}")
    for failure in (*failures, *failed):
        print(f"a process failed: {failure}", file=sys.stderr)
    if not rows:
        print("no implementation is available: nothing was repeated", file=sys.stderr)
    return 1 if failures or failed or not rows or any(row.wrong for row in rows) else 0


def groups(selections: Sequence[options.Selection], arguments: argparse.Namespace, device: torch.device) -> list[Group]:
    """The combinations to repeat: each implementation of ours, in each mode that promises equal repeats, on each
    one-GPU case that fits into a process's share of the memory."""
    share = torch.cuda.get_device_properties(device).total_memory / arguments.processes
    found = []
    for selection in selections:
        spec = selection.spec
        cases = [case for case in spec.cases if not arguments.case or case.name in arguments.case]
        everything = dataclasses.replace(selection, cases=tuple(cases))
        found += [
            (spec, case, mode, name)
            for case, mode in everything.groups()
            if spec.determinism.get(mode) == "run-to-run" and ROOM * spec.cost(case, mode).bytes <= share
            if not execute.unfit(case, torch.cuda.get_device_capability(device))
            for name in selection.implementations
            if name in spec.implementations and not spec.skip_reason(name, case, mode)
        ]
    return found


def repeat(group: Group, device: torch.device, seconds: float, seed: int) -> Tally:
    """Repeats a call on the same inputs for `seconds` seconds, and at least FEWEST_CALLS times. Compares each result
    with the first. Tensors that a call updates in place are restored before each."""
    spec, case, mode, name = group
    generator = torch.Generator(device).manual_seed(seed)
    inputs = spec.make_inputs(case, device, generator)
    fn = execute.load(spec, name, case, mode)
    grads = execute.out_grads(spec, case, fn, inputs, mode, generator)
    before = {n: inputs[n].clone() for n in case.mutates}
    run = execute.bind(spec, fn, inputs, mode, grads)
    tally = Tally(spec.name, case.name, mode, name)
    first: tuple[torch.Tensor, ...] = ()
    deadline = time.perf_counter() + seconds
    while tally.calls < FEWEST_CALLS or time.perf_counter() < deadline:
        for key, value in before.items():
            inputs[key].copy_(value)
        results = run()
        tally.calls += 1
        if tally.calls == 1:
            first = tuple(t.clone() for t in results)
        elif not same_bits(results, first):
            tally.wrong += 1
            tally.what = tally.what or f"call {tally.calls} of process {seed - SEED}: {_difference(results, first)}"
    return tally


def _difference(results: Sequence[torch.Tensor], first: Sequence[torch.Tensor]) -> str:
    """Which results differ, in how many elements, and where the first of these is."""
    said = []
    for number, (result, before) in enumerate(zip(results, first, strict=True)):
        if not same_bits([result], [before]):
            places = (bits(result) != bits(before)).nonzero()
            at = tuple(places[0].tolist())
            said.append(f"result {number} differs in {len(places)} of {result.numel()} elements from {at} on")
    return "; ".join(said)


def _work(chosen: list[Group], arguments: argparse.Namespace, device: torch.device) -> int:
    """Runs one of the processes: prints a line of JSON for each group. 1 if one raised."""
    random.Random(arguments.worker).shuffle(chosen)
    failed = False
    for group in chosen:
        try:
            tally = repeat(group, device, arguments.seconds / len(chosen), SEED + arguments.worker)
        except execute.Unavailable:
            continue
        except (Exception, SystemExit) as error:  # the other groups are still worth running
            failed = True
            spec, case, mode, name = group
            print(f"{spec.name} {case.name} {mode} {name}: {type(error).__name__}: {error}", file=sys.stderr)
            if isinstance(error, torch.AcceleratorError):
                break  # nothing can run after it
        else:
            print(json.dumps(dataclasses.asdict(tally)), flush=True)
        torch.cuda.empty_cache()
    return 1 if failed else 0


def _start(arguments: argparse.Namespace, number: int, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "harness", "stress", "--worker", str(number), "--seconds", str(seconds)]
    command += ["--processes", str(arguments.processes), "--gpu", arguments.gpu]
    command += options.words({name: getattr(arguments, name) for name in ("kernel", "case", "mode", "impl")})
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=registry.ROOT)


def _together(processes: Sequence[subprocess.Popen[str]]) -> tuple[list[Tally], list[str]]:
    """Collects the results of the processes, and the last output line of each that failed."""
    tallies, failures = [], []
    try:
        with ThreadPoolExecutor(len(processes)) as pool:  # one thread each, so that no process blocks on a full pipe
            said = list(pool.map(lambda process: process.communicate(), processes))
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
    for process, (output, errors) in zip(processes, said, strict=True):
        tallies += [Tally(**json.loads(line)) for line in output.splitlines() if line.startswith("{")]
        if process.returncode:
            failures.append((errors.strip() or f"exit code {process.returncode}").splitlines()[-1])
    return tallies, failures


def summed(tallies: Iterable[Tally]) -> list[Tally]:
    """Sums the tallies of each case, mode and implementation."""
    found: dict[Any, Tally] = {}
    for tally in tallies:
        own = found.setdefault(_key(vars(tally)), dataclasses.replace(tally, calls=0, wrong=0, what=None))
        own.calls, own.wrong = own.calls + tally.calls, own.wrong + tally.wrong
        own.what = own.what or tally.what
    return [found[key] for key in sorted(found)]


def show(rows: Sequence[Tally]) -> None:
    """Prints a line for each kernel and mode, then each case that had a wrong repeat."""
    lines: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        line = lines.setdefault((row.kernel, row.mode), [0, 0, 0])
        for index, number in enumerate((1, row.calls, row.wrong)):
            line[index] += number
    cells = [(*key, *line) for key, line in lines.items()]
    tables.show("repeats under load", ("kernel", "mode", ">cases", ">calls", ">wrong"), cells)
    for row in rows:
        if row.wrong:
            print(f"{' '.join(_key(vars(row)))}: {row.wrong} of {row.calls} calls; {row.what}")

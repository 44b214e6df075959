"""`python -m harness build`: compiles every JIT kernel of every SPEC ahead of time; needs no GPU.

Worker processes do this, each for some pairs of kernel and target. Whether Triton's interpreter, in which tests run, is
used is decided when Triton is imported: a worker always starts without it, and sees no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from .. import options, registry
from ..compiling import build_report
from ..compiling.ahead import Outcome, compile_spec, target_name
from ..spec import KernelSpec

FOLDER = "build"
MAX_WORKERS = 8

Pair = tuple[str, tuple[int, int]]


def configure(parser: argparse.ArgumentParser) -> None:
    options.add_selection(parser, "all, with --quick all bench cases", "all but peers")
    group = parser.add_argument_group("build")
    group.add_argument("--quick", action="store_true", help="only the bench cases, not the small correctness cases")
    group.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="output folder (default: reports/build; .out/build for a kernel outside the checkout; none if only part "
        "of a kernel is selected)",
    )
    group.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    group.add_argument("--pair", action="append", default=[], help=argparse.SUPPRESS)


def main(arguments: argparse.Namespace) -> int:
    """0, or 1 where a kernel does not compile or has one of the faults that `ahead.compile_spec` names."""
    if arguments.worker:
        return _work(arguments)
    specs = [selection.spec for selection in _selections(arguments)]
    if not specs:
        raise ValueError("nothing is selected; see `python -m harness list`")
    pairs = [(spec.name, capability) for spec in specs for capability in spec.compile_targets]
    outcomes = run_workers(pairs, arguments)
    kernels = [merge(spec, outcomes) for spec in specs]
    for kernel in kernels:
        build_report.show(kernel)
    part = bool(arguments.quick or arguments.case or arguments.mode or arguments.impl)
    if arguments.out or not part:
        out = arguments.out or registry.results(spec.name for spec in specs) / FOLDER
        build_report.write(out, kernels)
        print(f"written: {out}")
    failures = [failure for kernel in kernels for failure in kernel["failures"]]
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


def _selections(arguments: argparse.Namespace) -> list[options.Selection]:
    """As `options.select`, without kernels of which only baselines are selected."""
    return [s for s in options.select(arguments) if set(s.implementations) & set(s.spec.implementations)]


def merge(spec: KernelSpec, outcomes: Iterable[Outcome]) -> build_report.Built:
    """Merges the results of all targets for one kernel, in the form of its file."""
    mine = [outcome for outcome in outcomes if outcome.kernel == spec.name]
    return build_report.built(
        spec.name,
        rows=[row for outcome in mine for row in outcome.rows],
        failures=[failure for outcome in mine for failure in outcome.failures],
        skipped=[reason for outcome in mine for reason in outcome.skipped],
    )


def run_workers(pairs: Sequence[Pair], arguments: argparse.Namespace) -> list[Outcome]:
    """Distributes the pairs over processes, one per core, and collects their results.

    A process that crashes is a failure of each of its pairs; the others go on.
    """
    count = min(len(pairs), os.cpu_count() or 1, MAX_WORKERS)
    shares = [pairs[start::count] for start in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{index}.json") for index in range(count)]
        workers = [_start(share, file, arguments) for share, file in zip(shares, files, strict=True)]
        outcomes: list[Outcome] = []
        try:
            for worker, share, file in zip(workers, shares, files, strict=True):
                outcomes += _collect(worker.wait(), share, file)
        finally:
            for worker in workers:
                worker.kill()  # on Ctrl-C; no effect on one that has ended
                worker.wait()
    return outcomes


def _start(share: Sequence[Pair], file: Path, arguments: argparse.Namespace) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "harness", "build", "--worker", str(file)]
    for kernel, (major, minor) in share:
        command += ["--pair", f"{kernel}:{major}.{minor}"]
    command += options.words({name: getattr(arguments, name) for name in ("case", "mode", "impl")})
    command += ["--quick"] * arguments.quick
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.Popen(command, cwd=registry.ROOT, env=environment)


def _collect(code: int, share: Sequence[Pair], file: Path) -> list[Outcome]:
    if code == 0:
        return [Outcome(**entry) for entry in json.loads(file.read_text(encoding="utf-8"))]
    reason = f"the compiling process ended with exit code {code}"
    return [
        Outcome(kernel, target, failures=[f"{target} {kernel}: {reason}"])
        for kernel, target in ((kernel, target_name(capability)) for kernel, capability in share)
    ]


def _work(arguments: argparse.Namespace) -> int:
    """Runs a worker: compiles its pairs one after the other and writes the results to the given file."""
    outcomes = []
    for kernel, capability in map(_parse_pair, arguments.pair):
        arguments.kernel = [kernel]
        for selection in _selections(argparse.Namespace(**{**vars(arguments), "case": None})):
            spec = selection.spec
            chosen = arguments.case or [c.name for c in spec.cases if c.bench or not arguments.quick]
            cases = [case for case in spec.cases if case.name in chosen]
            outcome = compile_spec(spec, capability, cases, selection.modes, selection.implementations)
            print(f"{outcome.kernel} {outcome.target}: {len(outcome.rows)} kernels", flush=True)
            outcomes.append(asdict(outcome))
    arguments.worker.write_text(json.dumps(outcomes), encoding="utf-8")
    return 0


def _parse_pair(text: str) -> Pair:
    kernel, _, capability = text.rpartition(":")
    major, _, minor = capability.partition(".")
    return kernel, (int(major), int(minor))

"""`mutate`: small faults in a kernel's own source, one at a time; how many of them the checks and tests reject.

Results are in reports/mutants, one line a mutant. A run takes up where the last one stopped: what is known is not run
again unless its function changed, or it survived, is not argued to be equivalent, and the checks changed. `--report`
writes reports/faults.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import options, registry
from ..mutation import mutants, report, results, run
from ..mutation.mutants import Mutant
from ..reporting.progress import Progress

MINUTES = 60.0
INTERPRETER = "interpreter"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kernel", action="append", metavar="NAME", help="only this kernel (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    parser.add_argument("--jobs", type=int, metavar="N", help="mutants at a time (default: the cores; 8 on a GPU)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="draws the order of the mutants (default: 0)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        metavar="M",
        help=f"for a kernel, but not before --least mutants are known (default: {MINUTES:.0f})",
    )
    parser.add_argument(
        "--least",
        type=int,
        default=run.LEAST,
        metavar="N",
        help=f"mutants to know of a kernel, however long that takes; 0 lets --minutes end it (default: {run.LEAST})",
    )
    parser.add_argument("--file", action="append", metavar="FILE", help="only mutants of this file of the folder")
    parser.add_argument("--again", action="store_true", help="run all survivors again, and nothing else")
    parser.add_argument("--list", action="store_true", help="print the mutants and run none")
    parser.add_argument("--report", action="store_true", help="write reports/faults.md from the results and run none")
    parser.add_argument("--out", type=Path, default=results.FOLDER, metavar="DIR", help="default: reports/mutants")
    names = ("kernel", "device", "jobs", "seed", "minutes", "least", "file", "again", "list")
    parser.set_defaults(unused_by_report={name: parser.get_default(name) for name in names})


def main(arguments: argparse.Namespace) -> int:
    """0, also where mutants survive: the report lists them."""
    if arguments.report:
        options.refuse(arguments, arguments.unused_by_report, "--report", *arguments.unused_by_report)
    names = arguments.kernel or [name for name in registry.names() if registry.package(name).startswith("kernels.")]
    for name in names:
        registry.package(name)  # ValueError for one that is not there
    if arguments.report:
        target = arguments.out.parent / "faults.md"
        target.write_text(report.page(arguments.out), encoding="utf-8")
        print(target)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the copies of the checkout are removed
    for name in names:
        _one(name, arguments)
    return 0


def _one(kernel: str, arguments: argparse.Namespace) -> None:
    device = arguments.device or ("cuda" if _has_gpu() else "cpu")
    label = INTERPRETER if device == "cpu" else "gpu"
    every = mutants.of_kernel(kernel)
    able = [m for m in every if device == "cuda" or m.device == "any"]
    chosen = [m for m in able if not arguments.file or m.file in arguments.file]
    if arguments.list:
        print("\n".join(f"{m.key}  {m.file}:{m.number}  {m.function}  {m.operator}" for m in chosen))
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    results.tidy(kernel, every, arguments.out)
    checks = results.digest_of_checks(kernel)
    known = results.current(results.load(kernel, arguments.out), every, label)
    argued = mutants.equivalent(kernel)
    left = [
        mutant
        for mutant in mutants.order(chosen, arguments.seed)
        if _to_run(known.get(mutant.key), checks, mutant.identity in argued, arguments.again)
    ]
    left.sort(key=lambda mutant: mutant.key not in known)  # survivors first
    retried = sum(mutant.key in known for mutant in left)
    print(f"{kernel} on {label}: {len(every)} mutants, {len(able)} for this device, {len(left)} to run", flush=True)
    if not left:
        return
    jobs = arguments.jobs or (min(8, os.cpu_count() or 1) if device == "cuda" else os.cpu_count() or 1)
    counts: Counter[str] = Counter()
    before = results.original(kernel, label, arguments.out)
    with (
        results.path(kernel, arguments.out).open("a", encoding="utf-8") as file,
        Progress(kernel, len(left)) as progress,
    ):

        def done(mutant: Mutant, answer: Mapping[str, Any]) -> None:
            counts[answer["status"]] += 1
            line = results.line(mutant, label, checks, answer)
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            by = f" by {answer['by']}" if answer["by"] else ""
            place = f"{mutant.file}:{mutant.number} {mutant.operator}"
            progress.line(f"{answer['status']:8} {answer['seconds']:5.1f} s  {place}{by}")

        run.run(
            kernel,
            device,
            left,
            jobs,
            arguments.minutes,
            retried + max(0, arguments.least - len(known)),
            done,
            lambda text: print(text, flush=True),
            run.Baseline(before["checks"], before["tests"]) if before else None,
            lambda original: results.keep_original(
                kernel, label, {"checks": original.checks, "tests": original.tests}, arguments.out
            ),
        )
    results.tidy(kernel, every, arguments.out)
    print(f"{kernel}: " + ", ".join(f"{n} {status}" for status, n in counts.most_common()))


def _to_run(known: Mapping[str, Any] | None, checks: str, argued: bool, again: bool) -> bool:
    """What has no result, and survivors once the checks have changed; with `again` all survivors and nothing else."""
    if known is None:
        return not again
    return known["status"] == "survived" and (again or (known["checks"] != checks and not argued))


def _has_gpu() -> bool:
    """Without starting CUDA here: it would not matter, but takes seconds."""
    return os.environ.get("TRITON_INTERPRET") != "1" and Path("/proc/driver/nvidia/version").exists()

"""`mutate`: small faults in a kernel's own source, one at a time; how many of them the checks and tests reject.

Results are in reports/mutants, one line per mutant. A run continues where the last one stopped: a mutant with a result
runs again only if its function changed, or if it survived, is not declared equivalent, and the checks changed. Kernels
alternate, each with its mutants in an order drawn from the seed, so that equally many are known of each when time is
up. A result is written when its mutant ends; --minutes includes start-up, and ends a run cleanly.
`--machine-code` determines, without a GPU, which mutants of CUDA C++ do not compile or compile to the same machine
code: no run on a GPU then spends time on them. `--coverage` measures on a GPU which cases execute the statement that a
mutant changes, and `--near` checks only a few of these. `--merge` adds the results of another machine. `--report`
writes reports/faults.md.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from .. import options, registry
from ..mutation import mutants, near, report, results, run
from ..mutation.kernel import Kernel
from ..mutation.mutants import Mutant, is_cuda
from ..reporting.progress import Progress

MINUTES = 60.0
JOBS_ON_GPU = 8  # each has up to three contexts of half a gigabyte
INTERPRETER, ON_GPU = report.LABELS


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kernel", action="append", metavar="NAME", help="only this kernel (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    gpus = "GPUs that share the mutants, as 0,1,2 (default: all)"
    parser.add_argument("--devices", type=options.gpus, metavar="LIST", help=gpus)
    jobs = f"mutants at a time (default: the cores; at most {JOBS_ON_GPU} a GPU)"
    parser.add_argument("--jobs", type=int, metavar="N", help=jobs)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="draws the order of the mutants (default: 0)")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, metavar="M", help=f"for all kernels, no more (default: {MINUTES:.0f})"
    )
    parser.add_argument("--most", type=int, metavar="N", help="mutants to know of a kernel, however much time is left")
    parser.add_argument("--quick", action="store_true", help="without the tests and the checks that use torch.compile")
    some = (
        "so many checks of a quick run as take the original S seconds, the cheapest of each kind first (default: all)"
    )
    parser.add_argument("--check-seconds", type=float, metavar="S", help=some)
    near_help = (
        "of a mutant of CUDA C++ only checks of a few cases that execute it, as found by --coverage (needs --quick)"
    )
    parser.add_argument("--near", action="store_true", help=near_help)
    pattern = "only mutants of files of the folder that this matches, as *.cu*"
    parser.add_argument("--file", action="append", metavar="PATTERN", help=pattern)
    compiled = "compile mutants of CUDA C++ and run none (needs NVRTC)"
    parser.add_argument("--machine-code", action="store_true", help=compiled)
    covered = "find the cases that execute each mutant of CUDA C++, on GPUs, and run no mutant"
    parser.add_argument("--coverage", action="store_true", help=covered)
    parser.add_argument("--again", action="store_true", help="run all survivors again, and nothing else")
    parser.add_argument("--list", action="store_true", help="print the mutants and run none")
    parser.add_argument(
        "--merge", type=Path, metavar="DIR", help="add the results in DIR to those of --out, and run none"
    )
    parser.add_argument("--report", action="store_true", help="write reports/faults.md from the results and run none")
    parser.add_argument("--out", type=Path, default=results.FOLDER, metavar="DIR", help="default: reports/mutants")
    names = (
        "kernel",
        "device",
        "devices",
        "jobs",
        "seed",
        "minutes",
        "most",
        "quick",
        "check_seconds",
        "near",
        "file",
        "machine_code",
        "coverage",
        "again",
        "list",
    )
    parser.set_defaults(unused_by_report={name: parser.get_default(name) for name in names})


def main(arguments: argparse.Namespace) -> int:
    """0, also where mutants survive: the report lists them. 1 if some kernel could not be evaluated."""
    end = time.monotonic() + 60 * arguments.minutes
    if arguments.report:
        options.refuse(arguments, arguments.unused_by_report, "--report", *arguments.unused_by_report)
    names = arguments.kernel or [name for name in registry.names() if registry.package(name).startswith("kernels.")]
    if arguments.merge:
        options.refuse(arguments, arguments.unused_by_report, "--merge", *arguments.unused_by_report)
        return _merge(arguments.merge, arguments.out)
    for name in names:
        registry.package(name)  # ValueError for an unknown name
    if arguments.report:
        target = arguments.out.parent / "faults.md"
        target.write_text(report.page(arguments.out), encoding="utf-8")
        print(target)
        return 0
    if arguments.machine_code:
        unused = ("device", "devices", "jobs", "quick", "check_seconds", "near", "coverage", "again", "list")
        options.refuse(arguments, arguments.unused_by_report, "--machine-code", *unused)
        return _machine_code(names, arguments)
    if arguments.coverage:
        unused = ("device", "seed", "most", "quick", "check_seconds", "near", "file", "again", "list")
        options.refuse(arguments, arguments.unused_by_report, "--coverage", *unused)
        return _coverage(names, end, arguments)
    if arguments.check_seconds is not None and not arguments.quick:
        raise ValueError("--check-seconds needs --quick: what it leaves out is no result of all checks")
    if arguments.near and (not arguments.quick or arguments.check_seconds is not None):
        raise ValueError("--near needs --quick, and no --check-seconds: it chooses the checks itself")
    device = arguments.device or ("cuda" if _has_gpu() else "cpu")
    if device == "cpu" and arguments.devices:
        raise ValueError("--devices needs --device cuda")
    every = {name: mutants.of_kernel(name) for name in names}
    chosen = {name: _chosen(found, device, arguments.file) for name, found in every.items()}
    if arguments.list:
        for found in chosen.values():
            print("\n".join(f"{m.key}  {m.file}:{m.number}  {m.function}  {m.operator}" for m in found))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the copies of the checkout are removed
    return _run(every, chosen, device, end, arguments)


def _chosen(every: Sequence[Mutant], device: str, patterns: Sequence[str] | None) -> list[Mutant]:
    able = [m for m in every if device == "cuda" or m.device == "any"]
    return [m for m in able if not patterns or any(fnmatch.fnmatch(m.file, pattern) for pattern in patterns)]


def _run(
    every: Mapping[str, Sequence[Mutant]],
    chosen: Mapping[str, Sequence[Mutant]],
    device: str,
    end: float,
    arguments: argparse.Namespace,
) -> int:
    label = INTERPRETER if device == "cpu" else ON_GPU
    arguments.out.mkdir(parents=True, exist_ok=True)
    kernels = []
    for name, found in every.items():
        results.tidy(name, found, arguments.out)
        left = _left(name, found, chosen[name], label, arguments)
        print(f"{name} on {label}: {len(found)} mutants, {len(chosen[name])} chosen, {len(left)} to run", flush=True)
        if left:
            kernels.append(Kernel(name, left, near.load(name, arguments.out) if arguments.near else {}))
    if not kernels:
        return 0
    counts = {kernel.name: Counter[str]() for kernel in kernels}
    checks = {kernel.name: results.digest_of_checks(kernel.name, arguments.quick) for kernel in kernels}
    with contextlib.ExitStack() as stack:
        files: dict[str, TextIO] = {
            kernel.name: stack.enter_context(results.path(kernel.name, arguments.out).open("a", encoding="utf-8"))
            for kernel in kernels
        }
        progress = stack.enter_context(Progress("mutants", sum(len(kernel.left) for kernel in kernels)))

        def done(mutant: Mutant, answer: Mapping[str, Any]) -> None:
            counts[mutant.kernel][answer["status"]] += 1
            digest = checks[mutant.kernel]
            if answer["status"] == results.SAME:
                digest = results.digest_of_source(mutant.kernel, mutant.file) + results.QUICK * arguments.quick
            line = results.line(mutant, label, digest, answer)
            files[mutant.kernel].write(json.dumps(line, ensure_ascii=False) + "\n")
            files[mutant.kernel].flush()
            by = f" by {answer['by']}" if answer["by"] else ""
            place = f"{mutant.kernel}/{mutant.file}:{mutant.number} {mutant.operator}"
            spent = ", ".join(f"{name} {seconds:.1f}" for name, seconds in answer.get("spent", {}).items())
            progress.line(f"{answer['status']:8} {answer['seconds']:5.1f} s ({spent})  {place}{by}")

        gpus = (arguments.devices or options.visible_gpus()) if device == "cuda" else []
        jobs = arguments.jobs or min(os.cpu_count() or 1, JOBS_ON_GPU * len(gpus) if gpus else 1 << 10)
        run.run(
            kernels,
            device,
            jobs,
            end,
            done,
            lambda text: print(text, flush=True),
            arguments.quick,
            arguments.check_seconds,
            gpus,
            originals=not arguments.near,
        )
    for kernel in kernels:
        results.tidy(kernel.name, every[kernel.name], arguments.out)
        tally = counts[kernel.name]
        said = ", ".join(f"{n} {status}" for status, n in tally.most_common()) or "none"
        print(f"{kernel.broken or f'{kernel.name}: {said}'}; {len(kernel.left)} were not begun")
        if kernel.failing:
            print(f"{kernel.name}: left out, as the original fails: {', '.join(sorted(kernel.failing))}")
            name, reason = next(iter(kernel.failing.items()))
            print(f"{kernel.name}: {name}: {reason}")
    return 1 if any(k.broken or counts[k.name][results.ERROR] for k in kernels) else 0


def _merge(source: Path, target: Path) -> int:
    files = sorted(source.glob("*.jsonl"))
    if not files:
        raise FileNotFoundError(f"{source} has no results")
    target.mkdir(parents=True, exist_ok=True)
    for file in files:
        print(f"{file.stem}: {results.merge(file.stem, mutants.of_kernel(file.stem), source, target)} results")
    return 0


def _machine_code(names: Sequence[str], arguments: argparse.Namespace) -> int:
    """Compiles the first --most mutants of each kernel in the order of the seed, while there is time."""
    from ..mutation import machine_code

    deadline = time.monotonic() + 60 * arguments.minutes
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in names:
        every = mutants.of_kernel(name)
        in_cuda = [m for m in _chosen(every, "cuda", arguments.file) if is_cuda(m.file)]
        if not in_cuda:
            continue
        variants = machine_code.variants(registry.load(name))
        known = results.current(results.load(name, arguments.out), every, ON_GPU)
        counts = Counter[str]()
        nearby = dict(near.load(name, arguments.out))
        with results.path(name, arguments.out).open("a", encoding="utf-8") as file:
            for mutant in mutants.order(in_cuda, arguments.seed)[: arguments.most]:
                if time.monotonic() > deadline:
                    break
                if known.get(mutant.key, {"status": "survived"})["status"] != "survived":
                    continue
                judged = machine_code.judge(mutant, variants)
                counts[judged.answer["status"] if judged.answer else "other machine code"] += 1
                if judged.answer:
                    line = results.line(mutant, ON_GPU, results.digest_of_source(name, mutant.file), judged.answer)
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
                else:
                    nearby.setdefault(mutant.key, [list(launcher) for launcher in judged.near])
        near.store(name, nearby, every, arguments.out)
        results.tidy(name, every, arguments.out)
        print(f"{name}: " + (", ".join(f"{n} {status}" for status, n in counts.most_common()) or "none"), flush=True)
    return 0


def _coverage(names: Sequence[str], end: float, arguments: argparse.Namespace) -> int:
    """Finds near cases by execution, for the kernels that are measured in time. 1 if some are not."""
    from ..mutation import coverage

    if not _has_gpu():
        raise RuntimeError("--coverage needs a GPU")
    places = {name: own for name in names if (own := coverage.places_of(name))}
    gpus = arguments.devices or options.visible_gpus()
    jobs = arguments.jobs or min(os.cpu_count() or 1, JOBS_ON_GPU * len(gpus))
    measurement = coverage.Measurement(list(places), end, lambda text: print(text, flush=True))
    measurement.run(gpus, jobs)
    for name, own in places.items():
        if measurement.missing[name]:
            print(f"{name}: not measured completely, so its near cases stay as they were")
            continue
        every, executed = mutants.of_kernel(name), measurement.by_mark(name)
        found = coverage.near(own, every, executed)
        near.store(name, {**near.load(name, arguments.out), **found}, every, arguments.out)
        none = sum(not launchers for launchers in found.values())
        print(
            f"{name}: {len(executed)} of {sum(map(len, own.values()))} marks were executed; "
            f"{none} of {len(found)} mutants are where no {coverage.CHECK} check executes"
        )
    return 1 if any(measurement.missing[name] for name in places) else 0


def _left(
    kernel: str, every: Sequence[Mutant], chosen: Sequence[Mutant], label: str, arguments: argparse.Namespace
) -> list[Mutant]:
    """The mutants to run, in their order."""
    accepted = {results.digest_of_checks(kernel, quick) for quick in {False, arguments.quick}}
    known = results.current(results.load(kernel, arguments.out), every, label)
    argued = mutants.equivalent(kernel)
    left = [
        mutant
        for mutant in mutants.order(list(chosen), arguments.seed)
        if _to_run(known.get(mutant.key), accepted, mutant.identity in argued, arguments)
    ]
    left.sort(key=lambda mutant: mutant.key not in known)  # survivors first
    retried = sum(mutant.key in known for mutant in left)
    if arguments.most is not None:
        left = left[: retried + max(0, arguments.most - len(known))]
    nearby = near.load(kernel, arguments.out) if arguments.near else {}
    return [mutant for mutant in left if nearby.get(mutant.key) != []]  # no check of a near run executes the others


def _to_run(
    known: Mapping[str, Any] | None, accepted: Collection[str], argued: bool, arguments: argparse.Namespace
) -> bool:
    """Whether to run a mutant: if it has no complete result, or survived checks other than those accepted. Machine code
    that a quick run found to be the same counts for quick runs only. With `again` only survivors run."""
    if known is None or known["status"] in (results.UNFINISHED, results.ERROR):
        return not arguments.again
    if known["status"] == results.SAME:
        return results.is_quick(known) and not (arguments.quick or arguments.again)
    return known["status"] == "survived" and (arguments.again or (known["checks"] not in accepted and not argued))


def _has_gpu() -> bool:
    """Whether there is a GPU, without starting CUDA here: that would do no harm, but takes seconds."""
    return os.environ.get("TRITON_INTERPRET") != "1" and Path("/proc/driver/nvidia/version").exists()

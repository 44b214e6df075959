"""`bench` without a GPU: correctness in the interpreter, the ahead-of-time build, and the floor of each case.

It prints no GPU time, because none is measured.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence

from rich.console import Console

from . import options, registry, roofline
from .reporting import tables

FLOORS_HEAD = ("kernel", "case", "mode", ">bytes", ">FLOPs", ">floor", "bound by")


def main(selections: Sequence[options.Selection], key: str | None, arguments: argparse.Namespace) -> int:
    """Runs the correctness checks in Triton's interpreter and the ahead-of-time build, and prints the floor of each
    case. Exit code 1 if either of the first two fails."""
    console = Console(soft_wrap=True, highlight=False)
    gpu = roofline.get(key or "h200")
    notice = f"No GPU found: nothing is timed. Correctness checks, compilation, and roofline bounds for {gpu.title}."
    console.print(notice, style="bold")
    failed = 0
    # The accuracy check of every case. The other checks take longer than all else here; `nox -s test` runs them.
    for step, options_of_step in (("check", ["--quiet", "--check", "accuracy"]), ("build", ["--quick"])):
        console.rule(step)
        words = [*_kernels(selections), *_narrowed(arguments), *options_of_step]
        failed |= _harness(step, words, interpret=step == "check")
    console.rule("floors")
    tables.show(f"roofline bounds of {gpu.title} (datasheet)", FLOORS_HEAD, floors(selections, gpu))
    console.print(notice, style="bold")
    return 1 if failed else 0


def _harness(command: str, arguments: Sequence[str], interpret: bool) -> int:
    """Runs another command in a separate process: Triton decides at import whether it interprets or compiles."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    sys.stdout.flush()
    return subprocess.run(
        [sys.executable, "-m", "harness", command, *arguments], cwd=registry.ROOT, env=environment, check=False
    ).returncode


def _kernels(selections: Sequence[options.Selection]) -> list[str]:
    names = dict.fromkeys(s.spec.name for s in selections)
    return [word for name in names for word in ("--kernel", name)]


def _narrowed(arguments: argparse.Namespace) -> list[str]:
    chosen = {"--case": arguments.case, "--mode": arguments.mode, "--impl": arguments.impl}
    return [word for option, names in chosen.items() for name in names or () for word in (option, name)]


def floors(selections: Sequence[options.Selection], gpu: roofline.Gpu) -> list[tuple[str, ...]]:
    """A row with the least time of each case on that GPU, from the datasheet's ceilings."""
    rows: list[tuple[str, ...]] = []
    for selection in selections:
        for case, mode in selection.groups():
            cost = selection.spec.cost(case, mode)
            floor = roofline.floor_seconds(cost, gpu.ceilings)
            sizes = (f"{cost.bytes / 1e6:.1f} MB", f"{cost.total_flops / 1e9:.2f} G")
            time = roofline.microseconds(floor.seconds)
            rows.append((selection.spec.name, case.name, mode, *sizes, time, floor.limit))
    return rows

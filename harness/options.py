"""Options that several commands share, declared once so that they mean the same everywhere."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import registry

if TYPE_CHECKING:
    from .spec import Case, KernelSpec


def add_selection(
    parser: argparse.ArgumentParser, cases: str = "all bench cases", implementations: str = "all, with all peers"
) -> None:
    """Adds --kernel, --case, --mode, --impl; each may be given more than once. The other arguments describe the
    defaults of --case and --impl."""
    group = parser.add_argument_group("selection", "each option may be given more than once")
    group.add_argument(
        "--kernel",
        action="append",
        metavar="NAME",
        help="only this kernel (default: all); PATH[:SPEC] for one outside the checkout",
    )
    group.add_argument("--case", action="append", metavar="NAME", help=f"only this case (default: {cases})")
    modes = "only this mode (default: all): fwd, bwd, fwd+bwd, step, train"
    group.add_argument("--mode", action="append", metavar="MODE", help=modes)
    help_line = f"only this implementation or peer (default: {implementations})"
    group.add_argument("--impl", action="append", metavar="NAME", help=help_line)


def add_target(parser: argparse.ArgumentParser) -> None:
    """Adds --gpu and --device."""
    group = parser.add_argument_group("device")
    group.add_argument(
        "--gpu",
        default="auto",
        type=str.lower,
        metavar="NAME",
        help="GPU model of harness/gpus.toml, e.g. h200, h100, a100-80 (default: the GPU found)",
    )
    group.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if available, else cpu")


def add_output(
    parser: argparse.ArgumentParser, default: str = "reports/<gpu>; .out/<gpu> for a kernel outside the checkout"
) -> None:
    """Adds --out."""
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"output folder (default: {default})")


def gpus(text: str) -> list[str]:
    """Parses a list of GPUs; each is returned as a value of CUDA_VISIBLE_DEVICES."""
    found = [part.strip() for part in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of GPUs such as 0,1,2")
    return found


def visible_gpus() -> list[str]:
    """All GPUs that this process may use, in the form of `gpus`, without starting CUDA."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return gpus(visible)
    return [str(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))] or ["0"]


def refuse(arguments: argparse.Namespace, defaults: Mapping[str, object], where: str, *names: str) -> None:
    """ValueError if one of the options with these names was given; `where` says in which mode it would be ignored."""
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) != defaults[name]]
    if given:
        raise ValueError(f"{' and '.join(given)} cannot be used with {where}")


def words(chosen: Mapping[str, Sequence[str] | None]) -> list[str]:
    """Command-line words of options that may be given more than once: {"case": ["a", "b"]} is --case a --case b."""
    return [word for name, values in chosen.items() for value in values or () for word in (f"--{name}", value)]


@dataclass(frozen=True)
class Selection:
    """The part of one kernel that --case, --mode and --impl select."""

    spec: KernelSpec
    cases: tuple[Case, ...]
    modes: tuple[str, ...]
    implementations: tuple[str, ...]

    def groups(self) -> list[tuple[Case, str]]:
        """Every case in every mode in which it runs."""
        return [(case, mode) for case in self.cases for mode in self.modes if mode in self.spec.modes_of(case)]


def select(
    arguments: argparse.Namespace,
    nameable: Callable[[KernelSpec], Sequence[Case]] = lambda spec: (*spec.cases, *spec.suite_cases),
) -> list[Selection]:
    """The selected part of every selected kernel; `nameable` are the cases that --case may name. An unknown name is a
    ValueError that lists the known ones."""
    chosen = [registry.load(name) for name in arguments.kernel or registry.names()]
    chosen = list({id(spec): spec for spec in chosen}.values())
    if twice := sorted(name for name, count in Counter(spec.name for spec in chosen).items() if count > 1):
        raise ValueError(f"--kernel: more than one SPEC has the name {', '.join(map(repr, twice))}")
    known(arguments.case, {c.name for s in chosen for c in nameable(s)}, "case")
    known(arguments.mode, {m for s in chosen for m in s.modes}, "mode")
    known(arguments.impl, {i for s in chosen for i in implementations(s)}, "implementation")
    selections = []
    for spec in chosen:
        if arguments.case:
            cases = tuple(c for c in nameable(spec) if c.name in arguments.case)
        else:
            cases = tuple(c for c in spec.cases if c.bench)
        modes = tuple(m for m in spec.modes if not arguments.mode or m in arguments.mode)
        impls = tuple(i for i in implementations(spec) if not arguments.impl or i in arguments.impl)
        if cases and modes and impls:
            selections.append(Selection(spec, cases, modes, impls))
    return selections


def implementations(spec: KernelSpec) -> list[str]:
    """Names of this folder's implementations, best first, then of the baselines."""
    return [*spec.implementations, *(b.name for b in spec.baselines)]


def known(names: Sequence[str] | None, every: set[str], what: str) -> None:
    """ValueError if one of the names is not among `every`, with these."""
    if unknown := sorted(set(names or ()) - every):
        raise ValueError(f"unknown {what} {', '.join(map(repr, unknown))}; known: {', '.join(sorted(every))}")

"""`list`: what --kernel, --case, --mode and --impl can select."""

from __future__ import annotations

import argparse

from .. import options, registry
from ..spec import KernelSpec


def configure(parser: argparse.ArgumentParser) -> None:
    options.add_selection(parser, "all bench cases, with --all all")
    parser.add_argument("--all", action="store_true", help="also list the cases that are only for correctness checks")


def main(arguments: argparse.Namespace) -> int:
    if arguments.all and not arguments.case:
        chosen = [registry.load(name) for name in arguments.kernel or registry.names()]
        arguments.case = sorted({case.name for spec in chosen for case in spec.cases})
    print("\n\n".join(describe(selection) for selection in options.select(arguments)) or "nothing is selected")
    return 0


def describe(selection: options.Selection) -> str:
    """The selected part of one kernel: its modes, implementations and unit, then a line for each case."""
    spec = selection.spec
    width = max(len(case.name) for case in selection.cases)
    ours = [name for name in selection.implementations if name in spec.implementations]
    others = [name for name in selection.implementations if name not in spec.implementations]
    lines = [
        spec.name,
        f"  modes            {', '.join(selection.modes)}",
        f"  implementations  {', '.join(_needs(spec, name) for name in ours) or 'none'}",
        f"  compared with    {', '.join(others) or 'none'}",
        f"  throughput in    {spec.unit}/s",
        "  cases",
    ]
    for case in selection.cases:
        settings = {**case.dims, "dtype": str(case.dtype).removeprefix("torch."), **case.params}
        settings |= {"GPUs": case.world_size} if case.world_size > 1 else {}
        shown = ", ".join(f"{key} {value}" for key, value in settings.items())
        lines.append(f"    {case.name:<{width}}  {shown}{'' if case.bench else '  (correctness only)'}")
    return "\n".join(lines)


def _needs(spec: KernelSpec, name: str) -> str:
    """'cuda (sm_90)': an implementation, and the compute capability that it requires."""
    needed = spec.min_capability.get(name)
    return f"{name} (sm_{needed[0]}{needed[1]})" if needed else name

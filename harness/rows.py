"""The parts of a record's row and run lines that are not measurements."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from .spec import Case, KernelSpec, Yardstick

OPTIONAL = ("samples", "warmup", "suite")  # recorded only if they were given
OPTIONS = ("gpu", "quick", "timer", "case", "mode", "impl", "host", "host_compiled", "resume")


def asked(arguments: argparse.Namespace) -> dict[str, Any]:
    """The command line of a bench in the form of the record."""
    given = {name: getattr(arguments, name, None) for name in OPTIONAL}
    if getattr(arguments, "turns", None) is not None:
        given["turns"] = True  # the file's name means nothing elsewhere
    return {name: getattr(arguments, name) for name in OPTIONS} | {n: v for n, v in given.items() if v is not None}


def described(spec: KernelSpec, case: Case, mode: str, name: str, status: str, reason: str | None) -> dict[str, Any]:
    """The row of an implementation without its measurements."""
    yardsticks = {b.name: b for b in spec.baselines if isinstance(b, Yardstick)}
    cost = yardsticks[name].cost if name in yardsticks else spec.cost
    baseline = kind(spec, name) == "baseline"
    return {
        "case": case.name,
        "mode": mode,
        "dims": dict(case.dims),
        "dtype": _written(case.dtype),
        "params": {name: _written(value) for name, value in case.params.items()},
        "implementation": name,
        "kind": kind(spec, name),
        **({"pytorch": name in spec.pytorch} if baseline else {}),
        **({"ablation": spec.ablation[name]} if name in spec.ablation else {}),
        "status": status,
        "reason": reason,
        "cost": cost(case, mode).to_record(),
        "items": spec.items(case),
        "unit": spec.unit,
    }


def kind(spec: KernelSpec, name: str) -> str:
    """One of "ours", "baseline" and "yardstick"."""
    if name in spec.implementations:
        return "ours"
    return "yardstick" if any(b.name == name and isinstance(b, Yardstick) for b in spec.baselines) else "baseline"


def _written(value: Any) -> Any:
    """A value in the form of a record: a dtype by its name."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value

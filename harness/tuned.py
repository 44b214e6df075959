"""Results of `tune`, and whether a kernel's present configuration is among the best of them. Needs no GPU.

reports/<gpu>/tune/<kernel>.json:
{"schema": 2, "kernel", "gpu", "environments", "rows": [{"kernel", "mode", "case", "function": "pick_fwd_config", "run",
 "implementation": the one in which it was tuned, "arguments": [as `pick_*` was called],
 "column": "cold" | "graph", "picked": {...}, "picked_us",
 "candidates": [{"config": {...}, "median_us": time | null, "reason": why there is none}, ...]}]}
The configuration that was picked at the time is among the candidates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from . import registry
from .reporting import rows_json
from .reporting.choices import SCHEMA
from .spec import KernelSpec

#: Tolerance by which the picked configuration may be slower than the best one measured: about the noise of a search.
MARGIN = 0.03


def files(root: Path = registry.ROOT) -> list[Path]:
    """Every tune file of the reports."""
    return sorted(root.glob("reports/*/tune/*.json"))


def behind(path: Path, spec: KernelSpec) -> list[str]:
    """Messages for present configurations that are not among the best according to one file; empty if all are."""
    wrong = []
    for row in rows_json.read(path, SCHEMA)["rows"]:
        try:
            verdict = judge(row, pick_today(spec, row))
        except (TypeError, ValueError) as error:  # its signature has changed since the measurement
            verdict = f"{row['kernel']} {row['mode']} {row['case']}: {row['function']}: {error}"
        if verdict:
            wrong.append(verdict)
    return wrong


def replay(path: Path, spec: KernelSpec) -> list[dict[str, Any]]:
    """Writes the present choice, and its measured time, into a file. Returns its rows. ValueError or TypeError if the
    choice was not measured."""
    document = rows_json.read(path, SCHEMA)
    for row in document["rows"]:
        row["picked"] = pick_today(spec, row)
        mine = _measured(row, row["picked"])
        if mine is None or mine["median_us"] is None:
            raise ValueError(judge(row, row["picked"]))
        row["picked_us"] = mine["median_us"]
    path.write_text(rows_json.dumps(document), encoding="utf-8")
    return document["rows"]


def encode(value: Any) -> Any:
    """A configuration or an argument of `pick_*` as JSON. TypeError for what a pure function would not be given."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{value!r} cannot be written to a tune file: give pick functions plain values")


def decode(value: Any) -> Any:
    """An argument of `pick_*` from JSON."""
    if isinstance(value, dict):
        return getattr(torch, value["dtype"])
    return tuple(decode(item) for item in value) if isinstance(value, list) else value


def pick_today(spec: KernelSpec, row: Mapping[str, Any]) -> Any:
    """The kernel's present choice where it picked `row["picked"]` at the time, as JSON. `pick_*` is pure: no GPU."""
    for tunable in spec.tunables:
        if (tunable.function, tunable.mode) == (row["function"], row["mode"]):
            return encode(getattr(tunable.module, tunable.function)(*map(decode, row["arguments"])))
    raise ValueError(f"{spec.name} no longer has the tunable {row['function']!r} in mode {row['mode']!r}: tune again")


def _measured(row: Mapping[str, Any], config: Any) -> Mapping[str, Any] | None:
    return next((c for c in row["candidates"] if c["config"] == config), None)


def judge(row: Mapping[str, Any], picked: Any) -> str | None:
    """Why this configuration is not among the best that were measured, or None."""
    times = [c["median_us"] for c in row["candidates"] if c["median_us"] is not None]
    mine = _measured(row, picked)
    where = f"{row['kernel']} {row['mode']} {row['case']}"
    if mine is None:
        return f"{where}: {row['function']} selects {picked}, which is not among the measured candidates: tune again"
    if mine["median_us"] is None:
        return f"{where}: {row['function']} selects {picked}, which failed: {mine['reason']}"
    best = min(times)
    if mine["median_us"] <= best * (1 + MARGIN):
        return None
    fastest = next(c["config"] for c in row["candidates"] if c["median_us"] == best)
    slower = 100 * (mine["median_us"] / best - 1)
    return (
        f"{where}: {row['function']} selects {picked} ({mine['median_us']:.2f} µs), {slower:.1f} % slower than "
        f"{fastest} ({best:.2f} µs)"
    )

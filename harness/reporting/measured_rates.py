"""Rates for a model, from committed records of several GPUs: that of the one-GPU kernel, and that of a GPU's link."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .. import record
from .entries import Row
from .findings import cost_of


@dataclass(frozen=True)
class Rate:
    """A rate in FLOP/s or bytes/s. `source` says what was measured, and where; `gpu` is that GPU's name, if known."""

    value: float
    source: str
    gpu: str | None = None


def rows(reports: Path, kernel: str) -> list[Row]:
    """The rows of our implementations on several GPUs, from all reports of a kernel."""
    files = sorted(reports.glob(f"*/records/{kernel}.jsonl"))
    found = (row for file in files for row in record.load(file).rows)
    return [row for row in found if row.ours and row.ok and row.get("several")]


def kernel_rate(found: Iterable[Row], mode: str, series: str | None, length: int) -> Rate | None:
    """The rate of the one-GPU kernel that the efficiency refers to: in cases of that series if there are any, at the
    nearest length."""
    timed = [row for row in found if row.mode == mode and row["several"].get("alone") and row["several"].get("axis")]
    same = [row for row in timed if row["several"]["axis"][0] == series] or timed
    if not same:
        return None
    nearest = min(same, key=lambda row: abs(math.log(row["several"]["axis"][1] / length)))
    alone = nearest["several"]["alone"]
    flops = cost_of(nearest).total_flops * nearest.run.world_size
    where = f"{alone['implementation']} on one GPU, {nearest.case} {mode}, reports/{nearest.run.gpu_folder}"
    return Rate(flops / (alone["median_us"] * 1e-6), where, nearest.run.gpu.get("name"))


def link_rate(found: Iterable[Row], gpu: str | None = None) -> Rate | None:
    """The rate of one direction of a GPU's link with both in use, from the newest run, on GPUs of this name if any."""
    runs = {row.run.id: row.run for row in found if _link(row)}
    runs = {key: run for key, run in runs.items() if run.gpu.get("name") == gpu} or runs
    if not runs:
        return None
    newest = runs[max(runs)]
    where = f"both directions at once, reports/{newest.gpu_folder}"
    return Rate(newest.ceilings["measured"]["link"], where, newest.gpu.get("name"))


def _link(row: Row) -> float | None:
    return (row.run.ceilings.get("measured") or {}).get("link")

"""The summary of a suite: for the console and as JSON. Made only from rows of the record.

A line is one of our implementations in a case and mode, beside the baseline that the suite names first. If a baseline
was not measured in the same run, its line has no speed-up and is excluded from mean, median and range, which say how
many lines they cover.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .. import roofline
from ..suites import Part, Suite
from . import console, tables
from . import markdown as md
from .entries import Row
from .memory_table import size

SCHEMA = 1

HEAD = (
    "kernel", "case", "mode", "implementation", ">latency", ">95 % CI", ">baseline", ">baseline latency", ">speed-up",
    ">throughput", ">items/s", ">peak memory", ">memory reduction", "note",
)  # fmt: skip
STATISTICS_HEAD = (
    "kernel", "case", "mode", "implementation", ">mean", ">std", ">min", ">max", ">median", ">p95", ">p99", ">samples",
)  # fmt: skip
FIGURES = ("mean_us", "std_us", "min_us", "max_us", "median_us", "p95_us", "p99_us", "n")

Line = dict[str, Any]


def summary(suite: Suite, rows: Sequence[Row]) -> dict[str, Any]:
    """The whole summary, in the form of its JSON. `rows` may hold more than the suite's."""
    lines: list[Line] = []
    measured: list[Line] = []
    for part in suite.parts:
        groups: dict[tuple[str, str], dict[str, Row]] = {}
        for row in rows:
            if row.kernel == part.kernel and row.case in part.cases:
                groups.setdefault((row.case, row.mode), {})[row.implementation] = row
        order = {case: place for place, case in enumerate(part.cases)}
        for _, group in sorted(groups.items(), key=lambda entry: order[entry[0][0]]):
            lines += [_line(row, group.get(part.baselines[0]), part) for row in group.values() if row.ours]
            measured += [_statistics(row) for row in group.values() if row.ok]
    speedups = [line["speedup"]["median"] for line in lines if line["speedup"]]
    return {
        "schema": SCHEMA,
        "suite": suite.name,
        "title": suite.title,
        "environment": dict(rows[-1].run.environment) if rows else {},
        "speedup": _aggregate(speedups, len(lines)),
        "statistics": measured,
        "rows": lines,
    }


def _line(row: Row, baseline: Row | None, part: Part) -> Line:
    name = part.baselines[0]
    status = baseline.status if baseline is not None else "not selected"
    if baseline is not None and baseline.run.id != row.run.id:  # no ratio is paired, and clocks may differ
        baseline, status = None, "was measured in another run"
    column = row.column() or {}
    seconds = row.seconds() if row.ok else None
    theirs = baseline.column(row.headline) if baseline is not None and baseline.ok else None
    if baseline is not None and row.ok and status == "ok" and theirs is None:
        status = f"has no {row.headline} timing"
    peaks = row.get("peak_memory_bytes"), baseline.get("peak_memory_bytes") if baseline is not None else None
    cost = roofline.Cost.from_record(row["cost"])
    return {
        "kernel": row.kernel,
        "case": row.case,
        "mode": row.mode,
        "implementation": row.implementation,
        "status": row.status,
        "reason": row.get("reason"),
        "latency_us": column.get("median_us") if row.ok else None,
        "ci95_us": column.get("ci95_us") if row.ok else None,
        "baseline": name,
        "baseline_status": status,
        "baseline_latency_us": theirs["median_us"] if theirs else None,
        "speedup": row.get("ratios", {}).get(name) if row.ok and theirs else None,
        "bytes_per_second": cost.bytes / seconds if seconds else None,
        "flop_per_second": cost.total_flops / seconds if seconds else None,
        "throughput": console.throughput(row.data, column) if row.ok else None,
        "items_per_second": row["items"] / seconds if seconds else None,
        "unit": part.unit or row["unit"],
        "peak_memory_bytes": peaks[0],
        "baseline_peak_memory_bytes": peaks[1],
        "memory_reduction": peaks[1] / peaks[0] if peaks[0] and peaks[1] is not None else None,
    }


def _statistics(row: Row) -> Line:
    column = row.column() or {}
    where = {"kernel": row.kernel, "case": row.case, "mode": row.mode, "implementation": row.implementation}
    return {**where, **{name: column.get(name) for name in FIGURES}}


def _aggregate(speedups: Sequence[float], of: int) -> dict[str, Any]:
    """Geometric and arithmetic mean, median, minimum and maximum, and the number of lines that they cover."""
    if not speedups:
        nothing = dict.fromkeys(("mean", "arithmetic_mean", "median", "min", "max"))
        return {"count": 0, "of": of, **nothing}
    return {
        "count": len(speedups),
        "of": of,
        "mean": statistics.geometric_mean(speedups),
        "arithmetic_mean": statistics.fmean(speedups),
        "median": statistics.median(speedups),
        "min": min(speedups),
        "max": max(speedups),
    }


def show(found: Mapping[str, Any]) -> None:
    """Prints the tables, and the aggregate of the speed-ups."""
    title = f"{found['suite']}: {found['title']}"
    tables.show(title, HEAD, [cells(line) for line in found["rows"]])
    print()
    tables.show(f"{found['suite']}: µs", STATISTICS_HEAD, [_figures(line) for line in found["statistics"]])
    print(f"\n{together(found)}")


def cells(line: Line) -> list[str]:
    """One line under HEAD."""
    note = "" if line["status"] == "ok" else f"{line['status']}: {line['reason']}"
    if not note and line["baseline_status"] != "ok":
        note = f"{line['baseline']} {line['baseline_status']}"
    latency, theirs, ratio = line["latency_us"], line["baseline_latency_us"], line["speedup"]
    reduction = line["memory_reduction"]
    return [
        line["kernel"],
        line["case"],
        line["mode"],
        line["implementation"],
        md.figures(latency, " µs"),
        md.interval(line["ci95_us"]),
        line["baseline"],
        md.figures(theirs, " µs"),
        md.times(ratio["median"], ratio["ci95"]) if ratio else md.NONE,
        line["throughput"] or md.NONE,
        roofline.rate(line["items_per_second"], 1.0, line["unit"]) if line["items_per_second"] else md.NONE,
        size(line["peak_memory_bytes"]),
        md.NONE if reduction is None else f"{reduction:.2f}×",
        note,
    ]


def _figures(line: Line) -> list[str]:
    where = [line["kernel"], line["case"], line["mode"], line["implementation"]]
    return [*where, *(md.figures(line[name]) for name in FIGURES[:-1]), str(line["n"])]


def together(found: Mapping[str, Any]) -> str:
    """'speed-up over the baseline, 11 of 12 lines: mean 1.20× (geometric; arithmetic 1.21×), median 1.19×, min …'."""
    all_of_them = found["speedup"]
    count = f"{all_of_them['count']} of {all_of_them['of']} lines"
    if not all_of_them["count"]:
        return f"speed-up over the baseline: none, {count} measured"
    names = ("mean", "arithmetic_mean", "median", "min", "max")
    mean, plain, median, low, high = (md.times(all_of_them[name]) for name in names)
    means = f"mean {mean} (geometric; arithmetic {plain})"
    return f"speed-up over the baseline, {count}: {means}, median {median}, min {low}, max {high}"


def dumps(found: Mapping[str, Any]) -> str:
    """The text of its JSON file."""
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"

"""The files that `profile` writes: reports/<gpu>/profile/<kernel>.json, and README.md made from every JSON file there.

The files have ncu's figures. The bench's times of the same calls are read from the records when a page is made, so the
order of the two runs does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..reporting import by_stage, markdown, rows_json, tables
from ..reporting.entries import Row

SCHEMA = 2
KEY = ("kernel", "case", "mode", "implementation")  # of a row, as `entries.Row.key`

Profiled = dict[str, Any]
#: the key of a row -> µs
Medians = Mapping[tuple[str, ...], float]

ROW_HEAD = (
    "case", "mode", "implementation", ">kernels", ">ncu", ">harness", ">ncu / harness", ">DRAM", ">compulsory",
    ">DRAM / compulsory", "commit", "error",
)  # fmt: skip
LAUNCH_HEAD = (
    "case", "mode", "implementation", "kernel", ">duration", ">DRAM %", ">L2 %", ">SM %", ">tensor %", ">occupancy %",
    ">registers", ">shared", ">spilled", "stalls",
)  # fmt: skip

INTRODUCTION = """\
# Profile

Nsight Compute on every benchmark case: `python -m harness profile`. Clocks are not locked; caches are flushed before
each pass.

- **ncu** is the sum of the durations of the kernels of one call, **harness** the cold median of the record. The
  harness's time includes the gaps between kernels and the overhead of the events, so the ratio is below 1 for short
  calls.
- **DRAM** is the traffic from and to device memory, **compulsory** the bytes that the case must at least move (`cost`
  of the SPEC). If the ratio is above 1, some data is moved more than once; if it is below 1, outputs were still in L2
  when the kernel ended, or a kernel read from L2 what another had written.
- **DRAM %**, **L2 %**, **SM %** and **tensor %** are relative to the peak rate, over the kernel's duration;
  **occupancy %** is the achieved occupancy. **spilled**: bytes through the L1 cache to and from local memory.
  **stalls**: the main stall reasons of resident warps, as a percentage of their time.
- A training step of a model also has a table by stage; its table of kernels combines the launches of one kernel in a
  stage.
"""


def write(
    out: Path,
    kernel: str,
    gpu: str,
    environment: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    measured: Medians,
) -> None:
    """Writes the kernel's file (`rows_json.merge` says what is kept of an earlier one), and README.md of all there."""
    head = {"schema": SCHEMA, "kernel": kernel, "gpu": gpu}
    path = out / f"{kernel}.json"
    rows_json.merge(path, head, environment, rows, lambda row: (row["case"], row["mode"], row["implementation"]))
    write_readme(out, measured)


def write_readme(out: Path, measured: Medians) -> Path:
    """README.md of all files in `out`. Returns its path."""
    path = out / "README.md"
    kernels = [rows_json.read(file, SCHEMA) for file in sorted(out.glob("*.json"))]
    for kernel in kernels:
        kernel["rows"] = compared(kernel["rows"], measured)
    path.write_text(readme(kernels), encoding="utf-8")
    return path


def medians(rows: Iterable[Row]) -> Medians:
    """The cold medians of a record's rows, since ncu flushes the caches too."""
    return {row.key: column["median_us"] for row in rows if row.status == "ok" and (column := row.column("cold"))}


def compared(rows: Iterable[Mapping[str, Any]], measured: Medians) -> list[dict[str, Any]]:
    """The rows with "harness_us", the bench's time, and "duration_ratio", ncu's over it; None if one is missing."""
    found = []
    for row in rows:
        duration, median = row["duration_us"], measured.get(tuple(row[name] for name in KEY))
        ratio = duration / median if duration and median else None
        found.append({**row, "harness_us": median, "duration_ratio": ratio})
    return found


def readme(kernels: Sequence[Profiled]) -> str:
    """The page: two tables per kernel, one of calls and one of kernels."""
    lines = [INTRODUCTION]
    for kernel in kernels:
        lines += [
            f"## {kernel['kernel']}",
            "",
            *dict.fromkeys(f"{_told(environment)}.  " for environment in kernel["environments"]),
            "",
            *markdown.table(ROW_HEAD, [row_cells(row, kernel["environments"][row["run"]]) for row in kernel["rows"]]),
            "",
        ]
        for row in (row for row in kernel["rows"] if by_stage.staged(row["launches"])):
            title = f"**{row['case']}**, {row['mode']}, {row['implementation']}. {by_stage.TEXT}"
            lines += [title, "", *markdown.table(by_stage.HEAD, by_stage.cells(row["launches"])), ""]
        launches = [cells for row in kernel["rows"] for cells in launch_cells(row)]
        if launches:
            lines += [*markdown.table(LAUNCH_HEAD, launches), ""]
    return "\n".join(lines)


def _told(environment: Mapping[str, Any]) -> str:
    gpu = environment.get("gpu") or {}
    versions = ", ".join(f"{n} {environment.get(n)}" for n in ("ncu", "torch", "triton"))
    return f"{gpu.get('name')}, driver {gpu.get('driver')}, {versions}"


def show(kernel: str, rows: Sequence[Mapping[str, Any]], environment: Mapping[str, Any]) -> None:
    """Prints the same on the console."""
    tables.show(f"{kernel}: calls", ROW_HEAD, [row_cells(row, environment) for row in rows])
    for row in (row for row in rows if by_stage.staged(row["launches"])):
        title = f"{kernel}: stages of {row['case']}, {row['implementation']}"
        tables.show(title, by_stage.HEAD, by_stage.cells(row["launches"]))
    launches = [cells for row in rows for cells in launch_cells(row)]
    if launches:
        tables.show(f"{kernel}: kernels", LAUNCH_HEAD, launches)


def row_cells(row: Mapping[str, Any], environment: Mapping[str, Any]) -> list[object]:
    """One call under ROW_HEAD."""
    return [
        row["case"],
        row["mode"],
        row["implementation"],
        len(row["launches"]) or None,
        markdown.figures(row["duration_us"], " µs"),
        markdown.figures(row["harness_us"], " µs"),
        markdown.figures(row["duration_ratio"]),
        _megabytes(row["dram_bytes"]),
        _megabytes(row["cost_bytes"]),
        markdown.figures(row["bytes_ratio"]),
        str(environment.get("commit") or "unknown")[:7],
        None if row["status"] == "ok" else f"{row['status']}: {row['reason']}",
    ]


def launch_cells(row: Mapping[str, Any]) -> list[list[object]]:
    """The kernels of one call under LAUNCH_HEAD; if it has stages, one line for each kernel in a stage."""
    return [
        [
            row["case"],
            row["mode"],
            row["implementation"],
            launch["name"],
            markdown.figures(launch["duration_us"], " µs"),
            *(markdown.figures(launch[k]) for k in ("dram_pct", "l2_pct", "sm_pct", "tensor_pct", "occupancy_pct")),
            launch["registers"],
            markdown.size(launch["shared_bytes"]),
            markdown.size(launch["spill_bytes"]),
            ", ".join(f"{reason} {share:.0f}" for reason, share in launch["stalls"][:3]),
        ]
        for launch in by_stage.grouped(row["launches"])
    ]


def _megabytes(value: float | None) -> str:
    return markdown.figures(None if value is None else value / 1e6, " MB")

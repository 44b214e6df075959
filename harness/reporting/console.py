"""The tables that a bench prints: times of every implementation, and their memory. Made from the record's rows only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import roofline
from . import markdown as md
from . import memory_table, tables

Data = Mapping[str, Any]
Table = tuple[str, Sequence[str], list[list[str]]]

MEMORY_HEAD = ("case", "mode", *memory_table.HEAD)


def times_head(against: str | None) -> tuple[str, ...]:
    """The headings of `times`."""
    figures = (">median", ">95 % CI", ">mean", ">std", ">min", ">max", ">p95", ">p99", ">samples")
    speedup = (f">speed-up over {against}",) if against else ()
    return ("case", "mode", "implementation", *figures, *speedup, ">throughput", "note")


def times(rows: Sequence[Data], against: str | None) -> list[list[str]]:
    """A line for each row: µs, the speed-up over the implementation `against` with its interval, GB/s or TFLOP/s, and
    remarks."""
    lines = []
    for row in rows:
        column = (row.get("columns") or {}).get(row.get("headline")) or {}
        names = ("median", "mean", "std", "min", "max", "p95", "p99")
        median, *others = (md.figures(column.get(f"{name}_us")) for name in names)
        figures = [median, md.interval(column.get("ci95_us")), *others, str(column.get("n", md.NONE))]
        speedup = [over(row, against)] if against else []
        note = row["status"] if row["status"] != "ok" else ""
        note += f": {row['reason']}" if row.get("reason") else ""
        lines.append(
            [row["case"], row["mode"], row["implementation"], *figures, *speedup, throughput(row, column), note]
        )
    return lines


def over(row: Data, against: str | None) -> str:
    """'1.23× [1.22, 1.24]': the time of `against` over this one's."""
    if row["implementation"] == against and row.get("columns"):
        return md.times(1.0)
    ratio = (row.get("ratios") or {}).get(against or "")
    return md.times(ratio["median"], ratio["ci95"]) if ratio else md.NONE


def throughput(row: Data, column: Data) -> str:
    """Throughput of the compulsory work: TFLOP/s if a pipe limits it on a GPU such as an H200, else GB/s."""
    cost = roofline.Cost.from_record(row["cost"])
    if not column.get("median_us") or not (cost.bytes or cost.total_flops):
        return md.NONE
    limit = roofline.floor_seconds(cost, roofline.get("h200").ceilings).limit
    return roofline.throughput(column["median_us"] * 1e-6, cost, limit)


def memory(rows: Sequence[Data]) -> list[list[str]]:
    """A line for each row that was measured; ratios are to the first of ours in its case and mode."""
    groups: dict[tuple[str, str], list[Data]] = {}
    for row in rows:
        if row.get("peak_memory_bytes") is not None or row.get("growth_bytes") is not None:
            groups.setdefault((row["case"], row["mode"]), []).append(row)
    return [[*group, *cells] for group, members in groups.items() for cells in memory_table.cells(members)]


def titles(title: str, rows: Sequence[Data]) -> tuple[str, str]:
    """The titles of the tables of times and of memory. Wall-clock times are named as such."""
    wall = any(row.get("timer") == "wall" for row in rows)
    of_times = f"{title}: wall-clock time on the CPU, µs" if wall else f"{title}: device time, µs"
    of_memory = "memory of the process in addition to the inputs" if wall else "memory in addition to the inputs"
    return of_times, f"{title}: {of_memory}"


def _both(title: str, rows: Sequence[Data], against: str | None) -> list[Table]:
    timed, remembered = titles(title, rows)
    found: list[Table] = []
    if any(row.get("columns") for row in rows):
        found.append((timed, times_head(against), times(rows, against)))
    if cells := memory(rows):
        found.append((remembered, MEMORY_HEAD, cells))
    if not found:  # nothing was measured: the notes say why
        found.append((title, times_head(against), times(rows, against)))
    return found


def lines(title: str, rows: Sequence[Data], against: str | None) -> list[str]:
    """The tables as text."""
    return [line for table in _both(title, rows, against) for line in (*tables.plain(*table), "")]


def show(title: str, rows: Sequence[Data], against: str | None) -> None:
    """Prints the tables."""
    for table in _both(title, rows, against):
        tables.show(*table)
        print()

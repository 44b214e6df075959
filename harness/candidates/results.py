"""The results of a benchmark: a row for each candidate and baseline in each case and mode."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .. import compaction, record
from ..reporting import console

#: modes of the record -> modes of this interface
WORDS = {"fwd": "inference", "train": "training"}
SUFFIX = "-training"


@dataclass(frozen=True)
class Statistics:
    """Statistics of the samples of one call's time, in µs. `ci95_us` is the interval of the median. `timer` says what
    was measured: "events", "graph" and "cupti" are device time, "wall" is wall-clock time on a CPU."""

    timer: str
    n: int
    median_us: float
    mean_us: float
    std_us: float
    min_us: float
    max_us: float
    p95_us: float
    p99_us: float
    ci95_us: tuple[float, float]
    samples_us: tuple[float, ...]


@dataclass(frozen=True)
class Ratio:
    """Another's time over this one's, paired by round: above 1 this one is faster. With the interval of the median."""

    median: float
    ci95: tuple[float, float]


@dataclass(frozen=True)
class Result:
    """One candidate or baseline in one case and mode ("inference" or "training").

    `status` is "ok", "skipped", "wrong", "error", "oom" or "over-roofline", and `reason` says why it is not "ok".
    `statistics` is None if nothing was timed. `faster_than` has a ratio for each other implementation that was timed.
    `error` is the largest error against the reference in fp64, None for the reference itself. Bytes are None if they
    were not measured. `row` is the row of the record.
    """

    case: str
    mode: str
    name: str
    candidate: bool
    status: str
    reason: str | None
    statistics: Statistics | None
    faster_than: Mapping[str, Ratio]
    error: float | None
    peak_bytes: int | None
    saved_bytes: int | None
    growth_bytes: int | None
    warnings: tuple[str, ...]
    row: Mapping[str, Any]


class Results:
    """The rows of a benchmark, in the order of cases, modes, candidates and baselines."""

    def __init__(self, title: str, rows: Iterable[Mapping[str, Any]], against: str | None) -> None:
        self.title, self.against = title, against
        groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        rows = list(rows)
        for row in rows:
            groups.setdefault((row["case"], row["mode"]), []).append(row)
        self.rows = tuple(_result(row, groups[row["case"], row["mode"]]) for row in rows)

    def __iter__(self) -> Iterator[Result]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, name: str, *, case: str | None = None, mode: str | None = None) -> Result:
        """The first row of that name, and of that case and mode if given. KeyError if there is none."""
        for row in self.rows:
            if row.name == name and case in (None, row.case) and mode in (None, row.mode):
                return row
        raise KeyError(
            f"no row of {name!r} in case {case!r} and mode {mode!r}; names: {sorted({r.name for r in self})}"
        )

    @property
    def ok(self) -> bool:
        """Whether no candidate is wrong or failed."""
        return all(row.status in ("ok", "skipped") for row in self.rows if row.candidate)

    def lines(self) -> list[str]:
        """The tables of times and of memory, as `python -m harness bench` prints them."""
        return console.lines(self.title, [row.row for row in self.rows], self.against)

    def show(self) -> None:
        """Prints the tables of `lines`."""
        console.show(self.title, [row.row for row in self.rows], self.against)

    def to_json(self) -> str:
        """The rows of the record, with all samples, as JSON."""
        return json.dumps(json.loads(record.dumps({"title": self.title, "rows": [dict(r.row) for r in self.rows]})))


def _result(row: Mapping[str, Any], group: Iterable[Mapping[str, Any]]) -> Result:
    """The result of a row; `group` are all rows of its case and mode."""
    column = (row.get("columns") or {}).get(row.get("headline"))
    recorded = row.get("ratios") or {}
    ratios = {}
    for other in group:
        name = other["implementation"]
        # A record does not keep the ratios of baselines' rows: their samples give them.
        found = recorded.get(name) or (compaction.ratio_over(row, other) if column and other is not row else None)
        if found:
            ratios[name] = Ratio(found["median"], tuple(found["ci95"]))
    return Result(
        case=row["case"].removesuffix(SUFFIX) if row["mode"] == "train" else row["case"],
        mode=WORDS.get(row["mode"], row["mode"]),
        name=row["implementation"],
        candidate=row["kind"] == "ours",
        status=row["status"],
        reason=row["reason"],
        statistics=_statistics(row, column) if column else None,
        faster_than=ratios,
        error=(row.get("error") or {}).get("max"),
        peak_bytes=row.get("peak_memory_bytes"),
        saved_bytes=row.get("saved_bytes"),
        growth_bytes=row.get("growth_bytes"),
        warnings=tuple(row.get("warnings") or ()),
        row=row,
    )


def _statistics(row: Mapping[str, Any], column: Mapping[str, Any]) -> Statistics:
    names = ("n", "median_us", "mean_us", "std_us", "min_us", "max_us", "p95_us", "p99_us")
    low, high = column["ci95_us"]
    figures = {name: column[name] for name in names}
    return Statistics(row["timer"], **figures, ci95_us=(low, high), samples_us=tuple(column["samples_us"]))

"""Leaves out of a record's lines what can be derived from the others, and restores it. Nothing that a verdict depends
on is rounded, or left out.

- Fields that all rows of a group share are stored once, in its start line: "shared" for every row, "measured" for those
  that were timed. A row's own value takes precedence.
- A ratio that the stored samples reproduce to the last bit is null. Others are kept, such as one to a row that was
  measured again since.
- Ratios of peers' rows, which older records have, are left out: nothing reads them.
- Column statistics and errors have nine significant digits, which distinguish any two float32 values; a CUDA event's
  time is a float32. Samples, ratios and A/A pairs keep every digit.
- Samples of the warm column are dropped for good, but its statistics are kept: no comparison uses the samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .measure import stats

Entry = dict[str, Any]
Group = tuple[str, str, str]

DIGITS = 9
SHARED = ("dims", "dtype", "params", "cost", "items", "unit")
MEASURED = ("timer", "headline", "clocks")


def restore(entries: Iterable[Entry]) -> None:
    """Restores, in place, what `shorten` left out of the rows of one file. ValueError if a ratio's samples are
    missing."""
    starts: dict[Group, Entry] = {}
    groups: dict[Group, dict[str, Entry]] = {}
    for entry in entries:
        if entry["type"] == "start":
            starts[_group(entry)] = {name: entry.pop(name, {}) for name in ("shared", "measured")}
        elif entry["type"] == "row":
            _inherit(entry, starts.get(_group(entry), {}))
            groups.setdefault(_group(entry), {})[str(entry.get("implementation"))] = entry
    for group, rows in groups.items():
        for name, row in rows.items():
            ratios = row.get("ratios") or {}
            for other in [other for other, ratio in ratios.items() if ratio is None]:
                if not _ours(row):
                    del ratios[other]
                    continue
                ratios[other] = ratio_over(row, rows.get(other))
                if ratios[other] is None:
                    where = "/".join((*group, name))
                    raise ValueError(f"{where}: its ratio over {other!r} is neither stored nor given by samples")


def _inherit(row: Entry, start: Mapping[str, Any]) -> None:
    for name, value in start.get("shared", {}).items():
        row.setdefault(name, value)
    if "columns" in row:
        for name, value in start.get("measured", {}).items():
            row.setdefault(name, value)


def shorten(entries: Iterable[Entry]) -> list[Entry]:
    """The lines of one file without redundant data. `restore` is the inverse."""
    entries = list(entries)
    groups: dict[Group, list[Entry]] = {}
    for entry in entries:
        if entry["type"] == "row":
            groups.setdefault(_group(entry), []).append(entry)
    common: dict[Group, Entry] = {}
    shortened = []
    for entry in entries:
        rows = groups.get(_group(entry), [])
        if entry["type"] == "start" and rows:
            measured = [row for row in rows if "columns" in row]
            common[_group(entry)] = {"shared": _common(rows, SHARED), "measured": _common(measured, MEASURED)}
            entry = {**entry, **common[_group(entry)]}
        elif entry["type"] == "row":
            entry = _shortened(entry, rows, common.get(_group(entry), {}))
        shortened.append(entry)
    return shortened


def _group(entry: Mapping[str, Any]) -> Group:
    return str(entry["run"]), str(entry.get("case")), str(entry.get("mode"))


def _common(rows: list[Entry], names: Iterable[str]) -> Entry:
    """The first row's values of those of these fields that every row has."""
    return {name: rows[0][name] for name in names if rows and all(name in row for row in rows)}


def _shortened(row: Entry, rows: Iterable[Entry], common: Mapping[str, Entry]) -> Entry:
    inherited = {**common.get("shared", {}), **(common.get("measured", {}) if "columns" in row else {})}
    short = {name: value for name, value in row.items() if not (name in inherited and inherited[name] == value)}
    if "columns" in row:
        short["columns"] = {name: _rounded(column) for name, column in row["columns"].items()}
        short["columns"].get("warm", {}).pop("samples_us", None)
    for name in ("sustained", "error"):
        if row.get(name):
            short[name] = _rounded(row[name])
    if row.get("ratios"):
        others = {other["implementation"]: other for other in rows}
        ratios = row["ratios"].items() if _ours(row) else ()
        short["ratios"] = {
            name: None if ratio == ratio_over(row, others.get(name)) else ratio for name, ratio in ratios
        }
    return short


def _ours(row: Mapping[str, Any]) -> bool:
    return row.get("kind") == "ours"


def ratio_over(row: Mapping[str, Any], other: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Time of `other` over the row's in its headline column, as the bench computes it."""
    headline = row.get("headline")
    mine, theirs = (((r or {}).get("columns") or {}).get(headline) for r in (row, other))
    if not mine or not theirs or len(mine["samples_us"]) != len(theirs["samples_us"]):
        return None
    rounds = (row.get("clocks") or {}).get("rounds", {}).get(headline, {})
    return stats.ratio_of_columns(theirs, mine, rounds.get("throttled", ()))


def _rounded(figures: Mapping[str, Any]) -> Entry:
    return {name: value if name == "samples_us" else _digits(value) for name, value in figures.items()}


def _digits(value: Any) -> Any:
    if isinstance(value, list):
        return [_digits(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value

"""A kernel's picked configuration compared with the best of all candidates, from the results of `tune`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import markdown as md

SCHEMA = 2  # of a tune file
HEAD = (
    "mode", "case", ">candidates", ">selected", ">best", ">slower by", "selected configuration", "best configuration",
)  # fmt: skip


def cells(row: Mapping[str, Any]) -> list[object]:
    """The row of one case under HEAD. Times are medians; candidates that failed have none."""
    timed = [candidate for candidate in row["candidates"] if candidate["median_us"] is not None]
    best = min(timed, key=lambda candidate: candidate["median_us"])
    return [
        row["mode"],
        row["case"],
        len(timed),
        md.figures(row["picked_us"], " µs"),
        md.figures(best["median_us"], " µs"),
        md.percent(100 * (row["picked_us"] / best["median_us"] - 1)),
        short(row["picked"]),
        short(best["config"]),
    ]


def section(document: Mapping[str, Any]) -> list[str]:
    """A table for each `pick_*` function of a kernel's tune file."""
    lines = [
        "`tune` times each case with every candidate configuration. The table compares the configuration that the "
        "kernel selects (*selected*) with the fastest candidate (*best*). Candidates that do not compile, do not run "
        "or give a different result are not counted.",
        "",
    ]
    rows = document["rows"]
    for function in dict.fromkeys(row["function"] for row in rows):
        mine = [row for row in rows if row["function"] == function]
        searched = dict.fromkeys(row["implementation"] for row in mine if "implementation" in row)
        title = f"{function}, in {', '.join(searched)}" if searched else function
        lines += [f"### {title}", "", *md.table(HEAD, [cells(row) for row in mine]), ""]
    return lines


def short(config: Any) -> str:
    """A short text for a configuration: `block_m=64 num_warps=4`, `split 8`."""
    if isinstance(config, Mapping):
        return " ".join(f"{name}={value}" for name, value in config.items())
    return " ".join(map(str, config)) if isinstance(config, list | tuple) else str(config)

"""The memory of every implementation of a case: peak, bytes saved for the backward, growth. Older records have only the
peak; for these there is no such table, and the peak is in the table of times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import markdown as md

HEAD = (
    "implementation", ">peak", ">relative", ">saved for the backward", ">relative", ">growth in ten calls",
)  # fmt: skip

TEXT = (
    "- **Memory** in addition to the inputs: *peak* during a call; *saved for the backward* by the forward, apart from "
    "its inputs and outputs; *growth*, what is still allocated after ten more calls. *Relative* is the figure divided "
    "by that of this kernel's first implementation."
)

Data = Mapping[str, Any]


def cells(rows: Sequence[Data]) -> list[list[str]]:
    """A row under HEAD for each row of the record; ratios are to our first implementation."""
    ours: Data = next((row for row in rows if row.get("kind") == "ours"), {})
    return [
        [
            str(row["implementation"]),
            size(row.get("peak_memory_bytes")),
            share(row.get("peak_memory_bytes"), ours.get("peak_memory_bytes")),
            size(row.get("saved_bytes")),
            share(row.get("saved_bytes"), ours.get("saved_bytes")),
            growth(row.get("growth_bytes")),
        ]
        for row in rows
    ]


def section(rows: Sequence[Data]) -> list[str]:
    """The table in Markdown; empty for old records."""
    if all(row.get("growth_bytes") is None and row.get("saved_bytes") is None for row in rows):
        return []
    return ["", *md.table(HEAD, cells(rows))]


def size(value: float | None) -> str:
    """Bytes; a dash if they were not measured."""
    return md.NONE if value is None else md.size(value)


def share(value: float | None, ours: float | None) -> str:
    """'2.13×' of ours; a dash if one was not measured or ours is 0."""
    return md.NONE if value is None or not ours else f"{value / ours:.2f}×"


def growth(value: float | None) -> str:
    """'0 B', or bytes with a sign."""
    return md.NONE if value is None else f"{'+' if value > 0 else ''}{md.size(value)}"

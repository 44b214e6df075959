"""The breakdown of a case's time: its stages, each timed separately, and an ablation of the parts of ours.

Only SPECs that declare them have these sections (`KernelSpec.stages`, `KernelSpec.ablation`).
"""

from __future__ import annotations

from collections.abc import Sequence

from .. import roofline
from . import markdown as md
from .entries import Row
from .findings import Finding

STAGES_TEXT = (
    "Each stage is timed separately, forward and backward together, over all layers in one CUDA graph. *Total* is the "
    "time of the whole call in a CUDA graph, as in the tables above; *rest* is *total* minus the sum of the stages. "
    "*Rest* is negative if the stages take longer when they run separately."
)
ABLATION_TEXT = (
    "One row for each peer, for each variant of this implementation with one part replaced, and, last, for the "
    "complete implementation (*ours*). *Relative time* is the time of the row divided by that of the complete "
    "implementation in the same rounds, that is, how much faster the complete implementation is."
)
ABLATION_HEAD = ("variant", "implementation", ">separate launches", ">one CUDA graph", ">relative time")


def stages(found: Sequence[Finding]) -> list[str]:
    """The section on the time by stage; empty if none was measured."""
    rows = [(finding, row) for finding in found for row in finding.rows if row.ok and row.get("stages_us")]
    if not rows:
        return []
    names = list(dict.fromkeys(name for _, row in rows for name in row["stages_us"]))
    head = ("case", "implementation", *(f">{name}" for name in names), ">rest", ">total")
    return ["## Time by stage", "", STAGES_TEXT, "", *md.table(head, [_stages(f, row, names) for f, row in rows]), ""]


def _stages(finding: Finding, row: Row, names: Sequence[str]) -> list[object]:
    taken = row["stages_us"]
    column = "graph" if row.column("graph") else finding.column
    whole = row.seconds(column) if row.column(column) else None
    times = [roofline.microseconds(taken[name] * 1e-6) if taken.get(name) else None for name in names]
    rest = None if whole is None else whole - sum(taken.values()) * 1e-6
    sign = "−" if rest is not None and rest < 0 else ""
    said = None if rest is None else sign + roofline.microseconds(abs(rest))
    name = f"**{row.implementation}**" if row.ours else row.implementation
    return [finding.case, name, *times, said, None if whole is None else roofline.microseconds(whole)]


def ablation(found: Sequence[Finding]) -> list[str]:
    """The ablation section, a table for each case; empty if no row belongs to one."""
    lines: list[str] = []
    for finding in found:
        rows = [row for row in finding.rows if row.ok and row.get("ablation")]
        if len(rows) > 1:
            title = f"**{finding.case}**, {finding.mode}"
            lines += [title, "", *md.table(ABLATION_HEAD, [_part(row, _whole(rows)) for row in _ordered(rows)]), ""]
    return ["## Ablation", "", ABLATION_TEXT, "", *lines] if lines else []


def _whole(rows: Sequence[Row]) -> Row | None:
    """Ours in full: the first of our implementations."""
    return next((row for row in rows if row.ours), None)


def _ordered(rows: Sequence[Row]) -> list[Row]:
    """Peers, then ours with one part replaced, then ours in full."""
    whole = _whole(rows)
    return sorted(rows, key=lambda row: (row.ours, row is whole))


def _part(row: Row, whole: Row | None) -> list[object]:
    ratio = whole.get("ratios", {}).get(row.implementation) if whole is not None else None
    over = md.times(ratio["median"], ratio.get("ci95")) if ratio and ratio.get("median") else None
    times = [roofline.microseconds(row.seconds(name)) if row.column(name) else None for name in ("cold", "graph")]
    return [row["ablation"], f"**{row.implementation}**" if row.ours else row.implementation, *times, over]

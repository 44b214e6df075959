"""The tables of a report that READMEs show: of all kernels, and of one mode of one kernel."""

from __future__ import annotations

from collections.abc import Sequence

from .. import roofline
from . import aggregates, pages
from . import markdown as md
from .findings import Finding

MODE_HEAD = ("case", ">latency", ">speed-up over the fastest peer", ">over PyTorch", ">% of roofline")
KERNELS_HEAD = (
    "kernel", "mode", ">cases", "bound by", ">% of measured roofline",
    ">in the mean", ">mean speed-up over the fastest peer (range)",
    ">in the mean", ">mean speed-up over PyTorch (range)",
)  # fmt: skip


MOST_CASES = 8  # per mode: a README should stay short enough to be read from beginning to end


def of_mode(found: Sequence[Finding]) -> list[str]:
    """One row per case of one mode, for a README; the report explains the marks. If there are many cases, the first of
    the records are shown, whatever their results, and the number of the others."""
    rows: list[list[object]] = []
    notes: set[str] = set()
    for finding in found[:MOST_CASES]:
        best, column = finding.best, "" if finding.column == "cold" else f" ({finding.column})"
        if best is None:
            rows.append([finding.case, "not measured", None, None, None])
            continue
        speedup, pytorch = finding.over_best_peer, finding.over_pytorch
        rows.append(
            [
                finding.case,
                roofline.microseconds(best.seconds(finding.column)) + column + pages.marks(finding, best, notes),
                f"{md.times(speedup.median)} {speedup.peer}{pages.failed(finding, notes)}" if speedup else None,
                md.times(pytorch.median) if pytorch else None,
                pages.share(finding, best, notes),
            ]
        )
    more = f"{MOST_CASES} of {len(found)} cases; the report has all."
    return [*md.table(MODE_HEAD, rows), *(["", more] if len(found) > MOST_CASES else [])]


def of_kernels(found: Sequence[Finding], link: str) -> list[str]:
    """One row per kernel, mode and precision over its cases, with the worst beside the mean: nothing is selected, and
    excluded cases are counted. The percentage of the roofline is over all cases that were measured."""
    rows = []
    for group in aggregates.groups(found):
        shares = [s for f in group.found if f.best and (s := f.percent(f.best, f.measured)) is not None]
        peers, pytorch = group.over_best_peer(), group.over_pytorch()
        page = f"[{group.mode}]({link}/{pages.stem(group.kernel, group.mode)}.md)"
        rows.append(
            [
                f"[{group.kernel}]({link}/{group.kernel}.md)",
                page + (f", {group.precision}" if group.precision else ""),
                len(group.found),
                ", ".join(dict.fromkeys(f.limit for f in group.found)),
                f"{min(shares):.0f} to {max(shares):.0f} %" if shares else None,
                peers.counted() if peers.library else f"0 of {peers.cases}",
                peers.text(),
                pytorch.counted(),
                pytorch.text(),
            ]
        )
    return md.table(KERNELS_HEAD, rows)

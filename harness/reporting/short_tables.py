"""The tables that a README shows of a report: of all kernels, and of one mode of one kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .. import roofline
from . import markdown as md
from . import pages
from .findings import Finding, Speedup, geometric_mean

MODE_HEAD = ("case", ">ours", ">over the best peer", ">of the measured roofline")


def of_mode(found: Sequence[Finding]) -> list[str]:
    """One row per case of one mode, for a README."""
    rows = []
    for finding in found:
        best, column = finding.best, "" if finding.column == "cold" else f" ({finding.column})"
        if best is None:
            rows.append([finding.case, "not measured", None, None])
            continue
        speedup = finding.over_best_peer
        rows.append(
            [
                finding.case,
                roofline.microseconds(best.seconds(finding.column)) + column + pages.marks(best, set()),
                f"{md.times(speedup.median)} {speedup.peer}" if speedup else None,
                pages.share(finding, best, set()),
            ]
        )
    return md.table(MODE_HEAD, rows)


def of_kernels(found: Sequence[Finding], link: str) -> list[str]:
    """One row per kernel and mode over all of its cases, the worst beside the mean: nothing is picked."""
    rows = []
    for kernel, mode in dict.fromkeys((f.kernel, f.mode) for f in found):
        group = [f for f in found if (f.kernel, f.mode) == (kernel, mode)]
        shares = [s for f in group if f.best and (s := f.percent(f.best, f.measured)) is not None]
        rows.append(
            [
                f"[{kernel}]({link}/{kernel}.md)",
                f"[{mode}]({link}/{pages.stem(kernel, mode)}.md)",
                len(group),
                ", ".join(dict.fromkeys(f.limit for f in group)),
                f"{min(shares):.0f} to {max(shares):.0f} %" if shares else None,
                _mean(f.over_best_peer for f in group),
                _mean(f.over_eager for f in group),
            ]
        )
    head = (
        "kernel", "mode", ">cases", "bound by", ">of the measured roofline",
        ">over the best peer: mean (range)", ">over eager: mean (range)",
    )  # fmt: skip
    return md.table(head, rows)


def _mean(speedups: Iterable[Speedup | None]) -> str | None:
    values = [s.median for s in speedups if s]
    if not values:
        return None
    return f"**{md.times(geometric_mean(values))}** ({md.times(min(values))} to {md.times(max(values))})"

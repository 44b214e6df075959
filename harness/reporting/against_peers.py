"""The number of cases in which this kernel is faster or slower than the fastest peer, and which peers those are."""

from __future__ import annotations

from collections.abc import Sequence

from . import aggregates
from . import markdown as md
from .findings import Finding, Speedup

TITLE = "Faster or slower than the fastest peer"
TEXT = (
    "A *peer* is another implementation of the same operation; docs/PEERS.md describes each. Each case compares what "
    "this repository's function runs by default with the fastest peer of the same run. The *speed-up* is the peer's "
    "time divided by the function's: below 1× the peer is faster. *Faster* and *slower* count the cases in which its "
    "95 % confidence interval lies entirely above or below 1, *equal* those in which it contains 1. *Undecided* are "
    "cases in which a peer failed, lacks the reported timing or was left out of the run, or no peer was measured. "
    "Cases in which the GPU throttled are counted here, but are excluded from the means."
)
HEAD = (
    "kernel", "mode", ">cases", ">faster", ">equal", ">slower", ">undecided",
    "fastest peers: number of cases, and speed-up over the peer in them",
)  # fmt: skip


def table(found: Sequence[Finding]) -> list[str]:
    """One row per kernel, mode and precision."""
    return md.table(HEAD, [_row(group) for group in aggregates.groups(found)])


def _row(group: aggregates.Group) -> list[object]:
    decided = [f.over_best_peer for f in group.found if f.over_best_peer and not f.undecided]
    faster = sum(speedup.low > 1 for speedup in decided)
    slower = sum(speedup.high < 1 for speedup in decided)
    equal = len(decided) - faster - slower
    undecided = len(group.found) - len(decided)
    mode = group.mode + (f", {group.precision}" if group.precision else "")
    counts = [len(group.found), faster, equal, slower, undecided]
    return [f"[{group.kernel}]({group.kernel}.md)", mode, *counts, "; ".join(_by_peer(decided))]


def _by_peer(speedups: Sequence[Speedup]) -> list[str]:
    """'fa4 in 8: 0.998× to 1.13×', the most frequent fastest peer first."""
    medians: dict[str, list[float]] = {}
    for speedup in speedups:
        medians.setdefault(speedup.peer, []).append(speedup.median)
    often = sorted(medians.items(), key=lambda item: -len(item[1]))
    return [f"{peer} in {len(of)}: {_span(min(of), max(of))}" for peer, of in often]


def _span(low: float, high: float) -> str:
    ends = md.times(low), md.times(high)
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)

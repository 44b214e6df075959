"""Flags for rows and cases whose figures are doubtful: the mark in tables, and the reason for exclusion from means.

A figure that the harness itself doubts is shown, marked, and not averaged.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..measure.stats import FEWEST
from ..roofline import MARGIN, MEMORY
from .entries import Row
from .findings import Finding, Speedup

#: Largest relative width of the 95 % interval of a median or a ratio; sampling aims at half of it.
WIDE = 0.02
#: part of the warning of a row whose time includes host time
UNQUEUED = "cannot be queued"


@dataclass(frozen=True)
class Flag:
    """`word` is the same for all cases with such a flaw, `note` explains the mark below a table."""

    sign: str
    word: str
    note: str


THROTTLED = Flag(
    "‡",
    "the GPU throttled",
    "The GPU throttled during some of the samples; the page of the mode gives their number and the reason.",
)
ALL_THROTTLED = Flag(
    "‡‡",
    THROTTLED.word,
    "No valid sample: the GPU throttled during all of them, so the time is that of a throttled GPU.",
)
_OVER = "above 100 % of the measured roofline"
OVER_BY_L2 = Flag(
    "†",
    _OVER,
    "Above 100 %, but not an error: with a warm L2 or in a CUDA graph, L2 can serve part of the compulsory bytes "
    "without DRAM traffic (`harness/roofline.py` has the rule).",
)
OVER_BY_CLOCK = Flag(
    "††",
    _OVER,
    "Above 100 %, but not an error: the kernel is compute-bound and ran at a higher clock than the GEMM that measured "
    "the peak rate, which was power-limited.",
)
OVER_BY_NOISE = Flag(
    "†††",
    _OVER,
    "Above 100 %, but not an error: the measured peak bandwidth is a median, and this row is within its noise.",
)
OVER = (OVER_BY_L2, OVER_BY_CLOCK, OVER_BY_NOISE)
WIDE_INTERVAL = Flag(
    "≈",
    f"a confidence interval wider than {100 * WIDE:.0f} %",
    "Noisy: the 95 % confidence interval of the time, or of the speed-up over the fastest peer, is wider than "
    f"{100 * WIDE:.0f} %.",
)
FEW = Flag(
    "△",
    f"fewer than {FEWEST} samples",
    f"Fewer than {FEWEST} samples: what stands for the 95 % confidence interval of the time, a speed-up or an "
    "efficiency is their range, which contains the median less often.",
)
WARNED = Flag("§", "a warning by the harness", "The harness warns about this row; see the page of the mode.")
FAILED = Flag(
    "¶",
    "a peer failed",
    "A peer that supports this case failed or lacks the reported timing, so the peer shown may not be the fastest; the "
    "page of the mode names that peer and the reason.",
)
ABSENT = Flag(
    "◊",
    "a peer was not in the run",
    "The run that measured this case lacked one of this kernel's present peers: it was left out of the run, or was "
    "added later. So the peer shown may not be the fastest.",
)
OTHER_RUN = Flag(
    "◦",
    "measured in another run",
    "Measured in a different run than this kernel, so no speed-up is given.",
)


def of_row(finding: Finding, row: Row) -> list[Flag]:
    """The doubts about the time of one implementation."""
    found = (
        throttled(finding, row),
        over(finding, row),
        _wide(finding, row),
        _few(finding, row),
        _warned(finding, row),
        _other_run(finding, row),
    )
    return [flag for flag in found if flag]


def _other_run(finding: Finding, row: Row) -> Flag | None:
    return OTHER_RUN if finding.best is not None and row.ok and row.run.id != finding.best.run.id else None


def throttled(finding: Finding, row: Row) -> Flag | None:
    """Throttling, by the clocks that were read during the measurement: in the rounds of the finding's column if the
    record has clocks by round, since the power limit may affect the warm column and not the cold one."""
    clocks = row.get("clocks", {})
    rounds = (clocks.get("rounds") or {}).get(finding.column)
    if rounds:
        count, samples = len(rounds["throttled"]), len(rounds["sm_mhz"])
    else:
        count, samples = clocks.get("throttled_samples") or 0, clocks.get("samples") or 0
    return (ALL_THROTTLED if samples and count >= samples else THROTTLED) if count else None


def over(finding: Finding, row: Row) -> Flag | None:
    """More than 100 % of the measured roofline, as displayed; and why that is no error."""
    share = finding.percent(row, finding.measured)
    if share is None or round(share, 1) <= 100:
        return None
    if finding.limit not in MARGIN:
        return OVER_BY_CLOCK
    return OVER_BY_L2 if finding.limit == MEMORY and finding.column in ("warm", "graph") else OVER_BY_NOISE


def _wide(finding: Finding, row: Row) -> Flag | None:
    column = row.column(finding.column)
    low, high = (column or {}).get("ci95_us") or (None, None)
    wide = column and low and high and (high - low) / column["median_us"] > WIDE
    return WIDE_INTERVAL if wide else None


def _few(finding: Finding, row: Row) -> Flag | None:
    column = row.column(finding.column)
    return FEW if column and column.get("n", FEWEST) < FEWEST else None


def _warned(finding: Finding, row: Row) -> Flag | None:
    """Any warning of ours; of a peer only that its time includes host time, since a less accurate peer still counts. A
    CUDA graph includes no host time."""
    unqueued = [text for text in row.get("warnings", []) if text.startswith(UNQUEUED)]
    others = [text for text in row.get("warnings", []) if not text.startswith(UNQUEUED)]
    return WARNED if (unqueued and finding.column != "graph") or (row.ours and others) else None


def of_ratio(finding: Finding, speedup: Speedup | None) -> list[Flag]:
    """Reasons to exclude a speed-up from the means: by our row, by the other's and by the interval of their ratio. A
    peer above 100 % of the roofline is no reason, since this only makes it look faster."""
    found = of_row(finding, finding.best) if finding.best is not None else []
    if speedup is not None:
        if speedup.row is not None and speedup.row.ok:
            found += [flag for flag in of_row(finding, speedup.row) if flag not in OVER]
        if not steady(speedup):
            found.append(WIDE_INTERVAL)
    return list(dict.fromkeys(found))


def steady(speedup: Speedup) -> bool:
    """Whether the ratio's interval is narrow enough for a mean."""
    return (speedup.high - speedup.low) / speedup.median <= WIDE

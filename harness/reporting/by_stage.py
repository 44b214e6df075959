"""ncu's figures of a whole step: launches by stage, and the launches of one kernel in a stage combined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import markdown

Launch = Mapping[str, Any]

REST = "rest"
PERCENTAGES = ("dram_pct", "l2_pct", "sm_pct", "tensor_pct", "occupancy_pct")
HEAD = ("stage", ">kernels", ">duration", ">of the call", ">DRAM", ">DRAM %", ">L2 %", ">SM %", ">tensor %")
TEXT = (
    "By stage, forward and backward together: a launch belongs to the stage whose function launched it, or whose "
    "function created the autograd node that launched it. Percentages are means over the stage's kernels, weighted by "
    "time; ncu runs the kernels one at a time."
)


def staged(launches: Sequence[Launch]) -> bool:
    """Whether any launch has a stage."""
    return any(launch.get("stage") for launch in launches)


def cells(launches: Sequence[Launch]) -> list[list[object]]:
    """Rows under HEAD: one for each stage in order of first launch; launches without a stage come last."""
    found: dict[str, list[Launch]] = {}
    for launch in launches:
        found.setdefault(launch.get("stage") or REST, []).append(launch)
    found |= {REST: found.pop(REST)} if REST in found else {}
    whole = _sum(launches, "duration_us")
    return [_cells(stage, mine, whole) for stage, mine in found.items()]


def _cells(stage: str, launches: Sequence[Launch], whole: float | None) -> list[object]:
    duration = _sum(launches, "duration_us")
    return [
        stage,
        len(launches),
        markdown.figures(duration, " µs"),
        markdown.percent(100 * duration / whole if duration is not None and whole else None),
        markdown.size(_sum(launches, "dram_bytes")),
        *(markdown.figures(_mean(launches, name)) for name in PERCENTAGES[:4]),
    ]


def grouped(launches: Sequence[Launch]) -> list[dict[str, Any]]:
    """The launches of a whole step, with those of one kernel in one stage combined, longest first: "launches" is their
    number, durations and bytes are summed, percentages are means weighted by time, registers and shared memory are
    maxima. Without stages the launches are returned unchanged."""
    if not staged(launches):
        return [dict(launch) for launch in launches]
    found: dict[tuple[str, str], list[Launch]] = {}
    for launch in launches:
        found.setdefault((launch.get("stage") or REST, launch["name"]), []).append(launch)
    made = [_together(stage, mine) for (stage, _), mine in found.items()]
    return sorted(made, key=lambda group: -(group["duration_us"] or 0.0))


def _together(stage: str, launches: Sequence[Launch]) -> dict[str, Any]:
    longest = max(launches, key=lambda launch: launch["duration_us"] or 0.0)
    return {
        **longest,
        "name": f"{stage}: {len(launches)} × {longest['name']}",
        **{name: _sum(launches, name) for name in ("duration_us", "dram_bytes", "spill_bytes")},
        **{name: _mean(launches, name) for name in PERCENTAGES},
        **{name: _most(launches, name) for name in ("registers", "shared_bytes")},
    }


def _sum(launches: Sequence[Launch], name: str) -> float | None:
    values = [launch[name] for launch in launches]
    return None if not values or None in values else sum(values)


def _mean(launches: Sequence[Launch], name: str) -> float | None:
    """The mean weighted by duration."""
    known = [(launch["duration_us"], launch[name]) for launch in launches]
    if any(duration is None or value is None for duration, value in known):
        return None
    total = sum(duration for duration, _ in known)
    return sum(duration * value for duration, value in known) / total if total else None


def _most(launches: Sequence[Launch], name: str) -> int | None:
    values = [launch[name] for launch in launches if launch[name] is not None]
    return max(values, default=None)

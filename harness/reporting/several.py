"""The report's section on cases of several GPUs: how well each implementation scales, and its exposed transfer time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import roofline
from . import markdown as md
from .entries import Row
from .findings import Finding, cost_of, modes_of

HEAD = (
    "case", "mode", "implementation", ">time", ">throughput per GPU", ">T₁", ">efficiency", ">exposed transfers",
    ">peak memory", ">outside the allocator", ">ranks",
)  # fmt: skip

TEXT = (
    "*Time* Tₙ is the median of the slowest rank's time in each round, *throughput per GPU* that of one GPU in this "
    "time. *T₁* is the time of this kernel's one-GPU version on the whole problem, measured in the same rounds, or "
    "*once* after them if it takes seconds. *Efficiency* is T₁ / (N · Tₙ). *Exposed transfers* is the extra time over "
    "the same implementation without transfers. *Peak memory* is what a call allocates in addition to its inputs, on "
    "the rank with the most. *Outside the allocator* is the memory that the first call allocated outside PyTorch's "
    "caching allocator: NCCL buffers, symmetric memory, code. *Ranks* are the medians of the fastest and the slowest "
    "rank."
)

MODEL_HEAD = ("case", "mode", "implementation", ">measured", ">model", ">error", ">predicted efficiency")

MODEL_TEXT = (
    "Prediction of the performance model of `plan`, from T₁ in the same rounds and the measured link bandwidth. "
    "*Error* is that of the predicted time: negative if the prediction is too short."
)


def section(found: Sequence[Finding], charts: bool) -> list[str]:
    """The table of a kernel, and its images if there are any; empty without cases of several GPUs."""
    measured = [(finding, row) for finding in found for row in finding.rows if row.ok and row.get("several")]
    if not measured:
        return []
    lines = ["## Several GPUs", ""]
    for mode in modes_of(found) if charts else ():
        if points(found, mode):
            kernel = found[0].kernel
            lines += [f"![{kernel} {mode}: efficiency over length]({stem(kernel, mode)}.svg)", ""]
    lines += [TEXT, "", *md.table(HEAD, [_cells(finding, row) for finding, row in measured]), ""]
    lines += _models(measured)
    reasons: dict[str, dict[str, None]] = {}
    for finding, row in measured:
        if reason := row["several"].get("alone_reason"):
            reasons.setdefault(reason, {})[f"{finding.case} {finding.mode}"] = None
    said = [f"- No efficiency ({reason}): {', '.join(places)}." for reason, places in reasons.items()]
    return [*lines, *said, ""] if said else lines


def _models(measured: Sequence[tuple[Finding, Row]]) -> list[str]:
    """The predictions of `plan`'s model beside the measurements; empty if no row has them."""
    cells = []
    for finding, row in measured:
        if model := row["several"].get("model"):
            error = 100 * (model["us"] * 1e-6 / row.seconds() - 1)
            efficiency = (by_model := predicted(row)) and md.percent(100 * by_model)
            times = (roofline.microseconds(s) for s in (row.seconds(), model["us"] * 1e-6))
            cells.append((finding.case, finding.mode, row.implementation, *times, f"{error:+.1f} %", efficiency))
    return [MODEL_TEXT, "", *md.table(MODEL_HEAD, cells), ""] if cells else []


def predicted(row: Row) -> float | None:
    """The efficiency by the model: the measured T1 over N times the predicted time. The record's own counts the latency
    of a launch twice, since the model adds it to a T1 that includes it."""
    several = row["several"]
    alone, model = several.get("alone"), several.get("model")
    return alone["median_us"] / (row.run.world_size * model["us"]) if alone and model else None


def stem(kernel: str, mode: str) -> str:
    """Name of the chart of one mode, without suffix."""
    return f"{kernel}-{mode.replace('+', '-')}-efficiency"


def _cells(finding: Finding, row: Row) -> list[object]:
    several, seconds = row["several"], row.seconds()
    efficiency, alone, exposed = (several.get(name) for name in ("efficiency", "alone", "exposed_us"))
    outside, ranks = several.get("outside_bytes"), sorted(several["rank_median_us"])
    return [
        finding.case,
        finding.mode,
        f"**{row.implementation}**" if row.ours else row.implementation,
        roofline.microseconds(seconds),
        rate(row, finding.limit),
        roofline.microseconds(alone["median_us"] * 1e-6) + (", once" if alone["n"] == 1 else "") if alone else None,
        _percent(efficiency) if efficiency else None,
        _exposed(exposed, seconds) if exposed else None,
        md.size(row.get("peak_memory_bytes")),
        md.size(max(outside)) if outside else None,
        " to ".join(roofline.microseconds(us * 1e-6) for us in (ranks[0], ranks[-1])),
    ]


def rate(row: Row, limit: str) -> str:
    """TFLOP/s of one GPU if the tensor cores are used, else the rate of the limit."""
    cost = cost_of(row)
    if cost.main_pipe != "fp32":
        return roofline.tflops(cost.total_flops / row.seconds())
    return roofline.throughput(row.seconds(), cost, limit)


def _percent(efficiency: Mapping[str, Any]) -> str:
    low, high = efficiency["ci95"]
    return f"{100 * efficiency['median']:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def _exposed(exposed: Mapping[str, Any], seconds: float) -> str:
    """Exposed time and its percentage; noise can make it negative if transfers are fully overlapped."""
    us = exposed["median"]
    return f"{md.figures(us)} µs, {1e-4 * us / seconds:.1f} %"


def points(found: Sequence[Finding], mode: str) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """For one mode, by series and implementation: length and efficiency in percent, from short to long."""
    series: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for finding in found:
        for row in finding.rows if finding.mode == mode else ():
            several = row.get("several", {})
            if row.ok and several.get("axis") and several.get("efficiency"):
                name, length = several["axis"]
                points = series.setdefault(name, {}).setdefault(row.implementation, [])
                points.append((length, 100 * several["efficiency"]["median"]))
    return {name: {i: sorted(points) for i, points in of.items()} for name, of in series.items()}

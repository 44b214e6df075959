"""The charts that hold a kernel, or all kernels, against the roofline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..roofline import floor_seconds
from .charts import DATASHEET_LINE, GRID, MEASURED_LINE, MUTED, OURS, STYLE, legend, number, palette
from .findings import Finding, geometric_mean
from .markdown import times

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKS = {"fwd": "o", "bwd": "s", "fwd+bwd": "D", "step": "^"}


def roofline(findings: Sequence[Finding], gpu: str) -> Figure:
    """Left the roofline itself, log-log. Right how much of it each case reaches: memory-bound cases of one kernel share
    an intensity and would hide each other on the left."""
    import matplotlib
    from matplotlib.figure import Figure

    shown = [f for f in findings if f.best and f.measured and f.percent(f.best, f.measured)]
    modes = list(dict.fromkeys(f.mode for f in shown))
    shown.sort(key=lambda f: modes.index(f.mode))
    colours = palette(findings)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11.0, max(4.1, 1.7 + 0.3 * len(shown))), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.15))
        if shown:
            _landscape(left, shown)
            _distances(right, shown, colours)
            names = [n for n in colours if any(f.seconds(r) for f in shown for r in f.rows if r.implementation == n)]
            legend(figure, names, colours, findings)
        title = f"{findings[0].kernel}: roofline of one {gpu}"
        figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")
    return figure


def _landscape(axes: Axes, shown: Sequence[Finding]) -> None:
    """FLOP per compulsory byte against FLOP/s, with the roofs of the pipes that these cases use."""
    measured, datasheet = shown[0].measured, shown[0].datasheet
    assert measured is not None
    pipes = [pipe for pipe in dict.fromkeys(f.cost[2] for f in shown) if pipe in measured.flops]
    intensities = [f.intensity for f in shown if 0 < f.intensity < math.inf]
    ridges = [measured.flops[pipe] / measured.bandwidth for pipe in pipes]
    low = min(intensities + ridges, default=1) / 8
    high = max(intensities + ridges, default=1) * 8
    axes.set(xscale="log", yscale="log", xlim=(low, high), xlabel="FLOP per compulsory byte", ylabel="TFLOP/s")
    dashed: Any = (0, (4, 2))
    for ceilings, colour, dashes in ((datasheet, DATASHEET_LINE, dashed), (measured, MEASURED_LINE, "-")):
        if ceilings is None:
            continue
        for pipe in pipes:
            top = ceilings.flops.get(pipe, 0) / 1e12
            if top:
                ridge = top * 1e12 / ceilings.bandwidth
                roof = [low * ceilings.bandwidth / 1e12, top, top]
                axes.plot([low, ridge, high], roof, color=colour, lw=1.4, ls=dashes, zorder=2)
    for pipe in pipes:
        top = max(c.flops.get(pipe, 0) for c in (measured, datasheet) if c) / 1e12
        label = f"{pipe}: {number(measured.flops[pipe] / 1e12)} TFLOP/s measured"
        place: Any = {"textcoords": "offset points", "ha": "right", "va": "bottom"}
        axes.annotate(label, (high, top), (-3, 3), fontsize=8, color=MEASURED_LINE, **place)
    _points(axes, shown)
    axes.set_ylim(axes.dataLim.y0 / 2, axes.dataLim.y1 * 4)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(lambda value, _: "")
    axes.set_title(f"measured memory roof: {measured.bandwidth / 1e9:.0f} GB/s")
    axes.grid(color=GRID, lw=0.8)


def _points(axes: Axes, shown: Sequence[Finding]) -> None:
    from matplotlib.lines import Line2D

    for finding in shown:
        for row, ours in ((finding.peer(), False), (finding.best, True)):
            seconds = finding.seconds(row) if row else None
            if row and seconds and 0 < finding.intensity < math.inf:
                axes.plot(
                    finding.intensity, finding.cost[0] / seconds / 1e12, MARKS.get(finding.mode, "o"),
                    ms=7 if ours else 6, mfc=OURS[0] if ours else "white",
                    mec="white" if ours else MUTED, mew=0.8 if ours else 1.1, zorder=5 if ours else 4,
                )  # fmt: skip
    handles: list[Any] = [
        Line2D([], [], ls="", marker=MARKS.get(mode, "o"), ms=7, mfc=OURS[0], mec="white", label=f"{mode}, ours")
        for mode in dict.fromkeys(f.mode for f in shown)
    ]
    handles.append(Line2D([], [], ls="", marker="o", ms=6, mfc="white", mec=MUTED, label="best peer"))
    axes.legend(handles=handles, loc="upper left", handletextpad=0.3)  # above the roof nothing can lie


def _distances(axes: Axes, shown: Sequence[Finding], colours: dict[str, str]) -> None:
    """Percent of the measured roofline: ours above, every other implementation below it on the same line."""
    for at, finding in enumerate(shown):
        assert finding.best is not None
        mine = finding.percent(finding.best, finding.measured) or 0
        for row in finding.rows:
            share = finding.percent(row, finding.measured)
            if share is not None and row is not finding.best:
                axes.plot(share, at + 0.2, "o", ms=5.5, mfc=colours[row.implementation], mec="white", mew=0.5, zorder=3)
        colour = colours[finding.best.implementation]
        axes.plot([0, mine], [at - 0.12] * 2, color=colour, lw=1.6, alpha=0.35, zorder=2)
        axes.plot(mine, at - 0.12, MARKS.get(finding.mode, "o"), ms=8, mfc=colour, mec="white", zorder=5)
        place: Any = {"transform": axes.get_yaxis_transform(), "va": "center"}
        axes.text(1.015, at, f"{mine:.0f} %", fontweight="bold", fontsize=8.5, **place)
        limit = _datasheet_limit(finding)
        if limit:
            axes.plot([limit] * 2, [at - 0.5, at + 0.5], color=DATASHEET_LINE, lw=1.3, ls=(0, (4, 2)), zorder=2)
        if at and finding.mode != shown[at - 1].mode:
            axes.axhline(at - 0.5, color=MUTED, lw=0.8, zorder=0)
    axes.axvline(100, color=MEASURED_LINE, lw=1.4, zorder=1)
    reached = [f.percent(r, f.measured) or 0 for f in shown for r in f.rows]
    axes.set_xlim(0, max(*(_datasheet_limit(f) or 0 for f in shown), *reached, 100) + 4)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    labels = [f"{f.case}  {f.mode}" + ("" if f.column == "cold" else f" ({f.column})") for f in shown]
    axes.set_yticks(range(len(shown)), labels)
    axes.set_title("% of the measured roofline")
    axes.grid(axis="x", color=GRID, lw=0.8)
    axes.spines["left"].set_visible(False)


def _datasheet_limit(finding: Finding) -> float | None:
    """The data sheet's roofline in percent of the measured one."""
    if not finding.datasheet or not finding.measured:
        return None
    promised = floor_seconds(*finding.cost, finding.datasheet).seconds
    return 100 * floor_seconds(*finding.cost, finding.measured).seconds / promised if promised else None


def overview(findings: Sequence[Finding], gpu: str) -> Figure:
    """All kernels on one page: each case's share of the measured roofline, ours against the best peer."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    lanes: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        if finding.best and finding.percent(finding.best, finding.measured):
            lanes.setdefault((finding.kernel, finding.mode), []).append(finding)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.0, 1.85 + 0.46 * max(len(lanes), 1)), layout="constrained")
        axes = figure.add_subplot()
        top = max([_lane(axes, at, lane) for at, lane in enumerate(lanes.values())], default=100)
        axes.axvline(100, color=MEASURED_LINE, lw=1.4, zorder=1)
        axes.set_yticks(range(len(lanes)), [f"{kernel}  {mode}" for kernel, mode in lanes])
        axes.set_ylim(len(lanes) - 0.4, -0.6)
        axes.set_xlim(0, max(top, 100) + 4)
        axes.set_xlabel("% of the measured roofline: copy bandwidth or GEMM rate of this very card; one point per case")
        axes.set_title(
            "geometric mean of the speed-ups over the best peer",
            loc="right",
            fontsize=8.5,
            fontweight="normal",
            color=MUTED,
        )
        axes.grid(axis="x", color=GRID, lw=0.8)
        axes.spines["left"].set_visible(False)
        handles = [
            Line2D([], [], ls="", marker="o", ms=8.5, mfc=OURS[0], mec="white", label="ours"),
            Line2D(
                [], [], ls="", marker="o", ms=6.5, mfc="white", mec=MUTED, mew=1.2, label="best peer of the same run"
            ),
            Line2D([], [], color=MEASURED_LINE, lw=1.4, label="measured ceiling"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, handletextpad=0.4)
        figure.suptitle(f"How near to the limit of one {gpu}", x=0.012, ha="left", fontsize=13, fontweight="bold")
    return figure


def _lane(axes: Axes, at: int, lane: Sequence[Finding]) -> float:
    """One kernel and mode. Returns the largest percentage in it."""
    top = 0.0
    for finding in lane:
        peer = finding.peer()
        theirs = finding.percent(peer, finding.measured) if peer else None
        mine = (finding.percent(finding.best, finding.measured) if finding.best else None) or 0
        top = max(top, mine, theirs or 0)
        if theirs is not None:
            axes.plot(theirs, at + 0.18, "o", ms=6.5, mfc="white", mec=MUTED, mew=1.2, zorder=3)
        axes.plot(mine, at - 0.13, "o", ms=8.5, mfc=OURS[0], mec="white", mew=0.8, alpha=0.9, zorder=4)
    if at:
        axes.axhline(at - 0.5, color=GRID, lw=0.8, zorder=0)
    speedups = [f.over_best_peer.median for f in lane if f.over_best_peer]
    if speedups:
        place: Any = {"transform": axes.get_yaxis_transform(), "va": "center", "ha": "left"}
        axes.text(1.012, at, f"{times(geometric_mean(speedups))}", fontweight="bold", fontsize=9.5, **place)
    return top

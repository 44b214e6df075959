"""The roofline of a kernel, and the overview of all kernels, which is the first chart that a reader sees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .aggregates import Group, groups
from .charts import BLUE, DATASHEET_LINE, GRID, LINE, MEASURED_LINE, MUTED, STYLE, WIDTH
from .findings import Finding, geometric_mean
from .markdown import figures, times

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKS = {"fwd": "o", "bwd": "s", "fwd+bwd": "D", "step": "^", "train": "v"}


def roofline(findings: Sequence[Finding], gpu: str) -> Figure:
    """FLOP per compulsory byte against FLOP/s, log-log, with the roofs of the pipes that the kernel's cases use."""
    import matplotlib
    from matplotlib.figure import Figure

    shown = [f for f in findings if f.best and f.measured and f.percent(f.best, f.measured)]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
        axes = figure.add_subplot()
        if shown:
            _landscape(axes, shown)
        title = f"{findings[0].kernel}: roofline of {gpu}"
        figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")
    return figure


def _landscape(axes: Axes, shown: Sequence[Finding]) -> None:
    """Draws the roofs, measured and from the datasheet, and a point for each case: ours and its best peer."""
    measured, datasheet = shown[0].measured, shown[0].datasheet
    assert measured is not None
    pipes = [pipe for pipe in dict.fromkeys(f.cost.main_pipe for f in shown) if pipe in measured.flops]
    intensities = [f.intensity for f in shown if 0 < f.intensity < math.inf]
    ridges = [measured.flops[pipe] / measured.bandwidth for pipe in pipes]
    low = min(intensities + ridges, default=1) / 8
    high = max(intensities + ridges, default=1) * 30  # room for the labels
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
    for group in _near({pipe: measured.flops[pipe] / 1e12 for pipe in pipes}):
        label = ", ".join(f"{pipe} {figures(top)}" for pipe, top in group.items()) + " TFLOP/s measured"
        place: Any = {"textcoords": "offset points", "ha": "right", "va": "top", "zorder": 3}
        place["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # a roof may run behind it
        axes.annotate(label, (high, min(group.values())), (-3, -3), fontsize=8, color=MEASURED_LINE, **place)
    _points(axes, shown)
    _key(axes, shown, with_datasheet=datasheet is not None)
    axes.set_ylim(axes.dataLim.y0 / 2, axes.dataLim.y1 * 4)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.minorticks_off()
    axes.set_title(f"measured memory bandwidth: {measured.bandwidth / 1e9:.0f} GB/s")
    axes.grid(color=GRID, lw=0.8)


def _near(tops: dict[str, float]) -> list[dict[str, float]]:
    """Groups pipes so that there is room for a label between the roofs of two groups."""
    groups: list[dict[str, float]] = []
    for pipe in sorted(tops, key=lambda pipe: -tops[pipe]):
        if groups and min(groups[-1].values()) < 1.4 * tops[pipe]:
            groups[-1][pipe] = tops[pipe]
        else:
            groups.append({pipe: tops[pipe]})
    return groups


def _points(axes: Axes, shown: Sequence[Finding]) -> None:
    """Draws ours and the best peer of each case; a case without FLOPs or bytes has no point."""
    for finding in shown:
        for row, ours in ((finding.peer(), False), (finding.best, True)):
            seconds = finding.seconds(row) if row else None
            if row and seconds and 0 < finding.intensity < math.inf:
                axes.plot(
                    finding.intensity, finding.cost.total_flops / seconds / 1e12, MARKS.get(finding.mode, "o"),
                    ms=7 if ours else 6, mfc=BLUE if ours else "white",
                    mec="white" if ours else MUTED, mew=0.8 if ours else 1.1, zorder=5 if ours else 4,
                )  # fmt: skip


def _key(axes: Axes, shown: Sequence[Finding], with_datasheet: bool) -> None:
    """Draws the legend of the roofline."""
    from matplotlib.lines import Line2D

    handles: list[Any] = [
        Line2D([], [], ls="", marker=MARKS.get(mode, "o"), ms=7, mfc=BLUE, mec="white", label=f"{mode}, this kernel")
        for mode in dict.fromkeys(f.mode for f in shown)
    ]
    handles.append(Line2D([], [], ls="", marker="o", ms=6, mfc="white", mec=MUTED, label="fastest peer"))
    handles.append(Line2D([], [], color=MEASURED_LINE, lw=1.4, label="measured ceiling"))
    if with_datasheet:
        handles.append(Line2D([], [], color=DATASHEET_LINE, lw=1.4, ls=(0, (4, 2)), label="datasheet"))
    axes.legend(handles=handles, loc="upper left", handletextpad=0.3)  # no point can lie above the roof


def overview(findings: Sequence[Finding], gpu: str) -> Figure:
    """All kernels on one page: each case's percentage of the measured roofline, ours against the best peer."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    lanes = [group for group in groups(findings) if any(f.best and f.percent(f.best, f.measured) for f in group.found)]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 1.85 + 1.3 * LINE * max(len(lanes), 1)), layout="constrained")
        axes = figure.add_subplot()
        top = max([_lane(axes, at, lane) for at, lane in enumerate(lanes)], default=100)
        axes.axvline(100, color=MEASURED_LINE, lw=1.4, zorder=1)
        axes.set_yticks(range(len(lanes)), [lane.name for lane in lanes])
        axes.set_ylim(len(lanes) - 0.4, -0.6)
        axes.set_xlim(0, max(top, 100) + 4)
        axes.set_xlabel("% of the measured roofline (bandwidth of memory or links, or GEMM rate); one point per case")
        axes.set_title(
            "mean speed-up over the fastest peer (see Means); grey: over torch.compile only",
            loc="right",
            fontsize=8.5,
            fontweight="normal",
            color=MUTED,
        )
        axes.grid(axis="x", color=GRID, lw=0.8)
        axes.spines["left"].set_visible(False)
        handles = [
            Line2D([], [], ls="", marker="o", ms=7.5, mfc=BLUE, mec="white", label="this kernel"),
            Line2D([], [], ls="", marker="o", ms=6, mfc="white", mec=MUTED, mew=1.2, label="fastest peer in the run"),
            Line2D([], [], color=MEASURED_LINE, lw=1.4, label="measured ceiling"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, handletextpad=0.4)
        figure.suptitle(f"Share of the roofline of {gpu}", x=0.012, ha="left", fontsize=13, fontweight="bold")
    return figure


def _lane(axes: Axes, at: int, group: Group) -> float:
    """Draws one kernel, mode and precision. Returns the largest percentage in it."""
    lane = [f for f in group.found if f.best and f.percent(f.best, f.measured)]
    ours = [f.percent(f.best, f.measured) or 0 for f in lane if f.best]
    found = [f.percent(peer, f.measured) for f in lane if not f.undecided and (peer := f.peer())]
    theirs = [share for share in found if share is not None]
    axes.plot(theirs, [at + 0.18] * len(theirs), "o", ms=6, mfc="white", mec=MUTED, mew=1.2, zorder=3)
    axes.plot(ours, [at - 0.15] * len(ours), "o", ms=7.5, mfc=BLUE, mec="white", mew=0.8, alpha=0.9, zorder=4)
    if at:
        axes.axhline(at - 0.5, color=GRID, lw=0.8, zorder=0)
    mean = group.over_best_peer()
    if mean.values:
        place: Any = {"transform": axes.get_yaxis_transform(), "va": "center", "ha": "left"}
        look: Any = {"fontweight": "bold"} if mean.library else {"color": MUTED}
        axes.text(1.012, at, times(geometric_mean(mean.values)), fontsize=9, **place, **look)
    return max([*ours, *theirs])

"""The charts of a report, drawn with matplotlib and written as SVG.

White ground of their own, so that they read the same on a light and on a dark page; Okabe and Ito's palette, which
colour-blind readers can tell apart; ours in the one strong blue, everything else paler. The same records give the same
bytes: text becomes outlines, ids come from a fixed salt and no date is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..roofline import MEMORY
from .findings import Finding

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS = ("#0072B2", "#56B4E9", "#004C77")
PEERS = ("#B9BEC6", "#E8A33D", "#5FB49C", "#D79BBE", "#8A6D3B", "#7F8792")
INK, MUTED, GRID = "#1F2328", "#656D76", "#E4E8EC"
MEASURED_LINE, DATASHEET_LINE = "#B23A00", "#8C959F"

STYLE: Any = {
    "svg.hashsalt": "ridgeline",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 9.0,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 9.0,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


def available() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def save(figure: Figure, path: Path) -> None:
    """Writes SVG, or what the suffix says; without a date or a version in it."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    svg = path.suffix == ".svg"
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, metadata={"Date": None, "Creator": None} if svg else None)
    if svg:  # matplotlib ends many lines of path data with a space
        lines = path.read_text(encoding="utf-8").splitlines()
        path.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")


def palette(findings: Sequence[Finding]) -> dict[str, str]:
    """A colour for each implementation of a kernel, the same in all its charts: ours first, in the record's order."""
    ours = list(dict.fromkeys(r.implementation for f in findings for r in f.rows if r.ours))
    peers = list(dict.fromkeys(r.implementation for f in findings for r in f.rows if not r.ours))
    colours = {name: OURS[index % len(OURS)] for index, name in enumerate(ours)}
    return colours | {name: PEERS[index % len(PEERS)] for index, name in enumerate(peers)}


def throughput(findings: Sequence[Finding], gpu: str) -> Figure:
    """Horizontal bars: GB/s where memory is the limit, TFLOP/s where compute is, one panel per mode and limit."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = _panels(findings)
    colours = palette(findings)
    names = [name for name in colours if any(f.rate(r) for f in findings for r in f.rows if r.implementation == name)]
    columns = min(2, len(panels)) or 1
    rows_of_panels = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    heights = [max(len(fs) for _, _, fs in line) * (len(names) * 0.17 + 0.2) + 0.75 for line in rows_of_panels]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11.0, sum(heights) + 0.85), layout="constrained")
        grid = figure.add_gridspec(len(rows_of_panels), columns, height_ratios=heights)
        for index, line in enumerate(rows_of_panels):
            for place, (mode, limit, group) in enumerate(line):
                axes = figure.add_subplot(grid[index, place])
                _bars(axes, group, names, colours)
                axes.set_ylim(max(len(fs) for _, _, fs in line) - 0.45, -0.55)
                what = "GB/s of compulsory traffic" if limit == MEMORY else "TFLOP/s of useful work"
                axes.set_title(f"{mode}: {what}")
        legend(figure, names, colours, findings)
        figure.suptitle(f"{findings[0].kernel} on one {gpu}", x=0.012, ha="left", fontsize=13, fontweight="bold")
    return figure


def _panels(findings: Sequence[Finding]) -> list[tuple[str, str, list[Finding]]]:
    panels: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        if any(finding.rate(row) for row in finding.rows):
            panels.setdefault((finding.mode, finding.limit), []).append(finding)
    return [(mode, limit, group) for (mode, limit), group in panels.items()]


def _bars(axes: Axes, group: Sequence[Finding], names: Sequence[str], colours: dict[str, str]) -> None:
    """One cluster per case, ours on top; ceilings as a line across each cluster, since pipes may differ by case."""
    scale = 1e9 if group[0].limit == MEMORY else 1e12
    height = 0.84 / max(len(names), 1)
    peak = max((f.ceiling(c) or 0) for f in group for c in (f.measured, f.datasheet)) / scale
    peak = max(peak, *((f.rate(r) or 0) / scale for f in group for r in f.rows))
    for at, finding in enumerate(group):
        present = {row.implementation: row for row in finding.rows if finding.rate(row)}
        for slot, name in enumerate(names):
            y = at - 0.42 + (slot + 0.5) * height
            row = present.get(name)
            if row is None:
                axes.text(peak * 0.006, y, f"{name}: not measured", va="center", fontsize=6.5, color=MUTED)
                continue
            value = (finding.rate(row) or 0) / scale
            axes.barh(y, value, height=height * 0.88, color=colours[name], zorder=2)
            _bar_label(axes, finding, row, value, y, peak)
        for ceilings, colour, dashes in (
            (finding.measured, MEASURED_LINE, "-"),
            (finding.datasheet, DATASHEET_LINE, (0, (4, 2))),
        ):
            ceiling = finding.ceiling(ceilings)
            if ceiling:
                axes.plot([ceiling / scale] * 2, [at - 0.46, at + 0.46], color=colour, lw=1.3, ls=dashes, zorder=3)
    axes.set_yticks(range(len(group)), [_case(f) for f in group])
    axes.set_xlim(0, peak * 1.04)
    axes.grid(axis="x", color=GRID, lw=0.8)
    axes.spines["left"].set_visible(False)


def _bar_label(axes: Axes, finding: Finding, row: Any, value: float, y: float, peak: float) -> None:
    share = finding.percent(row, finding.measured)
    text = number(value) + (f"  ({share:.0f} %)" if share is not None else "")
    inside = value > 0.3 * peak
    if not inside:  # far from the ceiling a case is about latency
        text += f"  {number((finding.seconds(row) or 0) * 1e6)} µs"
    axes.text(
        value - peak * 0.008 if inside else value + peak * 0.008,
        y,
        text,
        ha="right" if inside else "left",
        va="center",
        fontsize=7.2,
        fontweight="bold" if row.ours else "normal",
        color="white" if inside and row.ours else INK,
        zorder=4,
    )


def _case(finding: Finding) -> str:
    return finding.case if finding.column == "cold" else f"{finding.case}\n({finding.column})"


def number(value: float) -> str:
    """Three figures."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def legend(figure: Figure, names: Sequence[str], colours: dict[str, str], findings: Sequence[Finding]) -> None:
    """Implementations and ceilings, below the axes."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    ours = {row.implementation for f in findings for row in f.rows if row.ours}
    handles: list[Any] = [Patch(color=colours[n], label=f"{n} (ours)" if n in ours else n) for n in names]
    handles.append(Line2D([], [], color=MEASURED_LINE, lw=1.3, label="measured ceiling"))
    if any(f.datasheet for f in findings):
        handles.append(Line2D([], [], color=DATASHEET_LINE, lw=1.3, ls=(0, (4, 2)), label="data sheet"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 8), handlelength=1.4)

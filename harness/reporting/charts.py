"""Common parts of a report's charts, and the chart of a kernel's implementations; written as SVG.

They have a white background, so that they look the same on a light and on a dark page. Each implementation has its own
marker and a colour that colour-blind readers can distinguish (after Okabe and Ito); ours is the one saturated blue. The
same records give the same bytes: ids come from a fixed salt and no date is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..roofline import microseconds
from . import svg
from .findings import Finding
from .markdown import times

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1F2328", "#656D76", "#E4E8EC"
BLUE, ORANGE, GREEN, PINK, BROWN, GREY, PURPLE, OLIVE = (
    "#0072B2", "#E08A00", "#009E73", "#CC6699", "#8A6D3B", "#8C959F", "#6F4FB0", "#A89A00",
)  # fmt: skip
MEASURED_LINE, DATASHEET_LINE = "#B23A00", "#8C959F"

STYLE: Any = {
    "svg.hashsalt": "ridgeline",
    "svg.fonttype": "none",
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

#: inches: the width of every chart, and the height of one row of a chart of points
WIDTH, LINE = 10.5, 0.27
#: vertical offsets, in rows, of points that would hide each other
LEVELS = (0.0, 0.27, -0.27)


@dataclass(frozen=True)
class Look:
    """Colour, marker and size of an implementation, the same in all charts of its kernel. A yardstick's is hollow."""

    colour: str
    mark: str
    size: float
    hollow: bool = False


BLUES = (BLUE, "#56B4E9", "#004C77", "#7FA9D9")
OURS: tuple[Look, ...] = (
    Look(BLUE, "o", 8.5),
    Look("#56B4E9", "D", 5.8),
    Look("#004C77", "h", 6.8),
    Look("#7FA9D9", "8", 6.8),
)
OURS += tuple(Look(colour, mark, 7.0) for mark in ("d", "p", "*", "P", "X", "^") for colour in BLUES)
PEERS = tuple(
    Look(colour, mark, size)
    for colour, mark, size in (
        (GREY, "s", 5.6), (ORANGE, "^", 6.8), (GREEN, "v", 6.8), (PINK, "P", 7.2), (BROWN, "X", 7.0),
        (PURPLE, "<", 6.8), (OLIVE, ">", 6.8), (INK, "*", 8.0), (ORANGE, "p", 6.8), (GREEN, "s", 5.6),
    )
)  # fmt: skip
PEERS += tuple(
    Look(colour, mark, 6.8) for mark in ("d", "D", "H") for colour in (ORANGE, GREEN, PINK, BROWN, PURPLE, OLIVE, GREY)
)
YARDSTICKS = tuple(Look(INK, mark, size, hollow=True) for mark, size in (("o", 5.6), ("s", 5.2), ("D", 5.0)))


def available() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def save(figure: Figure, path: Path) -> None:
    """Writes SVG, or the format of the suffix, without a date or a version in it."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    drawing = path.suffix == ".svg"
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, metadata={"Date": None, "Creator": None} if drawing else None)
    if drawing:
        path.write_text(svg.shortened(path.read_text(encoding="utf-8")), encoding="utf-8")


def looks(findings: Sequence[Finding]) -> dict[str, Look]:
    """Colour and marker of each implementation of a kernel: ours first, in the record's order, then peers, then
    yardsticks."""
    rows = [row for finding in findings for row in finding.rows]
    ours = dict.fromkeys(row.implementation for row in rows if row.ours)
    yardsticks = dict.fromkeys(row.implementation for row in rows if row.yardstick)
    peers = dict.fromkeys(row.implementation for row in rows if not row.ours and not row.yardstick)
    found = {name: OURS[index % len(OURS)] for index, name in enumerate(ours)}
    found |= {name: PEERS[index % len(PEERS)] for index, name in enumerate(peers)}
    return found | {name: YARDSTICKS[index % len(YARDSTICKS)] for index, name in enumerate(yardsticks)}


def peers(findings: Sequence[Finding], mode: str, gpu: str) -> Figure:
    """One mode of a kernel: a row for each case, in it a point for each implementation at its share of the roofline.

    `findings` are those of all modes, so that an implementation looks the same in each chart of the kernel.
    """
    import matplotlib
    from matplotlib.figure import Figure

    shown = [finding for finding in findings if finding.mode == mode and finding.shares()]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 1.75 + LINE * len(shown)), layout="constrained")
        axes = figure.add_subplot()
        _lines(axes, shown)
        _points(axes, shown, looks(findings))
        _margin(axes, shown)
        axes.set_xlabel("% of the measured roofline (bandwidth of memory or links, or GEMM rate)")
        title = f"{findings[0].kernel} {mode} on {gpu}"
        figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")
        _legend(figure, shown, looks(findings))
    return figure


def _lines(axes: Axes, shown: Sequence[Finding]) -> None:
    """Draws the axes: a line from the lowest to the highest point of each case, and the ceiling."""
    shares = [list(finding.shares().values()) for finding in shown]
    places = range(len(shown))
    axes.hlines(places, [min(s) for s in shares], [max(s) for s in shares], color=GRID, lw=2.2, zorder=1)
    axes.axvline(100, color=MEASURED_LINE, lw=1.4, zorder=1)
    axes.set_xlim(0, max(100, *(max(s) for s in shares)) + 4)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_yticks(places, [case_label(finding) for finding in shown])
    axes.grid(axis="x", color=GRID, lw=0.8)
    axes.spines["left"].set_visible(False)


def case_label(finding: Finding) -> str:
    """The case, and the column if that is not the cold one."""
    return finding.case if finding.column == "cold" else f"{finding.case} ({finding.column})"


def _points(axes: Axes, shown: Sequence[Finding], looks: dict[str, Look]) -> None:
    """Draws one series for each implementation; ours last, so that nothing hides it."""
    series: dict[str, tuple[list[float], list[float]]] = {}
    low, high = axes.get_xlim()
    for at, finding in enumerate(shown):
        for name, (share, level) in spread(finding.shares(), 0.016 * (high - low), list(looks)).items():
            xs, ys = series.setdefault(name, ([], []))
            xs.append(share)
            ys.append(at + level)
    for depth, name in enumerate(reversed([name for name in looks if name in series])):
        look = looks[name]
        axes.plot(*series[name], zorder=3 + 0.1 * depth, **_marker(look))


def _marker(look: Look) -> dict[str, Any]:
    face, edge, width = ("white", look.colour, 1.1) if look.hollow else (look.colour, "white", 0.7)
    return {"ls": "", "marker": look.mark, "ms": look.size, "mfc": face, "mec": edge, "mew": width, "clip_on": False}


def spread(shares: dict[str, float], width: float, order: Sequence[str]) -> dict[str, tuple[float, float]]:
    """(share, level) by name: points closer than `width` go to different levels, as long as there are levels.

    Names that come first in `order` keep the middle.
    """
    placed: dict[str, tuple[float, float]] = {}
    for name in sorted(shares, key=order.index):
        share = shares[name]

        def room(level: float, share: float = share) -> float:
            return min((abs(share - x) for x, y in placed.values() if y == level), default=float("inf"))

        free = [level for level in LEVELS if room(level) >= width]
        placed[name] = share, free[0] if free else max(LEVELS, key=room)
    return placed


def _margin(axes: Axes, shown: Sequence[Finding]) -> None:
    """Writes on the right of the axes: our time, the speed-up over the best peer, and which that is."""

    def write(line: float, points: float, text: str, **look: Any) -> None:
        place: Any = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points", "va": "center"}
        axes.annotate(text, (1, line), (points, 0), **{"fontsize": 8.5, "annotation_clip": False, **place, **look})

    faint = {"color": MUTED, "fontsize": 8}
    write(-0.9, 46, "time", ha="right", **faint)
    write(-0.9, 53, "speed-up over the fastest peer", **faint)
    for at, finding in enumerate(shown):
        if finding.best is None:
            write(at, 10, "not measured", **faint)
            continue
        write(at, 46, microseconds(finding.best.seconds(finding.column)), ha="right")
        if speedup := finding.over_best_peer:
            write(at, 53, times(speedup.median), fontweight="bold")
            write(
                at,
                92,
                speedup.peer + (" ¶" if finding.unmeasured else "") + (" ◊" if finding.absent else ""),
                **faint,
            )


def _legend(figure: Figure, shown: Sequence[Finding], looks: dict[str, Look]) -> None:
    """Draws the legend below the axes: implementations with a point in this chart, and the ceiling."""
    from matplotlib.lines import Line2D

    rows = {row.implementation: row for finding in shown for row in finding.rows}
    drawn = [name for name in looks if any(name in finding.shares() for finding in shown)]
    handles: list[Any] = []
    for name in drawn:
        kind = " (this kernel)" if rows[name].ours else " (yardstick)" if rows[name].yardstick else ""
        handles.append(Line2D([], [], label=name + kind, **_marker(looks[name])))
    handles.append(Line2D([], [], color=MEASURED_LINE, lw=1.4, label="measured ceiling"))
    columns = math.ceil(len(handles) / math.ceil(len(handles) / 7))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, handletextpad=0.4, columnspacing=1.6)

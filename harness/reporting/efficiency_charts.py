"""The chart of several GPUs: efficiency relative to our one-GPU kernel, over the length of the problem."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .charts import GRID, MEASURED_LINE, STYLE, WIDTH, looks
from .findings import Finding
from .several import points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS, HEIGHT = 3, 2.7


def efficiency(found: Sequence[Finding], mode: str, gpu: str) -> Figure:
    """One mode of a kernel: a panel for each series, in it a line for each implementation. `found` are the findings of
    all modes, so that an implementation looks the same in each chart of the kernel."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    series = points(found, mode)
    rows, columns = math.ceil(len(series) / COLUMNS), min(len(series), COLUMNS)
    look, rows_of = looks(found), {row.implementation: row for f in found for row in f.rows}
    drawn = [name for name in look if any(name in of for of in series.values())]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 1.1 + HEIGHT * rows), layout="constrained")
        panels = list(figure.subplots(rows, columns, sharey=True, squeeze=False).flat)
        for axes, (name, of) in zip(panels, series.items(), strict=False):
            _panel(axes, name, {i: of[i] for i in reversed(drawn) if i in of}, look)
        for axes in panels[len(series) :]:
            axes.set_visible(False)
        handles = [
            Line2D([], [], color=look[name].colour, marker=look[name].mark, ms=look[name].size,
                   label=name + (" (this kernel)" if rows_of[name].ours else ""))
            for name in drawn
        ]  # fmt: skip
        title = f"{found[0].kernel} {mode} on {gpu}: efficiency, T₁ / (N · Tₙ)"
        figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6))
    return figure


def _panel(axes: Axes, name: str, of: dict[str, list[tuple[int, float]]], look: dict) -> None:
    lengths = sorted({length for points in of.values() for length, _ in points})
    axes.axhline(100, color=MEASURED_LINE, lw=1.2, zorder=1)
    for implementation, places in of.items():
        mark = look[implementation]
        x, y = zip(*places, strict=True)
        axes.plot(x, y, color=mark.colour, marker=mark.mark, ms=mark.size, lw=1.4, mec="white", mew=0.7, zorder=3)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}".replace(",", "\u202f") for length in lengths], rotation=30, ha="right")
    axes.set_ylim(bottom=0)
    axes.set(title=name, xlabel="length", ylabel="efficiency, %")
    axes.minorticks_off()
    axes.grid(color=GRID, lw=0.8)

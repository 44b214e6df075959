"""The page of a model that is trained with each variant of a kernel: losses beside the plain one, over seeds.

It is made of training/<kernel>.json, which an example writes: "results" has for each variant, "none" first, and seed
the loss on text held out, the time of a step, and the curve of the training loss, [last step, mean since the one
before].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

from . import markdown as md
from . import pages
from .charts import BLUE, BROWN, GREEN, GREY, GRID, OLIVE, ORANGE, PINK, PURPLE, STYLE, WIDTH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA = 1
PLAIN = "none"
COLOURS = (GREY, BLUE, GREEN, ORANGE, PINK, BROWN, PURPLE, OLIVE)

HEAD = ("kind", ">seeds", ">loss", ">beside none", ">least", ">most", ">ms a step")

TEXT = (
    "*Loss* is the mean over the seeds of that on text which no training has seen. *Beside none* is the mean "
    "difference to the uncompressed training of the same seed, which has the same weights at first and the same "
    "batches; *least* and *most* are those of one seed. What the seeds themselves make of the loss is below the table."
)


def stem(kernel: str) -> str:
    """Name of the page and of its chart, without suffix."""
    return f"{kernel}-training"


def page(kernel: str, gpu: str, document: Mapping[str, Any]) -> list[str]:
    """<kernel>-training.md."""
    results = document["results"]
    lines = [f"# {kernel}: training on {gpu}", "", pages.GENERATED, ""]
    lines += [f"[{kernel}]({kernel}.md) · [All kernels](README.md)", ""]
    model = ", ".join(f"{name} {value}" for name, value in document["model"].items())
    lines += [f"{document['steps']} steps on {document['ranks']} ranks ({document['device']}), PyTorch "
              f"{document['torch']}; {model}, the batch being a rank's.", ""]  # fmt: skip
    lines += [f"![{kernel}: loss over steps]({stem(kernel)}.svg)", "", TEXT, ""]
    lines += md.table(HEAD, [_cells(kind, of, results[PLAIN]) for kind, of in results.items()])
    plain = [run["loss"] for run in results[PLAIN].values()]
    return [*lines, "", f"Uncompressed, the seeds are from {min(plain):.4f} to {max(plain):.4f}.", ""]


def _cells(kind: str, of: Mapping[str, Any], plain: Mapping[str, Any]) -> list[object]:
    losses, times = [run["loss"] for run in of.values()], [run["ms_a_step"] for run in of.values()]
    over = [run["loss"] - plain[seed]["loss"] for seed, run in of.items()]
    cells: list[object] = [kind, len(of), f"{mean(losses):.4f}"]
    cells += [None] * 3 if kind == PLAIN else [f"{value:+.4f}" for value in (mean(over), min(over), max(over))]
    return [*cells, md.figures(mean(times))]


def curve(of: Mapping[str, Any]) -> list[tuple[int, float]]:
    """The mean over the seeds of the training loss: step and loss."""
    runs = [run["curve"] for run in of.values()]
    return [(points[0][0], mean(loss for _, loss in points)) for points in zip(*runs, strict=True)]


def chart(kernel: str, gpu: str, document: Mapping[str, Any]) -> Figure:
    """The training loss over steps and, where kinds differ by less than a line's width, what it is beside none."""
    import matplotlib
    from matplotlib.figure import Figure

    curves = {kind: curve(of) for kind, of in document["results"].items()}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        for (kind, points), colour in zip(curves.items(), COLOURS, strict=False):
            steps, losses = zip(*points, strict=True)
            left.plot(steps, losses, color=colour, lw=1.4, label=kind)
            right.plot(steps, _beside(losses, curves[PLAIN]), color=colour, lw=1.4)
        for axes, title in ((left, "loss"), (right, "loss less that of none")):
            axes.set(title=title, xlabel="step")
            axes.grid(color=GRID, lw=0.8)
        title = f"{kernel}: training on {gpu}"
        figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")
        figure.legend(loc="outside lower center", ncols=len(curves))
    return figure


def _beside(losses: Sequence[float], plain: Sequence[tuple[int, float]]) -> list[float]:
    return [loss - other for loss, (_, other) in zip(losses, plain, strict=True)]

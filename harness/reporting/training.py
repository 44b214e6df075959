"""The page of a model that is trained in several ways: losses compared with those of a plain training, over seeds.

It is made from training/<kernel>.json, which an example writes:
{
    "schema": 1, "device": "NVIDIA H200", "torch": "2.11.0", "steps": int,
    "ranks": int,                    # where there are several
    "model": {name: size, ...},      # and what else the trainings have in common
    "plain": kind,                   # what the others are compared with; by default "none"
    "kinds": {kind: what it is},     # optional
    "other_models": [kind, ...],     # optional: those that do not begin with the plain one's weights
    "bounds": {name: loss},          # optional: losses that no training reaches, such as that of the best guess
    "results": {kind: {seed: {"loss": on data held out, "ms_a_step": float, "curve": [[last step, mean since], ...]}}},
}
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
LABELS_A_LINE = 6
COLOURS = (GREY, BLUE, GREEN, ORANGE, PINK, BROWN, PURPLE, OLIVE)

TEXT = (
    "*Loss* is the loss on held-out data, averaged over the seeds. *Minus {0}* is the mean difference from `{0}` with "
    "the same seed, which has the same initial weights and the same batches; *min* and *max* are the extremes over the "
    "seeds. The range of the loss over the seeds is given below the table."
)


def stem(kernel: str) -> str:
    """Name of the page and of its chart, without suffix."""
    return f"{kernel}-training"


def image(kernel: str, folder: str = "") -> list[str]:
    """The chart in Markdown. `folder`: where the reports are, ending in '/'."""
    return [f"![{kernel}: loss over steps]({folder}{stem(kernel)}.svg)", ""]


def page(kernel: str, gpu: str, document: Mapping[str, Any]) -> list[str]:
    """<kernel>-training.md."""
    results, plain = document["results"], document.get("plain", PLAIN)
    lines = [f"# {kernel}: training on {gpu}", "", pages.GENERATED, ""]
    lines += [f"[{kernel}]({kernel}.md) · [All kernels](README.md)", "", _head(document), ""]
    lines += image(kernel)
    lines += [f"- `{kind}`: {what}" for kind, what in document.get("kinds", {}).items() if kind in results]
    lines += [f"- {name}: a loss of {loss:.4f}" for name, loss in document.get("bounds", {}).items()]
    lines += [""] * (lines[-1] != "") + [TEXT.format(plain), ""]
    head = ("kind", ">seeds", ">loss", f">minus {plain}", ">min", ">max", ">ms per step")
    rows = [_cells(kind, of, None if kind in _alone(document) else results[plain]) for kind, of in results.items()]
    losses = [run["loss"] for run in results[plain].values()]
    return [
        *lines,
        *md.table(head, rows),
        "",
        f"The loss of `{plain}` ranges from {min(losses):.4f} to {max(losses):.4f} over the seeds.",
        "",
    ]


def _head(document: Mapping[str, Any]) -> str:
    ranks = document.get("ranks", 1)
    where = document["device"] if ranks == 1 else f"{ranks} ranks ({document['device']})"
    model = ", ".join(f"{name} {value}" for name, value in document["model"].items())
    each = "" if ranks == 1 else ", batch size per rank"
    return f"{document['steps']} steps on {where}, PyTorch {document['torch']}; {model}{each}."


def _alone(document: Mapping[str, Any]) -> set[str]:
    """The kinds that are not compared with the plain one."""
    return {document.get("plain", PLAIN), *document.get("other_models", ())}


def _cells(kind: str, of: Mapping[str, Any], plain: Mapping[str, Any] | None) -> list[object]:
    losses, times = [run["loss"] for run in of.values()], [run["ms_a_step"] for run in of.values()]
    cells: list[object] = [kind, len(of), f"{mean(losses):.4f}"]
    if plain is None:
        cells += [None] * 3
    else:
        over = [run["loss"] - plain[seed]["loss"] for seed, run in of.items()]
        cells += [f"{value:+.4f}" for value in (mean(over), min(over), max(over))]
    return [*cells, md.figures(mean(times))]


def curve(of: Mapping[str, Any]) -> list[tuple[int, float]]:
    """The training loss averaged over the seeds: step and loss."""
    runs = [run["curve"] for run in of.values()]
    return [(points[0][0], mean(loss for _, loss in points)) for points in zip(*runs, strict=True)]


def chart(kernel: str, gpu: str, document: Mapping[str, Any]) -> Figure:
    """The training loss over steps and, if kinds differ by less than a line's width, its difference to the plain
    one's."""
    import matplotlib
    from matplotlib.figure import Figure

    results, plain = document["results"], document.get("plain", PLAIN)
    curves = {kind: curve(of) for kind, of in results.items()}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        for (kind, points), colour in zip(curves.items(), COLOURS, strict=False):
            steps, losses = zip(*points, strict=True)
            left.plot(steps, losses, color=colour, lw=1.4, label=kind)
            if kind == plain or kind not in _alone(document):
                alike = curve({seed: results[plain][seed] for seed in results[kind]})  # a kind may have fewer seeds
                right.plot(steps, _beside(losses, alike), color=colour, lw=1.4)
        for name, loss in document.get("bounds", {}).items():
            left.axhline(loss, color="black", lw=1, ls="--", label=name)
        for axes, title in ((left, "loss"), (right, f"loss minus that of {plain}")):
            axes.set(title=title, xlabel="step")
            axes.grid(color=GRID, lw=0.8)
        title = f"{kernel}: training on {gpu}"
        figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")
        figure.legend(
            loc="outside lower center", ncols=min(LABELS_A_LINE, len(curves) + len(document.get("bounds", {})))
        )
    return figure


def _beside(losses: Sequence[float], plain: Sequence[tuple[int, float]]) -> list[float]:
    return [loss - other for loss, (_, other) in zip(losses, plain, strict=True)]

"""The output of a running bench: a live progress bar on a terminal, one line per group elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from .. import roofline


class Progress:
    """A context manager around the groups of one kernel."""

    def __init__(self, kernel: str, groups: int, quiet: bool = False) -> None:
        self._kernel = kernel
        self._console = Console(soft_wrap=True, highlight=False, quiet=quiet)
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
        )
        self._task = self._bar.add_task(kernel, total=groups)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def line(self, text: str) -> None:
        """Prints a line about a step that is complete."""
        self._bar.update(self._task, advance=1)
        self._console.print(text, markup=False)

    def group(
        self,
        case: str,
        mode: str,
        rows: Sequence[Mapping[str, Any]],
        ceilings: roofline.Ceilings | None,
        spent: str = "",
    ) -> None:
        """Prints a line for a measured group: medians, shares of the roofline, and where the time went."""
        parts = []
        for row in rows:
            if row["status"] not in ("ok", "over-roofline"):
                parts.append(f"{row['implementation']} {row['status']}")
                continue
            seconds, cost = row["columns"][row["headline"]]["median_us"] * 1e-6, row["cost"]
            work = roofline.Cost.from_record(cost)
            share = roofline.percent_of_roofline(seconds, work, ceilings) if ceilings else None
            text = f"{row['implementation']} {roofline.microseconds(seconds)}"
            parts.append(text + (f" ({share:.1f} %)" if share else ""))
        line = f"{self._kernel} {mode:<7} {case}: " + ", ".join(parts)
        if spent:
            line += f" [{spent}]"
        self.line(line)
        for row in rows:
            if row["kind"] == "ours" and row["status"] not in ("ok", "skipped"):
                self._console.print(f"  {row['implementation']}: {row['reason']}", markup=False)


def spent_on(seconds: Mapping[str, float]) -> str:
    """Host time by stage in seconds, as text."""
    return f"{sum(seconds.values()):.1f} s: {', '.join(f'{name} {took:.1f}' for name, took in seconds.items())}"

"""GitHub-flavoured Markdown: tables, and the format of figures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

#: text of an empty table cell
NONE = "–"


#: Escape sequences of terminals (ECMA-48: CSI, OSC, and short ones) and other control characters.
_CONTROL = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]+[0-~]|[@-Z\\-_])|[\x00-\x08\x0b-\x1f\x7f]"
)


def printable(text: str) -> str:
    """The text without terminal escape sequences, which compiler messages may have: reports are read elsewhere."""
    return _CONTROL.sub("", text)


def sentence(text: str) -> str:
    """The text with a capital first letter: 'one NVIDIA H200' -> 'One NVIDIA H200'."""
    return text[:1].upper() + text[1:]


def cell(value: object) -> str:
    """Text escaped so that it cannot break its table."""
    return (
        NONE if value is None or value == "" else printable(str(value)).replace("|", "\\|").replace("\n", " ").strip()
    )


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a table. A heading that starts with '>' makes its column right-aligned."""
    names = [name.removeprefix(">") for name in head]
    rules = ["--:" if name.startswith(">") else "---" for name in head]
    body = ["| " + " | ".join(cell(value) for value in row) + " |" for row in rows]
    return ["| " + " | ".join(names) + " |", "|" + "|".join(rules) + "|", *body]


def details(summary: str, lines: Iterable[str]) -> list[str]:
    """A collapsed block."""
    return ["<details>", f"<summary>{summary}</summary>", "", *lines, "", "</details>"]


def figures(value: float | None, unit: str = "") -> str:
    """At least three significant digits and all digits of the integer part: 0.123, 1.23, 12.3, 123, 1234."""
    if value is None:
        return NONE
    size = abs(float(f"{value:.3g}"))  # 99.96 is shown as 100, not 100.0
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:.{digits}f}{unit}"


def interval(bounds: Sequence[float | None] | None) -> str:
    """'[1.23, 1.25]'."""
    return f"[{figures(bounds[0])}, {figures(bounds[1])}]" if bounds else NONE


def times(value: float, bounds: Sequence[float] | None = None) -> str:
    """'1.23× [1.22, 1.24]'; a third decimal near 1, where it decides the verdict."""
    digits = 3 if 0.95 < value < 1.05 else 2
    text = f"{value:.{digits}f}×"
    return f"{text} [{bounds[0]:.{digits}f}, {bounds[1]:.{digits}f}]" if bounds else text


def percent(value: float | None) -> str:
    """'97.3 %'."""
    return NONE if value is None else f"{value:.1f} %"


def size(value: float | None) -> str:
    """Bytes in binary units."""
    if value is None:
        return NONE
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(value) >= factor:
            return figures(value / factor, f" {unit}")
    return f"{value:.0f} B"


def prefixed(value: float, unit: str) -> str:
    """'131 MFLOP'."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return figures(value / factor, f" {prefix}{unit}")
    return figures(value, f" {unit}")


def span(values: Sequence[float | None] | None, unit: str) -> str:
    """'1755 to 1980 MHz', or a single figure if both ends are equal."""
    if not values or values[0] is None or values[-1] is None:
        return NONE
    low, high = f"{values[0]:.0f}", f"{values[-1]:.0f}"
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"

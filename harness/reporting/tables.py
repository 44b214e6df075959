"""Tables on the console: drawn by rich on a terminal, aligned text in a log."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints one table. A heading that starts with '>' makes its column right-aligned, as in `markdown.table`."""
    cells = [["" if value is None else str(value) for value in row] for row in rows]
    if sys.stdout.isatty():
        _draw(title, head, cells)
    else:
        print("\n".join(plain(title, head, cells)))


def plain(title: str, head: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table for a log: the title, the headings, the rows."""
    names = [name.removeprefix(">") for name in head]
    widths = [max(len(row[i]) for row in [names, *cells]) for i in range(len(names))]

    def line(row: Sequence[str]) -> str:
        pairs = zip(head, row, widths, strict=True)
        return "  ".join(f"{c:>{w}}" if h.startswith(">") else f"{c:<{w}}" for h, c, w in pairs).rstrip()

    return [title, line(names), *(line(row) for row in cells)]


def _draw(title: str, head: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for name in head:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left")
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)

"""Tables of host time: microseconds of the calling thread for a call of each implementation."""

from __future__ import annotations

from collections.abc import Sequence

from . import markdown as md
from .entries import HOST, HOST_COMPILED, Records, Row
from .findings import EAGER, is_pytorch, is_reference

# PyTorch's own implementations, and those made from the reference.
NOT_LIBRARIES = ("eager", "compile", "compile-max", "foreach", "sdpa-flash", "cudnn", "flex", "flex-flash")

WAYS = {
    "nograd": "forward without gradients",
    "fwd": "forward, saving tensors for the backward",
    "fwd+bwd": "forward and backward",
    "step": "step",
}

EXPLAINED = (
    "CPU time of the calling thread in µs per call, on inputs so small that the GPU is never the bottleneck: median of "
    "{rounds} of 40 calls, implementations interleaved, in eager mode unless labelled compiled. *Forward and "
    "backward* includes waiting for autograd's thread. A *ratio* is this kernel's time divided by the other's."
)


def way(row: Row) -> str:
    """A row's kind of call in words."""
    name = row.mode.removeprefix(HOST)
    plain = name.removesuffix(HOST_COMPILED)
    return WAYS.get(plain, plain) + (", compiled" if plain != name else "")


def groups(records: Records, kernel: str | None = None) -> list[list[Row]]:
    """Host rows by kernel, case and kind of call, in the order of the records."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in records.rows:
        if row.host and kernel in (None, row.kernel):
            found.setdefault(row.group, []).append(row)
    return list(found.values())


def _explained(found: Sequence[Sequence[Row]]) -> str:
    """The text above a table, with the number of rounds, of which a quick bench has fewer."""
    numbers = [column["n"] for rows in found for row in rows if row.ok and (column := row.column())]
    return EXPLAINED.format(rounds=md.span((min(numbers), max(numbers)), "rounds") if numbers else "rounds")


def section(records: Records, kernel: str) -> list[str]:
    """The table of one kernel: a row per kind of call, a column per implementation. Empty without host rows."""
    found = groups(records, kernel)
    if not found:
        return []
    names = list(dict.fromkeys(r.implementation for rows in found for r in sorted(rows, key=lambda r: not r.ours)))
    names = [n for n in names if any(r.implementation == n and r.ok for rows in found for r in rows)]
    lines = ["## Host time per call", "", _explained(found), ""]
    table = []
    for rows in found:
        medians = {r.implementation: _median(r) for r in rows if r.ok}
        table.append([way(rows[0]), rows[0].case, *(medians.get(name) for name in names)])
    ours = {r.implementation for rows in found for r in rows if r.ours}
    head = ("call", "case", *(f">**{name}**" if name in ours else f">{name}" for name in names))
    lines += [*md.table(head, table), ""]
    absent = dict.fromkeys(
        f"- {r.implementation}, {way(r)}: **{r.status}**, {r.get('reason', '')}"
        for rows in found
        for r in rows
        if not r.ok
    )
    said = [f"- {r.implementation}, {way(r)}: {w}" for rows in found for r in rows for w in r.get("warnings", [])]
    return [*lines, *absent, *said, *([""] if absent or said else [])]


def overview(records: Records) -> list[str]:
    """The table of all kernels: our best against PyTorch, or else the reference, and the fastest library. Empty without
    host rows."""
    table = _against_others(records)
    if not table:
        return []
    return ["## Host time per call", "", _explained(groups(records)), "", *md.table(("kernel", *HEAD), table), ""]


def short(records: Records) -> list[str]:
    """The table of one kernel for its README, as in `overview`."""
    table = [line[1:] for line in _against_others(records)]
    return ["**Host time per call**", "", *md.table(HEAD, table), ""] if table else []


HEAD = ("call", ">this kernel, µs", ">PyTorch, µs", ">ratio to it", ">fastest library, µs", ">ratio to it")


def _against_others(records: Records) -> list[list[object]]:
    table: list[list[object]] = []
    for rows in groups(records):
        if rows[0].mode.endswith(HOST_COMPILED):
            continue
        ours = _fastest([r for r in rows if r.ours])
        if ours is None:
            continue
        pytorch = _fastest([r for r in rows if is_pytorch(r)]) or _fastest(
            [r for r in rows if r.implementation == EAGER]
        )
        own = [r for r in rows if r.ours or is_pytorch(r) or r.implementation in NOT_LIBRARIES]
        library = _fastest([r for r in rows if r not in own])
        table.append(
            [
                ours.kernel,
                way(ours),
                _median(ours),
                *_against(ours, pytorch),
                *_against(ours, library),
            ]
        )
    return table


def _against(ours: Row, other: Row | None) -> tuple[str | None, str | None]:
    """The other's time, and ours relative to it."""
    if other is None:
        return None, None
    name = f"{other.implementation} (the reference)" if is_reference(other) else other.implementation
    return f"{name} {_median(other)}", f"{ours.seconds() / other.seconds():.2f}"


def _fastest(rows: Sequence[Row]) -> Row | None:
    return min((r for r in rows if r.ok), key=lambda r: r.seconds(), default=None)


def _median(row: Row) -> str:
    return f"{1e6 * row.seconds():.1f}"

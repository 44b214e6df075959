"""The link speed below which an exchange with compression pays off, from its time without transfers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import roofline
from . import markdown as md
from .entries import Row
from .findings import Finding, cost_of

HEAD = (
    "case", "mode", "implementation", ">bytes sent", ">bytes uncompressed", ">kernels alone", ">break-even link speed",
    "speed of the uncompressed exchange", ">measured speed-up over uncompressed",
)  # fmt: skip

TITLE = "## Link speeds at which compression pays off"

TEXT = (
    "*Bytes sent* are the bytes that one GPU sends, *bytes uncompressed* those of the uncompressed exchange that the "
    "last column names. *Kernels alone* is the time with transfers replaced by local copies. The *break-even link "
    "speed* per direction is (bytes saved) / (time of the kernels alone): on a faster link the kernels take longer "
    "than the saved transfers. This assumes that transfers do not overlap with kernels and take time proportional to "
    "their bytes; for large messages the true break-even speed is therefore at least this high. The next column gives "
    "the speed that the uncompressed exchange reached in the same rounds, and whether compression pays off at it. The "
    "last column is the measured result on these links."
)


def section(found: Sequence[Finding]) -> list[str]:
    """The table of a kernel; empty if no row has a baseline without compression."""
    rows = [(f, row) for f in found for row in f.rows if row.ok and _plain(row) and _local_us(row)]
    if not rows:
        return []
    return [TITLE, "", TEXT, "", *md.table(HEAD, [_cells(*pair) for pair in rows]), ""]


def break_even(row: Row) -> float:
    """Bytes per second and direction below which compression pays off; 0 if it saves no bytes."""
    saved = _plain(row)["link_bytes"] - cost_of(row).link_bytes
    return max(0.0, saved) / (1e-6 * _local_us(row))


def _plain(row: Row) -> Mapping[str, Any]:
    return row.get("several", {}).get("plain") or {}


def _local_us(row: Row) -> float:
    return row.get("several", {}).get("local_median_us") or 0.0


def _uncompressed_speed(finding: Finding, compressed: Row) -> float | None:
    """Bytes per second and direction of the exchange without compression in the same run."""
    plain = _plain(compressed)
    for row in finding.rows:
        if row.implementation == plain["implementation"] and row.ok and row.run.id == compressed.run.id:
            return plain["link_bytes"] / row.seconds()
    return None


def _cells(finding: Finding, row: Row) -> list[object]:
    plain, speed = _plain(row), break_even(row)
    link = _uncompressed_speed(finding, row)
    ratio = row.get("ratios", {}).get(plain["implementation"])
    over = f"{md.times(ratio['median'], ratio['ci95'])} {plain['implementation']}" if ratio else None
    return [
        finding.case,
        finding.mode,
        f"**{row.implementation}**",
        md.size(cost_of(row).link_bytes),
        md.size(plain["link_bytes"]),
        roofline.microseconds(1e-6 * _local_us(row)),
        f"{1e-9 * speed:.0f} GB/s" if speed else "none",
        f"{1e-9 * link:.0f} GB/s: {'pays off' if speed > link else 'does not pay off by this bound'}" if link else None,
        over,
    ]

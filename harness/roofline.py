"""The roofline: a lower bound on the time of a cost, and how close a measurement comes to it.

    floor = max(bytes / bandwidth, FLOPs / rate of each pipe, bytes over a link / its rate)

The bytes and FLOPs are the compulsory work of `Cost`, so the floor is a bound on any implementation and not an
estimate of this one. Ceilings have two sources: `gpus.toml` holds the datasheet's (dense), `calibrate` measures those
of this card. The measured ones decide; the datasheet's are shown beside them.

**More than 100 %.** A measurement below its floor is an error in the timing or in the cost (`over_roofline`), except
for DRAM traffic that L2 hits avoid. How much that can be depends on the column:

cold    nothing: L2 is flushed by writing, so it is full of dirty lines. Each line that a kernel loads or writes evicts
        one of them, so DRAM moves at least the compulsory bytes, however small the problem. The same holds for cupti,
        which times cold calls.
graph   at most half of the bytes, and no more than L2 holds: it rotates through twice the L2, so at best every second
        line is still there.
warm    all that L2 holds: a line that stays from one call to the next saves one transfer, its read or its write-back.

So a problem that fits in L2 has no memory floor in the warm column, and half of one in a graph; the compute floor
holds in every column. The percentages of a report refer to the whole floor: where they exceed 100 without an error,
the reason is L2, and the report marks it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = Path(__file__).with_name("gpus.toml")

#: Possible limits of the floor, besides a pipe by its name: DRAM, the links between GPUs, the link to the host.
MEMORY, LINK, HOST = "memory", "link", "host"
#: DRAM bandwidths that a run records: of a copy, of a read, and of two reads and a write. The highest is the ceiling.
BANDWIDTHS = ("bandwidth", "bandwidth_read", "bandwidth_2r1w")
#: Measured ceilings are medians of noisy measurements: exceeding them by this much is not yet an error. A GEMM is
#: power-limited, so its rate is that of the clock at which it was measured (792 and 701 TFLOP/s at two sizes on one
#: card); a kernel that leaves the tensor cores idle more often runs at a higher clock.
MARGIN, COMPUTE_MARGIN = {MEMORY: 0.02, LINK: 0.05, HOST: 0.05}, 0.1
COLUMNS = ("cold", "warm", "graph", "cupti")


@dataclass(frozen=True)
class Cost:
    """Compulsory work of one GPU: every input read once, every output written once, the useful FLOPs.

    flops       by pipe: "fp32" is the CUDA cores; "tf32", "bf16", "fp16" and "fp8" are the tensor cores. A plain number
                is the FLOPs of `pipe`.
    bytes       to and from DRAM
    link_bytes  that this GPU sends to others or receives from them, whichever is more: links are full duplex
    host_bytes  the same for the link to the host
    """

    flops: Mapping[str, float] | float
    bytes: int
    pipe: InitVar[str] = "fp32"
    link_bytes: int = 0
    host_bytes: int = 0

    def __post_init__(self, pipe: str) -> None:
        if not isinstance(self.flops, Mapping):
            object.__setattr__(self, "flops", {pipe: self.flops})

    @property
    def by_pipe(self) -> Mapping[str, float]:
        assert isinstance(self.flops, Mapping)
        return self.flops

    @property
    def total_flops(self) -> float:
        return sum(self.by_pipe.values())

    @property
    def main_pipe(self) -> str:
        """The pipe with the most FLOPs."""
        return max(self.by_pipe, key=self.by_pipe.__getitem__, default="fp32")

    @classmethod
    def from_record(cls, entry: Mapping[str, Any]) -> Cost:
        """The `cost` of a row. Before schema 2 it had the FLOPs of one pipe."""
        links = {name: entry.get(name, 0) for name in ("link_bytes", "host_bytes")}
        return cls(entry.get("flops", 0), entry.get("bytes", 0), entry.get("pipe", "fp32"), **links)

    def to_record(self) -> dict[str, Any]:
        """The `cost` object of a row; links are included where they are used."""
        links = {name: getattr(self, name) for name in ("link_bytes", "host_bytes") if getattr(self, name)}
        return {"flops": dict(self.by_pipe), "bytes": self.bytes, **links}


@dataclass(frozen=True)
class Ceilings:
    """`bandwidth` in bytes per second; `flops` by pipe ("fp32", "tf32", "bf16", "fp16", "fp8") in FLOP per second;
    `link` and `host` in bytes per second and direction, None where there is none. `source` says where the figures come
    from, except those named in `promised`, which are the datasheet's."""

    bandwidth: float
    flops: Mapping[str, float]
    source: str = "measured"
    link: float | None = None
    host: float | None = None
    promised: tuple[str, ...] = ()

    @classmethod
    def from_record(cls, entry: Mapping[str, Any] | None, source: str) -> Ceilings | None:
        """The `ceilings.measured` or `ceilings.datasheet` of a run, None where the record has none."""
        bandwidths = [float(entry[name]) for name in BANDWIDTHS if entry.get(name)] if entry else []
        if not entry or not bandwidths:
            return None
        flops = {pipe: float(rate) for pipe, rate in (entry.get("flops") or {}).items() if rate}
        return cls(max(bandwidths), flops, source, entry.get("link"), entry.get("host"))

    def with_links_of(self, datasheet: Ceilings | None) -> Ceilings:
        """These, with the datasheet's links where none were measured: that requires several GPUs."""
        if datasheet is None:
            return self
        promised = tuple(name for name in (LINK, HOST) if getattr(datasheet, name) and not getattr(self, name))
        return replace(self, link=self.link or datasheet.link, host=self.host or datasheet.host, promised=promised)

    def source_of(self, limit: str) -> str:
        """Where the ceiling of a floor's `limit` comes from."""
        return "datasheet" if limit in self.promised else self.source

    def to_record(self) -> dict[str, Any]:
        """The `ceilings` object of the record."""
        links = {name: rate for name, rate in (("link", self.link), ("host", self.host)) if rate}
        return {"bandwidth": self.bandwidth, "flops": dict(self.flops), **links}


@dataclass(frozen=True)
class Gpu:
    """One row of `gpus.toml`, in SI units."""

    key: str
    title: str
    names: tuple[str, ...]
    capability: tuple[int, int]
    sms: int
    memory_bytes: float
    l2_bytes: int
    ceilings: Ceilings
    source: str
    url: str


@dataclass(frozen=True)
class Floor:
    """The least time, and its limit: MEMORY, LINK, HOST or a pipe by its name."""

    seconds: float
    limit: str


@cache
def table() -> dict[str, tuple[Gpu, ...]]:
    """The GPUs by key. `get` returns the first board of a key when no device name decides between them."""
    with TABLE.open("rb") as file:
        rows = tomllib.load(file)
    return {key: tuple(_gpu(key, board) for board in _boards(row)) for key, row in rows.items()}


def _boards(row: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    yield dict(row)
    for variant in row.get("variants", ()):
        yield {**row, **variant}


def _gpu(key: str, row: Mapping[str, Any]) -> Gpu:
    flops = {pipe: rate * 1e12 for pipe, rate in row["tflops"].items()}
    return Gpu(
        key=key,
        title=row["title"],
        names=tuple(row["names"]),
        capability=(row["capability"][0], row["capability"][1]),
        sms=row["sms"],
        memory_bytes=row["memory_gib"] * 2**30,
        l2_bytes=int(row["l2_mib"] * 2**20),
        ceilings=Ceilings(
            row["bandwidth_gbs"] * 1e9, flops, row["source"], _gb(row.get("link_gbs")), _gb(row.get("host_gbs"))
        ),
        source=row["source"],
        url=row["url"],
    )


def _gb(rate: float | None) -> float | None:
    return None if rate is None else rate * 1e9


def keys() -> list[str]:
    """The names that --gpu accepts besides auto."""
    return list(table())


def identify(device_name: str, memory_bytes: float | None = None) -> str | None:
    """The key of the card with this device name and memory, or None for one that is not in the table.

    The name must match as a whole. If the memory is given it must be the nominal size, less what the driver and ECC
    reserve: a slice of a card, or a modified one, is another card.
    """
    board = _board(device_name, memory_bytes)
    return board.key if board else None


def _board(device_name: str, memory_bytes: float | None) -> Gpu | None:
    for gpu in (gpu for boards in table().values() for gpu in boards):
        named = any(re.fullmatch(name, device_name.strip()) for name in gpu.names)
        if named and (memory_bytes is None or 0.85 <= memory_bytes / gpu.memory_bytes <= 1.05):
            return gpu
    return None


def get(key: str, device_name: str | None = None) -> Gpu:
    """The card of that key, and the board of that device name if it has several. ValueError lists the known keys."""
    if key not in table():
        raise ValueError(f"unknown GPU {key!r}; known: {', '.join(keys())}")
    board = _board(device_name, None) if device_name else None
    return board if board and board.key == key else table()[key][0]


def floor_seconds(cost: Cost, ceilings: Ceilings) -> Floor:
    """The least time for this work: the largest of its terms. A term without a ceiling is left out."""
    terms = _terms(cost, ceilings)
    limit = max(terms, key=terms.__getitem__)  # memory is first, so it is the limit where all are zero
    return Floor(terms[limit], limit)


def _terms(cost: Cost, ceilings: Ceilings) -> dict[str, float]:
    """Seconds by possible limit of the floor."""
    terms = {MEMORY: cost.bytes / ceilings.bandwidth}
    for name, moved, bandwidth in ((LINK, cost.link_bytes, ceilings.link), (HOST, cost.host_bytes, ceilings.host)):
        if bandwidth:
            terms[name] = moved / bandwidth
    for pipe, flops in cost.by_pipe.items():
        if rate := ceilings.flops.get(pipe):
            terms[pipe] = flops / rate
    return terms


def percent_of_roofline(seconds: float, cost: Cost, ceilings: Ceilings) -> float | None:
    """100 · floor / time; None where the work or the time is zero."""
    floor = floor_seconds(cost, ceilings).seconds
    return 100 * floor / seconds if floor > 0 and seconds > 0 else None


def bytes_that_must_move(bytes: float, column: str, l2_bytes: float) -> float:
    """The compulsory bytes that remain when L2 has avoided as many as it can in that column (see the module)."""
    if column not in COLUMNS:
        raise ValueError(f"unknown column {column!r}; known: {', '.join(COLUMNS)}")
    kept = {"warm": bytes, "graph": bytes / 2}.get(column, 0)
    return bytes - min(l2_bytes, kept)


def over_roofline(
    seconds: float, cost: Cost, ceilings: Ceilings, *, column: str = "cold", l2_bytes: float = 0
) -> str | None:
    """Why this time is impossible, or None. Pass the *measured* ceilings; `column` is one of COLUMNS.

    Each term has a margin of its own, so the largest is not always the one that is violated.
    """
    moved = replace(cost, bytes=int(bytes_that_must_move(cost.bytes, column, l2_bytes)), pipe=cost.main_pipe)
    terms = _terms(moved, ceilings)
    broken = {name: least for name, least in terms.items() if seconds < least * (1 - MARGIN.get(name, COMPUTE_MARGIN))}
    if not broken:
        return None
    floor = Floor(*max((least, name) for name, least in broken.items()))
    amounts = {MEMORY: moved.bytes, LINK: moved.link_bytes, HOST: moved.host_bytes}
    rates = {MEMORY: ceilings.bandwidth, LINK: ceilings.link, HOST: ceilings.host}
    if floor.limit in amounts:
        over = "" if floor.limit == MEMORY else f" over the {floor.limit}"
        work, rate = f"{amounts[floor.limit]:.4g} bytes{over}", gbps(rates[floor.limit] or 0)
    else:
        work, rate = f"{moved.by_pipe[floor.limit]:.4g} {floor.limit} FLOPs", tflops(ceilings.flops[floor.limit])
    return (
        f"{column}: {microseconds(seconds)} for {work} is {100 * floor.seconds / seconds:.0f} % of the ceiling "
        f"({rate}, {ceilings.source_of(floor.limit)}), whose floor is {microseconds(floor.seconds)}: the timing or the "
        "cost is wrong"
    )


def gbps(bytes_per_second: float) -> str:
    """'4254 GB/s', with decimals only where they are significant."""
    return f"{_figures(bytes_per_second / 1e9)} GB/s"


def tflops(flop_per_second: float) -> str:
    """'782 TFLOP/s'."""
    return f"{_figures(flop_per_second / 1e12)} TFLOP/s"


def microseconds(seconds: float) -> str:
    """'12.3 µs', or milliseconds from 10 ms on."""
    us = seconds * 1e6
    return f"{_figures(us / 1e3)} ms" if us >= 1e4 else f"{_figures(us)} µs"


def rate(items: float, seconds: float, unit: str) -> str:
    """'1.52 G rows/s'."""
    value = items / seconds
    for factor, prefix in ((1e12, "T "), (1e9, "G "), (1e6, "M "), (1e3, "k ")):
        if value >= factor:
            return f"{_figures(value / factor)} {prefix}{unit}/s"
    return f"{_figures(value)} {unit}/s"


def rate_of(seconds: float, cost: Cost, limit: str) -> float:
    """Compulsory bytes per second where DRAM or a link is the limit, useful FLOPs per second where a pipe is."""
    moved = {MEMORY: cost.bytes, LINK: cost.link_bytes, HOST: cost.host_bytes}
    return moved.get(limit, cost.total_flops) / seconds


def throughput(seconds: float, cost: Cost, limit: str) -> str:
    """`rate_of` in GB/s or TFLOP/s."""
    rate = rate_of(seconds, cost, limit)
    return gbps(rate) if limit in MARGIN else tflops(rate)


def _figures(value: float) -> str:
    """At least three significant figures, and all digits before the point."""
    magnitude = abs(float(f"{value:.3g}"))  # 99.96 is shown as 100, not 100.0
    return f"{value:.0f}" if magnitude >= 100 else f"{value:.1f}" if magnitude >= 10 else f"{value:.2f}"

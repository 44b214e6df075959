"""The results of each case and mode: our best implementation, its best peer, its distance from the roofline.

Pages, charts and the README block all use these, so that each figure is computed in one place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..compaction import ratio_over
from ..roofline import HOST, LINK, MEMORY, Ceilings, Cost, floor_seconds, percent_of_roofline, rate_of
from . import declared
from .entries import Records, Row, Run

#: the reference, and the reference under torch.compile
EAGER, COMPILES = "eager", ("compile", "compile-max")
#: the implementation of a call that does not select one
DEFAULT = "auto"
#: Names of what a PyTorch user would write, for records whose rows do not say so themselves.
PYTORCH = frozenset({"torch", "fused", "sdpa-flash", "cudnn", "all-reduce"})
#: A peer with one of these statuses should have run and failed, so the best of the others may not be the best peer.
FAILED = frozenset({"error", "oom", "crashed", "wrong", "over-roofline"})
#: the order in which modes are shown; others follow
MODES = ("fwd", "bwd", "fwd+bwd", "step", "train")


@dataclass(frozen=True)
class Speedup:
    """Time of `peer` over ours, paired by round. `row` is the peer's, if there is one. `unthrottled` is the same over
    the rounds without throttling, if there were others: median, interval and number of rounds."""

    peer: str
    median: float
    low: float
    high: float
    row: Row | None = field(default=None, compare=False, repr=False)
    unthrottled: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    @property
    def without_throttling(self) -> Speedup | None:
        """The speed-up over the rounds without throttling, if the GPU throttled in some rounds but not in all."""
        if not self.unthrottled:
            return None
        low, high = self.unthrottled["ci95"]
        return replace(self, median=self.unthrottled["median"], low=low, high=high, unthrottled=None)

    @property
    def pytorch(self) -> bool:
        """Whether the peer is what a PyTorch user would write."""
        return self.row is not None and is_pytorch(self.row)

    @property
    def reference(self) -> bool:
        """Whether it is over the oracle's own arithmetic, which nobody would write, and which is no peer."""
        return self.peer == EAGER and not self.pytorch

    @property
    def library(self) -> bool:
        """Whether the peer is a hand-written kernel."""
        return self.pytorch or self.other_library

    @property
    def other_library(self) -> bool:
        """Whether the peer is a kernel of another library than PyTorch."""
        return not self.pytorch and self.peer not in (EAGER, *COMPILES)


@dataclass(frozen=True)
class Finding:
    """One case and mode of one kernel. `best` is ours: the default version ("auto") or, if that was not measured in the
    run, the fastest version that was; None if none was.
    `failed` are the peers that should have run with it and failed, except the reference, and `untimed` those that ran
    but have no time in `column`, e.g. since a CUDA graph cannot capture them. `absent` are peers that are declared for
    the kernel now but were not in the run, which was of `chosen` implementations or is older."""

    kernel: str
    case: str
    mode: str
    rows: tuple[Row, ...]
    best: Row | None
    column: str
    speedups: tuple[Speedup, ...]
    failed: tuple[Row, ...] = ()
    untimed: tuple[Row, ...] = ()
    absent: tuple[str, ...] = ()
    chosen: bool = False

    @property
    def left_out(self) -> tuple[str, ...]:
        """The peers that a run of chosen implementations did not measure, one of which may be the best."""
        return self.absent if self.chosen else ()

    @property
    def unmeasured(self) -> tuple[Row, ...]:
        """The peers that should have a time in `column` and have none: one of them may be the fastest."""
        return self.failed + self.untimed

    @property
    def undecided(self) -> bool:
        """Whether the best peer is unknown."""
        return bool(self.unmeasured or self.left_out)

    @property
    def run(self) -> Run:
        return (self.best or self.rows[0]).run

    @property
    def measured(self) -> Ceilings | None:
        ceilings = Ceilings.from_record(self.run.ceilings.get("measured"), "measured")
        return ceilings and ceilings.with_links_of(self.datasheet)

    @property
    def datasheet(self) -> Ceilings | None:
        return Ceilings.from_record(self.run.ceilings.get("datasheet"), "datasheet")

    @property
    def cost(self) -> Cost:
        return cost_of(self.best or self.rows[0])

    @property
    def limit(self) -> str:
        """The limit that sets the floor, at the measured ceilings if there are any."""
        ceilings = self.measured or self.datasheet
        if ceilings is None:
            return MEMORY
        return floor_seconds(self.cost, ceilings).limit

    @property
    def intensity(self) -> float:
        """FLOPs per compulsory byte."""
        return self.cost.total_flops / self.cost.bytes if self.cost.bytes else math.inf

    @property
    def over_best_peer(self) -> Speedup | None:
        return min((s for s in self.speedups if not s.reference), key=lambda s: s.median, default=None)

    @property
    def over_pytorch(self) -> Speedup | None:
        """The speed-up over what a PyTorch user would write; the fastest, if there are several ways."""
        return min((s for s in self.speedups if s.pytorch), key=lambda s: s.median, default=None)

    @property
    def over_reference(self) -> Speedup | None:
        """The speed-up over the oracle's own arithmetic."""
        return next((s for s in self.speedups if s.reference), None)

    @property
    def verdict(self) -> str | None:
        """The verdict; None if a peer failed, lacks this column or was left out, since it may be the best."""
        best = None if self.undecided else self.over_best_peer
        return verdict(best.median) if best else None

    def seconds(self, row: Row) -> float | None:
        """Median of a row in this finding's column; None if that was not measured."""
        return row.seconds(self.column) if row.ok and row.column(self.column) else None

    def percent(self, row: Row, ceilings: Ceilings | None) -> float | None:
        """Percentage of the roofline that a row reaches in this finding's column."""
        seconds = self.seconds(row)
        return percent_of_roofline(seconds, cost_of(row), ceilings) if seconds and ceilings else None

    def shares(self) -> dict[str, float]:
        """Percent of the measured roofline by implementation, for those measured in this finding's column."""
        found = {row.implementation: self.percent(row, self.measured) for row in self.rows}
        return {name: share for name, share in found.items() if share is not None}

    def rate(self, row: Row) -> float | None:
        """Bytes per second or FLOP per second, according to the limit."""
        seconds = self.seconds(row)
        return rate_of(seconds, cost_of(row), self.limit) if seconds else None

    def ceiling(self, ceilings: Ceilings | None) -> float | None:
        """The ceiling in the unit of `rate`."""
        if ceilings is None:
            return None
        others = {MEMORY: ceilings.bandwidth, LINK: ceilings.link, HOST: ceilings.host}
        return others[self.limit] if self.limit in others else ceilings.flops.get(self.limit)

    def of_yardsticks(self) -> list[tuple[str, float]]:
        """Our rate as a fraction of each yardstick's in the same run."""
        found = []
        for row in self.rows:
            if self.best and row.yardstick and row.run.id == self.best.run.id:
                ours, theirs = self.rate(self.best), self.rate(row)
                if ours and theirs:
                    found.append((row.implementation, ours / theirs))
        return found

    def peer(self) -> Row | None:
        """The row of the best peer in the run, if it is still current."""
        best = self.over_best_peer
        rows = (row for row in self.rows if row.ok and row.run.id == self.run.id)
        return next((row for row in rows if best and row.implementation == best.peer), None)


def is_pytorch(row: Row) -> bool:
    """Whether a row is what a PyTorch user would write: from its own field or, in older records, by its name."""
    declared = row.data.get("pytorch")
    if declared is not None:
        return bool(declared)
    name = row.implementation
    return name in PYTORCH or name.startswith("torch-") or (row.kernel, name) == ("gelu", EAGER)


def is_reference(row: Row) -> bool:
    """Whether a row is the oracle's own arithmetic, which nobody would write."""
    return row.implementation == EAGER and not is_pytorch(row)


def _is_peer(row: Row) -> bool:
    return not row.ours and not row.yardstick and not is_reference(row)


def cost_of(row: Row) -> Cost:
    """The compulsory work of a row's case."""
    return Cost.from_record(row.get("cost", {}))


def verdict(speedup: float) -> str:
    """The verdict by the median of the speed-up over the best peer of the same run."""
    if speedup > 1.5:
        return "excellent"
    return "good" if speedup >= 1.2 else "measured" if speedup >= 1 else "investigate"


def findings(records: Records) -> list[Finding]:
    """One finding per kernel, case and mode: kernels by name, forward before backward, cases in the order of the
    records. Host time is not included: `host.py` has its tables."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in sorted(records.rows, key=lambda row: (row.kernel, _place(row.mode))):
        if not row.host:
            groups.setdefault(row.group, []).append(row)
    return [_finding(records, rows) for rows in groups.values()]


def modes_of(found: Iterable[Finding]) -> list[str]:
    """The modes of findings, forward before backward."""
    return sorted(dict.fromkeys(f.mode for f in found), key=_place)


def _place(mode: str) -> int:
    return MODES.index(mode) if mode in MODES else len(MODES)


def _finding(records: Records, rows: Sequence[Row]) -> Finding:
    ours = [row for row in rows if row.ours and row.ok]
    best = min(ours, key=lambda row: row.seconds(), default=None)
    # The default version, if it was measured in the same run as the fastest.
    best = next((row for row in ours if best and row.implementation == DEFAULT and row.run.id == best.run.id), best)
    column = (best.headline if best else next((r.headline for r in rows if r.ok), None)) or "cold"
    kernel, case, mode = rows[0].group
    ordered = sorted(rows, key=lambda row: not row.ours)
    siblings = {row.implementation: row for row in records.siblings(best)} if best else {}
    failed = tuple(row for row in siblings.values() if _is_peer(row) and row.status in FAILED)
    untimed = tuple(
        row for row in siblings.values() if _is_peer(row) and row.status == "ok" and row.column(column) is None
    )
    speedups = tuple(_speedups(records, best, siblings))
    absent, chosen = (_absent(records, best, siblings), bool(best.run.options.get("impl"))) if best else ((), False)
    return Finding(kernel, case, mode, tuple(ordered), best, column, speedups, failed, untimed, absent, chosen)


def _absent(records: Records, best: Row, siblings: Mapping[str, Row]) -> tuple[str, ...]:
    """Peers that are declared now and have neither a row nor a ratio of the run: compaction drops the row of one that
    was measured again later. Those that do not support the case are left out: some run has skipped them, or it uses
    several GPUs and they are made from the reference, which uses one."""
    rows = (row for row in (*records.rows, *records.superseded) if row.group == best.group)
    none = {row.implementation for row in rows if row.status == "skipped"}
    none |= set(declared.FROM_REFERENCE.values()) if best.run.world_size > 1 else set()
    known = {*siblings, *best.get("ratios", {}), *none}
    return tuple(name for name in declared.peers(best.kernel) if name not in known)


def _speedups(records: Records, best: Row | None, siblings: Mapping[str, Row]) -> list[Speedup]:
    """Speed-ups over each baseline measured in the same run whose results were correct."""
    if best is None:
        return []
    ours = {row.implementation for row in records.rows if row.kernel == best.kernel and row.ours}
    latest = {row.implementation: row for row in records.rows if row.group == best.group}
    found = []
    for name, ratio in best.get("ratios", {}).items():
        sibling = siblings.get(name)
        peer = sibling.status == "ok" and not sibling.ours and not sibling.yardstick if sibling else name not in ours
        if peer and (ends := _interval(ratio)):
            row = sibling or latest.get(name)
            found.append(Speedup(name, ratio["median"], ends[0], ends[1], row, ratio.get("unthrottled")))
    return found


def in_column(finding: Finding, column: str) -> Finding:
    """The same finding in another column that was measured, with the speed-ups in that column, from the samples of the
    same run."""
    best = finding.best
    assert best is not None
    rows = {s.peer: s.row for s in finding.speedups} | {row.implementation: row for row in finding.untimed}
    mine = {**best.data, "headline": column}
    found = []
    for name, row in rows.items():
        ratio = ratio_over(mine, row.data) if row is not None and row.run.id == best.run.id else None
        if ratio and (ends := _interval(ratio)):
            found.append(Speedup(name, ratio["median"], ends[0], ends[1], row, ratio.get("unthrottled")))
    timed = {speedup.peer for speedup in found}
    untimed = tuple(row for name, row in rows.items() if row is not None and _is_peer(row) and name not in timed)
    return replace(finding, column=column, speedups=tuple(found), untimed=untimed)


def _interval(ratio: dict[str, Any]) -> tuple[float, ...]:
    low, high = ratio.get("ci95") or (None, None)
    return (low, high) if ratio.get("median") and low and high else ()


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean. Needs at least one value."""
    return math.exp(sum(map(math.log, values)) / len(values))

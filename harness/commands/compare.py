"""`compare`: two sets of records, row by row: FASTER, SAME, SLOWER or UNSURE (`verdicts` has the rule).

Differences between the two machines are printed first, since they may explain more than a change of a kernel. Where
both sides have measured a baseline such as eager, the change relative to it is shown beside the verdict: if clocks were
lower on one side, everything is slower there but that ratio has not changed. The verdict itself is about time.

Exit codes: 0 nothing that `--fail-on` names was found, 1 something was, 2 misuse, 3 a record that cannot be read. The
default is `slower`, which includes a row that was measured before and fails now.

With `--relative PEER` rows are compared by their time over PEER's of the same run, so that a slower machine does not
count as a slower kernel; a row without that peer on both sides is UNSURE.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import git, record
from ..registry import ROOT
from ..reporting import markdown as md
from ..reporting.entries import Records, Row
from ..reporting.verdicts import (
    FASTER,
    HOST_THRESHOLD,
    SAME,
    SLOWER,
    THRESHOLD,
    UNSURE,
    Ratio,
    against,
    classify,
    noise_floor,
    ratio_of_medians,
)

FAILED = "FAILED"
#: name for `--fail-on` -> predicate of a Comparison
FAIL_ON: dict[str, Callable[[Comparison], bool]] = {
    "slower": lambda found: any(pair.verdict in (SLOWER, FAILED) and not pair.current.host for pair in found.pairs),
    "unsure": lambda found: any(pair.verdict == UNSURE for pair in found.pairs),
    "missing": lambda found: any(missing.side == "baseline" for missing in found.missing),
    "memory": lambda found: any(growth.judged for growth in found.memory),
    "host": lambda found: any(pair.verdict in (SLOWER, FAILED) and pair.current.host for pair in found.pairs),
}
MEMORY = {"peak": "peak_memory_bytes", "saved for the backward": "saved_bytes"}
LEAST_GROWTH = 1 << 20  # bytes: less is rounding by an allocator
ORDER = (SLOWER, FAILED, UNSURE, FASTER, SAME)
BROKEN = ("oom", "error", "wrong", "crashed", "over-roofline")

#: compared properties of the two sides' runs: title -> function of a run
FACTS: dict[str, Any] = {
    "GPU": lambda run: run.gpu.get("name"),
    "GPUs": lambda run: run.world_size,
    "GPU (UUID)": lambda run: run.gpu.get("uuid"),
    "driver": lambda run: run.gpu.get("driver"),
    "maximum SM clock (MHz)": lambda run: run.gpu.get("sm_clock_max_mhz"),
    "power limit (W)": lambda run: run.gpu.get("power_limit_w"),
    "PyTorch": lambda run: run.environment.get("torch"),
    "Triton": lambda run: run.environment.get("triton"),
    "CUDA": lambda run: run.environment.get("cuda"),
    "Python": lambda run: run.environment.get("python"),
    "timer": lambda run: run.options.get("timer"),
    "quick": lambda run: run.options.get("quick"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    where = "FILE|DIR|GIT-REV"
    parser.add_argument("--baseline", required=True, metavar=where, help="records to compare with")
    parser.add_argument(
        "--current", default=str(ROOT / "reports"), metavar=where, help="new records (default: reports/)"
    )
    parser.add_argument(
        "--threshold",
        type=float,
        default=100 * THRESHOLD,
        metavar="PERCENT",
        help="smallest change that counts (default: 3)",
    )
    parser.add_argument("--all", action="store_true", help="compare peers too, not only this repository's kernels")
    parser.add_argument(
        "--fail-on",
        type=_fail_on,
        default=("slower",),
        metavar="WHAT[,WHAT]",
        help=f"exit with code 1 on any of these: {', '.join(FAIL_ON)} (default: slower)",
    )
    parser.add_argument("--relative", metavar="PEER", help="compare times relative to PEER in the same run")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="also write the tables there, for a pull request")
    parser.add_argument("--json", type=Path, metavar="FILE.json", help="also write the verdicts there")


def _fail_on(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := sorted(set(names) - set(FAIL_ON)):
        raise argparse.ArgumentTypeError(f"{', '.join(map(repr, unknown))}: known are {', '.join(FAIL_ON)}")
    return names


def main(arguments: argparse.Namespace) -> int:
    if not 0 < arguments.threshold < 100:
        raise ValueError(f"--threshold is in percent, between 0 and 100, got {arguments.threshold:g}")
    try:
        baseline, current = read(arguments.baseline), read(arguments.current, option="--current")
    except record.RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    threshold = arguments.threshold / 100
    comparison = compare(baseline, current, threshold, everything=arguments.all, relative=arguments.relative)
    text = "\n".join(comparison.markdown()) + "\n"
    print(text, end="")
    failed = [name for name in arguments.fail_on if FAIL_ON[name](comparison)]
    if arguments.out:
        _write(arguments.out, text)
    if arguments.json:
        _write(arguments.json, json.dumps(comparison.as_json(failed), indent=1) + "\n")
    return 1 if failed else 0


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def read(source: str, root: Path = ROOT, option: str = "--baseline") -> Records:
    """Reads a file, a folder, or the contents of `reports/` at a git revision, whatever the work tree has. ValueError
    says what was tried, RecordError which line of which record cannot be read."""
    if Path(source).exists():
        return record.load(source)
    found = git.output(root, "rev-parse", "--verify", "--quiet", f"{source}^{{commit}}")
    if found is None:
        raise ValueError(f"{option} {source}: neither a file, nor a folder, nor a git revision of {root}")
    listed = git.output(root, "ls-tree", "-r", "--name-only", found.strip(), "--", "reports") or ""
    paths = [path for path in listed.splitlines() if re.fullmatch(r"reports/.+/records/[^/]+\.jsonl", path)]
    if not paths:
        raise ValueError(f"{option} {source}: no records under reports/ at that revision")
    names = {f"{source}:{path}": f"{found.strip()}:{path}" for path in paths}
    contents = {name: git.content_of(root, "show", at) or b"" for name, at in names.items()}
    return record.parse([(name, record.decoded(name, content)) for name, content in contents.items()])


@dataclass(frozen=True)
class Pair:
    """The same row, measured twice."""

    baseline: Row
    current: Row
    column: str | None
    verdict: str
    ratio: Ratio | None
    reference: str | None
    relative: Ratio | None
    note: str


@dataclass(frozen=True)
class Missing:
    """A row that only one side measured."""

    side: str
    row: Row
    why: str


@dataclass(frozen=True)
class Growth:
    """A change of a row's memory, in bytes. `judged`: it grew by more than the threshold and by more than a MiB."""

    row: Row
    what: str
    before: int
    after: int
    judged: bool


Keyed = dict[tuple[str, ...], Row]


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`."""

    pairs: tuple[Pair, ...]
    differences: tuple[tuple[str, str, str], ...]
    missing: tuple[Missing, ...]
    drift: tuple[tuple[str, float, int], ...]
    threshold: float
    memory: tuple[Growth, ...] = ()
    relative: str | None = None

    def as_json(self, failed: Sequence[str]) -> dict[str, Any]:
        """Verdicts, counts and what made the exit code 1, for other programs."""
        return {
            "failed": list(failed),
            "threshold": self.threshold,
            "relative": self.relative,
            "counts": dict(Counter(pair.verdict for pair in self.pairs)),
            "rows": [_entry(pair) for pair in self.pairs],
            "missing": [{"side": m.side, **_named(m.row), "why": m.why} for m in self.missing],
            "memory": [
                {**_named(g.row), "what": g.what, "baseline": g.before, "current": g.after, "more": g.judged}
                for g in self.memory
            ],
            "differences": [{"what": w, "baseline": b, "current": c} for w, b, c in self.differences],
        }

    def markdown(self) -> list[str]:
        """Differences between the machines, the counts, the table, and the missing rows."""
        lines = ["# Comparison", ""]
        if self.differences:
            lines += ["**The two sides were measured under different conditions:**", ""]
            lines += [*md.table(("property", "baseline", "current"), self.differences), ""]
        else:
            lines += ["Same GPU, driver, clock and power limits, and versions on both sides.", ""]
        for name, change, count in self.drift:
            said = f"changed by {_change(change)} (median of {count} rows)"
            lines.append(f"*{name}*, which is not this repository's code, {said}.  ")
        lines += [""] if self.drift else []
        counts = Counter(pair.verdict for pair in self.pairs)
        lines += [
            ", ".join(f"**{counts[v]} {v}**" for v in ORDER if counts[v]) + f" (threshold {_share(self.threshold)})",
            "",
        ]
        if self.relative:
            lines += [f"The verdicts compare the time relative to *{self.relative}* in the same run.", ""]
        lines += [*md.table(HEAD, [_line(pair) for pair in self.pairs]), ""]
        if self.memory:
            lines += ["Memory that changed:", ""]
            head = ("", *IDENTITY, "memory", ">baseline MiB", ">current MiB", ">change")
            lines += [*md.table(head, [_memory_line(growth) for growth in self.memory]), ""]
        if self.missing:
            lines += ["Measured on one side only:", ""]
            lines += md.table(("side", *IDENTITY, "reason"), [[m.side, *m.row.key, m.why] for m in self.missing])
        return lines


IDENTITY = ("kernel", "case", "mode", "implementation")
HEAD = (
    "verdict", *IDENTITY, "timing", ">baseline µs", ">current µs", ">change", ">95 % CI", ">relative to", "note",
)  # fmt: skip


def _named(row: Row) -> dict[str, str]:
    return dict(zip(IDENTITY, row.key, strict=True))


def _entry(pair: Pair) -> dict[str, Any]:
    def interval(ratio: Ratio | None) -> dict[str, float] | None:
        return {"value": ratio.value, "low": ratio.low, "high": ratio.high} if ratio else None

    return {
        **_named(pair.current),
        "verdict": pair.verdict,
        "column": pair.column,
        "ratio": interval(pair.ratio),
        "relative_to": pair.reference,
        "relative": interval(pair.relative),
        "host": pair.current.host,
        "note": pair.note,
    }


def _memory_line(growth: Growth) -> list[object]:
    change = _change(growth.after / growth.before) if growth.before else None
    sizes = (f"{size / 2**20:.1f}" for size in (growth.before, growth.after))
    return ["**MORE**" if growth.judged else "", *growth.row.key, growth.what, *sizes, change]


def _line(pair: Pair) -> list[object]:
    medians = [row.column(pair.column) if pair.column else None for row in (pair.baseline, pair.current)]
    relative = f"{_change(pair.relative.value)} to {pair.reference}" if pair.relative else None
    return [
        f"**{pair.verdict}**" if pair.verdict in (SLOWER, FAILED, FASTER) else pair.verdict,
        *pair.current.key,
        pair.column,
        *(md.figures(column["median_us"]) if column else None for column in medians),
        _change(pair.ratio.value) if pair.ratio else None,
        f"[{_change(pair.ratio.low)}, {_change(pair.ratio.high)}]" if pair.ratio else None,
        relative,
        pair.note,
    ]


def _change(ratio: float) -> str:
    return f"{round(100 * (ratio - 1), 1) + 0.0:+.1f} %"  # + 0.0 turns -0.0 into 0.0


def _share(threshold: float) -> str:
    return f"{100 * threshold:g} %"


def compare(
    baseline: Records,
    current: Records,
    threshold: float = THRESHOLD,
    *,
    everything: bool = False,
    relative: str | None = None,
) -> Comparison:
    """Joins the rows of both sides and compares them: by time or, with `relative`, by the time over that peer's.
    ValueError if no row is on both sides, or if that peer is in no row."""
    before, after = _by_key(baseline, current)
    shared = [key for key in after if key in before]
    wanted = [key for key in shared if everything or after[key].ours]
    peers = {row.implementation for row in after.values() if not row.ours}
    if relative is not None and relative not in peers:
        raise ValueError(f"--relative {relative}: no such peer was measured; there are {', '.join(sorted(peers))}")
    only = peers if relative is None else {relative}
    every = [row for records in (baseline, current) for row in (*records.rows, *records.superseded)]
    failed = {(row.run.id, *row.key) for row in every if not row.ok}
    # Only one implementation of a group is measured a second time; what that shows holds for all that ran with it.
    noise = {(row.run.id, *row.group): row.get("noise") for row in every if row.get("noise")}

    def usable(key: tuple[str, ...]) -> Iterable[str]:
        """Yields the peers that did not fail in either run of a row: one above the roofline has an impossible time."""
        of_rows = [(row.run.id, *row.group) for row in (before[key], after[key])]
        return (name for name in only if not any((*of_row, name) in failed for of_row in of_rows))

    def floor(key: tuple[str, ...]) -> float:
        return noise_floor(*(noise.get((row.run.id, *row.group)) for row in (before[key], after[key])))

    pairs = [pair for key in wanted if (pair := judge(before[key], after[key], threshold, usable(key), floor(key)))]
    if relative is not None:
        pairs = [_by_peer(pair, relative, threshold) for pair in pairs]
    if not pairs:
        raise ValueError("nothing was measured on both sides: no kernel, case, mode and implementation in common")
    return Comparison(
        tuple(sorted(pairs, key=lambda pair: (ORDER.index(pair.verdict), pair.current.key))),
        tuple(_differences([p.baseline for p in pairs], [p.current for p in pairs])),
        tuple(m for m in _missing(before, after) if everything or m.row.ours),
        tuple(_drift([(before[key], after[key]) for key in shared if not after[key].ours])),
        threshold,
        tuple(growth for key in wanted for growth in _growths(before[key], after[key], threshold)),
        relative,
    )


def _by_peer(pair: Pair, peer: str, threshold: float) -> Pair:
    """The same pair, compared by the time over that of a peer."""
    if pair.ratio is None:  # FAILED or UNSURE, with its reason
        return pair
    if pair.relative is None:
        return replace(pair, verdict=UNSURE, note=f"{peer} was not measured in the same run on both sides")
    limit = max(threshold, HOST_THRESHOLD) if pair.current.host else threshold
    return replace(pair, verdict=classify(pair.relative, limit), note="")


def _growths(before: Row, after: Row, threshold: float) -> Iterable[Growth]:
    """Yields memory figures that both sides recorded and that differ by more than rounding."""
    for what, name in MEMORY.items():
        old, new = before.get(name), after.get(name)
        if before.ok and after.ok and old is not None and new is not None and abs(new - old) > LEAST_GROWTH:
            yield Growth(after, what, old, new, new - old > max(LEAST_GROWTH, threshold * old))


def _missing(before: Keyed, after: Keyed) -> Iterable[Missing]:
    """Rows that one side measured and the other did not; failures are in the table of verdicts."""
    for side, mine, theirs in (("baseline", before, after), ("current", after, before)):
        for key, row in mine.items():
            other = theirs.get(key)
            if row.ok and other is None:
                yield Missing(side, row, "not in the records of the other side")
            elif row.ok and other and not other.ok and (side == "current" or other.status not in BROKEN):
                yield Missing(
                    side, row, f"{other.status} on the other side: {other.get('reason', 'no reason recorded')}"
                )


def _by_key(baseline: Records, current: Records) -> tuple[Keyed, Keyed]:
    """Rows by GPU and key. Where each side has one GPU these are compared, whether or not they are the same model."""
    sides = [{row.run.gpu_folder for row in records.rows} for records in (baseline, current)]
    one_each = all(len(side) == 1 for side in sides)

    def keyed(records: Records) -> Keyed:
        return {("" if one_each else row.run.gpu_folder, *row.key): row for row in records.rows}

    return keyed(baseline), keyed(current)


def judge(
    baseline: Row,
    current: Row,
    threshold: float = THRESHOLD,
    peers: Iterable[str] = ("eager",),
    floor: float | None = None,
) -> Pair | None:
    """The verdict on one row; None where the baseline was not measured, or the current side skipped it. `floor` is the
    noise of the two runs, by default of the two rows."""
    if not baseline.ok or (not current.ok and current.status not in BROKEN):
        return None
    if not current.ok:
        note = f"measured before, now {current.status}: {current.get('reason', 'no reason recorded')}"
        return Pair(baseline, current, None, FAILED, None, None, None, note)
    column = _column(baseline, current)
    if column is None:
        return Pair(baseline, current, None, UNSURE, None, None, None, "no timing was measured on both sides")
    if floor is None:
        floor = noise_floor(baseline.get("noise"), current.get("noise"))
    samples = [row.get("columns")[column]["samples_us"] for row in (baseline, current)]
    ratio = ratio_of_medians(samples[0], samples[1], floor)
    if ratio is None:
        return Pair(baseline, current, column, UNSURE, None, None, None, "fewer than six samples on a side")
    threshold = max(threshold, HOST_THRESHOLD) if current.host else threshold
    verdict = classify(ratio, threshold)
    reference, relative = _relative(baseline, current, column, peers)
    note = _note(verdict, reference, relative, threshold)
    return Pair(baseline, current, column, verdict, ratio, reference, relative, note)


def _column(baseline: Row, current: Row) -> str | None:
    """The current headline, else the first column that both have."""
    if baseline.host != current.host:
        return None
    for name in (current.headline, "cold", "graph", "cupti"):
        if name and baseline.column(name) and current.column(name):
            return name
    return None


def _relative(baseline: Row, current: Row, column: str, peers: Iterable[str]) -> tuple[str | None, Ratio | None]:
    """The change relative to eager or, without it, another of `peers`. Ratios are in the headline column."""
    if not baseline.headline == current.headline == column:
        return None, None
    before: Mapping[str, Any] = baseline.get("ratios", {})
    after: Mapping[str, Any] = current.get("ratios", {})
    for name in sorted(before.keys() & after.keys() & set(peers), key=lambda name: (name != "eager", name)):
        found = against(before[name], after[name])
        if found:
            return name, found
    return None, None


def _note(verdict: str, reference: str | None, relative: Ratio | None, threshold: float) -> str:
    """Whether the machine or the kernel moved."""
    if relative is None or verdict not in (SLOWER, FASTER):
        return ""
    if classify(relative, threshold) == SAME:
        return f"{reference} changed alike: probably the machine, not the kernel"
    return f"{reference} did not change alike: the kernel" if classify(relative, threshold) == verdict else ""


def _differences(baseline: Sequence[Row], current: Sequence[Row]) -> Iterable[tuple[str, str, str]]:
    """Facts that the two sides do not share, and the measured copy bandwidth where it moved by more than 1 %."""
    for title, fact in FACTS.items():
        before, after = (dict.fromkeys(_text(fact(row.run)) for row in rows) for rows in (baseline, current))
        if set(before) != set(after):
            yield title, ", ".join(before), ", ".join(after)
    before_rate, after_rate = (_bandwidth(rows) for rows in (baseline, current))
    if before_rate and after_rate and abs(after_rate / before_rate - 1) > 0.01:
        yield "measured copy (GB/s)", f"{before_rate / 1e9:.0f}", f"{after_rate / 1e9:.0f}"


def _text(value: object) -> str:
    return "unknown" if value is None else str(value)


def _bandwidth(rows: Sequence[Row]) -> float | None:
    rates = [rate for row in rows if (rate := (row.run.ceilings.get("measured") or {}).get("bandwidth"))]
    return statistics.median(rates) if rates else None


def _drift(shared: Sequence[tuple[Row, Row]]) -> Iterable[tuple[str, float, int]]:
    """(baseline's name, median ratio, rows) for each baseline that both sides measured."""
    ratios: dict[str, list[float]] = {}
    for before, after in shared:
        column = _column(before, after) if before.ok and after.ok else None
        if column:
            ratios.setdefault(after.implementation, []).append(after.seconds(column) / before.seconds(column))
    for name in sorted(ratios, key=lambda name: (name != "eager", name)):
        yield name, statistics.median(ratios[name]), len(ratios[name])

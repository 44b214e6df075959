"""`compare`: two sets of records, row by row: FASTER, SAME, SLOWER or UNSURE (`verdicts` has the rule).

Differences between the two machines are printed first, since they may explain more than a change of a kernel. Where
both sides have measured a baseline such as eager, the change relative to it stands beside the verdict: if the clocks
were lower that day, everything is slower but that ratio has not moved. The verdict itself is about time.

Exit code 1 when a row is SLOWER, or when one that was measured before now fails; otherwise 0.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import record
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
ORDER = (SLOWER, FAILED, UNSURE, FASTER, SAME)
BROKEN = ("oom", "error", "wrong", "crashed", "over-roofline")

#: what is compared of the two sides' runs: title -> reader of a run
FACTS: dict[str, Any] = {
    "GPU": lambda run: run.gpu.get("name"),
    "GPUs": lambda run: run.world_size,
    "card (UUID)": lambda run: run.gpu.get("uuid"),
    "driver": lambda run: run.gpu.get("driver"),
    "highest SM clock (MHz)": lambda run: run.gpu.get("sm_clock_max_mhz"),
    "power limit (W)": lambda run: run.gpu.get("power_limit_w"),
    "PyTorch": lambda run: run.environment.get("torch"),
    "Triton": lambda run: run.environment.get("triton"),
    "CUDA": lambda run: run.environment.get("cuda"),
    "Python": lambda run: run.environment.get("python"),
    "timer": lambda run: run.options.get("timer"),
    "quick": lambda run: run.options.get("quick"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--baseline", required=True, metavar="FILE|DIR|GIT-REV", help="records to compare with")
    parser.add_argument("--current", type=Path, default=ROOT / "reports", metavar="FILE|DIR", help="default: reports/")
    parser.add_argument("--threshold", type=float, default=100 * THRESHOLD, metavar="PERCENT", help="default: 3")
    parser.add_argument("--all", action="store_true", help="baselines and peers too, not only our implementations")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="also write the table there")


def main(arguments: argparse.Namespace) -> int:
    if not 0 < arguments.threshold < 100:
        raise ValueError(f"--threshold is in percent, between 0 and 100, got {arguments.threshold:g}")
    comparison = compare(
        read(arguments.baseline), record.load(arguments.current), arguments.threshold / 100, everything=arguments.all
    )
    text = "\n".join(comparison.markdown()) + "\n"
    print(text, end="")
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text, encoding="utf-8")
    return 1 if comparison.worse else 0


def read(source: str, root: Path = ROOT) -> Records:
    """A file, a folder, or what `reports/` held at a git revision. ValueError says what was tried."""
    if Path(source).exists():
        return record.load(source)
    found = _git(root, "rev-parse", "--verify", "--quiet", f"{source}^{{commit}}")
    if found is None:
        raise ValueError(f"--baseline {source}: neither a file, nor a folder, nor a git revision of {root}")
    listed = _git(root, "ls-tree", "-r", "--name-only", found.strip(), "--", "reports") or ""
    paths = [path for path in listed.splitlines() if re.fullmatch(r"reports/.+/records/[^/]+\.jsonl", path)]
    if not paths:
        raise ValueError(f"--baseline {source}: no records under reports/ at that revision")
    return record.parse([(f"{source}:{path}", _git(root, "show", f"{found.strip()}:{path}") or "") for path in paths])


def _git(root: Path, *arguments: str) -> str | None:
    run = subprocess.run(["git", *arguments], cwd=root, capture_output=True, encoding="utf-8", check=False)
    return run.stdout if run.returncode == 0 else None


@dataclass(frozen=True)
class Pair:
    """The same thing, measured twice."""

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


Keyed = dict[tuple[str, ...], Row]


@dataclass(frozen=True)
class Comparison:
    """What `compare` found."""

    pairs: tuple[Pair, ...]
    differences: tuple[tuple[str, str, str], ...]
    missing: tuple[Missing, ...]
    drift: tuple[tuple[str, float, int], ...]
    threshold: float

    @property
    def worse(self) -> bool:
        return any(pair.verdict in (SLOWER, FAILED) for pair in self.pairs)

    def markdown(self) -> list[str]:
        """Differences of the machines, the count, the table, what is missing."""
        lines = ["# Comparison", ""]
        if self.differences:
            lines += ["**The two sides were not measured alike:**", ""]
            lines += [*md.table(("what", "baseline", "current"), self.differences), ""]
        else:
            lines += ["Same GPU, driver, clock and power limits, and versions on both sides.", ""]
        for name, change, count in self.drift:
            lines.append(
                f"*{name}*, which is no code of ours, changed by {_change(change)} (median of {count} rows).  "
            )
        lines += [""] if self.drift else []
        counts = Counter(pair.verdict for pair in self.pairs)
        lines += [
            ", ".join(f"**{counts[v]} {v}**" for v in ORDER if counts[v]) + f" (threshold {_share(self.threshold)})",
            "",
        ]
        lines += [*md.table(HEAD, [_line(pair) for pair in self.pairs]), ""]
        if self.missing:
            lines += ["Measured on one side only:", ""]
            head = ("side", "kernel", "case", "mode", "implementation", "why")
            lines += md.table(head, [[m.side, *m.row.key, m.why] for m in self.missing])
        return lines


HEAD = (
    "verdict", "kernel", "case", "mode", "implementation", "column", ">baseline µs", ">current µs", ">change",
    ">95 % CI", ">relative to", "note",
)  # fmt: skip


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
    baseline: Records, current: Records, threshold: float = THRESHOLD, *, everything: bool = False
) -> Comparison:
    """Joins the rows of both sides and judges them. ValueError where nothing is on both."""
    before, after = _by_key(baseline, current)
    shared = [key for key in after if key in before]
    wanted = [key for key in shared if everything or after[key].ours]
    peers = {row.implementation for row in after.values() if not row.ours}
    pairs = [pair for key in wanted if (pair := judge(before[key], after[key], threshold, peers))]
    if not pairs:
        raise ValueError("nothing was measured on both sides: no kernel, case, mode and implementation in common")
    return Comparison(
        tuple(sorted(pairs, key=lambda pair: (ORDER.index(pair.verdict), pair.current.key))),
        tuple(_differences([p.baseline for p in pairs], [p.current for p in pairs])),
        tuple(m for m in _missing(before, after) if everything or m.row.ours),
        tuple(_drift([(before[key], after[key]) for key in shared if not after[key].ours])),
        threshold,
    )


def _missing(before: Keyed, after: Keyed) -> Iterable[Missing]:
    """Rows that one side measured and the other did not; failures are in the table of verdicts."""
    for side, mine, theirs in (("baseline", before, after), ("current", after, before)):
        for key, row in mine.items():
            other = theirs.get(key)
            if row.ok and other is None:
                yield Missing(side, row, "no such row on the other side")
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


def judge(baseline: Row, current: Row, threshold: float = THRESHOLD, peers: Iterable[str] = ("eager",)) -> Pair | None:
    """The verdict on one row; None where the baseline was not measured, or the current side skipped it."""
    if not baseline.ok or (not current.ok and current.status not in BROKEN):
        return None
    if not current.ok:
        note = f"measured before, now {current.status}: {current.get('reason', 'no reason recorded')}"
        return Pair(baseline, current, None, FAILED, None, None, None, note)
    column = _column(baseline, current)
    if column is None:
        return Pair(baseline, current, None, UNSURE, None, None, None, "no column was measured on both sides")
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
    for name in (current.headline, "cold", "graph", "cupti", "warm"):
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
        return f"{reference} moved with it: the machine, rather than the kernel"
    return f"{reference} did not move with it: the kernel" if classify(relative, threshold) == verdict else ""


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

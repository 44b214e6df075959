"""Means over the cases of a kernel, and which cases they exclude for what reason.

A mean is over one kernel in one mode and one precision: fp8 cases are not averaged with those in 16 or 32 bits. It is
geometric. It excludes cases whose figure the harness doubts (`flags.py`), those in which a peer that supports them
failed or lacks the reported timing, and those that no library supports. A kernel without any library is averaged over
torch.compile. If the only doubt is that the GPU throttled in some rounds, the ratio over the other rounds counts,
provided that its interval is as narrow as required of any ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import flags
from . import markdown as md
from .entries import Row
from .findings import Finding, Speedup, geometric_mean, is_pytorch

FP8 = "fp8"
NOT_MEASURED, NO_LIBRARY, NO_PEER = "this kernel was not measured", "no library supports it", "no peer was measured"
OVER_COMPILE = "torch.compile is the fastest peer, and no library but PyTorch supports it"
#: part of the reason in a peer's row if it is not installed (`execute.load`)
ABSENT = "is not installed"
MANY_GROUPS = 2  # up to which a caption names each
LEFT_OUT_HEAD = ("kernel", "mode", "reason for exclusion from the mean over the fastest peer", ">number", "cases")


@dataclass(frozen=True)
class Mean:
    """The speed-ups of the included cases, out of `cases`, and the reasons for excluding the others, by case.
    `unthrottled`: the cases included with the ratio over their unthrottled rounds. `library`: whether the speed-ups are
    over libraries or, if there are none, over torch.compile."""

    cases: int
    values: tuple[float, ...]
    left_out: dict[str, tuple[str, ...]]
    unthrottled: tuple[str, ...] = ()
    library: bool = True

    def counted(self) -> str:
        """'10 of 12'."""
        return f"{len(self.values)} of {self.cases}"

    def text(self) -> str | None:
        """'**1.23×** (1.01× to 1.50×)'."""
        if not self.values:
            return None
        mean = md.times(geometric_mean(self.values))
        only = "" if self.library else f", only over torch.compile, {self.counted()}"
        return f"**{mean}** ({md.times(min(self.values))} to {md.times(max(self.values))}){only}"

    def by_reason(self) -> dict[str, list[str]]:
        """The excluded cases by their reasons."""
        found: dict[str, list[str]] = {}
        for case, reasons in self.left_out.items():
            found.setdefault("; ".join(reasons), []).append(case)
        return found


@dataclass(frozen=True)
class Group:
    """The cases of one kernel in one mode that are averaged together."""

    kernel: str
    mode: str
    precision: str | None
    found: tuple[Finding, ...]

    @property
    def name(self) -> str:
        """'attention fwd in fp8'."""
        return f"{self.kernel} {self.mode}" + (f" in {self.precision}" if self.precision else "")

    def over_best_peer(self) -> Mean:
        """The mean over the fastest peer of the same run."""
        library = any(_library(finding) for finding in self.found)
        other = any(s.other_library for finding in self.found for s in finding.speedups)

        def reasons(finding: Finding, speedup: Speedup | None) -> list[str]:
            why = _reasons(finding, speedup)
            why += [f"the peer {name} was left out of the run" for name in finding.left_out]
            if library and not _library(finding) and not finding.undecided:
                why.append(NO_LIBRARY)
            elif other and _over_compile(finding) and not finding.undecided:
                why.append(OVER_COMPILE)
            return why

        return _mean(self.found, lambda speedup: not speedup.reference, reasons, library)

    def over_pytorch(self) -> Mean:
        """The mean over what a PyTorch user would write."""

        def reasons(finding: Finding, speedup: Speedup | None) -> list[str]:
            return _reasons(finding, speedup, is_pytorch)

        return _mean(self.found, lambda speedup: speedup.pytorch, reasons)


def groups(found: Sequence[Finding]) -> list[Group]:
    """Groups by kernel, mode and precision, in the order of findings. The precision is that of most of our FLOPs."""
    cases: dict[tuple[str, str, str | None], list[Finding]] = {}
    for finding in found:
        precision = FP8 if finding.cost.main_pipe == FP8 else None
        cases.setdefault((finding.kernel, finding.mode, precision), []).append(finding)
    return [Group(*key, tuple(of)) for key, of in cases.items()]


def left_out(found: Sequence[Finding]) -> list[str]:
    """A table of all cases that are in no mean over the best peer, with the reason for each."""
    rows = [
        [group.kernel, group.mode, reason, len(cases), ", ".join(cases)]
        for group in groups(found)
        for reason, cases in group.over_best_peer().by_reason().items()
    ]
    return md.table(LEFT_OUT_HEAD, rows) if rows else ["No case was excluded from a mean."]


def captions(found: Sequence[Finding]) -> list[str]:
    """The same as `left_out` in a few lines: a list item for each reason, with the number of cases by kernel."""
    counts: dict[str, dict[str, int]] = {}
    for group in groups(found):
        for reasons in group.over_best_peer().left_out.values():
            for reason in reasons:
                of = counts.setdefault(reason, {})
                of[group.name] = of.get(group.name, 0) + 1
    return [
        f"- {md.sentence(reason)}: {', '.join(f'{count} of {name}' for name, count in of.items())}."
        for reason, of in counts.items()
    ]


def unthrottled(found: Sequence[Finding]) -> str | None:
    """The number of cases by kernel that are included with the ratio over their unthrottled rounds, or None."""
    counts = [(group.name, len(group.over_best_peer().unthrottled)) for group in groups(found)]
    said = ", ".join(f"{count} of {name}" for name, count in counts if count)
    return f"In the means with the speed-up over their unthrottled rounds only: {said}." if said else None


def absent(found: Sequence[Finding]) -> list[str]:
    """A list item for each peer that was not installed and is missing in comparisons, with the number of cases by
    kernel."""
    counts: dict[str, dict[str, int]] = {}
    for group in groups(found):
        for row in (row for finding in group.found for row in finding.rows):
            if row.status == "skipped" and ABSENT in str(row.get("reason")):
                of = counts.setdefault(row.implementation, {})
                of[group.name] = of.get(group.name, 0) + 1
    return [
        f"- {name}, in {', '.join(f'{count} of {where}' for where, count in of.items())}."
        for name, of in counts.items()
    ]


def newer(found: Sequence[Finding]) -> list[str]:
    """A list item for each peer that is declared for a kernel now but was not in the run of a case, e.g. because it was
    added later: the number of cases by group or, if there are many, in total with the number of kernels."""
    counts: dict[str, dict[str, int]] = {}
    for group in groups(found):
        for name in (name for finding in group.found for name in finding.absent):
            of = counts.setdefault(name, {})
            of[group.name] = of.get(group.name, 0) + 1
    items = []
    for name, of in counts.items():
        where = ", ".join(f"{count} of {group}" for group, count in of.items())
        if len(of) > MANY_GROUPS:
            kernels = {group.split()[0] for group in of}
            where = f"{sum(of.values())} cases of {f'{len(kernels)} kernels' if len(kernels) > 1 else kernels.pop()}"
        items.append(f"- {name}, in {where}.")
    return items


def _library(finding: Finding) -> bool:
    """Whether a case is compared with a hand-written kernel of a library."""
    return any(speedup.library for speedup in finding.speedups)


def _over_compile(finding: Finding) -> bool:
    """Whether torch.compile is the best peer, and no library except PyTorch supports the case."""
    best = finding.over_best_peer
    return best is not None and not best.library and not any(s.other_library for s in finding.speedups)


def _reasons(finding: Finding, speedup: Speedup | None, counts: Callable[[Row], bool] = lambda row: True) -> list[str]:
    """The doubts about a speed-up, and the peers among those that count which may be faster than its peer."""
    if finding.best is None:
        return [NOT_MEASURED]
    doubts = [flag.word for flag in flags.of_ratio(finding, speedup)]
    unknown = [f"the peer {row.implementation} failed" for row in finding.failed if counts(row)]
    unknown += [
        f"the peer {row.implementation} has no {finding.column} timing" for row in finding.untimed if counts(row)
    ]
    return list(dict.fromkeys([*doubts, *unknown]))


def _least(speedups: Sequence[Speedup]) -> Speedup | None:
    """That over the fastest peer."""
    return min(speedups, key=lambda speedup: speedup.median, default=None)


def _mean(
    found: Sequence[Finding],
    counts: Callable[[Speedup], bool],
    reasons: Callable[[Finding, Speedup | None], list[str]],
    library: bool = True,
) -> Mean:
    """The mean over the fastest of the peers that count; in unthrottled rounds another one may be the fastest."""
    values, out, unthrottled = [], {}, []
    for finding in found:
        over = [speedup for speedup in finding.speedups if counts(speedup)]
        speedup = _least(over)
        why = reasons(finding, speedup)
        if speedup is None:
            why = why or [NO_PEER]
        elif why == [flags.THROTTLED.word]:
            rest = _least([calm for speedup in over if (calm := speedup.without_throttling)])
            if rest and reasons(finding, rest) == why:
                speedup, why = rest, []
                unthrottled.append(finding.case)
        if why or speedup is None:
            out[finding.case] = tuple(why)
        else:
            values.append(speedup.median)
    return Mean(len(found), tuple(values), out, tuple(unthrottled), library)

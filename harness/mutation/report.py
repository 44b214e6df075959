"""reports/faults.md: planted faults and mutants, and which of them the checks reject. Made from the results alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import registry
from ..reporting import markdown
from . import cuda_tokens, mutants, results
from .mutants import Mutant

PLANTED = "planted.json"
LABELS = ("interpreter", "gpu")
NOT_RUN = "not run"
HEAD = """# Faults

What the checks reject. A *planted fault* is a kernel that is wrong in one way on purpose (`tests/wrong`). A *mutant* is
a kernel whose own source was changed in one place, by rule and not by choice: another operator, an operand, a bound or
a mask dropped, two swapped, a constant changed, a statement left out, a cast, a scale or a fence removed
(`harness/mutation/operators.py` has the rules for Python and Triton, `cuda_tokens.py` those for CUDA C++).

A mutant is *killed* when one of these does not pass, and passes on the original: the checks of SPEC
(`python -m harness check`), the kernel's own tests, and its share of `tests/test_addresses.py` (no access outside a
tensor) and `tests/test_call.py` (the eager call), without those marked slow. To take far longer than the original does
(hang) or to end the process (crash) is to be killed too. It is *equivalent* when no call can show the change, which
`equivalent_mutants.toml` in the kernel's folder argues for each one. All others *survived*. The score is
killed / (run − equivalent). Where some were run `--quick`, without the tests and without the checks that use
`torch.compile`, it is the least that it can be.

A mutant of CUDA C++ is not run where NVRTC does not compile it, or makes the same machine code of it in every way in
which SPEC's cases compile it (`nox -s mutate -- --machine-code`). On a GPU a mutant that no check rejected, of CUDA C++
or of a function that Triton compiles, has the same code where all that the checks launched is the original's, bit for
bit, and something of it was made from the changed source.

An *unfinished* mutant is one whose checks were cut off when time was up, without one that had rejected it; the next run
takes it up again. Until then the score counts it as survived.

A fence, a wait or a barrier that is dropped is a fault which a run shows only if threads meet in an order that they may
never have had: those that survived are counted as survivors, and listed by themselves.

Not mutated, because such a change is no fault or none that a check of results could see: docstrings, annotations,
decorators, imports, `__all__`, strings and the arguments of exceptions, hints to the compiler, `num_warps`,
`num_stages`, cache hints, and the configurations (`configs.py`). `reference.py` is the oracle, `bench.py` the
declaration, `example.py` inputs, and the copies of `parts/` are shared by all kernels. Where not all mutants were run,
those that were are a random sample. Its survivors led to tests, so that a sample drawn anew has a lower score. In the
interpreter CUDA C++ and the modules that launch it are left out, and so are casts to 64 bits, which only more than 2^31
elements show.

This page is written by `nox -s mutate -- --report`, from the lines in `reports/mutants`.
"""


SYNCHRONISATION = """Dropped or weakened, and no result was wrong. Of these the early arrivals that the build looks for
in the machine code (CONTRIBUTING.md, Clusters), `nox -s sanitize` with racecheck and `nox -s stress` say more than a
run."""


@dataclass(frozen=True, eq=False)
class Scored:
    """One kernel's results on one kind of device. killed: (mutant, result), equivalent: (mutant, argument). The others
    are counts: invalid, that did not compile; same, with identical machine code; quick, survivors of only some of the
    checks; unfinished, for which time was up."""

    kernel: str
    label: str
    able: int
    killed: list[tuple[Mutant, dict[str, Any]]] = field(default_factory=list)
    equivalent: list[tuple[Mutant, str]] = field(default_factory=list)
    survived: list[Mutant] = field(default_factory=list)
    unfinished: int = 0
    invalid: int = 0
    same: int = 0
    quick: int = 0

    @property
    def run(self) -> int:
        return len(self.killed) + len(self.equivalent) + len(self.survived) + self.unfinished

    @property
    def score(self) -> float | None:
        """Percentage killed of the mutants that are not equivalent."""
        counted = self.run - len(self.equivalent)
        return 100 * len(self.killed) / counted if counted else None

    def of_status(self, status: str) -> int:
        return sum(result["status"] == status for _, result in self.killed)


def scored(kernel: str, label: str, folder: Path = results.FOLDER) -> Scored:
    every = mutants.of_kernel(kernel)
    able = [m for m in every if label != "interpreter" or m.device == "any"]
    arguments = mutants.equivalent(kernel)
    lines = results.current(results.load(kernel, folder), every, label)
    invalid = same = quick = unfinished = 0
    killed, equivalent, survived = [], [], []
    for mutant in able:
        line = lines.get(mutant.key)
        if line is None:
            continue
        if line["status"] == results.INVALID:
            invalid += 1
        elif line["status"] == results.SAME:
            same += 1
        elif line["status"] == results.ERROR:  # nothing is known about it
            continue
        elif line["status"] in results.KILLED:
            killed.append((mutant, dict(line)))
        elif mutant.identity in arguments:
            equivalent.append((mutant, arguments[mutant.identity]))
        elif line["status"] == results.UNFINISHED:
            unfinished += 1
        else:
            survived.append(mutant)
            quick += results.is_quick(line)
    return Scored(kernel, label, len(able), killed, equivalent, survived, unfinished, invalid, same, quick)


def page(folder: Path = results.FOLDER) -> str:
    """The text of reports/faults.md."""
    kernels = [name for name in registry.names() if registry.package(name).startswith("kernels.")]
    every = [scored(kernel, label, folder) for kernel in kernels for label in LABELS]
    found = [s for s in every if s.run or s.label == LABELS[0]]
    planted = _planted(folder)
    parts = [HEAD, "## Planted faults", *_planted_tables(planted), "## Mutants", _scores(found)]
    if any(s.run for s in found):
        parts += ["### By class", _by_class(found), "### What killed them", _by_check(found)]
        parts += ["## Survivors", *_survivors(found, synchronisation=False)]
        parts += ["## Surviving synchronisation", SYNCHRONISATION, *_survivors(found, synchronisation=True)]
        parts += ["## Equivalent mutants", *_equivalents(found)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _planted(folder: Path) -> list[dict[str, Any]]:
    path = folder / PLANTED
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []


def _planted_tables(planted: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not planted:
        yield "Not counted: `python -m tests.planted reports/mutants/planted.json`."
        return
    tried = [fault for fault in planted if fault["rejected_by"] is not None]
    rejected = [fault for fault in tried if fault["rejected_by"]]
    yield (
        f"{len(rejected)} of {len(tried)} are rejected, in {len({f['kernel'] for f in planted})} kernels; "
        f"{len(planted) - len(tried)} more need a GPU and were not tried here. "
        "The check is the first that rejects, the class is the cause that it names."
    )
    classes = sorted({(f["check"], f["cause"]) for f in tried})
    rows = []
    for check, cause in classes:
        inside = [f for f in tried if (f["check"], f["cause"]) == (check, cause)]
        names = sorted({f["name"] for f in inside})
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        rows.append([check, cause, str(len(inside)), str(sum(bool(f["rejected_by"]) for f in inside)), shown])
    yield _table(["check", "class", ">planted", ">rejected", "such as"], rows)
    if accepted := [f for f in tried if not f["rejected_by"]]:
        yield "Accepted: " + ", ".join(f"{f['kernel']}: {f['name']}" for f in accepted) + "."


def _scores(found: Sequence[Scored]) -> str:
    rows = []
    for s in found:
        if not s.run:
            rows.append([s.kernel, s.label, f"0 of {s.able}", *[NOT_RUN] * 9])
            continue
        killed = len(s.killed)
        counts = [killed, s.of_status("hang"), s.of_status("crash"), len(s.equivalent)]
        survived = f"{len(s.survived)}, {s.quick} of them quick" if s.quick else str(len(s.survived))
        of = f"{s.run} of {s.able}"
        ends = [survived, str(s.unfinished), markdown.percent(s.score)]
        rows.append([s.kernel, s.label, of, str(s.invalid), str(s.same), *map(str, counts), *ends])
    counted = (">killed", ">by a hang", ">by a crash", ">equivalent", ">survived", ">unfinished", ">score")
    return _table(["kernel", "run in", ">run", ">not compiled", ">same code", *counted], rows)


def _by_class(found: Sequence[Scored]) -> str:
    killed = Counter(m.kind for s in found for m, _ in s.killed)
    equal = Counter(m.kind for s in found for m, _ in s.equivalent)
    left = Counter(m.kind for s in found for m in s.survived)
    rows = []
    for kind in sorted({*killed, *equal, *left}):
        counted = killed[kind] + left[kind]
        score = 100 * killed[kind] / counted if counted else None
        counts = (counted + equal[kind], killed[kind], equal[kind], left[kind])
        rows.append([kind, *map(str, counts), markdown.percent(score)])
    return _table(["class", ">run", ">killed", ">equivalent", ">survived", ">score"], rows)


def _by_check(found: Sequence[Scored]) -> str:
    counts = Counter(_check(result["by"]) for s in found for _, result in s.killed)
    rows = [[name, str(number)] for name, number in counts.most_common()]
    return (
        "The first check that did not pass. They are made from the cheapest to the dearest, so this is no measure of "
        "what a check could reject.\n\n" + _table(["check", ">killed"], rows)
    )


def _check(by: str) -> str:
    """A check of SPEC by its name, tests by their file."""
    if "::" in by or ".py" in by:
        return by.partition("::")[0] if by.startswith("tests/") else "the kernel's own tests"
    return by.rpartition("-")[2]


def _survivors(found: Sequence[Scored], synchronisation: bool) -> Iterator[str]:
    listed = {s: [m for m in s.survived if (m.kind == cuda_tokens.SYNCHRONISATION) == synchronisation] for s in found}
    for s, survivors in listed.items():
        if survivors:
            lines = [f"- {_place(m)} `{_code(m.operator)}` in `{_code(m.line)}`" for m in survivors]
            yield f"**{s.kernel}**, {s.label}:\n\n" + "\n".join(lines)
    if not any(listed.values()):
        yield "None."


def _equivalents(found: Sequence[Scored]) -> Iterator[str]:
    for s in found:
        if s.equivalent:
            lines = [f"- {_place(m)} `{_code(m.operator)}`: {why}" for m, why in s.equivalent]
            yield f"**{s.kernel}**, {s.label}:\n\n" + "\n".join(lines)
    if not any(s.equivalent for s in found):
        yield "None."


def _place(mutant: Mutant) -> str:
    inside = f", `{mutant.function}`" if mutant.function else ""
    return f"{mutant.file}:{mutant.number}{inside}:"


def _code(text: str) -> str:
    return text.replace("`", "'")


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return "\n".join(markdown.table(head, rows))

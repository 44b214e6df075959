"""Sizes and layouts drawn at random from SPEC.fuzz, and the corners of its ranges.

Hypothesis draws them, derandomised: the same SPEC gives the same examples, and a failure is reported with the smallest
example found. The parameters are those of the case at hand.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from ..spec import Case
from . import layouts
from .battery import Rejected, Skipped, Subject, examine, grad_names, may_be_refused

EXAMPLES = {"cpu": 8, "cuda": 100}
PRIMES = (2, 3, 7, 31, 127, 521)


def corners(s: Subject) -> list[Case]:
    """Cases with one dimension at 1, at an end of its range or at the largest prime below the upper end; the others as
    in the case, clamped to their ranges."""
    base = {d: min(max(s.case.dims.get(d, low), low), high) for d, (low, high) in s.spec.fuzz.items()}
    cases = []
    for dim, (low, high) in s.spec.fuzz.items():
        prime = max((p for p in PRIMES if low <= p <= high), default=low)
        for size in sorted({low, max(low, 1), prime, high}):
            cases.append(resized(s.case, {**base, dim: size}, "corner"))
    return cases


def sizes(s: Subject, mode: str) -> None:
    """Checks the corners, then random sizes in random layouts."""
    if not s.spec.fuzz:
        raise Skipped("SPEC.fuzz is empty")
    for case in corners(s):
        with may_be_refused(s, where := f"dims {dict(case.dims)}"):
            examine(replace(s, case=case), s.inputs(case=case), mode, where=where)
    _fuzz(s, mode)


def _fuzz(s: Subject, mode: str) -> None:
    try:
        import hypothesis
        from hypothesis import strategies as st
    except ImportError as error:
        raise Skipped(f"the corners of SPEC.fuzz pass; random sizes need hypothesis ({error})") from error

    dims = st.fixed_dictionaries({d: st.integers(low, high) for d, (low, high) in s.spec.fuzz.items()})
    assigned = st.lists(st.sampled_from(layouts.LAYOUTS), min_size=1, max_size=8)
    seeds = st.integers(0, 2**16)

    @hypothesis.settings(
        max_examples=EXAMPLES[s.device.split(":")[0]],
        derandomize=True,
        database=None,
        deadline=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(dims, assigned, seeds)
    def one(dims: dict[str, int], assigned: list[str], seed: int) -> None:
        case = resized(s.case, dims, "fuzz")
        subject = replace(s, case=case, seed=s.seed + seed)
        inputs = subject.inputs()
        names = [*(n for n in inputs if hasattr(inputs[n], "stride")), *grad_names([None] * 4)]
        assignment = layouts.Assignment(dict(zip(names, itertools.cycle(assigned), strict=False)))
        with may_be_refused(s, where := f"dims {dims}, seed {seed}, {assignment}"):
            examine(subject, inputs, mode, assignment, where=where)

    try:
        one()
    except Rejected as rejection:
        # Hypothesis's own notes and traceback are suppressed: the reason names the example.
        raise Rejected(rejection.verdict) from None


def resized(case: Case, dims: dict[str, int], suffix: str) -> Case:
    """The case with other sizes, marked in its name."""
    return replace(case, name=f"{case.name}.{suffix}", dims={**case.dims, **dims}, bench=False)

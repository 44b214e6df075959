"""Fills Triton's cache with every candidate that `tune` is about to time, on all cores.

Compilation takes most of the time of a search. A kernel compiled ahead of time has the same cache key as one compiled
by a launch, so the search then only loads kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple
from unittest import mock

from .. import execute, options, registry
from ..spec import Case, KernelSpec, Tunable
from . import launches, nvrtc


class Job(NamedTuple):
    """One candidate of one tunable in one case."""

    kernel: str
    tunable: int
    case: str
    candidate: int
    capability: tuple[int, int]


class Wanted:
    """The selection of a `tune` command line: functions by name, and cases by name or each tunable's own. A case that
    only one tunable has is tuned for that one alone."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._functions, self._named = arguments.function, bool(arguments.case)

    def tunables(self, selection: options.Selection) -> list[tuple[int, Tunable]]:
        """The tunables, with their indices in SPEC."""
        return [
            (index, tunable)
            for index, tunable in enumerate(selection.spec.tunables)
            if tunable.mode in selection.modes and (not self._functions or tunable.function in self._functions)
        ]

    def cases(self, selection: options.Selection, tunable: Tunable) -> Sequence[Case]:
        if not self._named:
            return tunable.cases or selection.cases
        return tuple(c for c in selection.cases if c in selection.spec.cases or c in tunable.cases)


def nameable(spec: KernelSpec) -> list[Case]:
    """The cases that `tune --case` may name: SPEC's and its tunables' own."""
    own = (case for tunable in spec.tunables for case in tunable.cases)
    return list({case.name: case for case in (*own, *spec.cases)}.values())


def left_out(spec: KernelSpec, tunable: Tunable, case: Case, capability: tuple[int, int]) -> str | None:
    """Why a case is not tuned on a GPU of that capability, or None. This includes cases where SPEC.alias_reason says
    that the implementation is another one there, whose configuration it shares."""
    if reason := execute.unfit(case, capability):
        return reason
    if tunable.mode not in spec.modes_of(case):
        return f"it is not run in mode {tunable.mode}"
    return spec.unsupported_reason(spec.searched_in(tunable), case, tunable.mode)


def jobs(selections: Sequence[options.Selection], capability: tuple[int, int], wanted: Wanted) -> list[Job]:
    """All candidates that `tune` will try on a GPU of that capability."""
    return [
        Job(selection.spec.name, index, case.name, candidate, capability)
        for selection in selections
        for index, tunable in wanted.tunables(selection)
        for case in wanted.cases(selection, tunable)
        if not left_out(selection.spec, tunable, case, capability)
        for candidate in range(len(list(tunable.candidates(case))))
    ]


def run(work: Sequence[Job]) -> None:
    """Compiles all jobs. A candidate that cannot be compiled is left for `tune` to report."""
    context = multiprocessing.get_context("spawn")  # the CUDA context of this process does not survive a fork
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        list(pool.map(compile_candidate, work, chunksize=4))


def compile_candidate(job: Job) -> None:
    """Runs the launchers on fake tensors with the candidate instead of the picked configuration."""
    spec = registry.load(job.kernel)
    tunable = spec.tunables[job.tunable]
    case = next(case for case in (*tunable.cases, *spec.cases) if case.name == job.case)
    config = list(tunable.candidates(case))[job.candidate]
    fn = spec.implementations[spec.searched_in(tunable)]
    picked = mock.patch.object(tunable.module, tunable.function, lambda *_: config)
    silent = contextlib.redirect_stdout(io.StringIO())  # if ptxas rejects a kernel, Triton prints the whole PTX
    elsewhere = nvrtc.recording(nvrtc.package_of(spec), job.capability, lambda launch: None)
    with contextlib.suppress(Exception), silent, picked, launches.record(job.capability), elsewhere:
        execute.bind(spec, fn, spec.make_inputs(case, "cuda", None), tunable.mode)()

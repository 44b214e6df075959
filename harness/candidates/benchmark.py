"""A benchmark of your own code: candidates against a reference and baselines, checked, timed, with their memory.

    import harness

    results = harness.bench(
        candidates={"mine": my_rms_norm},
        inputs=lambda device, generator: {"x": torch.randn(4096, 4096, device=device, generator=generator)},
        reference=rms_norm,
        baselines=("eager", "compile"),
    )
    print(results.get("mine", mode="training").faster_than["eager"])

On a GPU it is timed like every kernel of this project (`harness/measure/timing.py`): device time, cold, warm and as a
graph. Without one it is wall-clock time on the CPU, and the tables say so. `python -m harness bench --kernel PATH:NAME`
accepts a `Benchmark` in a file of your own.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import options, record
from ..roofline import Cost
from ..spec import Case, Inputs, KernelSpec, Peer, Tolerance
from .baselines import Baseline, chosen, unavailable
from .calls import Call, shared_parameters, with_weights_of
from .problems import Problem, Source, described, least_cost
from .results import SUFFIX, Results

MODES = {"inference": "fwd", "training": "train"}
MEMORY = "memory"
TOLERANCE = Tolerance()
#: (arguments by name, mode) -> the compulsory work of a call in "inference" or "training". The tensors have no data.
CostOf = Callable[[Inputs, str], Cost]


@dataclass
class Benchmark:
    """Candidates, their reference and baselines, and the inputs.

    name        for tables and records: letters, digits, '.', '_' and '-'
    candidates  name -> function or module
    inputs      the arguments: a mapping of keyword arguments, a sequence of positional ones, a single tensor, or
                (preferably) a function (device, generator) that makes any of these anew. Given tensors are copied, and
                the elements of floating-point ones are permuted for each set.
    cases       instead of `inputs`, several of them: name -> inputs
    reference   defines the correct result: a function or module with the same arguments. It is also called in fp64 (a
                module as a copy in fp64). A candidate whose error against that is more than twice that of the reference
                in its own dtype is "wrong" and is not timed.
    baselines   "eager" (the reference itself), "compile", "flash", or a `Baseline` of `harness.candidates`
    cost        the compulsory work of a call (`harness.roofline.Cost`), or a function of (arguments, mode). By default
                every input is read once and every output written once, and in training as much again. On a GPU a time
                that this makes impossible is an error, so declare it if not all of the inputs are read.
    modes       "inference": without gradients; "training": one forward and backward, with the gradients of all
                floating-point inputs and of a module's parameters; "memory": no times, the memory of both. Modes with
                times measure memory too.
    tolerance   how far a result may be from the reference (`harness.spec.Tolerance`)
    items, unit the case's throughput in the reports: (arguments without data) -> number of items, and their unit

    A module whose parameters have the reference's names and shapes but other values is copied, and the copy gets the
    reference's. Random operations, such as dropout in training, cannot be checked: leave them out.
    """

    name: str
    candidates: Mapping[str, Callable[..., Any]]
    reference: Callable[..., Any]
    inputs: Source | None = None
    cases: Mapping[str, Source] = field(default_factory=dict)
    baselines: Sequence[str | Baseline] = ("eager",)
    cost: Cost | CostOf | None = None
    modes: Sequence[str] = ("inference", "training")
    tolerance: Tolerance = TOLERANCE
    items: Callable[[Inputs], int] | None = None
    unit: str = "calls"
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        """ValueError for a declaration that cannot be run; it names the argument."""
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", self.name):
            raise ValueError(
                f"name: must consist of letters, digits, '.', '_' and '-' and not begin with '.', got {self.name!r}"
            )
        if not self.candidates:
            raise ValueError("candidates: at least one is needed")
        if (self.inputs is None) == (not self.cases):
            raise ValueError("give either inputs or cases")
        if unknown := sorted(set(self.modes) - {*MODES, MEMORY}):
            raise ValueError(f"modes: unknown {', '.join(map(repr, unknown))}; known: {', '.join((*MODES, MEMORY))}")
        if not self.modes:
            raise ValueError(f"modes: at least one of {', '.join((*MODES, MEMORY))} is needed")
        if taken := sorted({b.name for b in chosen(self.baselines)} & set(self.candidates)):
            raise ValueError(f"candidates: the names {taken} are taken by baselines")

    @property
    def timed(self) -> bool:
        """Whether times are measured, or memory alone."""
        return set(self.modes) != {MEMORY}

    @cached_property
    def _device(self) -> torch.device:
        return torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def spec(self) -> KernelSpec:
        """The declaration that the harness works with. The reference runs once in each case, for its outputs."""
        return self._spec

    @cached_property
    def _spec(self) -> KernelSpec:
        reference = self._placed(self.reference)
        candidates = {n: with_weights_of(self._placed(fn), reference) for n, fn in self.candidates.items()}
        parameters = shared_parameters([reference, *candidates.values()])
        oracle = Call(reference, parameters)
        sources = self.cases if self.inputs is None else {"inputs": self.inputs}
        problems = {name: described(source, oracle, self._device) for name, source in sources.items()}
        modes = self.modes if self.timed else tuple(MODES)
        cases = tuple(
            Case(name + (SUFFIX if word == "training" else ""), problem.sizes, problem.dtype, bench=True, modes=(mode,))
            for name, problem in problems.items()
            for word, mode in MODES.items()
            if word in modes
        )

        def unsupported(case: Case, mode: str) -> str | None:
            idle = mode == "train" and not any(problems[_problem(case)].outputs.differentiable)
            return "nothing of the reference's result has a gradient" if idle else None

        return KernelSpec(
            name=self.name,
            implementations={name: Call(fn, parameters) for name, fn in candidates.items()},
            reference=oracle,
            baselines=tuple(
                Peer(baseline.name, supports=unsupported, load=partial(self._load, baseline, oracle))
                for baseline in chosen(self.baselines)
            ),
            unsupported_reason=lambda implementation, case, mode: unsupported(case, mode),
            make_inputs=lambda case, device, generator: problems[_problem(case)].inputs(
                torch.device(device), generator, "train" in case.modes
            ),
            cost=lambda case, mode: self._cost(problems[_problem(case)], mode),
            cases=cases,
            grads=(),
            modes=tuple(dict.fromkeys(mode for case in cases for mode in case.modes)),
            determinism={},
            tolerance=self.tolerance,
            unit=self.unit,
            items=lambda case: self.items(problems[_problem(case)].sample) if self.items else 1,
            fuzz={},
        )

    def _placed(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn.to(self._device) if isinstance(fn, nn.Module) else fn

    def _load(self, baseline: Baseline, oracle: Call) -> Call:
        try:
            made = self._placed(baseline.make(oracle.fn))
        except ImportError as error:
            raise unavailable(error) from error
        return Call(with_weights_of(made, oracle.fn), oracle.parameters)

    def _cost(self, problem: Problem, mode: str) -> Cost:
        if isinstance(self.cost, Cost):
            return self.cost
        if self.cost is None:
            return least_cost(problem, mode == "train")
        return self.cost(problem.sample, "training" if mode == "train" else "inference")

    def run(
        self,
        *,
        samples: int | None = None,
        warmup: int | None = None,
        quick: bool = False,
        out: Path | str | None = None,
        quiet: bool = False,
    ) -> Results:
        """Checks and measures everything, prints the tables unless `quiet`, and returns the rows.

        `samples` and `warmup` fix the numbers of rounds, which otherwise depend on the scatter; `quick` uses few. `out`
        is a folder for the record, which `python -m harness report` and `compare` read; there is none for memory alone.
        Raises ValueError for `samples` below 1 or `warmup` below 0, and propagates exceptions of the reference and the
        inputs; exceptions of a candidate or a baseline are in its row.
        """
        arguments = argparse.Namespace(
            gpu="auto", quick=quick, timer="auto", case=None, mode=None, impl=None, host="no", host_compiled=False,
            resume=False, samples=samples, warmup=warmup,
        )  # fmt: skip
        if not self.timed:
            arguments.quick, arguments.samples, arguments.warmup, out = True, 1, 0, None
        spec = self.spec()
        selection = options.Selection(spec, spec.cases, spec.modes, tuple(options.implementations(spec)))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(out or folder) / "records" / f"{spec.name}.jsonl"
            run_into(selection, path, arguments, self._device, quiet)
            rows: list[Mapping[str, Any]] = [row.data for row in record.load(path).newest()]
        if not self.timed:
            rows = [without_times(row) for row in rows]
        results = Results(self.name, rows, next((b.name for b in chosen(self.baselines)), None))
        if not quiet:
            results.show()
        return results


def run_into(
    selection: options.Selection, path: Path, arguments: argparse.Namespace, device: torch.device, quiet: bool = False
) -> int:
    """Benches a selection on the device into a record. Returns how many candidates' rows failed."""
    if device.type != "cuda":
        from .. import on_cpu

        return on_cpu.bench(selection, path, arguments, quiet)
    from ..commands.bench import Session

    with contextlib.redirect_stdout(io.StringIO()) if quiet else contextlib.nullcontext(), torch.cuda.device(device):
        return Session(device, arguments).bench(selection, path)


def without_times(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row reduced to its memory, for when nothing else was requested."""
    return {**row, "columns": {}, "ratios": {}, "noise": None, "headline": None}


def _problem(case: Case) -> str:
    return case.name.removesuffix(SUFFIX) if "train" in case.modes else case.name


def bench(
    candidates: Mapping[str, Callable[..., Any]],
    inputs: Source | None = None,
    *,
    reference: Callable[..., Any],
    cases: Mapping[str, Source] | None = None,
    baselines: Sequence[str | Baseline] = ("eager",),
    cost: Cost | CostOf | None = None,
    modes: Sequence[str] = ("inference", "training"),
    tolerance: Tolerance = TOLERANCE,
    device: torch.device | str | None = None,
    name: str = "bench",
    samples: int | None = None,
    warmup: int | None = None,
    quick: bool = False,
    out: Path | str | None = None,
    quiet: bool = False,
) -> Results:
    """Makes a `Benchmark` of these arguments and runs it at once (`Benchmark.run`); both document the arguments and the
    exceptions."""
    benchmark = Benchmark(
        name, candidates, reference, inputs, cases or {}, baselines, cost, modes, tolerance, device=device
    )
    return benchmark.run(samples=samples, warmup=warmup, quick=quick, out=out, quiet=quiet)

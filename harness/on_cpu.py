"""A bench on a CPU: checked like one on a GPU, and timed by the wall clock, as its rows say.

It is for a user's own code that runs on a CPU. The kernels of the checkout are not timed there: times in Triton's
interpreter would be meaningless.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import environment, execute, options, record, rows
from .correctness.accuracy import Verdict
from .correctness.stand_in import checked
from .measure import memory, timing, wall
from .reporting.progress import Progress
from .spec import FROM_REFERENCE, Case, Inputs, Yardstick
from .timed_data import timed_data

CPU = torch.device("cpu")
SETS = 2  # sets of inputs, at different addresses


def bench(selection: options.Selection, path: Path, arguments: argparse.Namespace, quiet: bool = False) -> int:
    """Benches all groups of one SPEC into its record. Returns how many rows of our own failed."""
    spec, run, failures = selection.spec, record.new_run_id(), 0
    groups, budget = len(selection.groups()), timing.budget(arguments)
    with record.Writer(path) as writer, Progress(spec.name, groups, quiet) as progress, memory.only_new_garbage():

        def write(kind: str, /, **entry: Any) -> None:
            writer.write({"type": kind, "run": run, "kernel": spec.name, **entry})

        write(
            "run",
            unit=spec.unit,
            options=rows.asked(arguments),
            environment=environment.capture(CPU),
            ceilings={"measured": None, "datasheet": None},
        )
        try:
            for case, mode in selection.groups():
                write("start", case=case.name, mode=mode)
                found = Group(selection, case, mode, budget).rows()
                for row in found:
                    write("row", **row)
                failures += sum(row["kind"] == "ours" and row["status"] not in ("ok", "skipped") for row in found)
                progress.group(case.name, mode, found, None)
        except KeyboardInterrupt:
            write("stop", reason="interrupted")
            raise
        write("stop", reason="complete")
    record.compact(path)
    return failures


@dataclass
class Group:
    """One case in one mode."""

    selection: options.Selection
    case: Case
    mode: str
    budget: timing.Budget
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    configurations: dict[str, dict[str, str]] = field(
        default_factory=dict
    )  # fallback configurations of baselines that needed one
    restore: Callable[[], object] = lambda: None  # restores what is updated in place in the first inputs

    def rows(self) -> list[dict[str, Any]]:
        """Checks, times and describes every implementation."""
        names = self.selection.implementations
        if reason := execute.unfit(self.case, (0, 0)):
            return [self._row(name, "skipped", reason) for name in names]
        torch._dynamo.reset()  # graphs of other cases would make shapes dynamic, or exceed the recompile limit
        spec, generator = self.selection.spec, torch.Generator().manual_seed(torch.seed() % 2**63)
        inputs = [spec.make_inputs(self.case, CPU, generator) for _ in range(SETS)]
        grads = [execute.out_grads(spec, self.case, spec.reference, i, self.mode, generator) for i in inputs]
        data = timed_data(self.case, self.mode, inputs, grads, generator)
        self.restore = partial(data.restore, 0)
        ready: dict[str, execute.Op] = {}
        for name in names:
            with self._guarded(name):
                fn = self._checked(name, inputs[0], grads[0])
                if name not in self.done:
                    ready[name] = fn
        measurement = self._measured(ready, inputs, grads, data)
        for name, fn in ready.items():
            if name not in self.done and measurement is not None:
                with self._guarded(name):
                    self._describe(name, fn, inputs[0], grads[0], measurement)
        return [self.done[name] for name in names]

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """Turns a failure of one implementation into its row."""
        try:
            yield
        except execute.Unavailable as error:
            self.done[name] = self._row(name, "skipped", str(error))
        except execute.LazyOutput as error:
            self.done[name] = self._row(name, "wrong", str(error))
        except Exception as error:  # foreign code may raise anything; its row reports it
            self.done[name] = self._row(name, "error", f"{type(error).__name__}: {execute.first_line(error)}")

    def _checked(self, name: str, inputs: Inputs, grads: Any) -> execute.Op:
        """The implementation, after a check on the timed inputs: ours must be correct, another gets a warning."""
        spec = self.selection.spec
        if name in spec.implementations and (reason := spec.skip_reason(name, self.case, self.mode)):
            raise execute.Unavailable(reason)

        def attempt(fn: execute.Op) -> None:
            execute.bind(spec, fn, inputs, self.mode, grads)()

        fn, configuration = execute.load_running(spec, name, self.case, self.mode, attempt)
        if configuration:
            self.configurations[name] = configuration
        if name in FROM_REFERENCE or rows.kind(spec, name) == Yardstick.__name__.lower():
            return fn
        ours = name in spec.implementations
        verdict = self.verdicts[name] = checked(
            spec, self.case, self.mode, inputs, fn, grads, seed=1, poison=ours, restore=self.restore
        )
        if ours and not verdict.ok:
            self.done[name] = self._row(name, "wrong", verdict.reason)
        return fn

    def _measured(
        self, ready: dict[str, execute.Op], inputs: list[Inputs], grads: list[Any], data: timing.Data
    ) -> timing.Measurement | None:
        """The times of all that can run, and of the first of ours a second time, as the A/A pair."""
        spec = self.selection.spec

        def contender(label: str, fn: execute.Op) -> timing.Contender:
            return timing.Contender(label, lambda i: execute.bind(spec, fn, inputs[i], self.mode, grads[i]))

        while left := {name: fn for name, fn in ready.items() if name not in self.done}:
            contenders = [contender(name, fn) for name, fn in left.items()]
            if again := next((name for name in left if name in spec.implementations), None):
                contenders.append(contender(again + timing.AA, left[again]))
            try:
                return wall.measure(contenders, self.budget, SETS, data=data, one_call=bool(self.case.mutates))
            except timing.ContenderFailed as failed:
                name, error = failed.name.removesuffix(timing.AA), failed.error
                self.done[name] = self._row(name, "error", f"{type(error).__name__}: {execute.first_line(error)}")
        return None

    def _describe(self, name: str, fn: execute.Op, inputs: Inputs, grads: Any, measurement: timing.Measurement) -> None:
        """The row of an implementation that was timed; ours is checked once more."""
        spec = self.selection.spec
        ratios = measurement.ratios(name, wall.WALL) if name in spec.implementations else {}
        noise = ratios.pop(name + timing.AA, None)
        saved = execute.saved_bytes(spec, fn, inputs, self.mode)
        run = execute.bind(spec, fn, inputs, self.mode, grads)
        used = memory.measure(run, CPU, saved)
        verdict = self.verdicts.get(name)
        if name in spec.implementations:
            after = checked(spec, self.case, self.mode, inputs, fn, grads, seed=3, restore=self.restore)
            if not after.ok:
                self.done[name] = self._row(name, "wrong", f"after timing: {after.reason}")
                return
        warned = verdict is not None and not verdict.ok
        said = f"less accurate than the tolerance for candidates: {verdict.reason}" if warned and verdict else ""
        self.done[name] = self._row(name, "ok", None) | {
            "timer": wall.WALL,
            "headline": wall.WALL,
            "columns": measurement.columns[name],
            "sustained": None,
            "ratios": {other: ratio for other, ratio in ratios.items() if not other.endswith(timing.AA)},
            "noise": noise,
            **used.to_record(),
            "error": verdict and {n: verdict.numbers.get(n) for n in ("max", "rms", "eager_max", "eager_rms")},
            "clocks": {},
            "warnings": [said] if said else [],
            **({"configuration": self.configurations[name]} if name in self.configurations else {}),
        }

    def _row(self, name: str, status: str, reason: str | None) -> dict[str, Any]:
        return rows.described(self.selection.spec, self.case, self.mode, name, status, reason)

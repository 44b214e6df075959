"""The bench: check, time, compare with peers and roofline, record.

One *group* is a case in a mode. All its implementations are checked against the oracle, timed interleaved on the same
inputs, and written to the record before the next group begins. An error in one group or implementation does not lose
earlier results. After one that ends the process, another process continues (`harness/renewal.py`).
"""

from __future__ import annotations

import argparse
import gc
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import environment, execute, host, jobs, on_cpu, options, record, registry, renewal, roofline, suites
from ..correctness.accuracy import Verdict
from ..correctness.oracle import Memory
from ..correctness.stand_in import checked
from ..measure import memory, timing
from ..measure.assembler import inductors_ptxas
from ..measure.quack_tuning import two_rounds
from ..measure.turns import Turns
from ..on_gpu import folder
from ..ranks import command as ranks
from ..ranks.launch import TIMEOUT
from ..reporting import console, suite_summary
from ..reporting.progress import Progress, spent_on
from ..rows import asked, described
from ..spec import EAGER, FROM_REFERENCE, Case, Cost, Inputs, KernelSpec, Yardstick
from ..stuck import said_where
from ..timed_data import timed_data
from . import calibrate

SUSTAINED_SECONDS = 1.0
#: A call whose floor is longer than this is made only a few times: with one set of inputs, which no cache holds, and
#: without memory growth or a sustained figure. Host time before its first launch is negligible, so the stream is not
#: blocked for a round.
LONG_SECONDS = 1.0
STUCK_SECONDS = 120.0


def configure(parser: argparse.ArgumentParser) -> None:
    options.add_selection(parser, "all bench cases; with --gpus those of N GPUs")
    parser.add_argument("--suite", metavar="NAME", help="run a suite (harness/suites.py) and print its summary")
    options.add_target(parser)
    options.add_output(parser, "reports/<gpu>; .out/<gpu> with --quick or --suite, or for a kernel from outside")
    group = parser.add_argument_group("measurement")
    timers = ("auto", "events", "graph", "cupti")
    help_line = "CUDA events, CUDA graph or CUPTI; see harness/measure/timing.py (default: auto)"
    group.add_argument("--timer", choices=timers, default="auto", help=help_line)
    group.add_argument("--quick", action="store_true", help="few samples of the first bench case only; output to .out/")
    group.add_argument(
        "--host",
        choices=("yes", "no", "only"),
        default="yes",
        help="measure host time per call in addition (yes, the default), not (no), or nothing else (only)",
    )
    group.add_argument("--host-compiled", action="store_true", help="host time also under torch.compile; takes minutes")
    group.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="the cases for N GPUs, with one process (rank) per GPU"
    )
    group.add_argument(
        "--rank-timeout",
        type=float,
        metavar="S",
        help=f"with --gpus: end the run after S seconds without progress of any rank (default: {TIMEOUT:g})",
    )
    group.add_argument(
        "--samples",
        type=int,
        nargs="?",
        const=50,
        metavar="N",
        help="exactly N samples (without N: 50) instead of as many as the confidence interval requires",
    )
    group.add_argument(
        "--warmup",
        type=int,
        nargs="?",
        const=10,
        metavar="N",
        help="N warm-up rounds (without N: 10), not a fixed time",
    )
    group.add_argument("--resume", action="store_true", help="continue an interrupted bench with the same options")
    group.add_argument(
        "--turns",
        type=Path,
        metavar="FILE",
        help="lock file by which concurrent benches share a GPU: one measures while the others compile",
    )
    group.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="N processes per GPU, of which one measures while the others compile peers; without host time",
    )
    group.add_argument(
        "--missing",
        action="store_true",
        help="with --jobs: only cases without a measurement of all present implementations, or with a withdrawn row",
    )
    group.add_argument(
        "--minutes", type=float, metavar="M", help="with --jobs: stop after M minutes, keep finished rows"
    )


#: Values that mean "not given", for options that some modes ignore.
NOT_GIVEN: dict[str, object] = {
    "suite": None,
    "timer": "auto",
    "host": "yes",
    "host_compiled": False,
    "samples": None,
    "warmup": None,
    "resume": False,
    "rank_timeout": None,
    "out": None,
    "turns": None,
    "jobs": None,
    "missing": False,
    "minutes": None,
}
OF_JOBS = ("missing", "minutes")


def main(arguments: argparse.Namespace) -> int:
    journal = renewal.journal()
    refuse = partial(options.refuse, arguments, NOT_GIVEN)
    if arguments.gpus < 1:
        raise ValueError(f"--gpus: at least 1, got {arguments.gpus}")
    if arguments.gpus > 1:
        refuse("--gpus", "suite", "samples", "warmup", "timer", "host", "host_compiled", "turns", "jobs", *OF_JOBS)
        return ranks.main(arguments)
    refuse("a bench without --gpus", "rank_timeout")
    if arguments.jobs is None:
        refuse("a bench without --jobs", *OF_JOBS)
    elif arguments.jobs < 1:
        raise ValueError(f"--jobs: at least 1, got {arguments.jobs}")
    else:
        refuse("--jobs", "suite", "host", "host_compiled", "resume", "turns")
    if arguments.host == "no":
        refuse("--host no", "host_compiled")
    if arguments.host == "only":
        refuse("--host only", "suite", "timer", "samples", "warmup")
    device, key = environment.target(arguments.gpu, arguments.device)
    suite = suites.find(arguments.suite) if arguments.suite else None
    selections = suites.select(suite, arguments) if suite else options.select(arguments)
    own = [s for s in selections if s.spec.name in registry.outside()]
    if arguments.quick and not arguments.case and not suite:
        selections = [options.Selection(s.spec, s.cases[:1], s.modes, s.implementations) for s in selections]
    if arguments.host != "only" and not any(selection.groups() for selection in selections):
        raise ValueError("--case, --mode and --impl select nothing: no such case runs in that mode")
    if arguments.jobs is not None:
        if device.type != "cuda" or own or arguments.quick:
            raise ValueError("--jobs needs a GPU, kernels of this checkout, and no --quick")
        out = arguments.out or registry.results(s.spec.name for s in selections) / folder(device, key)
        return jobs.main(arguments, selections, out)
    if device.type != "cuda" and not own:
        from .. import plan

        timed = "suite", "timer", "samples", "warmup", "host", "host_compiled", "resume", "out", "turns"
        refuse("a bench without a GPU", *timed)
        return plan.main(selections, key, arguments)
    name = folder(device, key) if device.type == "cuda" else device.type
    root = registry.results((s.spec.name for s in selections), committed=not (arguments.quick or suite))
    out = arguments.out or root / name / (f"suite-{suite.name}" if suite else "")
    if device.type == "cuda":
        left = [selection for selection in selections if selection.spec.name not in journal.complete]
        with torch.cuda.device(device):
            session = Session(device, arguments, journal)
            _benched(session.bench, left, out, suite)
        failures = journal.failures
    else:
        gpu_only = "timer", "host", "host_compiled", "resume", "turns"
        refuse("a bench on a CPU, which measures wall-clock time,", *gpu_only)
        failures = _benched(partial(on_cpu.bench, arguments=arguments), own, out, suite)
    print(f"records in {out / 'records'}")
    return 1 if failures else 0


def _benched(
    bench: Callable[[options.Selection, Path], int],
    selections: Sequence[options.Selection],
    out: Path,
    suite: suites.Suite | None,
) -> int:
    """Benches every kernel into its record, with its tables, and a suite's summary. Returns the failed rows of ours."""
    failures = 0
    for selection in selections:
        path = out / "records" / f"{selection.spec.name}.jsonl"
        failures += bench(selection, path)
        if suite is None:
            rows = [row.data for row in record.load(path).newest() if not row.host]
            usual = (*selection.spec.pytorch, EAGER.name)
            against = next((name for name in usual if name in selection.implementations), None)
            if rows:  # empty with --host only
                console.show(selection.spec.name, rows, against)
    if suite is not None:
        measured = [row for row in record.load(out).rows if not row.host]
        summary = suite_summary.summary(suite, measured)
        suite_summary.show(summary)
        (out / f"{suite.name}.json").write_text(suite_summary.dumps(summary), encoding="utf-8")
        print(f"summary in {out / (suite.name + '.json')}")
    return failures


class Interrupt:
    """Ensures that Ctrl-C takes effect: Python prints and ignores a KeyboardInterrupt raised in a destructor or
    weak-reference callback. `raise_if_lost` raises it again."""

    def __init__(self) -> None:
        self._seen = False

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, *_: object) -> None:
        self._seen = True
        raise KeyboardInterrupt

    def raise_if_lost(self) -> None:
        if self._seen:
            raise KeyboardInterrupt


@dataclass
class Session:
    """State that all kernels of one invocation share: the device, its ceilings and the clock."""

    device: torch.device
    arguments: argparse.Namespace
    journal: renewal.Journal = field(default_factory=renewal.Journal)

    def __post_init__(self) -> None:
        self.turns = Turns(getattr(self.arguments, "turns", None), self.device)
        self.turns.take()
        self.environment = environment.capture(self.device)
        measured = self.turns.once("ceilings", lambda: calibrate.measure(self.device))
        key = self.environment["gpu"]["key"]
        promised = roofline.get(key, self.environment["gpu"]["name"]).ceilings if key else None
        self.ceilings = calibrate.ceilings(measured).with_links_of(promised)
        self.recorded_ceilings = {"measured": measured, "datasheet": promised.to_record() if promised else None}
        self.clock = timing.Clock(self.device, timing.budget(self.arguments))
        self.turns.give()

    def bench(self, selection: options.Selection, path: Path) -> int:
        """Benches all groups of one kernel into its record. Returns how many rows of our own failed."""
        spec, run_id, journal = selection.spec, record.new_run_id(), self.journal
        finished = record.Finished()
        if self.arguments.resume or journal.renewed:
            finished = record.finished(
                path,
                options=asked(self.arguments),
                commit=self.environment["commit"],
                dirty=self.environment["dirty"],
                gpu=self.environment["gpu"]["name"],
                among=None if self.arguments.resume else journal.runs,
            )
        groups = [(c, m) for c, m in selection.groups() if (c.name, m) not in finished.done]
        if self.arguments.host == "only":
            groups = []
        failures = 0
        with record.Writer(path) as writer, Progress(spec.name, len(groups)) as progress, Interrupt() as interrupt:

            def write(kind: str, /, **entry: Any) -> None:
                writer.write({"type": kind, "run": run_id, "kernel": spec.name, **entry})

            journal.note(run=run_id)
            write(
                "run",
                unit=spec.unit,
                options=asked(self.arguments),
                environment=self.environment,
                ceilings=self.recorded_ceilings,
            )
            group: Group | None = None
            try:
                for case, mode in groups:
                    dead = (case.name, mode) in finished.died and not journal.knows(spec.name, case.name, mode)
                    if not dead:
                        write("start", case=case.name, mode=mode)
                    group = Group(self, selection, case, mode)
                    rows = group.crashed() if dead else group.rows()
                    for row in rows:
                        write("row", **row)
                    failed = sum(r["kind"] == "ours" and r["status"] not in ("ok", "skipped", "oom") for r in rows)
                    failures += failed
                    journal.note(failures=failed)
                    journal.note(at=None)
                    progress.group(case.name, mode, rows, self.ceilings, group.spent())
                    interrupt.raise_if_lost()
                if self.arguments.host != "no" and not getattr(self.arguments, "suite", None):
                    failures += self._host(selection, write)
                    interrupt.raise_if_lost()
                write("stop", reason="complete")
            except KeyboardInterrupt:
                write("stop", reason="interrupted")
                if group is not None and group.seconds:
                    print(f"\n{group.case.name} {group.mode}: {group.spent()}", file=sys.stderr)
                print("\ninterrupted: finished rows are kept, --resume continues", file=sys.stderr)
                raise SystemExit(130) from None
        record.compact(path)
        journal.note(complete=spec.name)
        return failures

    def _host(self, selection: options.Selection, write: Callable[..., None]) -> int:
        """Measures host time of every implementation into the record. Returns how many of our own failed."""
        failures = 0
        a, begin = self.arguments, partial(self.journal.begin, selection.spec.name)
        self.turns.begin()
        try:
            for case, way, rows in host.rows(selection, self.device, a.host_compiled, a.quick, begin):
                write("start", case=case.name, mode=way)
                for row in rows:
                    write("row", **row)
                medians = {r["implementation"]: r["columns"]["host"]["median_us"] for r in rows if r["status"] == "ok"}
                said = ", ".join(f"{name} {median:.1f}" for name, median in medians.items())
                print(f"{selection.spec.name} {case.name} {way}, µs per call: {said}", flush=True)
                failed = sum(r["kind"] == "ours" and r["status"] not in ("ok", "skipped") for r in rows)
                failures += failed
                self.journal.note(failures=failed)
                self.journal.note(at=None)
        except torch.AcceleratorError as error:
            self.journal.lost(execute.first_line(error))
            raise
        finally:
            self.turns.give()
        return failures


@dataclass
class Group:
    """One case in one mode."""

    session: Session
    selection: options.Selection
    case: Case
    mode: str

    def __post_init__(self) -> None:
        self.spec: KernelSpec = self.selection.spec
        self.cost: Cost = self.spec.cost(self.case, self.mode)
        self.yardsticks = {
            b.name: b.cost(self.case, self.mode) for b in self.spec.baselines if isinstance(b, Yardstick)
        }
        self.seconds: dict[str, float] = {}  # host time by stage
        self.compiled: dict[str, float] = {}  # seconds with the GPU while an implementation was compiled and tuned
        self.done: dict[str, dict[str, Any]] = {}
        self.verdicts: dict[str, Verdict] = {}
        self.configurations: dict[str, dict[str, str]] = {}  # fallback configurations of peers that needed one
        self.memory = Memory()
        self.restore: Callable[[], object] = lambda: None  # restores what is updated in place in the first inputs

    def crashed(self) -> list[dict[str, Any]]:
        """The rows of a group in which an earlier process died."""
        reason = "the process crashed in this case; not tried again"
        return [self._row(name, "crashed", reason) for name in self.selection.implementations]

    def rows(self) -> list[dict[str, Any]]:
        """Checks, times and describes every implementation."""
        if self.session.turns.shared:
            self._import()
        self.session.turns.begin()
        try:
            if reason := execute.unfit(self.case, torch.cuda.get_device_capability(self.session.device)):
                self._close_all("skipped", reason)
            else:
                with said_where(STUCK_SECONDS):
                    self._measure()
        except renewal.Crashed as error:
            self._close_all("crashed", str(error))
        except (torch.cuda.OutOfMemoryError, torch.AcceleratorError) as error:
            if not execute.out_of_memory(error):
                # After any other CUDA error the context is lost, and with it all later groups in this process.
                self.session.journal.lost(execute.first_line(error))
            self._close_all("oom" if execute.out_of_memory(error) else "error", execute.first_line(error))
        finally:
            gc.collect()
            torch.cuda.empty_cache()
            self.session.turns.give()
        return [self.done[n] for n in self.selection.implementations]

    def spent(self) -> str:
        """Host time by stage in seconds; of a GPU that is shared for how long this bench held it, and for how long of
        that while an implementation was compiled and tuned."""
        turns = self.session.turns
        if not turns.shared:
            return spent_on(self.seconds)
        compiled = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.compiled.items() if seconds > 0.5)
        return spent_on(self.seconds) + f"; GPU held for {turns.had:.1f}" + (f" ({compiled})" if compiled else "")

    def _import(self) -> None:
        """Loads peers once in advance, since imports take seconds for which the GPU is not needed."""
        for name in self.selection.implementations:
            with suppress(Exception):  # it recurs, and is reported, when the peer is measured
                self._begin(name)
                execute.load(self.spec, name, self.case, self.mode)

    def _close_all(self, status: str, reason: str) -> None:
        for name in self.selection.implementations:
            self.done.setdefault(name, self._row(name, status, reason))

    def _begin(self, name: str | None) -> None:
        """Notes that an implementation is next, or None: all of them. Raises Crashed if it ended an earlier process."""
        self.session.journal.begin(self.spec.name, self.case.name, self.mode, name)

    def _measure(self) -> None:
        self._begin(None)
        torch._dynamo.reset()  # graphs of other cases would make shapes dynamic, or exceed the recompile limit
        device, clock = self.session.device, self.session.clock
        generator = torch.Generator(device).manual_seed(torch.seed() % 2**63)
        free = torch.cuda.mem_get_info(device)[0]
        long = self._long()
        sets = 1 if long else timing.input_sets(self.cost.bytes, clock.l2_bytes, free, bool(self.case.mutates))
        with self._stage("inputs"):
            inputs = [self.spec.make_inputs(self.case, device, generator) for _ in range(sets)]
            grads = [
                execute.out_grads(self.spec, self.case, self.spec.reference, i, self.mode, generator) for i in inputs
            ]
            torch.cuda.synchronize()
        data = timed_data(self.case, self.mode, inputs, grads, generator)
        self.restore = partial(data.restore, 0)
        ready: dict[str, execute.Op] = {}
        for name in self.selection.implementations:
            with self._guarded(name), clock.stream():
                self._once(name)
                self._begin(name)

                def attempt(fn: execute.Op) -> None:
                    with self.session.turns.compiling(), inductors_ptxas(), two_rounds():
                        execute.bind(self.spec, fn, inputs[0], self.mode, grads[0])()
                    torch.cuda.synchronize()

                had = self.session.turns.had
                with self._stage("compilation"):
                    fn, configuration = execute.load_running(self.spec, name, self.case, self.mode, attempt)
                self.compiled[name] = self.session.turns.had - had
                if configuration:
                    self.configurations[name] = configuration
                with self._stage("checks"):
                    self._check(name, fn, inputs[0], grads[0], seed=1)
                if name not in self.done:
                    ready[name] = fn
        # Memory that the checks leave in PyTorch's cache would be missing under the gate, where it cannot be released.
        gc.collect()
        torch.cuda.empty_cache()
        with memory.only_new_garbage():
            self._time(ready, inputs, grads, data)

    def _time(
        self,
        ready: dict[str, execute.Op],
        inputs: Sequence[Inputs],
        grads: Sequence[Sequence[torch.Tensor] | None],
        data: timing.Data,
    ) -> None:
        """Times and describes the implementations that are correct, and checks ours once more."""
        clock, long = self.session.clock, self._long()

        def contender(name: str, fn: execute.Op) -> timing.Contender:
            return timing.Contender(name, lambda i: execute.bind(self.spec, fn, inputs[i], self.mode, grads[i]))

        measurement = None
        while ready and measurement is None:
            contenders = [contender(name, fn) for name, fn in ready.items()]
            again = next((n for n in ready if n in self.spec.implementations), None)
            if again:
                contenders.append(contender(again + timing.AA, ready[again]))
            try:
                self._begin(None)
                with self._stage("timing"):
                    measurement = clock.measure(contenders, self._timer(), len(inputs), data, held=not long)
                memory.make_room(clock.device)  # of the graphs, before the columns that are measured call by call
            except timing.ContenderFailed as failed:
                name = failed.name.removesuffix(timing.AA)
                with self._guarded(name):
                    self._begin(name)
                    raise failed.error from None
                del ready[name]
        for name, fn in ready.items():
            with self._guarded(name), clock.stream():
                assert measurement is not None
                self._begin(name)
                self._describe(name, fn, inputs[0], contender(name, fn), measurement)
                with self._stage("stages"):
                    self._add_stages(name)
                if name in self.spec.implementations:
                    with self._stage("checks"):
                        self._check(name, fn, inputs[0], grads[0], seed=3, timed=True)

    def _long(self) -> bool:
        return roofline.floor_seconds(self.cost, self.session.ceilings).seconds > LONG_SECONDS

    def _timer(self) -> str:
        """--timer, or what the SPEC says unless calls take seconds."""
        asked: str = self.session.arguments.timer
        return "graph" if asked == "auto" and self.spec.captured and not self._long() else asked

    def _once(self, name: str) -> None:
        """Raises Unavailable if an implementation does not support the case or is an alias of another one there."""
        if name in self.spec.implementations and (reason := self.spec.skip_reason(name, self.case, self.mode)):
            raise execute.Unavailable(reason)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """Adds the elapsed time to that of the stage, less the time of waiting for others that use the GPU."""
        start, waited = time.perf_counter(), self.session.turns.waited
        try:
            yield
        finally:
            waited = self.session.turns.waited - waited
            took = {name: time.perf_counter() - start - waited} | ({"waiting": waited} if waited else {})
            self.seconds |= {stage: self.seconds.get(stage, 0.0) + seconds for stage, seconds in took.items()}

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """Turns a failure of one implementation into its row."""
        try:
            yield
        except execute.Unavailable as error:
            self.done[name] = self._row(name, "skipped", str(error))
        except execute.LazyOutput as error:
            self.done[name] = self._row(name, "wrong", str(error))
        except renewal.Crashed as error:
            self.done[name] = self._row(name, "crashed", str(error))
        except Exception as error:  # a peer may raise anything; its row reports it
            if execute.out_of_memory(error):
                if self.session.turns.shared:  # the case will be repeated alone on the GPU
                    raise torch.cuda.OutOfMemoryError(execute.first_line(error)) from None
                self.done[name] = self._row(name, "oom", execute.first_line(error))
                gc.collect()
                torch.cuda.empty_cache()
                return
            if isinstance(error, torch.AcceleratorError):
                raise
            self.done[name] = self._row(name, "error", f"{type(error).__name__}: {execute.first_line(error)}")

    def _check(
        self,
        name: str,
        fn: execute.Op,
        inputs: Inputs,
        grads: Sequence[torch.Tensor] | None,
        seed: int,
        timed: bool = False,
    ) -> None:
        """Checks the results on the timed inputs. Ours must be correct; a peer that is not gets a warning."""
        if name in FROM_REFERENCE or name in self.yardsticks:  # the reference itself, or another op
            return
        ours = name in self.spec.implementations
        verdict = checked(
            self.spec, self.case, self.mode, inputs, fn, grads, seed, ours, memory=self.memory, restore=self.restore
        )
        if not timed:
            self.verdicts[name] = verdict
            run = execute.bind(self.spec, fn, inputs, self.mode, grads)
            share = timing.share_on_stream(run, torch.cuda.current_stream())
            if share < 0.5 and ours:
                reason = f"only {100 * share:.0f} % of its GPU time is on the stream on which it was called"
                self.done[name] = self._row(name, "wrong", reason)
        if not verdict.ok and ours:
            when = "after timing: " if timed else ""
            self.done[name] = self._row(name, "wrong", f"{when}{verdict.reason}")

    def _describe(
        self,
        name: str,
        fn: execute.Op,
        inputs: Inputs,
        contender: timing.Contender,
        measurement: timing.Measurement,
    ) -> None:
        """Makes the row of an implementation that was timed."""
        columns, timer = measurement.columns[name], self._timer()
        ours = next((n for n in self.spec.implementations if n in measurement.columns), name)
        headline = measurement.headline(ours, timer)
        headline = headline if headline in columns else "cold"
        ratios = {}
        if name in self.spec.implementations:
            with self._stage("ratios"):
                ratios = measurement.ratios(name, headline)
        noise = ratios.pop(name + timing.AA, None)
        with self._stage("saved bytes"):
            saved = execute.saved_bytes(self.spec, fn, inputs, self.mode)  # before a bound backward holds its own graph
        with self._stage("memory"):
            run = contender.bind(0)
            used = memory.measure(run, self.session.device, saved, growth=not self._long())
        verdict = self.verdicts.get(name)
        warnings = list(measurement.warnings[name])
        if verdict and not verdict.ok:
            warnings.append(f"less accurate than the tolerance for this repository's kernels: {verdict.reason}")
        over = [
            reason
            for column in ("cold", "warm", "graph")
            if column in columns and (reason := self._over(name, columns[column]["median_us"], column))
        ]
        sustained = None
        if name == ours and not self.session.arguments.quick and not self._long():
            with self._stage("sustained"):
                sustained = self.session.clock.sustained(run, SUSTAINED_SECONDS)
        self.done[name] = self._row(name, "over-roofline" if over else "ok", "; ".join(over) or None) | {
            "timer": "graph" if headline == "graph" else "cupti" if timer == "cupti" else "events",
            "headline": headline,
            "columns": columns,
            "sustained": sustained,
            "ratios": {other: ratio for other, ratio in ratios.items() if not other.endswith(timing.AA)},
            "noise": noise,
            **used.to_record(),
            "error": verdict and {n: verdict.numbers.get(n) for n in ("max", "rms", "eager_max", "eager_rms")},
            "clocks": measurement.clocks,
            "warnings": warnings,
            **({"configuration": self.configurations[name]} if name in self.configurations else {}),
        }

    def _add_stages(self, name: str) -> None:
        """Adds microseconds by stage to the row, where the SPEC has stages. A failure there is only a warning, since
        the times are measured."""
        row = self.done[name]
        try:
            found = self.spec.stages(name, self.case, self.mode, self.session.device)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            row["warnings"].append(f"no time by stage: {type(error).__name__}: {execute.first_line(error)}")
            return
        if found:
            row["stages_us"] = {stage: seconds * 1e6 for stage, seconds in found.items()}

    def _over(self, name: str, microseconds: float, column: str) -> str | None:
        cost = self.yardsticks.get(name, self.cost)
        limits, l2 = self.session.ceilings, self.session.clock.l2_bytes
        return roofline.over_roofline(microseconds * 1e-6, cost, limits, column=column, l2_bytes=l2)

    def _row(self, name: str, status: str, reason: str | None) -> dict[str, Any]:
        return described(self.spec, self.case, self.mode, name, status, reason)

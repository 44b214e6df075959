"""`python -m harness tune`: every candidate configuration on this GPU, against the one that the kernel picks by itself.

While a candidate runs, only the kernel's `pick_*` function is replaced: inputs and launcher are the same. A candidate
counts only if its results are those of the picked configuration. The results are committed under reports/<gpu>/tune/;
`tuned` describes their format, and how a test without a GPU uses them. After a change of a `pick_*` function, --replay
evaluates it on these results.

Candidates are timed in groups, each with the picked configuration. Times are scaled by that configuration's time in the
group, so that clock drift between groups favours none.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from .. import environment, execute, options, plans, tuned
from ..compiling import precompile
from ..compiling.precompile import Wanted
from ..correctness.in_place import OnCopies
from ..measure import timing
from ..on_gpu import Place, place
from ..reporting import choices, rows_json, tables
from ..reporting.choices import SCHEMA
from ..spec import Case, KernelSpec, Tunable
from ..timed_data import timed_data
from ..tuned import encode, judge

SEED = 20261121
GROUP = 7
#: Largest difference from the picked configuration's result, relative to its largest element. It only detects grossly
#: wrong results: `check` tests the accuracy of the configuration that is finally picked.
AGREEMENT = 0.02


def configure(parser: argparse.ArgumentParser) -> None:
    options.add_selection(parser)
    options.add_target(parser)
    options.add_output(parser)
    group = parser.add_argument_group("tuning")
    group.add_argument(
        "--function", action="append", metavar="NAME", help="only this `pick_*` function; may be given more than once"
    )
    group.add_argument(
        "--replay",
        action="store_true",
        help="measure nothing: write the configurations selected now into the committed files, with the recorded times",
    )


def main(arguments: argparse.Namespace) -> int:
    """0, or 1 if a picked configuration is more than MARGIN slower than the best candidate."""
    if arguments.replay:
        return _replay(options.select(arguments))
    wanted = Wanted(arguments)
    selections = [s for s in options.select(arguments, precompile.nameable) if wanted.tunables(s)]
    where = place("tune", arguments, selections)
    if not selections:
        raise ValueError("nothing that is selected has tunables in its SPEC")
    captured = environment.capture(where.device)
    if where.device.type == "cuda":
        work = precompile.jobs(selections, torch.cuda.get_device_capability(where.device), wanted)
        print(f"compiling {len(work)} candidates", flush=True)
        precompile.run(work)
    behind = 0
    for selection in selections:
        name, rows = selection.spec.name, []
        path, head = where.out / "tune" / f"{name}.json", {"schema": SCHEMA, "kernel": name, "gpu": where.folder}
        for row in _rows(selection, where, wanted):  # each is written at once, so that an interrupt keeps it
            rows.append(row)
            rows_json.merge(path, head, captured, [row], lambda row: (row["case"], row["mode"], row["function"]))
        print(f"written: {path}")
        show(name, rows)
        behind += sum(judge(row, row["picked"]) is not None for row in rows)
    return 1 if behind else 0


def _replay(selections: Sequence[options.Selection]) -> int:
    """`main` without a GPU, on every committed file of these kernels."""
    behind = 0
    for selection in selections:
        for path in tuned.files():
            if path.stem == selection.spec.name:
                rows = tuned.replay(path, selection.spec)
                show(f"{path.stem} on {path.parent.parent.name}", rows)
                behind += sum(judge(row, row["picked"]) is not None for row in rows)
    return 1 if behind else 0


def _rows(selection: options.Selection, where: Place, wanted: Wanted) -> Iterator[dict[str, Any]]:
    clock, capability = new_clock(where.device), torch.cuda.get_device_capability(where.device)
    for _, tunable in wanted.tunables(selection):
        for case in wanted.cases(selection, tunable):
            if reason := precompile.left_out(selection.spec, tunable, case, capability):
                print(f"skipped {selection.spec.name} {tunable.mode} {case.name} {tunable.function}: {reason}")
                continue
            row = search(selection.spec, tunable, case, where.device, clock)
            print(f"{row['kernel']} {row['mode']} {row['case']}: {_summary(row)}", flush=True)
            yield row
            gc.collect()
            torch.cuda.empty_cache()


def search(spec: KernelSpec, tunable: Tunable, case: Case, device: torch.device, clock: Any) -> dict[str, Any]:
    """Times every candidate of one case. Returns the row of the file."""
    name = spec.searched_in(tunable)
    fn, sets = execute.load(spec, name, case, tunable.mode), input_sets(spec, case, tunable.mode, clock)
    generator = torch.Generator(device).manual_seed(SEED)
    inputs = [spec.make_inputs(case, device, generator) for _ in range(sets)]
    # The same incoming gradients for all candidates, since their results are compared.
    grads = [execute.out_grads(spec, case, fn, i, tunable.mode, generator) for i in inputs]

    def bind(config: Any, op: execute.Op = fn) -> Callable[[int], execute.Run]:
        return lambda index: _bound(
            spec, tunable, config, lambda: execute.bind(spec, op, inputs[index], tunable.mode, grads[index])
        )

    # On copies of what it updates in place: otherwise each result would be the next input, and be compared with itself.
    compared = OnCopies(fn, case.mutates)
    with _listening(spec, tunable) as calls:
        expected = execute.bind(spec, compared, inputs[0], tunable.mode, grads[0])()
    if not calls:
        raise ValueError(f"{spec.name}: {tunable.function} is not called in mode {tunable.mode}, so cannot be tuned")
    arguments, picked = calls[-1]
    configs = [picked, *(config for config in tunable.candidates(case) if config != picked)]
    reasons = {i: reason for i, c in enumerate(configs) if i and (reason := _unfit(bind(c, compared), expected))}
    del expected
    data = timed_data(case, tunable.mode, inputs, grads, generator)
    medians, column = _timed([bind(c) for c in configs], reasons, sets, clock, data)
    return {
        "kernel": spec.name,
        "mode": tunable.mode,
        "case": case.name,
        "function": tunable.function,
        "implementation": name,
        "arguments": [encode(argument) for argument in arguments],
        "column": column,
        "picked": encode(picked),
        "picked_us": medians.get(0),
        "candidates": [
            {"config": encode(config), "median_us": medians.get(i), "reason": reasons.get(i)}
            for i, config in enumerate(configs)
        ],
    }


def _bound(spec: KernelSpec, tunable: Tunable, config: Any, bind: Callable[[], execute.Run]) -> execute.Run:
    """A callable for which `pick_*` returns `config`, both in the forward that `bind` may run and in each call."""
    own: plans.Kept = []

    @contextmanager
    def chosen() -> Iterator[None]:
        picked = mock.patch.object(tunable.module, tunable.function, lambda *_, **__: config)
        with picked, plans.apart(spec, own):
            yield

    with chosen():
        inner = bind()

    def run() -> tuple[torch.Tensor, ...]:
        with chosen():
            return inner()

    return run


@contextmanager
def _listening(spec: KernelSpec, tunable: Tunable) -> Iterator[list[tuple[tuple[Any, ...], Any]]]:
    """Yields a list of (arguments, result) of each call of `pick_*`. Raises TypeError if it is called with keywords."""
    original = getattr(tunable.module, tunable.function)
    calls: list[tuple[tuple[Any, ...], Any]] = []

    def listen(*arguments: Any) -> Any:
        result = original(*arguments)
        calls.append((arguments, result))
        return result

    with mock.patch.object(tunable.module, tunable.function, listen), plans.apart(spec, []):
        yield calls


def _unfit(bind: Callable[[int], execute.Run], expected: Sequence[torch.Tensor]) -> str | None:
    """Why a candidate cannot be used: it does not compile, does not run, or gives other results."""
    try:
        result = bind(0)()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as error:  # whatever a compiler raises is this candidate's reason; the others still run
        return f"{type(error).__name__}: {execute.first_line(error)}"
    for mine, theirs in zip(result, expected, strict=True):
        if mine.numel() and not _agree(mine, theirs):
            return "gives a different result than the selected configuration"
    return None


def _agree(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    if mine.element_size() == 1:  # 8-bit floats have no arithmetic
        mine, theirs = mine.float(), theirs.float()
    scale = theirs.abs().amax()
    return bool((mine - theirs).abs().amax() <= AGREEMENT * scale)


def _timed(
    binds: Sequence[Callable[[int], execute.Run]],
    reasons: dict[int, str],
    sets: int,
    clock: Any,
    data: timing.Data,
) -> tuple[dict[int, float], str]:
    """Medians in µs by index, scaled to the picked one's (index 0), and their column. Adds to `reasons`."""
    left = [i for i in range(1, len(binds)) if i not in reasons]
    groups = [left[start : start + GROUP] for start in range(0, len(left), GROUP)] or [[]]
    found: list[dict[int, float]] = []
    column: str | None = None  # that of the first group, for all: columns cannot be compared
    for group in groups:
        while True:
            medians, used, failed = median_times(clock, {i: binds[i] for i in (0, *group)}, sets, data, column)
            if failed is None:
                break
            index, reason = failed
            if index == 0:
                raise ValueError(f"the selected configuration itself fails: {reason}")
            reasons[index] = reason
            group.remove(index)
        found.append(medians)
        column = used
    anchor = statistics.median(medians[0] for medians in found)
    scaled = {i: us * anchor / medians[0] for medians in found for i, us in medians.items()}
    assert column is not None
    return {**scaled, 0: anchor}, column


def new_clock(device: torch.device) -> timing.Clock:
    """The clock that times the candidates: short samples, since there are many of them."""
    return timing.Clock(device, timing.QUICK)


def input_sets(spec: KernelSpec, case: Case, mode: str, clock: timing.Clock) -> int:
    """How many sets of inputs to rotate through, as in the bench."""
    free = torch.cuda.mem_get_info(clock.device)[0]
    return timing.input_sets(spec.cost(case, mode).bytes, clock.l2_bytes, free, bool(case.mutates))


def median_times(
    clock: timing.Clock,
    binds: Mapping[int, Callable[[int], execute.Run]],
    sets: int,
    data: timing.Data,
    column: str | None = None,
) -> tuple[dict[int, float], str, tuple[int, str] | None]:
    """Medians in µs of `column` (by default the bench's headline), its name, and the candidate that failed with its
    reason, if any; without a CUDA graph where that is the column, it failed."""
    contenders = [timing.Contender(str(index), bind) for index, bind in binds.items()]
    try:
        measurement = clock.measure(contenders, {None: "auto", "graph": "graph"}.get(column, "events"), sets, data)
    except timing.ContenderFailed as failed:
        return {}, "", (int(failed.name), f"{type(failed.error).__name__}: {str(failed.error)[:200]}")
    column = column or measurement.headline("0")
    for name, columns in measurement.columns.items():
        if column not in columns:
            return {}, "", (int(name), "; ".join(measurement.warnings[name]))
    medians = {int(name): columns[column]["median_us"] for name, columns in measurement.columns.items()}
    return medians, column, None


def _summary(row: Mapping[str, Any]) -> str:
    failed = sum(c["median_us"] is None for c in row["candidates"])
    verdict = judge(row, row["picked"])
    return f"{len(row['candidates'])} candidates, {failed} failed; " + (verdict or "the selected one is among the best")


def show(kernel: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the best candidate against the picked one, a line for each case."""
    tables.show(f"{kernel}: selected and best configuration", choices.HEAD, [choices.cells(row) for row in rows])

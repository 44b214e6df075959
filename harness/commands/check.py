"""`check`: every implementation of every kernel against its oracle, from the declarations in SPEC alone.

`plan` lists the checks, `run` makes one check, and tests/test_specs.py turns each into a test. The checks are in
`battery` (values, determinism, layouts), `isolation` (calls that disturb others), `special_values`, `fuzz` (sizes),
`refusal` (bad input), `integration` (torch.library, torch.compile, CUDA graphs, streams, devices) and `unmapped`
(out-of-bounds reads). The criterion for a tensor is in `accuracy`; `bench` calls `verify`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from .. import execute, options
from ..correctness import battery, fuzz, integration, isolation, refusal, special_values, unmapped
from ..correctness.accuracy import Verdict
from ..correctness.battery import Rejected, Skipped, Subject
from ..correctness.global_state import put_back
from ..correctness.verify import verify
from ..spec import WHOLE, WITHOUT_AUTOGRAD, Case, KernelSpec

__all__ = ["CHECKS", "Item", "Outcome", "Verdict", "configure", "main", "plan", "run", "verify"]

# The interpreter takes about a millisecond for each operation of each program.
CPU_BYTES, CPU_DIM = 2 << 20, 24


@dataclass(frozen=True)
class Check:
    """A check function, and on which cases, modes and devices it runs. `scope` says on which cases:

    every      all of them
    kind       one for each dtype and set of parameters
    structure  one for each dtype and set of tensors

    `gpu_scope` replaces it on a GPU. "kind" and "structure" use cases with bench=False, and in the interpreter shrink
    them to CPU_DIM. `any_dtype`: on a CPU, where the check takes seconds, one dtype represents all; on a GPU each dtype
    is checked. `both`: forward and backward are checked separately; otherwise only the fullest mode is, in which the
    outputs are checked together with the gradients. `device`: "cuda" if the check needs a GPU.
    """

    function: Callable[[Subject, str], Verdict | None]
    scope: str
    gpu_scope: str | None = None
    any_dtype: bool = False
    both: bool = False
    device: str = "any"
    backward_only: bool = False


CHECKS: dict[str, Check] = {
    "accuracy": Check(battery.accuracy, "every", both=True),
    "replay": Check(battery.replay, "kind", "every", both=True),
    "repeat": Check(battery.repeat, "kind", "every", both=True),
    "strides": Check(battery.strides, "kind", any_dtype=True),
    "leading": Check(battery.leading, "structure", any_dtype=True),
    "partial": Check(battery.partial, "kind", any_dtype=True, backward_only=True),
    "interleave": Check(isolation.interleaved, "structure", any_dtype=True),
    "alias": Check(isolation.aliased, "structure", any_dtype=True),
    "refusal": Check(refusal.refusals, "kind"),
    "values": Check(special_values.special_values, "structure", "kind", any_dtype=True),
    "sizes": Check(fuzz.sizes, "structure", "kind", any_dtype=True),
    "opcheck": Check(integration.opcheck, "structure", "kind", any_dtype=True),
    "compile": Check(integration.compiled, "structure", "kind", any_dtype=True),
    "stream": Check(integration.stream, "kind", both=True, device="cuda"),
    "graph": Check(integration.graph, "kind", both=True, device="cuda"),
    "device": Check(integration.second_device, "kind", device="cuda"),
    "unmapped": Check(unmapped.unmapped, "kind", device="cuda"),  # last, since a fault makes all later checks fail
}

# The other checks concern the tensors of one op: the ops of a training step are checked by themselves.
OF_A_TRAINING_STEP = ("accuracy", "replay", "repeat", "refusal", "stream", "graph", "device")


@dataclass(frozen=True)
class Item:
    """One check of one implementation on one case; `skip` is the reason why it is not made on this device."""

    spec: KernelSpec
    implementation: str
    case: Case
    mode: str
    check: str
    skip: str | None = None

    @property
    def name(self) -> str:
        return f"{self.spec.name}.{self.mode}.{self.case.name}.{self.implementation}-{self.check}"


@dataclass(frozen=True)
class Outcome:
    """The result of an item: `status` is pass, fail or skip; `cause` is one of `accuracy.CAUSES` when it failed."""

    item: Item
    status: str
    reason: str = ""
    cause: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


def plan(
    spec: KernelSpec,
    device: str,
    cases: Sequence[Case] | None = None,
    modes: Sequence[str] | None = None,
    implementations: Sequence[str] | None = None,
) -> list[Item]:
    """Lists the checks in order: the cheap ones and those that find most come first."""
    cases = spec.cases if cases is None else cases
    whole = tuple(m for m in WHOLE if m in spec.modes)
    phases = whole if set(spec.modes) <= set(WHOLE) else (("fwd", "bwd") if spec.grads else ("fwd",)) + whole
    halves = modes is not None and "fwd+bwd" in modes
    wanted = [m for m in phases if modes is None or m in modes or (halves and m not in WHOLE)]
    items = []
    for implementation in implementations or spec.implementations:
        for name, check in CHECKS.items():
            for case, skip in _cases(spec, cases, check, device):
                taken = {phase for mode in case.modes or phases for phase in mode.split("+")}
                chosen = [m for m in wanted if m in taken and (m in WITHOUT_AUTOGRAD or not case.mutates)]
                chosen = [m for m in chosen if not spec.skip_reason(implementation, case, m)]
                chosen = [m for m in chosen if m != "train" or name in OF_A_TRAINING_STEP]
                if chosen and not (check.backward_only and chosen[-1] in WITHOUT_AUTOGRAD):
                    for mode in chosen if check.both else chosen[-1:]:
                        items.append(Item(spec, implementation, case, mode, name, skip))
    return items


def _cases(spec: KernelSpec, cases: Sequence[Case], check: Check, device: str) -> Iterator[tuple[Case, str | None]]:
    """Yields the cases on which a check is made, each with a reason to skip it or None; others are out of its scope."""
    on_gpu = device.startswith("cuda")
    needs_gpu = "needs a GPU" if check.device == "cuda" and not on_gpu else None
    scope = check.gpu_scope or check.scope if on_gpu else check.scope
    if scope == "every":
        yield from ((case, needs_gpu or unable(spec, case, device)) for case in cases)
        return
    groups: dict[tuple, list[Case]] = {}
    for case in [case for case in cases if not case.bench] or cases:
        small = case if on_gpu else shrunk(spec, case)
        by_tensors = scope == "structure" and unable(spec, small, device) is None
        key = _tensors(spec, shrunk(spec, case)) if by_tensors else tuple(sorted(case.params.items()))
        dtype = None if check.any_dtype and not on_gpu else case.dtype
        groups.setdefault((dtype, case.mutates, case.world_size, key), []).append(small)
    for group in groups.values():
        group = [case for case in group if unable(spec, case, device) is None] or group
        # The first case that has rows and columns to get wrong: authors put the plain cases first.
        best = next((case for case in group if min(case.dims.values(), default=0) > 1), group[0])
        yield best, needs_gpu or unable(spec, best, device)


def shrunk(spec: KernelSpec, case: Case) -> Case:
    """The case with each dimension reduced to CPU_DIM, or as close to it as SPEC.fuzz allows."""
    wanted = {d: min(n, max(CPU_DIM, spec.fuzz[d][0])) for d, n in case.dims.items() if d in spec.fuzz}
    return case if wanted == {d: case.dims[d] for d in wanted} else fuzz.resized(case, wanted, "small")


def _tensors(spec: KernelSpec, case: Case) -> tuple[str, ...]:
    inputs = spec.make_inputs(case, "cpu", torch.Generator())
    return tuple(name for name, value in inputs.items() if isinstance(value, torch.Tensor))


def unable(spec: KernelSpec, case: Case, device: str) -> str | None:
    """Why a case cannot be checked on this device, or None."""
    if spec.stand_in(case) is not None:
        return "too large for the oracle: bench checks it on a smaller case"
    if device.startswith("cuda"):
        return execute.unfit(case, torch.cuda.get_device_capability(device))
    if reason := execute.uninterpretable(case):
        return reason
    if case.min_capability > (0, 0):
        return f"needs a GPU of compute capability {case.min_capability}"
    if case.world_size > 1:
        return execute.several(case)
    if case.bench or _bytes(spec, case) > CPU_BYTES:
        return "bench cases and large ones are checked on a GPU"
    return None


def _bytes(spec: KernelSpec, case: Case) -> int:
    return spec.cost(case, spec.modes[0]).bytes


def run(item: Item, device: str, seed: int = 0) -> Outcome:
    """Makes one check. An exception in it, also sys.exit(), becomes the outcome and is not raised."""
    if item.skip:
        return Outcome(item, "skip", item.skip)
    start = time.perf_counter()

    def outcome(status: str, verdict: Verdict) -> Outcome:
        return Outcome(item, status, verdict.reason, verdict.cause, verdict.numbers, time.perf_counter() - start)

    try:
        fn = execute.load(item.spec, item.implementation, item.case, item.mode)
        subject = Subject(item.spec, item.implementation, fn, item.case, device, seed)
        with put_back():
            verdict = CHECKS[item.check].function(subject, item.mode) or Verdict(True)
        if subject.refused and not subject.taken:
            return outcome("skip", Verdict(True, f"it takes none of these inputs: {subject.refused[0]}"))
        return outcome("pass", verdict)
    except (Skipped, execute.Unavailable) as skip:
        return outcome("skip", Verdict(True, str(skip)))
    except Rejected as rejected:
        return outcome("fail", rejected.verdict)
    except (Exception, SystemExit) as error:
        if execute.out_of_memory(error):
            return outcome("skip", Verdict(True, f"out of memory: {execute.first_line(error)}"))
        return outcome("fail", Verdict(False, f"{type(error).__name__}: {str(error).strip()[:500]}", "raised"))


def configure(parser: argparse.ArgumentParser) -> None:
    options.add_selection(parser, "all", "all of ours")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    parser.add_argument("--check", action="append", choices=tuple(CHECKS), help="only this check")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the random inputs (default: 0)")
    parser.add_argument("--quiet", action="store_true", help="print only failures and the summary")


def main(arguments: argparse.Namespace) -> int:
    """Prints a row for each item; 1 if one failed."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    device = arguments.device or ("cuda" if torch.cuda.is_available() and not interpreted else "cpu")
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: set it before any is imported
        torch.set_num_threads(1)  # the interpreter is serial, and a thread pool makes small tensors slower
    counts, skipped = dict.fromkeys(("pass", "fail", "skip"), 0), Counter[str]()
    print(f"checks on {device}, seed {arguments.seed}")
    print(f"{'':4}  {'kernel.mode.case.implementation-check':64}  {'s':>6}  reason")
    for selection in options.select(arguments):
        spec = selection.spec
        cases = selection.cases if arguments.case else spec.cases
        implementations = selection.implementations if arguments.impl else tuple(spec.implementations)
        for item in plan(spec, device, cases, selection.modes, implementations):
            if arguments.check and item.check not in arguments.check:
                continue
            outcome = run(item, device, arguments.seed)
            counts[outcome.status] += 1
            skipped[outcome.reason] += outcome.status == "skip"
            if outcome.status == "fail" or not arguments.quiet:
                print(row(outcome), flush=True)
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    for reason, count in (+skipped).most_common():
        print(f"{count:5} skipped: {reason}")
    if not sum(counts.values()):
        raise ValueError("nothing matches the selection")
    if not counts["pass"] + counts["fail"]:
        print(f"nothing was checked on {device}: every check was skipped")
    return 1 if counts["fail"] else 0


def row(outcome: Outcome) -> str:
    """One line of the table."""
    cause = f"[{outcome.cause}] " if outcome.cause else ""
    reason = f"  {cause}{' '.join(outcome.reason.split())}" if outcome.reason else ""
    return f"{outcome.status:4}  {outcome.item.name:64}  {outcome.seconds:6.1f}{reason}"

"""The numerical checks: one implementation of a kernel on one case against the oracle, with every input that SPEC
allows.

A check is a function of a Subject that returns nothing, or raises Rejected (with a Verdict) or Skipped (with a reason).
All of them use `examine`: one call with fresh memory poisoned, outputs and inputs between guard zones, and the results
compared with the oracle. They differ in the inputs that they pass to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial as bound
from typing import Any

import torch

from .. import execute
from ..sampling import Sample, draw
from ..spec import WITHOUT_AUTOGRAD, Case, Inputs, KernelSpec, Op
from . import guard, layouts
from .accuracy import Verdict, same_bits
from .in_place import OnCopies, overlapping
from .oracle import OutGrads, Tensors, call, judge

REPEATS = {"cpu": 3, "cuda": 10}  # the interpreter runs programs one after the other


class Rejected(Exception):
    """The implementation is wrong."""

    def __init__(self, verdict: Verdict, where: str = "") -> None:
        super().__init__(verdict.reason)
        self.verdict = replace(verdict, reason=f"{where}: {verdict.reason}") if where else verdict


class Skipped(Exception):
    """The check cannot be made here; the message says why."""


@dataclass(frozen=True)
class Subject:
    """What is checked: an implementation `fn`, called `name`, on one case and device. All data come from `seed`."""

    spec: KernelSpec
    name: str
    fn: Op
    case: Case
    device: str = "cpu"
    seed: int = 0

    def generator(self, offset: int = 0) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.seed + offset)

    def inputs(self, offset: int = 0, case: Case | None = None) -> Inputs:
        """Fresh random inputs; another offset gives others."""
        return self.spec.make_inputs(case or self.case, self.device, self.generator(offset))

    def out_grads(self, inputs: Inputs, offset: int = 0) -> list[torch.Tensor]:
        """Incoming gradients for the outputs that the reference has on these inputs; 0 in the rows outside a sample."""
        sample = self.sample(inputs)
        outputs, _ = call(self.spec, self.spec.reference, sample.inputs(inputs) if sample else inputs)
        like = [t for t in outputs if t.is_floating_point()]
        grads = execute.random_like([sample.whole(t) for t in like] if sample else like, self.generator(offset + 1))
        if sample:
            sample.silence_others(grads)
        return grads

    def sample(self, inputs: Inputs) -> Sample | None:
        """The rows that are compared with the reference, where not all are."""
        return draw(self.spec, self.case, inputs, self.seed)

    def judge(
        self,
        inputs: Inputs,
        out_grads: OutGrads | None,
        results: Sequence[torch.Tensor],
        wrt: Sequence[str] | None = None,
    ) -> Verdict:
        return judge(self.spec, self.case, inputs, out_grads, results, wrt, sample=self.sample(inputs))

    def on_copies(self) -> OnCopies:
        """What is called in place of `fn`, so that inputs that it updates stay as they were."""
        return OnCopies(self.fn, self.case.mutates)

    def differentiable(self, inputs: Inputs) -> bool:
        return bool(execute.leaves(self.spec, inputs))


def contiguous(name: str, values: torch.Tensor) -> torch.Tensor:
    return layouts.place(values, "contiguous")


def as_made(name: str, values: torch.Tensor) -> torch.Tensor:
    """Guarded where it is contiguous; a layout that `make_inputs` chose is part of the case and stays."""
    return contiguous(name, values) if values.is_contiguous() else values


def writable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or where its elements share memory the same values each in a place of its own."""
    return contiguous(name, tensor) if overlapping(tensor) else tensor


def placed(tensors: Mapping[str, Any], place: Callable[[str, torch.Tensor], torch.Tensor]) -> Inputs:
    """The same inputs with every tensor moved to where `place` puts it."""
    return {n: place(n, t) if isinstance(t, torch.Tensor) else t for n, t in tensors.items()}


def grad_names(out_grads: OutGrads) -> list[str]:
    return [f"incoming gradient {i}" for i in range(len(out_grads))]


def guarded_call(
    s: Subject, inputs: Inputs, out_grads: OutGrads | None, wrt: Sequence[str] | None = None, where: str = ""
) -> Tensors:
    """Outputs and gradients of one observed call. Raises Rejected for any fault but wrong numbers."""
    named = dict(zip(grad_names(out_grads or ()), out_grads or (), strict=True))
    snapshot, fn = guard.Snapshot({**inputs, **named}), s.on_copies()

    def run() -> Tensors:
        outputs, grads = call(s.spec, fn, inputs, out_grads, wrt)
        return (*outputs, *grads)

    try:
        if s.device.startswith("cuda"):
            guard.rehearse(run)
        with guard.poisoned(), guard.Allocations() as allocations:
            observed = guard.observe(run)
    except Exception as error:
        raise as_rejection(error, where) from error
    in_place = bound(fn.verdict, inputs)
    verdict = guard.first_failure(observed.verdict, snapshot.verdict, in_place, allocations.verdict)
    if not verdict.ok:
        raise Rejected(verdict, where)
    return observed.copies


def as_rejection(error: Exception, where: str = "") -> Exception:
    """What an exception of the implementation means."""
    if execute.out_of_memory(error):
        return Skipped(f"out of memory: {execute.first_line(error)}")
    if isinstance(error, execute.Unavailable):
        return Skipped(str(error))
    cause = "lazy" if isinstance(error, execute.LazyOutput) else "raised"
    return Rejected(Verdict(False, f"{type(error).__name__}: {str(error).strip()[:500]}", cause), where)


def examine(
    s: Subject,
    inputs: Inputs,
    mode: str,
    place: Callable[[str, torch.Tensor], torch.Tensor] = contiguous,
    where: str = "",
    wrt: Sequence[str] | None = None,
    only: int | None = None,
) -> Verdict:
    """One observed call on `inputs`, placed in memory by `place`, against the oracle; raises Rejected.

    In mode "bwd" the outputs are checked as well as the gradients. `wrt` limits the inputs that are differentiated,
    `only` the outputs that have an incoming gradient.
    """
    inputs = placed(inputs, lambda n, t: writable(n, place(n, t)) if n in s.case.mutates else place(n, t))
    out_grads: OutGrads | None = None
    if mode not in WITHOUT_AUTOGRAD and s.differentiable(inputs):
        made = s.out_grads(inputs)
        spots = [place(n, g) for n, g in zip(grad_names(made), made, strict=True)]
        out_grads = [g if only in (None, i) else None for i, g in enumerate(spots)]
    verdict = s.judge(inputs, out_grads, guarded_call(s, inputs, out_grads, wrt, where), wrt)
    if not verdict.ok:
        raise Rejected(verdict, where)
    return verdict


def accuracy(s: Subject, mode: str) -> Verdict:
    """Random inputs as SPEC makes them."""
    return examine(s, s.inputs(), mode, as_made)


def replay(s: Subject, mode: str) -> None:
    """The same addresses with new contents must give the new answer."""
    inputs = placed(s.inputs(), contiguous)
    out_grads = None if mode in WITHOUT_AUTOGRAD else [contiguous("", g) for g in s.out_grads(inputs)]
    first = guarded_call(s, inputs, out_grads)
    guard.refill(inputs, s.inputs(offset=100))
    if out_grads is not None:
        names = grad_names(out_grads)
        guard.refill(dict(zip(names, out_grads, strict=True)), dict(zip(names, s.out_grads(inputs, 100), strict=True)))
    second = guarded_call(s, inputs, out_grads, where="after the inputs were refilled in place")
    verdict = s.judge(inputs, out_grads, second)
    if not verdict.ok and same_bits(first, second):
        verdict = Verdict(False, "gave the answer to earlier inputs after they were refilled in place", "replay")
    if not verdict.ok:
        raise Rejected(verdict)


def repeat(s: Subject, mode: str) -> None:
    """Bit-wise equal repeats, where SPEC declares them."""
    declared = s.spec.determinism.get(mode, "none")
    if declared not in ("run-to-run", "on request"):
        raise Skipped(f"determinism of {mode} is declared as {declared!r}")
    inputs = s.inputs()
    out_grads = None if mode in WITHOUT_AUTOGRAD else s.out_grads(inputs)
    first: Tensors = ()
    for number in range(REPEATS[s.device.split(":")[0]]):
        try:
            with guard.deterministic() if declared == "on request" else nullcontext():
                outputs, grads = call(s.spec, s.on_copies(), inputs, out_grads)
        except Exception as error:
            raise as_rejection(error) from error
        if number == 0:
            first = (*outputs, *grads)
        elif not same_bits(first, (*outputs, *grads)):
            raise Rejected(Verdict(False, f"repeat {number + 1} differs bit-wise from the first", "repeat"))


def strides(s: Subject, mode: str) -> None:
    """Every layout of every input and incoming gradient, in combinations."""
    inputs = s.inputs()
    names = [n for n, t in inputs.items() if isinstance(t, torch.Tensor)]
    if mode not in WITHOUT_AUTOGRAD:
        names += grad_names(s.out_grads(inputs))
    for assignment in layouts.rounds(names):
        examine(s, inputs, mode, assignment, where=str(assignment))


def partial(s: Subject, mode: str) -> None:
    """Each gradient requested alone, and each output used alone."""
    inputs = s.inputs()
    names = list(execute.leaves(s.spec, inputs))
    if len(names) > 1:
        for name in names:
            examine(s, inputs, mode, where=f"gradient of {name} alone", wrt=[name])
    count = len(s.out_grads(inputs))
    if count > 1:
        for index in range(count):
            examine(s, inputs, mode, where=f"output {index} alone used", only=index)


def leading(s: Subject, mode: str) -> None:
    """More and fewer leading dimensions, some of which cannot be flattened to one stride.

    The dimension that is split is the first of the tensors of highest rank; whatever shares it is split alike. An op
    may reject what the reference accepts, with TypeError or ValueError before a launch.
    """
    inputs = s.inputs()
    tensors = {n: t for n, t in inputs.items() if isinstance(t, torch.Tensor)}
    rank = max((t.dim() for t in tensors.values()), default=0)
    size = next((t.shape[0] for t in tensors.values() if t.dim() == rank), 0) if rank else 0
    shared = [n for n, t in tensors.items() if t.dim() and t.shape[0] == size]
    others = {d for n, t in tensors.items() for d in t.shape[n in shared :]}
    if size < 2 or size in others:
        raise Skipped(f"the leading dimension ({size}) cannot be told from the others or cannot be split")
    half = size // 2

    def reshaped(change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        return {**inputs, **{n: change(tensors[n][: 2 * half]) for n in shared}}

    def interleaved(t: torch.Tensor) -> torch.Tensor:
        return t.reshape(half, 2, *t.shape[1:]).transpose(0, 1)

    variants = {
        "one leading dimension less": ({**inputs, **{n: tensors[n][0] for n in shared}}, contiguous),
        "two leading dimensions": (reshaped(lambda t: t.reshape(2, half, *t.shape[1:])), contiguous),
        "two leading dimensions that cannot be flattened": (reshaped(interleaved), lambda name, t: t),
    }
    for where, (variant, place) in variants.items():
        _examine_or_refusal(s, variant, mode, place, where)


def _examine_or_refusal(s: Subject, inputs: Inputs, mode: str, place: Any, where: str) -> None:
    try:
        call(s.spec, s.spec.reference, inputs)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return  # the operation itself is not defined on such inputs
    with guard.launches() as launched:
        try:
            call(s.spec, s.on_copies(), inputs)
        except (TypeError, ValueError):
            if not launched:
                return
        except Exception as error:
            raise as_rejection(error, where) from error
    examine(s, inputs, mode, place, where)

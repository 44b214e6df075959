"""The numerical checks: one implementation of a kernel on one case against the oracle, with every kind of input that
SPEC allows.

A check is a function of a Subject that returns nothing, or raises Rejected (with a Verdict) or Skipped (with a reason).
All of them use `examine`: one call with poisoned fresh memory, inputs and outputs between guard zones, and a comparison
of the results with the oracle. They differ in the inputs that they pass to it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial as bound
from typing import Any

import torch

from .. import execute
from ..sampling import Sample, draw
from ..spec import WITHOUT_AUTOGRAD, Case, Inputs, KernelSpec, Op
from . import guard, layouts
from .accuracy import Verdict, same_bits
from .global_state import GlobalState
from .in_place import OnCopies, overlapping
from .oracle import Expected, OutGrads, Tensors, call, expected_of, hold_against, judge

_REFUSAL = re.compile(r"\w+: \w+=\S+ cannot run here: ")
REPEATS = {"cpu": 3, "cuda": 10}  # the interpreter runs the programs of a grid serially


class Rejected(Exception):
    """The implementation is wrong."""

    def __init__(self, verdict: Verdict, where: str = "") -> None:
        super().__init__(verdict.reason)
        self.verdict = replace(verdict, reason=f"{where}: {verdict.reason}") if where else verdict


class Refused(Rejected):
    """The implementation reports that it does not support the inputs: `op: option="value" cannot run here: reason`."""


class Skipped(Exception):
    """The check cannot run here; the message says why."""


@dataclass(frozen=True)
class Subject:
    """The object of a check: an implementation `fn` named `name`, on one case and device. All data come from `seed`.

    `taken` and `refused` list the variants of the inputs that the implementation accepted and refused.
    """

    spec: KernelSpec
    name: str
    fn: Op
    case: Case
    device: str = "cpu"
    seed: int = 0
    taken: list[str] = field(default_factory=list, compare=False)
    refused: list[str] = field(default_factory=list, compare=False)

    def generator(self, offset: int = 0) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.seed + offset)

    def inputs(self, offset: int = 0, case: Case | None = None) -> Inputs:
        """Fresh random inputs; each offset gives different ones."""
        return self.spec.make_inputs(case or self.case, self.device, self.generator(offset))

    def out_grads(self, inputs: Inputs, offset: int = 0) -> list[torch.Tensor]:
        """Incoming gradients for the outputs that the reference has on these inputs; 0 in rows that are not sampled."""
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

    def expected(self, inputs: Inputs, out_grads: OutGrads | None) -> Expected:
        """The expected outputs and gradients."""
        return expected_of(self.spec, inputs, out_grads, sample=self.sample(inputs))

    def hold_against(self, truth: Expected, inputs: Inputs, results: Sequence[torch.Tensor]) -> Verdict:
        return hold_against(truth, results, self.case, self.spec, self.sample(inputs))

    def on_copies(self) -> OnCopies:
        """A wrapper that calls `fn` on copies of the inputs that it updates in place, so that these do not change."""
        return OnCopies(self.fn, self.case.mutates)

    def differentiable(self, inputs: Inputs) -> bool:
        return bool(execute.leaves(self.spec, inputs))


def contiguous(name: str, values: torch.Tensor) -> torch.Tensor:
    return layouts.place(values, "contiguous")


def as_made(name: str, values: torch.Tensor) -> torch.Tensor:
    """Guarded where contiguous; a layout that `make_inputs` chose is part of the case and is kept."""
    return contiguous(name, values) if values.is_contiguous() else values


def writable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a contiguous copy of the values where its elements overlap in memory."""
    return contiguous(name, tensor) if overlapping(tensor) else tensor


def placed(tensors: Mapping[str, Any], place: Callable[[str, torch.Tensor], torch.Tensor]) -> Inputs:
    """The same inputs with every tensor moved to where `place` puts it."""
    return {n: place(n, t) if isinstance(t, torch.Tensor) else t for n, t in tensors.items()}


def grad_names(out_grads: OutGrads) -> list[str]:
    return [f"incoming gradient {i}" for i in range(len(out_grads))]


def guarded_call(
    s: Subject, inputs: Inputs, out_grads: OutGrads | None, wrt: Sequence[str] | None = None, where: str = ""
) -> guard.Observed:
    """Outputs and gradients of one observed call. Raises Rejected for any fault except wrong values and strides."""
    named = dict(zip(grad_names(out_grads or ()), out_grads or (), strict=True))
    snapshot, fn = guard.Snapshot({**inputs, **named}), s.on_copies()

    def run() -> Tensors:
        outputs, grads = call(s.spec, fn, inputs, out_grads, wrt)
        return (*outputs, *grads)

    try:
        if s.device.startswith("cuda"):
            guard.rehearse(run)
        with guard.poisoned(), guard.Allocations() as allocations, GlobalState() as state:
            observed = guard.observe(run)
    except Exception as error:
        raise as_rejection(error, where) from error
    in_place = bound(fn.verdict, inputs)
    verdict = guard.first_failure(observed.verdict, snapshot.verdict, in_place, allocations.verdict, state.verdict)
    if not verdict.ok:
        raise Rejected(verdict, where)
    return observed


@contextmanager
def may_be_refused(s: Subject, where: str) -> Iterator[None]:
    """Context for a check on inputs that differ from the case's. One of several implementations, which a user selects
    by an option, may report that it does not support them. The implementation behind "auto" must support everything."""
    try:
        yield
        s.taken.append(where)
    except Refused as refusal:
        if s.name == "auto":
            raise
        s.refused.append(f"{where}: {refusal}")


def as_rejection(error: Exception, where: str = "") -> Exception:
    """The Refused or Rejected that stands for an exception of the implementation."""
    if execute.out_of_memory(error):
        return Skipped(f"out of memory: {execute.first_line(error)}")
    if isinstance(error, execute.Unavailable):
        return Skipped(str(error))
    cause = "lazy" if isinstance(error, execute.LazyOutput) else "raised"
    kind = Refused if isinstance(error, RuntimeError) and _REFUSAL.match(str(error)) else Rejected
    return kind(Verdict(False, f"{type(error).__name__}: {str(error).strip()[:500]}", cause), where)


def examine(
    s: Subject,
    inputs: Inputs,
    mode: str,
    place: Callable[[str, torch.Tensor], torch.Tensor] = contiguous,
    where: str = "",
    only: int | None = None,
    forward_too: bool = False,
) -> Verdict:
    """Compares one observed call on `inputs`, placed in memory by `place`, with the oracle; raises Rejected.

    In mode "bwd" the outputs are checked as well as the gradients. `only` restricts which output has an incoming
    gradient. `forward_too` adds a call without autograd, whose outputs are compared with the same oracle.
    """
    inputs, out_grads = prepared(s, inputs, mode, place)
    if out_grads is not None:
        out_grads = [g if only in (None, i) else None for i, g in enumerate(out_grads)]
    observed, truth = guarded_call(s, inputs, out_grads, where=where), s.expected(inputs, out_grads)
    verdict = hold(s, observed, truth, inputs, where)
    if forward_too and out_grads is not None:
        there = f"{where}, without autograd"
        hold(s, guarded_call(s, inputs, None, where=there), truth.restricted(()), inputs, there)
    return verdict


def prepared(
    s: Subject, inputs: Inputs, mode: str, place: Callable[[str, torch.Tensor], torch.Tensor] = contiguous
) -> tuple[Inputs, OutGrads | None]:
    """Inputs, and incoming gradients where the mode has them, placed in memory by `place`."""
    inputs = placed(inputs, lambda n, t: writable(n, place(n, t)) if n in s.case.mutates else place(n, t))
    if mode in WITHOUT_AUTOGRAD or not s.differentiable(inputs):
        return inputs, None
    made = s.out_grads(inputs)
    return inputs, [place(n, g) for n, g in zip(grad_names(made), made, strict=True)]


def hold(s: Subject, observed: guard.Observed, truth: Expected, inputs: Inputs, where: str = "") -> Verdict:
    """Compares the results of one call with the oracle, and their strides with eager's; raises Rejected."""
    verdict = s.hold_against(truth, inputs, observed.copies)
    if verdict.ok and s.sample(inputs) is None and not (strides := _strides(s, observed.results, truth, inputs)).ok:
        verdict = strides
    if not verdict.ok:
        raise Rejected(verdict, where)
    return verdict


def _strides(s: Subject, results: Sequence[torch.Tensor], truth: Expected, inputs: Inputs) -> Verdict:
    """Whether the results have eager's strides or, failing that, are contiguous.

    Eager's strides follow from those of its inputs. A tensor updated in place keeps its strides, and SPEC may declare
    outputs with strides of their own. Strides of gradients are not checked: autograd decides them.
    """
    own = {f"output {index}" for index in s.spec.own_strides(s.case)}
    for name, result, eager in zip(truth.names, results, truth.eager, strict=True):
        allowed = [eager, *(inputs[n] for n in s.case.mutates if isinstance(inputs.get(n), torch.Tensor))]
        if name in own or not name.startswith("output") or result.is_contiguous():
            continue
        if not any(_spread(result) == _spread(t) for t in allowed):
            text = f"{name} has strides {tuple(result.stride())}, eager's {tuple(eager.stride())}"
            return Verdict(False, text, "strides")
    return Verdict(True)


def _spread(tensor: torch.Tensor) -> list[int]:
    """The strides of the dimensions longer than one element."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def accuracy(s: Subject, mode: str) -> Verdict:
    """Compares with the oracle on random inputs as SPEC makes them."""
    return examine(s, s.inputs(), mode, as_made)


def replay(s: Subject, mode: str) -> None:
    """New contents at the same addresses must give new results, and leave the former ones unchanged. The first element
    of each input is kept, so that an implementation cannot detect new contents by it."""
    inputs, out_grads = prepared(s, s.inputs(), mode)
    first = guarded_call(s, inputs, out_grads)
    refresh(inputs, s.inputs(offset=100))
    if out_grads is not None:
        names = grad_names(out_grads)
        refresh(dict(zip(names, out_grads, strict=True)), dict(zip(names, s.out_grads(inputs, 100), strict=True)))
    second = guarded_call(s, inputs, out_grads, where="after the inputs were refilled in place")
    verdict = s.judge(inputs, out_grads, second.copies)
    if not verdict.ok and same_bits(first.copies, second.copies):
        verdict = Verdict(False, "gave the answer to earlier inputs after they were refilled in place", "replay")
    if verdict.ok and not same_bits(first.copies, _apart(first.results, inputs, first.copies)):
        verdict = Verdict(False, "a second call changed the results of the first", "overwritten")
    if not verdict.ok:
        raise Rejected(verdict)


def refresh(tensors: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Writes new contents at the same addresses, except the first element of floating-point tensors."""
    firsts = {n: t.flatten()[:1].clone() for n, t in tensors.items() if _keeps_first(t)}
    guard.refill(tensors, values)
    for name, first in firsts.items():
        tensors[name].data[(0,) * tensors[name].dim()] = first[0]


def _keeps_first(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.numel() > 1


def _apart(results: Tensors, inputs: Inputs, copies: Tensors) -> Tensors:
    """The results, with a copy in place of each one that shares memory with an input, such as a view of it."""
    held = {t.untyped_storage().data_ptr() for t in inputs.values() if isinstance(t, torch.Tensor)}
    return tuple(c if r.untyped_storage().data_ptr() in held else r for r, c in zip(results, copies, strict=True))


def repeat(s: Subject, mode: str) -> None:
    """Checks that repeats are bit-wise equal, where SPEC declares it."""
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
    """Checks every layout of every input and incoming gradient, in combinations, with autograd and without."""
    inputs = s.inputs()
    names = [n for n, t in inputs.items() if isinstance(t, torch.Tensor)]
    if mode not in WITHOUT_AUTOGRAD:
        names += grad_names(s.out_grads(inputs))
    for assignment in layouts.rounds(names):
        with may_be_refused(s, str(assignment)):
            examine(s, inputs, mode, assignment, where=str(assignment), forward_too=True)


def subsets(names: Sequence[str], device: str) -> list[tuple[str, ...]]:
    """The sets of inputs for which gradients are requested. On a GPU: all but the full set, which other checks cover.
    In the interpreter, where the 127 backwards of seven inputs take minutes: the empty set, each input alone, and all
    but one. With the full set, any three inputs occur there in every combination."""
    every = range(len(names))
    counts = [count for count in every if device != "cpu" or count in (0, 1, len(names) - 1)]
    return [subset for count in counts for subset in itertools.combinations(names, count)]


def partial(s: Subject, mode: str) -> None:
    """Checks the gradients of `subsets` of the inputs (also of none, with autograd on); each output used alone; and a
    call under torch.no_grad() with inputs that require gradients, like a model's weights in inference."""
    inputs, out_grads = prepared(s, s.inputs(), mode)
    assert out_grads is not None
    _as_without_gradients(s, inputs)
    truth, names = s.expected(inputs, out_grads), list(execute.leaves(s.spec, inputs))
    for wrt in subsets(names, s.device):
        where = f"gradient of {' and '.join(wrt)} alone" if wrt else "autograd on, no input requires a gradient"
        hold(s, guarded_call(s, inputs, out_grads, wrt, where), truth.restricted(wrt), inputs, where)
    outputs = len(s.out_grads(inputs))
    if outputs > 1:
        for index in range(outputs):
            examine(s, inputs, mode, where=f"output {index} alone used", only=index)


def _as_without_gradients(s: Subject, inputs: Inputs) -> None:
    """Under torch.no_grad() it must make no difference that inputs require gradients: neither in the bits, nor in the
    memory that Python code allocates, as for a backward that will never run."""
    leaves = {n: t.detach().requires_grad_() for n, t in execute.leaves(s.spec, inputs).items()}
    where, found = "under no_grad, with inputs that require gradients", []
    for given in (inputs, {**inputs, **leaves}):
        try:
            call(s.spec, s.on_copies(), given)  # the first call may create a launch plan
            with guard.Allocations() as allocations:
                outputs, _ = call(s.spec, s.on_copies(), given)
        except Exception as error:
            raise as_rejection(error, where) from error
        found.append((outputs, allocations.bytes))
    (plain, least), (outputs, taken) = found
    if any(t.requires_grad for t in outputs):
        raise Rejected(Verdict(False, "a result requires a gradient", "error"), where)
    if taken > least:
        raise Rejected(Verdict(False, f"{taken} bytes are allocated, and {least} without gradients", "memory"), where)
    if not same_bits(plain, outputs):
        raise Rejected(Verdict(False, "other results than without gradients", "error"), where)


def leading(s: Subject, mode: str) -> None:
    """Checks more and fewer leading dimensions, some of which cannot be flattened to one stride.

    The first dimension of the tensors of highest rank is split; all tensors that share it are split alike. An op may
    reject what the reference accepts, with TypeError or ValueError before a launch.
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
        with may_be_refused(s, where):
            _examine_if_defined(s, variant, mode, place, where)


def _examine_if_defined(s: Subject, inputs: Inputs, mode: str, place: Any, where: str) -> None:
    try:
        call(s.spec, s.spec.reference, inputs)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return  # the operation is not defined on such inputs
    with guard.launches() as launched:
        try:
            call(s.spec, s.on_copies(), inputs)
        except (TypeError, ValueError):
            if not launched:
                return
        except Exception as error:
            raise as_rejection(error, where) from error
    examine(s, inputs, mode, place, where)

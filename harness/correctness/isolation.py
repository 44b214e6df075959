"""Checks that calls disturb neither each other nor their inputs: two problems at once, one tensor as two arguments."""

from __future__ import annotations

import gc
import itertools
from contextlib import nullcontext

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..spec import WHOLE, WITHOUT_AUTOGRAD
from . import writes
from .accuracy import Verdict, same_bits
from .battery import (
    Rejected,
    Skipped,
    Subject,
    as_rejection,
    contiguous,
    examine,
    grad_names,
    may_be_refused,
    placed,
    prepared,
)
from .oracle import Tensors, backward, forward


def interleaved(s: Subject, mode: str) -> None:
    """Runs the forward of one problem, that of another, their backwards, and the first backward once more, as with
    retain_graph=True. Neither results nor saved tensors may be in memory that another call reuses or the backward
    writes. No input is written to, even if it is restored. No memory of the results remains in use once they are
    dropped. In modes without a backward this runs with autograd on."""
    alive = _both(s, mode)
    if alive and any(not ref.expired() for ref in alive):
        gc.collect()  # an autograd function may be part of a reference cycle
        if kept := sum(not ref.expired() for ref in alive):
            raise Rejected(Verdict(False, f"{kept} results are kept in memory after their last use", "kept"))


def _both(s: Subject, mode: str) -> list[StorageWeakRef]:
    """References to the storages of all results, which nothing else keeps alive when this has returned."""
    problems = [prepared(s, s.inputs(offset), mode) for offset in (0, 400)]
    tensors = {f"{n} of problem {i}": t for i, (inputs, _) in enumerate(problems, 1) for n, t in inputs.items()}
    for i, (_, out_grads) in enumerate(problems, 1):
        tensors |= {f"{n} of problem {i}": g for n, g in zip(grad_names(out_grads or ()), out_grads or (), strict=True)}
    fn = s.on_copies()
    again: Tensors = ()
    try:
        with writes.watched(tensors) as written, torch.no_grad() if mode in WHOLE else nullcontext():
            outputs, leaves = forward(s.spec, fn, problems[0][0], _wrt(mode))
            copies = _copies(outputs)
            results = [outputs]
            others, other_leaves = forward(s.spec, fn, problems[1][0], _wrt(mode))
            results.append(others)
            if problems[0][1] is not None:
                gradients = backward(outputs, leaves, problems[0][1], again=True)
                copies += _copies(gradients)
                results += [gradients, backward(others, other_leaves, problems[1][1] or ())]
            later = _copies(tuple(itertools.chain(*results[::2])))
            if problems[0][1] is not None:
                again = _copies(backward(outputs, leaves, problems[0][1]))
    except Exception as error:
        raise as_rejection(error) from error
    if written:
        raise Rejected(Verdict(False, f"{', '.join(dict.fromkeys(written))} was written during the call", "inputs"))
    inputs, out_grads = problems[0]
    truth = s.expected(inputs, out_grads)
    verdict = s.hold_against(truth, inputs, copies)
    if verdict.ok and not same_bits(later, copies):
        verdict = Verdict(False, "a second call changed the results of the first", "overwritten")
    if not verdict.ok:
        raise Rejected(verdict, "two problems at once")
    kept = copies[: len(outputs)]
    if again and not (verdict := s.hold_against(truth, inputs, (*kept, *again))).ok:
        raise Rejected(verdict, "a second backward of the same graph")
    held = {t.untyped_storage().data_ptr() for t in tensors.values() if isinstance(t, torch.Tensor)}
    storages = (t.untyped_storage() for t in itertools.chain(*results))
    return [StorageWeakRef(storage) for storage in storages if storage.data_ptr() not in held]


def _wrt(mode: str) -> tuple[str, ...] | None:
    return () if mode in WITHOUT_AUTOGRAD else None


def _copies(tensors: Tensors) -> Tensors:
    return tuple(t.detach().clone() for t in tensors)


def aliased(s: Subject, mode: str) -> None:
    """Checks one tensor as two arguments, for each pair that has one shape and dtype: x is residual, k is v."""
    inputs = placed(s.inputs(), contiguous)
    tensors = {
        n: t
        for n, t in inputs.items()
        if isinstance(t, torch.Tensor) and t.is_floating_point() and n not in s.case.mutates
    }
    pairs = [(a, b) for a, b in itertools.combinations(tensors, 2) if _alike(tensors[a], tensors[b])]
    if not pairs:
        raise Skipped("no two inputs have one shape and dtype")
    for one, two in pairs:
        with may_be_refused(s, where := f"{one} is {two}"):
            examine(s, {**inputs, two: inputs[one]}, mode, _as_it_is, where=where)


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _as_it_is(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor

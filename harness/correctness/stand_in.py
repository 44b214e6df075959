"""Checks an implementation on a case that is too large for the oracle, through the stand-in that SPEC declares.

A smaller case of the same kind is checked by all of `verify`. On the timed inputs every result must be finite, inputs
that are not updated in place must be unchanged, and a subset of the results, which the reference can compute
separately, must be correct.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from .. import execute
from ..spec import Case, Inputs, KernelSpec, Op, StandIn
from .accuracy import PIECE, Verdict, compare, same_bits, upcast
from .guard import first_failure, refill
from .oracle import Memory
from .verify import verify


def checked(
    spec: KernelSpec,
    case: Case,
    mode: str,
    inputs: Inputs,
    fn: Op,
    out_grads: Sequence[torch.Tensor] | None,
    seed: int = 0,
    poison: bool = True,
    memory: Memory | None = None,
    restore: Callable[[], object] = lambda: None,
) -> Verdict:
    """Runs `verify` on `fn` and the timed inputs or, where SPEC has a stand-in for the case, the checks of this module.

    `restore` gives inputs that are updated in place the values whose results `memory` may have cached. Exceptions of
    the implementation propagate. The numbers are those of the smaller case where there is one.
    """
    stand_in = spec.stand_in(case)
    if stand_in is None:
        run = execute.bind(spec, fn, inputs, mode, out_grads)
        return verify(spec, case, mode, inputs, run, out_grads, seed, poison, memory, restore)
    whole = verify_smaller(spec, mode, inputs, fn, stand_in, seed, poison, memory)
    if not whole.ok:
        return replace(whole, reason=f"on {stand_in.case.name}: {whole.reason}")
    restore()
    return replace(verify_part(spec, case, mode, inputs, fn, stand_in, memory), numbers=whole.numbers)


def verify_smaller(
    spec: KernelSpec,
    mode: str,
    inputs: Inputs,
    fn: Op,
    stand_in: StandIn,
    seed: int,
    poison: bool,
    memory: Memory | None,
) -> Verdict:
    """Runs `verify` on the smaller case, with inputs of its own, in modes without autograd."""
    device = next(t.device for t in inputs.values() if isinstance(t, torch.Tensor))
    small = spec.make_inputs(stand_in.case, device, torch.Generator(device).manual_seed(seed))
    former = {name: small[name].clone() for name in stand_in.case.mutates}
    restore = partial(refill, {name: small[name] for name in former}, former)
    run = execute.bind(spec, fn, small, mode)
    return verify(spec, stand_in.case, mode, small, run, None, seed, poison, memory, restore)


def verify_part(
    spec: KernelSpec, case: Case, mode: str, inputs: Inputs, fn: Op, stand_in: StandIn, memory: Memory | None = None
) -> Verdict:
    """Checks one call on the timed inputs."""
    part = replace(spec, reference=stand_in.reference)
    given = stand_in.inputs(inputs)
    truth = (memory or Memory(0)).expected(part, given, None, None, False)
    kept = {n: t.clone() for n, t in inputs.items() if isinstance(t, torch.Tensor) and n not in case.mutates}
    results = execute.bind(spec, fn, inputs, mode)()

    def unchanged() -> Verdict:
        changed = [name for name, before in kept.items() if not same_bits([inputs[name]], [before])]
        return Verdict(not changed, f"{', '.join(changed)} was changed in place", "inputs" if changed else "")

    def finite() -> Verdict:
        for index, tensor in enumerate(results):
            if tensor.is_floating_point() and not all(bool(p.isfinite().all()) for p in tensor.flatten().split(PIECE)):
                return Verdict(False, f"output {index} has nan or inf", "nonfinite")
        return Verdict(True)

    def right() -> Verdict:
        found = stand_in.results(results, inputs)
        if len(found) != len(truth.oracle):
            return Verdict(False, f"{len(found)} results, expected {len(truth.oracle)}", "count")
        for name, result, oracle, eager in zip(truth.names, found, truth.oracle, truth.eager, strict=True):
            verdict = (
                _close(result, oracle, eager, stand_in.scalar)
                if eager.numel() == 1
                else compare(result, oracle, eager, case.dtype, spec.tolerance)
            )
            if not verdict.ok:
                return replace(verdict, reason=f"{name} of the part that is checked of the whole: {verdict.reason}")
        return Verdict(True)

    return first_failure(unchanged, finite, right)


def _close(result: torch.Tensor, oracle: torch.Tensor, eager: torch.Tensor, relative: float) -> Verdict:
    if (result.shape, result.dtype) != (eager.shape, eager.dtype):
        wanted = f"{eager.dtype} {tuple(eager.shape)}"
        return Verdict(False, f"is {result.dtype} {tuple(result.shape)}, expected {wanted}", "shape")
    error = float((upcast(result) - upcast(oracle)).abs() / upcast(oracle).abs())
    if error <= relative:
        return Verdict(True)
    return Verdict(False, f"the relative error is {error:.3g}, allowed is {relative:.3g}", "error")

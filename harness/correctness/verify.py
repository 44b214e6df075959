"""Correctness of what `bench` times: checks an implementation on the inputs and through the callable that are timed.

    out_grads = ...                                       # None without autograd
    run = execute.bind(spec, fn, inputs, mode, out_grads)
    before = verify(spec, case, mode, inputs, run, out_grads, seed=1)
    ... time `run` ...
    after = verify(spec, case, mode, inputs, run, out_grads, seed=2)

Each `verify` calls `run` several times (the first two to warm up) and rejects, in this order, with `Verdict.cause`

lazy      outputs or gradients that are not plain tensors                              (lazy output)
late      outputs that are not complete on the current stream when `run` returns       (side stream, thread)
inputs    a changed input that `Case.mutates` does not name; `bounds`: memory around one (mutated input)
count, shape, dtype, nonfinite, error    a wrong result, with fresh memory poisoned with NaN
replay    the result for the former contents after the inputs were refilled in place, at the same addresses and without
          a change of autograd's version counters                                      (cached replay)

Afterwards the inputs hold fresh random contents from `spec.make_inputs` (seed + 1), except the first element of each,
by which a cached result might be found out of date. Addresses, shapes and strides do not change, so `run` and CUDA
graphs captured from it remain valid. In mode "bwd", whose forward ran when `run` was bound, only the incoming gradients
are refilled. If SPEC samples the problem, some rows are compared with the reference, and the incoming gradients of all
others are 0 during the check. An exception of the implementation, out of memory included, propagates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from .. import execute, sampling
from ..spec import WITHOUT_AUTOGRAD, Case, Inputs, KernelSpec
from .accuracy import Verdict, same_bits
from .guard import Observed, Snapshot, first_failure, observe, poisoned, refill, rehearse
from .in_place import overlapping
from .oracle import Memory, judge


def verify(
    spec: KernelSpec,
    case: Case,
    mode: str,
    inputs: Inputs,
    run: execute.Run,
    out_grads: Sequence[torch.Tensor] | None = None,
    seed: int = 0,
    poison: bool = True,
    memory: Memory | None = None,
    restore: Callable[[], object] = lambda: None,
) -> Verdict:
    """The verdict on `run`, the callable that `execute.bind` made from `inputs`, `mode` and `out_grads`.

    `poison=False` leaves fresh memory as it is: poisoning uses PyTorch's deterministic mode, under which a backward
    that torch.compile compiled outside of it refuses to run. `memory` caches the oracle by contents. To make use of it,
    `restore` gives tensors that are updated in place the same values after the warm-up of every implementation.
    The numbers are those of the first result. Raises ValueError if a mode with a backward comes without `out_grads`.
    """
    if mode not in WITHOUT_AUTOGRAD and out_grads is None:
        raise ValueError(f"verify: mode {mode} needs the out_grads that run was bound with")
    grads = {f"incoming gradient {i}": g for i, g in enumerate(out_grads or ())}
    try:
        with poisoned() if poison else nullcontext():
            rehearse(run)
        restore()
        verdict, first = _once(spec, case, mode, inputs, run, grads, seed, poison, memory)
        if not verdict.ok:
            return verdict
        again, second = _once(spec, case, mode, inputs, run, grads, seed + 1, poison, memory, refresh=True)
    except execute.LazyOutput as error:
        return Verdict(False, str(error), "lazy")
    finally:
        if spec.sampled(case):  # the timed calls have a gradient in every row
            refill(grads, dict(zip(grads, execute.random_like(list(grads.values())), strict=True)))
    if again.ok:
        return verdict
    if again.cause in ("error", "nonfinite") and first and same_bits(first.copies, second.copies):
        return Verdict(
            False, "gave the answer to earlier inputs after they were refilled in place", "replay", again.numbers
        )
    return Verdict(False, f"after the inputs were refilled in place: {again.reason}", again.cause, again.numbers)


def _once(
    spec: KernelSpec,
    case: Case,
    mode: str,
    inputs: Inputs,
    run: execute.Run,
    grads: dict[str, torch.Tensor],
    seed: int,
    poison: bool,
    memory: Memory | None,
    refresh: bool = False,
) -> tuple[Verdict, Observed]:
    """One observed call of `run` and its verdict; with `refresh`, on new contents."""
    watched = {**inputs, **grads}
    sample = sampling.draw(spec, case, inputs, seed)
    if sample:
        sample.silence_others(list(grads.values()))
    fresh = _fresh(spec, case, mode, inputs, grads, seed) if refresh else {}
    if fresh and all(same_bits([watched[n]], [t]) for n, t in fresh.items()):  # left by a `verify` with the same seed
        fresh = _fresh(spec, case, mode, inputs, grads, seed + 1)
    if sample:
        sample.silence_others([fresh[n] for n in grads if n in fresh])
    # Tensors that the op updates in place are compared with their values from before the call; others must not change.
    former = {n: fresh[n] if refresh else inputs[n].clone() for n in case.mutates}
    start = fresh if refresh else former
    snapshot = None if refresh else Snapshot({n: t for n, t in watched.items() if n not in former})
    with poisoned() if poison else nullcontext():
        observed = observe(run, lambda: refill({n: watched[n] for n in start}, start))

    def unchanged() -> Verdict:
        if snapshot is not None:
            return snapshot.verdict()
        changed = [n for n, t in fresh.items() if n not in former and not same_bits([watched[n]], [t])]
        return (
            Verdict(not changed, f"{', '.join(changed)} was changed in place", "inputs") if changed else Verdict(True)
        )

    def right() -> Verdict:
        incoming = list(grads.values()) if grads else None
        start = {**inputs, **former}
        only = bool(grads)
        return judge(spec, case, start, incoming, observed.copies, grads_only=only, sample=sample, memory=memory)

    return first_failure(observed.verdict, unchanged, right), observed


def _fresh(
    spec: KernelSpec, case: Case, mode: str, inputs: Inputs, grads: dict[str, torch.Tensor], seed: int
) -> dict[str, torch.Tensor]:
    """New contents for the tensors that `run` reads at each call."""
    device = next(t.device for t in inputs.values() if isinstance(t, torch.Tensor))
    generator = torch.Generator(device).manual_seed(seed)
    held = {**inputs, **grads}
    fresh = dict(zip(grads, execute.random_like(list(grads.values()), generator), strict=True))
    if mode != "bwd":
        made = spec.make_inputs(case, device, generator)
        fresh |= {n: made[n] for n, t in inputs.items() if isinstance(t, torch.Tensor)}
    for name, tensor in fresh.items():
        if name not in case.mutates and tensor.is_floating_point() and tensor.numel() > 1 and not overlapping(tensor):
            first = (0,) * tensor.dim()
            tensor[first] = held[name].detach()[first]
    return fresh

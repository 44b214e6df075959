"""The host column: host time of every implementation on a SPEC's host cases, as rows of the record.

A row's mode is the kind of call: `host-nograd` (forward without gradients), `host-fwd` (forward that saves for a
backward), `host-fwd+bwd`, or `host-step` for ops that update in place; with `-compiled`, the same under torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from . import execute, options, renewal
from .measure import host, stats
from .measure.timing import AA, ContenderFailed
from .reporting.entries import HOST, HOST_COMPILED
from .spec import COMPILED, COMPILED_MAX, EAGER, Case, KernelSpec, Yardstick

Rows = list[dict[str, Any]]
#: Called with a case, a kind of call and an implementation, or None for all of them at once.
Begin = Callable[[str, str, "str | None"], object]


def ways(spec: KernelSpec, case: Case) -> tuple[str, ...]:
    """The kinds of call of a host case."""
    modes = spec.modes_of(case)
    if "step" in modes:
        return (f"{HOST}step",)
    differentiable = any(mode in ("bwd", "fwd+bwd") for mode in modes)
    return (f"{HOST}nograd", *((f"{HOST}fwd", f"{HOST}fwd+bwd") if differentiable else ()))


def rows(
    selection: options.Selection,
    device: torch.device,
    compiled: bool,
    quick: bool = False,
    begin: Begin = lambda case, way, name: None,
) -> Iterator[tuple[Case, str, Rows]]:
    """Yields (case, way, rows) of a kernel, eager calls first; with `compiled` also those under torch.compile. `begin`
    is called before anything runs, and raises Crashed for what must not run."""
    spec = selection.spec
    for case in spec.host_cases:
        for way in ways(spec, case):
            yield case, way, _group(selection, case, way, device, False, quick, begin)
        for way in ways(spec, case) if compiled else ():
            if way != f"{HOST}fwd":
                yield case, way + HOST_COMPILED, _group(selection, case, way, device, True, quick, begin)
                torch._dynamo.reset()


def _group(
    selection: options.Selection,
    case: Case,
    way: str,
    device: torch.device,
    compiled: bool,
    quick: bool,
    begin: Begin,
) -> Rows:
    spec, mode = selection.spec, way.removeprefix(HOST)
    as_recorded = way + (HOST_COMPILED if compiled else "")
    torch._dynamo.reset()  # graphs of other cases would make the shapes of a peer's own torch.compile dynamic
    generator = torch.Generator(device).manual_seed(1)
    inputs = spec.make_inputs(case, device, generator)
    grads = execute.out_grads(spec, case, spec.reference, inputs, "fwd+bwd" if "+" in mode else "fwd", generator)
    ready: list[host.Contender] = []
    done: dict[str, dict[str, Any]] = {}

    def row(name: str, status: str, reason: str | None) -> dict[str, Any]:
        return {
            "case": case.name,
            "mode": as_recorded,
            "dims": dict(case.dims),
            "dtype": str(case.dtype).removeprefix("torch."),
            "params": {key: str(value) for key, value in case.params.items()},
            "implementation": name,
            "kind": "ours" if name in spec.implementations else "baseline",
            **({} if name in spec.implementations else {"pytorch": name in spec.pytorch}),
            "status": status,
            "reason": reason,
            "cost": {"flops": {}, "bytes": 0},
            "items": 1,
            "unit": "calls",
        }

    # A yardstick is another op. The compiled reference is `compile`, which belongs to the compiled calls. `compile-max`
    # calls other kernels through the same wrapper.
    left_out = {b.name for b in spec.baselines if isinstance(b, Yardstick)}
    left_out |= {(COMPILED, EAGER)[compiled].name, COMPILED_MAX.name}
    among = spec.host_ops or selection.implementations
    names = [name for name in selection.implementations if name in among and name not in left_out]
    for name in names:
        try:
            begin(case.name, as_recorded, name)
            call = _call(spec, name, case, mode, inputs, grads, compiled)
            call()
            ready.append(host.Contender(name, call))
        except execute.Unavailable as error:
            done[name] = row(name, "skipped", str(error))
        except renewal.Crashed as error:
            done[name] = row(name, "crashed", str(error))
        except torch.AcceleratorError:
            raise  # the context is lost
        except Exception as error:  # a peer may raise anything; its row reports it
            done[name] = row(name, "error", f"{type(error).__name__}: {execute.first_line(error)}")
    try:
        begin(case.name, as_recorded, None)
    except renewal.Crashed as error:
        return [done.get(name) or row(name, "crashed", str(error)) for name in names]
    synchronise = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    while ready:
        ours = next((c for c in ready if c.name in spec.implementations), None)
        again = [host.Contender(ours.name + AA, ours.call)] if ours else []
        try:
            with torch.no_grad() if mode in ("nograd", "step") else nullcontext():
                host.measure([*ready, *again], synchronise, rounds=5 if quick else 21)
            ready += again
            break
        except ContenderFailed as failed:  # in a call that is not its first
            name, why = failed.name.removesuffix(AA), failed.error
            done[name] = row(name, "error", f"{type(why).__name__}: {execute.first_line(why)}")
            ready = [contender for contender in ready if contender.name != name]
    samples = {contender.name: contender.samples_us for contender in ready}
    for contender in ready:
        others = {n: s for n, s in samples.items() if n != contender.name and not n.endswith(AA)}
        ratios = {name: stats.ratio(other, contender.samples_us) for name, other in others.items()}
        twin = samples.get(contender.name + AA)
        done[contender.name] = row(contender.name, "ok", None) | {
            "timer": "host",
            "headline": "host",
            "columns": {"host": stats.column(contender.samples_us, "rounds")},
            "ratios": ratios,
            "noise": stats.ratio(twin, contender.samples_us) if twin else None,
            "warnings": ["the GPU was the bottleneck: this is not host time"] if contender.device_bound else [],
        }
    return [done[name] for name in names if name in done]


def _call(
    spec: KernelSpec, name: str, case: Case, mode: str, inputs: dict, grads: list | None, compiled: bool
) -> Callable[[], object]:
    """One call of an implementation, without overhead that a user's loop would not have."""
    if name in spec.implementations and (reason := spec.skip_reason(name, case, "fwd")):
        raise execute.Unavailable(reason)
    fn = execute.load(spec, name, case, "step" if mode == "step" else "fwd+bwd" if "+" in mode else "fwd")
    fn = spec.host_ops.get(name, fn)
    if compiled and name != COMPILED.name:
        torch._dynamo.reset()
        fn = torch.compile(fn, fullgraph=True, dynamic=False)
    if mode in ("nograd", "step"):
        with torch.no_grad():
            fn(**inputs)
        return _without_autograd(fn, inputs)
    wrt = {n: t.detach().requires_grad_() for n, t in execute.leaves(spec, inputs).items()}
    inputs, leaves = {**inputs, **wrt}, list(wrt.values())
    if mode == "fwd":
        return lambda: fn(**inputs)
    first = execute.outputs(fn(**inputs))
    differentiated = [place for place, output in enumerate(first) if output.requires_grad]
    if isinstance(fn(**inputs), torch.Tensor):
        (grad,) = grads or [None]
        return lambda: torch.autograd.grad(fn(**inputs), leaves, grad)
    return lambda: torch.autograd.grad([r for p, r in enumerate(fn(**inputs)) if p in differentiated], leaves, grads)


def _without_autograd(fn: Callable[..., object], inputs: dict) -> Callable[[], object]:
    return lambda: fn(**inputs)

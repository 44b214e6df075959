"""Turns an implementation, inputs and a mode into a callable without arguments, to be checked, timed and profiled.

fwd      fn(**inputs) without autograd
bwd      the backward alone: the forward ran when the callable was made, its graph is retained
fwd+bwd  both, each time
step     like fwd: an update in place
train    like fwd: the op runs its own forward, backward and optimizer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from . import sampling
from .measure import memory
from .spec import (
    COMPILED,
    COMPILED_MAX,
    EAGER,
    FROM_REFERENCE,
    MAX_AUTOTUNE,
    WITHOUT_AUTOGRAD,
    WITHOUT_DESCENT,
    Baseline,
    Case,
    Inputs,
    KernelSpec,
    Op,
    Peer,
)

Run = Callable[[], tuple[torch.Tensor, ...]]


class LazyOutput(TypeError):
    """An output that is not a plain tensor: a subclass may defer the work, which would not be timed."""


class Unavailable(Exception):
    """An implementation that cannot run here; the message is the reason shown in the report."""


def load(spec: KernelSpec, name: str, case: Case, mode: str) -> Op:
    """The callable behind an implementation's or baseline's name. Raises Unavailable with the reason, or ValueError."""
    if name in spec.implementations:
        if (needed := spec.min_capability.get(name, (0, 0))) > _capability():
            raise Unavailable(_needs(needed))
        return spec.implementations[name]
    for baseline in spec.baselines:
        if baseline.name == name:
            return _load_baseline(spec, baseline, case, mode)
    known = [*spec.implementations, *(b.name for b in spec.baselines)]
    raise ValueError(f"{spec.name} has no implementation {name!r}; known: {', '.join(known)}")


def _capability() -> tuple[int, int]:
    """Compute capability of the current GPU; (0, 0) without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def _load_baseline(spec: KernelSpec, baseline: Baseline, case: Case, mode: str) -> Op:
    if reason := baseline.supports(case, mode):
        raise Unavailable(reason)
    if not isinstance(baseline, Peer) and baseline.name == EAGER.name:
        return spec.reference
    if not isinstance(baseline, Peer) and baseline.name in FROM_REFERENCE:
        return _compiled(spec, None if baseline.name == COMPILED.name else MAX_AUTOTUNE)
    assert isinstance(baseline, Peer)
    return _load_peer(baseline.name, baseline.load)


def _compiled(spec: KernelSpec, options: dict[str, Any] | None) -> Op:
    # A compiled graph is specialised to its shapes: recompiling for each case keeps dynamic shapes out of the figures.
    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # a retained graph may run backward more than once
    return torch.compile(spec.reference, dynamic=False, options=options)


def _smaller(spec: KernelSpec, name: str) -> Mapping[str, Callable[[], Op]]:
    """The fallback configurations of a baseline, for when it does not run as intended."""
    baseline = next((b for b in spec.baselines if b.name == name), None)
    if isinstance(baseline, Peer):
        return baseline.configurations
    if baseline is not None and name == COMPILED_MAX.name:
        return {"no coordinate descent": partial(_compiled, spec, WITHOUT_DESCENT)}
    return {}


def _load_peer(name: str, load: Callable[[], Op]) -> Op:
    try:
        return load()
    except ImportError as error:
        raise Unavailable(f"{name} is not installed ({error})") from error


def load_running(
    spec: KernelSpec, name: str, case: Case, mode: str, attempt: Callable[[Op], object]
) -> tuple[Op, dict[str, str] | None]:
    """The callable behind a name for which `attempt` does not raise: that of `load` or, if it fails, the first of a
    peer's `configurations` that works. In the latter case also its name and the error: {"name", "instead_of"}.

    Raises what `load` or its attempt raised if no configuration runs either. A lost context
    (torch.AcceleratorError) is raised at once.
    """
    fn = load(spec, name, case, mode)
    smaller = _smaller(spec, name)
    try:
        attempt(fn)
        return fn, None
    except torch.AcceleratorError:
        raise
    except Exception as error:  # a peer may raise anything
        if not smaller:
            raise
        first = error.with_traceback(None)  # its frames hold the tensors of the attempt
    for configuration, load_smaller in smaller.items():
        del fn
        torch.cuda.empty_cache()
        fn = _load_peer(name, load_smaller)
        try:
            attempt(fn)
            return fn, {"name": configuration, "instead_of": f"{type(first).__name__}: {first_line(first)}"}
        except torch.AcceleratorError:
            raise
        except Exception:
            continue
    raise first


def outputs(result: torch.Tensor | Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """An op's result as a tuple of tensors. Raises LazyOutput for a tensor subclass."""
    tensors = (result,) if isinstance(result, torch.Tensor) else tuple(result)
    for tensor in tensors:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and not _is_fake(tensor):
            raise LazyOutput(f"an implementation must return plain tensors, got {type(tensor).__name__}")
    return tensors


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.FakeTensor)


def leaves(spec: KernelSpec, inputs: Inputs) -> dict[str, torch.Tensor]:
    """The inputs that are differentiated: floating-point inputs that are named in `spec.grads`. A kernel that also
    supports 8-bit codes has them as integers under the same names."""
    named = {n: inputs.get(n) for n in spec.grads}
    return {n: t for n, t in named.items() if isinstance(t, torch.Tensor) and t.is_floating_point()}


def bind(spec: KernelSpec, fn: Op, inputs: Inputs, mode: str, out_grads: Sequence[torch.Tensor] | None = None) -> Run:
    """Binds one call of `fn` in `mode`. bwd and fwd+bwd return the gradients of `leaves(...)` in order, fwd outputs.

    `out_grads` are the incoming gradients, by default `random_like` each output.
    """
    if mode in WITHOUT_AUTOGRAD:

        def forward() -> tuple[torch.Tensor, ...]:
            with torch.no_grad():
                return outputs(fn(**inputs))

        return forward

    wrt = {n: t.detach().requires_grad_() for n, t in leaves(spec, inputs).items()}
    inputs = {**inputs, **wrt}
    results = outputs(fn(**inputs))
    results = tuple(t for t in results if t.requires_grad)
    grads = random_like(results) if out_grads is None else list(out_grads)

    def backward(results: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(results, list(wrt.values()), grads, retain_graph=mode == "bwd")

    if mode == "bwd":
        return lambda: backward(results)
    return lambda: backward(tuple(t for t in outputs(fn(**inputs)) if t.requires_grad))


def saved_bytes(spec: KernelSpec, fn: Op, inputs: Inputs, mode: str) -> int | None:
    """Bytes that a call in `mode` saves for its backward (`measure.memory`); None if it has no backward."""
    if mode == "train":
        return memory.most_saved_bytes(bind(spec, fn, inputs, mode), (fn, *inputs.values()))
    if mode in WITHOUT_AUTOGRAD:
        return None
    wrt = {n: t.detach().requires_grad_() for n, t in leaves(spec, inputs).items()}
    return memory.saved_bytes(lambda: fn(**{**inputs, **wrt}), (fn, *inputs.values(), *wrt.values()))


def out_grads(
    spec: KernelSpec, case: Case, fn: Op, inputs: Inputs, mode: str, generator: torch.Generator | None
) -> list[torch.Tensor] | None:
    """Incoming gradients for the outputs of `fn` that require gradients, as `bind` takes them; None without autograd.

    Standard normal; that of a scalar is 1, as in `loss.backward()`.
    """
    if mode in WITHOUT_AUTOGRAD:
        return None
    sample = sampling.draw(spec, case, inputs)
    inputs = sample.inputs(inputs) if sample else inputs
    wrt = {n: t.detach().requires_grad_() for n, t in leaves(spec, inputs).items()}
    results = [t for t in outputs(fn(**{**inputs, **wrt})) if t.requires_grad]
    results = [sample.whole(t) for t in results] if sample else results
    return [torch.ones_like(t) if t.dim() == 0 else random_like([t], generator)[0] for t in results]


def unfit(case: Case, capability: tuple[int, int]) -> str | None:
    """Why one process on a GPU of that compute capability cannot run the case, or None."""
    if capability < case.min_capability:
        return _needs(case.min_capability)
    if case.world_size > 1:
        return several(case)
    return None


def uninterpretable(case: Case) -> str | None:
    """Why Triton's interpreter cannot compute a case, or None."""
    name = str(case.dtype).removeprefix("torch.")
    wrong = name == "bfloat16" or name.startswith("float8_")
    return f"Triton's interpreter computes {name} wrongly" if wrong else None


def several(case: Case) -> str:
    """Why a single-process command skips a case of several GPUs."""
    return f"needs {case.world_size} GPUs of one host: bench --gpus {case.world_size}"


def _needs(capability: tuple[int, int]) -> str:
    return "needs compute capability {}.{}".format(*capability)


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception means out of memory: in PyTorch's allocator, or in CUDA where others hold the memory."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "CUDA error: out of memory" in str(error)


def first_line(error: BaseException) -> str:
    """An exception's message without the source code and stack that some append; its type if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def random_like(tensors: Sequence[torch.Tensor], generator: torch.Generator | None = None) -> list[torch.Tensor]:
    """Incoming gradients: standard normal, one per output."""
    return [torch.randn(t.shape, dtype=t.dtype, device=t.device, generator=generator) for t in tensors]

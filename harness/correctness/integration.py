"""Checks of the integration with PyTorch and CUDA: torch.library, torch.compile, graphs, streams, a second device."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .. import registry
from ..capture import capture
from ..spec import WITHOUT_AUTOGRAD, Inputs, Op
from . import guard
from .accuracy import Verdict
from .battery import Rejected, Skipped, Subject, as_rejection, contiguous, examine, grad_names, placed
from .in_place import OnCopies
from .oracle import OutGrads, Tensors, backward, call, forward

# Namespaces of the ops that come with PyTorch.
BUILT_IN = {"aten", "prim", "prims", "profiler", "inductor", "higher_order", "quantized", "_c10d_functional", "cuda"}


def namespace(fn: Op) -> str | None:
    """The namespace of the ops of a kernel in the registry: its package with the dots replaced. None for any other
    function."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    package = getattr(fn, "__module__", "").rpartition(".")[0]
    return package.replace(".", "_") if package.split(".")[0] in registry.COLLECTIONS else None


class _CustomOps(TorchDispatchMode):
    """Records each custom op that is called, once, with copies of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, tuple, dict]] = {}
        self.differentiated = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in BUILT_IN:
            copies = tree_map_only(torch.Tensor, self._copy, (args, kwargs))
            self.calls.setdefault(str(func), (func, *copies))
        return func(*args, **kwargs)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad and self.differentiated)


def opcheck(s: Subject, mode: str) -> None:
    """Runs torch.library.opcheck (schema, autograd registration, fake tensors, AOT dispatch) on each custom op."""
    inputs = s.inputs()
    recorder = _CustomOps()
    with recorder:
        wrt: tuple[str, ...] | None = () if mode in WITHOUT_AUTOGRAD else None
        outputs, leaves = forward(s.spec, s.on_copies(), inputs, wrt)
        recorder.differentiated = False  # saved leaves still require grad, but a double backward is not supported
        if mode not in WITHOUT_AUTOGRAD:
            backward(outputs, leaves, s.out_grads(inputs))
    home = namespace(s.fn)
    found = {func.namespace for func, _, _ in recorder.calls.values()}
    # A composed kernel has no ops of its own.
    needed = {registry.package(name).replace(".", "_") for name in s.spec.needs}
    if home and not found & (needed or {home}):
        reason = f"no op of the namespace {home} was called (found: {', '.join(sorted(found)) or 'none'})"
        raise Rejected(Verdict(False, reason, "opcheck"))
    if not recorder.calls:
        raise Skipped("not a kernel of the registry, and it registers no op")
    for name, (func, args, kwargs) in recorder.calls.items():
        try:
            torch.library.opcheck(func, args, kwargs, test_utils=_utilities(func, args, kwargs))
        except Exception as error:
            raise Rejected(Verdict(False, f"{name}: {_short(error)}", "opcheck")) from error


def _utilities(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """The tests of opcheck that can pass. The last treats NaN as unequal to NaN; `compiled` traces the op anyway."""
    results = func(*tree_map_only(torch.Tensor, torch.clone, args), **tree_map_only(torch.Tensor, torch.clone, kwargs))
    floating = [t for t in tree_leaves(results) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    without = ("test_schema", "test_autograd_registration", "test_faketensor")
    return without if any(t.isnan().any() for t in floating) else (*without, "test_aot_dispatch_dynamic")


def compiled(s: Subject, mode: str) -> None:
    """Checks torch.compile(fullgraph=True), forward and backward, for these shapes and then for symbolic ones.

    Without a GPU the backend is aot_eager, which traces everything but needs no C compiler.
    """
    backend = "inductor" if s.device.startswith("cuda") else "aot_eager"
    for dynamic in (False, True):
        torch._dynamo.reset()
        fn = OnCopies(torch.compile(s.fn, fullgraph=True, backend=backend, dynamic=dynamic), s.case.mutates)
        inputs = s.inputs()
        out_grads = None if mode in WITHOUT_AUTOGRAD else s.out_grads(inputs)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outputs, grads = call(s.spec, fn, inputs, out_grads)
        except Exception as error:
            raise Rejected(Verdict(False, f"dynamic={dynamic}: {_short(error)}", "compile")) from error
        finally:
            torch._dynamo.reset()
        _judge(s, (*outputs, *grads), inputs, out_grads, f"compiled, dynamic={dynamic}")


def graph(s: Subject, mode: str) -> None:
    """Captures a CUDA graph, then replays it on new contents of the same inputs. The backward is captured together with
    its forward. Work on a stream that is not joined is not in the graph, so this check detects it too."""
    inputs, fn = placed(s.inputs(), contiguous), s.on_copies()
    out_grads = None if mode in WITHOUT_AUTOGRAD else [contiguous("", g) for g in s.out_grads(inputs)]

    def run() -> Tensors:
        outputs, grads = call(s.spec, fn, inputs, out_grads)
        return (*outputs, *grads)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    captured = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):
            for _ in range(3):  # compiles, and fills the allocator's pools
                run()
        torch.cuda.synchronize()
        with capture(captured):
            results = run()
    except Exception as error:
        raise Rejected(Verdict(False, _short(error), "graph")) from error
    for offset in (200, 201):
        guard.refill(inputs, s.inputs(offset))
        if out_grads is not None:
            names = grad_names(out_grads)
            fresh = dict(zip(names, s.out_grads(inputs, offset), strict=True))
            guard.refill(dict(zip(names, out_grads, strict=True)), fresh)
        for tensor in results:
            tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor.zero_()
        captured.replay()
        torch.cuda.synchronize()
        _judge(s, results, inputs, out_grads, "replay of the CUDA graph")


def second_device(s: Subject, mode: str) -> None:
    """Checks tensors on cuda:1 while device 0 is current."""
    if torch.cuda.device_count() < 2:
        raise Skipped("there is only one GPU")
    other = Subject(s.spec, s.name, s.fn, s.case, "cuda:1", s.seed)
    with torch.cuda.device(0):
        examine(other, other.inputs(), mode, where="on cuda:1 with device 0 current")


def stream(s: Subject, mode: str) -> None:
    """Checks a non-default stream, on which the inputs become ready only after a delay."""
    inputs, fn = placed(s.inputs(), contiguous), s.on_copies()
    out_grads = None if mode in WITHOUT_AUTOGRAD else [contiguous("", g) for g in s.out_grads(inputs)]
    fresh = s.inputs(offset=300)

    def run() -> Tensors:
        outputs, grads = call(s.spec, fn, inputs, out_grads)
        return (*outputs, *grads)

    try:
        guard.rehearse(run)
        with guard.poisoned():
            observed = guard.observe(run, lambda: guard.refill(inputs, fresh))
    except Exception as error:
        raise as_rejection(error) from error
    verdict = observed.verdict()
    if not verdict.ok:
        raise Rejected(verdict)
    _judge(s, observed.copies, inputs, out_grads, "on another stream")


def _judge(s: Subject, results: Sequence[torch.Tensor], inputs: Inputs, out_grads: OutGrads | None, where: str) -> None:
    verdict = s.judge(inputs, out_grads, results)
    if not verdict.ok:
        raise Rejected(verdict, where)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"

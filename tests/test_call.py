"""An eager call takes the short way where it may, and gives what torch.library's op gives where it may not.

Over every kernel, on its smallest case: in the interpreter without a GPU, on the GPU where there is one.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from harness import execute, registry
from harness.commands import vendor
from harness.correctness.accuracy import FP8, same_bits
from harness.correctness.in_place import OnCopies
from harness.correctness.oracle import call
from harness.plans import kept_by
from harness.spec import WITHOUT_AUTOGRAD, Case, Inputs, KernelSpec, Op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = sorted(p.parent.name for p in registry.ROOT.glob("kernels/*/launch.py") if vendor.part_of(p))
pytestmark = pytest.mark.parametrize("kernel_name", KERNELS)


class Seen(TorchDispatchMode):
    """Changes nothing, and notes the ops of our own that pass. Its being there is what `lean` looks for."""

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.namespace, self.ops = f"kernels_{kernel}", []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == self.namespace:
            self.ops.append(func)
        return func(*args, **(kwargs or {}))


@cache
def spec_of(kernel: str) -> KernelSpec:
    return registry.load(kernel)


def is_small(case: Case) -> bool:
    """Whether the interpreter can run it in one process, and there is something to run."""
    return not case.bench and case.world_size == 1 and all(case.dims.values())


def small(spec: KernelSpec, dtype: torch.dtype | None = None) -> Case:
    """The case with the least data that the interpreter can run and that has some, of that dtype."""
    dtypes = [dtype] if dtype else [torch.float32, torch.float16]
    usable = [c for c in spec.cases if c.dtype in dtypes and is_small(c)]
    usable = [c for c in usable if not c.mutates] or usable
    if not usable:
        pytest.skip(f"no small case of {dtype}")
    sizes = {
        case.name: sum(t.numel() for t in tensors(spec.make_inputs(case, "meta", None)).values()) for case in usable
    }
    return min(usable, key=lambda case: (sizes[case.name] < 64, sizes[case.name]))


def tensors(inputs: Inputs) -> dict[str, torch.Tensor]:
    return {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}


def subject(kernel: str, dtype: torch.dtype | None = None) -> tuple[KernelSpec, Op, Case, Inputs]:
    spec = spec_of(kernel)
    case = small(spec, dtype)
    inputs = spec.make_inputs(case, DEVICE, torch.Generator(DEVICE).manual_seed(7))
    return spec, OnCopies(next(iter(spec.implementations.values())), case.mutates), case, inputs


def differentiable(spec: KernelSpec, case: Case, inputs: Inputs) -> bool:
    with_autograd = any(mode not in WITHOUT_AUTOGRAD for mode in spec.modes_of(case))
    return with_autograd and bool(execute.leaves(spec, inputs))


def run(spec: KernelSpec, fn: Op, case: Case, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """Outputs and, where there are any, gradients, for incoming gradients that depend on the outputs' shapes alone."""
    if not differentiable(spec, case, inputs):
        with torch.no_grad():
            return execute.outputs(fn(**inputs))
    with torch.no_grad():
        like = [t for t in execute.outputs(fn(**inputs)) if t.is_floating_point()]
    grads = execute.random_like(like, torch.Generator(DEVICE).manual_seed(3))
    outputs, gradients = call(spec, fn, inputs, grads)
    return (*outputs, *gradients)


def equal(results, others) -> bool:
    return same_bits(list(results), list(others))


def plans(kernel: str) -> int:
    """How many plans the kernel keeps."""
    return sum(map(len, kept_by(spec_of(kernel))))


def by_library(kernel: str, spec: KernelSpec, fn: Op, case: Case, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    with Seen(kernel):
        return run(spec, fn, case, inputs)


@pytest.fixture(autouse=True)
def _interpreter_can(kernel_name: str) -> None:
    if DEVICE == "cpu" and any(t.dtype in FP8 for t in _outputs_of(kernel_name)):
        pytest.skip("Triton's interpreter computes fp8 wrongly")


@cache
def _outputs_of(kernel: str) -> tuple[torch.Tensor, ...]:
    spec, _, _, inputs = subject(kernel)
    return execute.outputs(OnCopies(spec.reference, ())(**inputs))


def test_both_ways_give_the_same_bits(kernel_name: str) -> None:
    spec, fn, case, inputs = subject(kernel_name)
    eager = run(spec, fn, case, inputs)
    assert plans(kernel_name), "an eager call keeps its plans"
    with Seen(kernel_name) as seen:
        library = run(spec, fn, case, inputs)
    assert seen.ops, "under a mode the op is called"
    assert equal(eager, library)


def test_a_second_call_uses_the_plans_of_the_first(kernel_name: str) -> None:
    spec, fn, case, inputs = subject(kernel_name)
    first = run(spec, fn, case, inputs)
    every = kept_by(spec)
    kept = [plan for plans in every for plan in plans.values()]
    assert equal(first, run(spec, fn, case, inputs))
    again = [plan for plans in every for plan in plans.values()]
    assert len(again) == len(kept) and all(new is old for new, old in zip(again, kept, strict=True)), "made anew"


def _off_a_boundary(t: torch.Tensor) -> torch.Tensor:
    room = t.new_empty(t.numel() + 1)
    return room[1:].view(t.shape).copy_(t)


def _strided(t: torch.Tensor) -> torch.Tensor:
    return t.new_empty(*t.shape[:-1], t.shape[-1] + 3)[..., : t.shape[-1]].copy_(t) if t.dim() else t.clone()


def _transposed(t: torch.Tensor) -> torch.Tensor:
    return t.mT.contiguous().mT if t.dim() > 1 else t.clone()


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t.clone(),
    "off a 16-byte boundary": _off_a_boundary,
    "rows at a stride": _strided,
    "transposed": _transposed,
}


def test_plans_are_told_apart_by_layout_and_dtype(kernel_name: str) -> None:
    """One after the other, twice, so that each finds the plans of all others."""
    for _ in range(2):
        for dtype in (torch.float32, torch.float16):
            if not any(c.dtype == dtype and is_small(c) for c in spec_of(kernel_name).cases):
                continue
            spec, fn, case, inputs = subject(kernel_name, dtype)
            if case.mutates:
                continue
            for layout in LAYOUTS.values():
                moved = {**inputs, **{n: layout(t) for n, t in tensors(inputs).items()}}
                assert equal(run(spec, fn, case, moved), by_library(kernel_name, spec, fn, case, moved))


def test_few_plans_are_kept(kernel_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, fn, case, inputs = subject(kernel_name)
    want = run(spec, fn, case, inputs)
    for kept in kept_by(spec_of(kernel_name)):
        kept.clear()
        monkeypatch.setattr(kept, "size", 1)
    moved = {**inputs, **{n: _off_a_boundary(t) for n, t in tensors(inputs).items()}}
    for given in (inputs, moved, inputs):
        results = run(spec, fn, case, given)
        assert all(len(kept) <= 1 for kept in kept_by(spec_of(kernel_name)))
    assert equal(results, want)


@pytest.mark.gpu  # Triton's interpreter patches its language while a kernel runs: one thread at a time
def test_two_threads_at_once(kernel_name: str) -> None:
    spec, fn, case, inputs = subject(kernel_name)
    other = spec.make_inputs(case, DEVICE, torch.Generator(DEVICE).manual_seed(8))
    want = [run(spec, fn, case, given) for given in (inputs, other)]
    wrong, barrier = [], threading.Barrier(2)

    def work(which: int) -> None:
        barrier.wait()
        for _ in range(5):
            try:
                good = equal(run(spec, fn, case, (inputs, other)[which]), want[which])
            except Exception as error:
                good = error
            if good is not True:
                wrong.append(good)

    threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.fixture
def leaves(kernel_name: str) -> tuple[KernelSpec, Op, Inputs, list[torch.Tensor]]:
    """A kernel with gradients, and its differentiated inputs."""
    spec, fn, case, inputs = subject(kernel_name)
    if not differentiable(spec, case, inputs):
        pytest.skip("it has no gradient")
    wanted = execute.leaves(spec, inputs)
    fresh = {name: t.detach().clone().requires_grad_() for name, t in wanted.items()}
    return spec, fn, {**inputs, **fresh}, list(fresh.values())


def loss_of(fn: Op, inputs: Inputs) -> torch.Tensor:
    outputs = [t for t in execute.outputs(fn(**inputs)) if t.is_floating_point() and t.requires_grad]
    return sum((t * t).sum() for t in outputs)


def test_hooks_and_a_result_that_is_used_twice(kernel_name: str, leaves) -> None:
    _, fn, inputs, wrt = leaves

    def gradients() -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        handles = [t.register_hook(lambda grad: seen.append(grad) or grad * 2) for t in wrt]
        twice = loss_of(fn, inputs) + 3 * loss_of(fn, inputs)
        results = torch.autograd.grad(twice, wrt)
        for handle in handles:
            handle.remove()
        return [*results, *seen]

    eager = gradients()
    with Seen(kernel_name):
        assert equal(eager, gradients())


def test_what_is_saved_may_come_back_elsewhere(kernel_name: str, leaves) -> None:
    """Saved-tensor hooks, as checkpointing and offloading use them."""
    _, fn, inputs, wrt = leaves
    want = torch.autograd.grad(loss_of(fn, inputs), wrt)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: _off_a_boundary(t)):
        got = torch.autograd.grad(loss_of(fn, inputs), wrt)
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b)
    checkpointed = torch.utils.checkpoint.checkpoint(lambda: loss_of(fn, inputs), use_reentrant=False)
    assert equal(want, torch.autograd.grad(checkpointed, wrt))


def test_a_retained_graph_gives_the_same_again(kernel_name: str, leaves) -> None:
    _, fn, inputs, wrt = leaves
    loss = loss_of(fn, inputs)
    first = torch.autograd.grad(loss, wrt, retain_graph=True)
    assert equal(first, torch.autograd.grad(loss, wrt))


def test_a_second_derivative_is_refused_or_right(kernel_name: str, leaves) -> None:
    spec, fn, inputs, wrt = leaves

    def second(op: Op) -> tuple[torch.Tensor, ...]:
        gradients = torch.autograd.grad(loss_of(op, inputs), wrt, create_graph=True)
        return torch.autograd.grad(sum((g * g).sum() for g in gradients), wrt)

    try:
        got = second(fn)
    except (RuntimeError, NotImplementedError):
        return
    for ours, expected in zip(got, second(spec.reference), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-4)


def test_an_input_that_was_changed_since_is_noticed_or_does_not_matter(kernel_name: str, leaves) -> None:
    _, fn, inputs, wrt = leaves
    want = torch.autograd.grad(loss_of(fn, inputs), wrt)
    scaled = {n: t * 1 if t is not None and any(t is w for w in wrt) else t for n, t in inputs.items()}
    loss = loss_of(fn, scaled)
    for name, value in scaled.items():
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            with torch.no_grad():
                scaled[name].mul_(2)
    try:
        got = torch.autograd.grad(loss, wrt)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        assert equal(want, got)


def test_functorch_gives_what_autograd_gives_or_says_that_it_cannot(kernel_name: str, leaves) -> None:
    _, fn, inputs, wrt = leaves
    name = next(n for n, v in inputs.items() if any(v is w for w in wrt))
    others = {n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in inputs.items() if n != name}
    x = inputs[name].detach()

    def first(x: torch.Tensor) -> torch.Tensor:
        return execute.outputs(fn(**others, **{name: x}))[0]

    direction = torch.randn_like(first(x))
    want = torch.autograd.grad(first(inputs[name]), inputs[name], direction)[0]
    with suppress(RuntimeError, NotImplementedError):
        torch.testing.assert_close(torch.func.grad(lambda x: (first(x) * direction).sum())(x), want)
    with suppress(RuntimeError, NotImplementedError):
        batched = torch.func.vmap(first)(torch.stack([x, 2 * x]))
        torch.testing.assert_close(batched, torch.stack([first(x), first(2 * x)]))


def test_batched_gradients_are_not_wrong(kernel_name: str, leaves) -> None:
    _, fn, inputs, wrt = leaves
    output = next(t for t in execute.outputs(fn(**inputs)) if t.is_floating_point() and t.requires_grad)
    directions = torch.randn(2, *output.shape, dtype=output.dtype, device=output.device)
    want = [torch.autograd.grad(output, wrt, d, retain_graph=True, allow_unused=True) for d in directions]
    try:
        got = torch.autograd.grad(output, wrt, directions, is_grads_batched=True, retain_graph=True, allow_unused=True)
    except (RuntimeError, NotImplementedError):
        return
    for place, batch in enumerate(got):
        for direction in (0, 1):
            if batch is not None:
                torch.testing.assert_close(batch[direction], want[direction][place])


@pytest.mark.parametrize("frozen", [False, True])
def test_forward_mode_is_refused_and_not_wrong(kernel_name: str, leaves, frozen: bool) -> None:
    """Also where no input requires a gradient, so that autograd does not see the call."""
    _, fn, inputs, wrt = leaves
    name = next(n for n, v in inputs.items() if any(v is w for w in wrt))
    x = inputs[name].detach()
    if frozen:
        inputs = {n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
    with torch.autograd.forward_ad.dual_level(), pytest.raises((RuntimeError, NotImplementedError)):
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        output = execute.outputs(fn(**{**inputs, name: dual}))[0]
        if torch.autograd.forward_ad.unpack_dual(output).tangent is None:
            raise AssertionError("the tangent was dropped")


def test_a_lazily_negated_tensor_is_read_right(kernel_name: str) -> None:
    spec, fn, case, inputs = subject(kernel_name)
    floats = {n: t for n, t in tensors(inputs).items() if t.is_floating_point() and n not in case.mutates}
    if not floats:
        pytest.skip("it has no such input")
    name = next(iter(floats))
    want = run(spec, fn, case, {**inputs, name: -floats[name]})
    lazy = torch._neg_view(floats[name])
    with torch.no_grad():
        got = execute.outputs(fn(**{**inputs, name: lazy}))
    assert lazy.is_neg() and equal(got, want[: len(got)])


def test_modes_and_contexts_change_nothing(kernel_name: str) -> None:
    _, fn, _, inputs = subject(kernel_name)
    with torch.no_grad():
        want = execute.outputs(fn(**inputs))
        with torch.inference_mode():
            assert equal(want, execute.outputs(fn(**inputs)))
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            assert equal(want, execute.outputs(fn(**inputs)))
        with _deterministic():
            assert equal(execute.outputs(fn(**inputs)), execute.outputs(fn(**inputs)))
        with torch.device(DEVICE):
            assert equal(want, execute.outputs(fn(**inputs)))


def test_contexts_change_no_gradient(kernel_name: str) -> None:
    """The level of forward AD, which no tensor takes part in, is there inside the ops of torch.library too."""
    spec, fn, case, inputs = subject(kernel_name)
    want = run(spec, fn, case, inputs)
    for context in (torch.device(DEVICE), torch.autograd.forward_ad.dual_level()):
        with context:
            assert equal(want, run(spec, fn, case, inputs))


def test_a_tensor_on_a_cpu_is_refused_outside_the_interpreter(kernel_name: str, monkeypatch) -> None:
    """By the name of the function and of an argument."""
    _, fn, _, inputs = subject(kernel_name)
    monkeypatch.setattr(sys.modules[f"kernels.{kernel_name}.checks"], "INTERPRETED", False)
    on_cpu = tree_map_only(torch.Tensor, torch.Tensor.cpu, inputs)
    names = "|".join(inspect.signature(getattr(sys.modules[f"kernels.{kernel_name}"], kernel_name)).parameters)
    with pytest.raises(RuntimeError, match=rf"^{kernel_name}: ({names}) must be on a GPU, or .* got cpu"):
        fn(**on_cpu)


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def test_fake_tensors_stay_fake(kernel_name: str) -> None:
    _, fn, _, inputs = subject(kernel_name)
    real = execute.outputs(fn(**inputs))
    with FakeTensorMode() as mode:
        fakes = tree_map_only(torch.Tensor, mode.from_tensor, inputs)
        results = execute.outputs(fn(**fakes))
    assert all(isinstance(t, FakeTensor) for t in results)
    assert [(t.shape, t.dtype, t.device) for t in results] == [(t.shape, t.dtype, t.device) for t in real]


class Wrapped(torch.Tensor):
    """A tensor subclass that keeps its data in another tensor, as DTensor and quantised weights do."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Wrapped, lambda t: t.inner, (args, kwargs or {}))
        SEEN.append(func)
        return func(*args, **kwargs)


SEEN: list = []


def test_a_subclass_sees_the_op(kernel_name: str) -> None:
    _, fn, case, inputs = subject(kernel_name)
    if case.mutates:
        pytest.skip("an op in place on a wrapper is the wrapper's business")
    with torch.no_grad():
        want = execute.outputs(fn(**inputs))
        SEEN.clear()
        got = fn(**{n: Wrapped(v) if isinstance(v, torch.Tensor) else v for n, v in inputs.items()})
        # An input that is also a result, as a scale that is given, comes back wrapped.
        got = [t.inner if isinstance(t, Wrapped) else t for t in (got if isinstance(got, tuple) else (got,))]
    assert any(func.namespace == f"kernels_{kernel_name}" for func in SEEN)
    assert equal(want, got)


def test_export(kernel_name: str) -> None:
    """The op stands in the exported graph."""
    spec, fn, case, inputs = subject(kernel_name)
    if case.mutates:
        pytest.skip("what it updates are parameters, not inputs")
    names = list(tensors(inputs))
    rest = {n: v for n, v in inputs.items() if n not in names}
    op = next(iter(spec.implementations.values()))

    class Module(torch.nn.Module):
        def forward(self, *values: torch.Tensor):
            return op(**dict(zip(names, values, strict=True)), **rest)

    program = torch.export.export(Module(), tuple(inputs[n] for n in names))
    found = {node.target.namespace for node in program.graph.nodes if hasattr(node.target, "namespace")}
    assert f"kernels_{kernel_name}" in found
    with torch.no_grad():
        want = execute.outputs(fn(**inputs))
        assert equal(want, execute.outputs(program.module()(*(inputs[n] for n in names))))

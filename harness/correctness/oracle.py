"""The expected results: the reference in fp64 (the oracle) and in the case's own dtype (eager), whose error is the
yardstick."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from .. import execute
from ..sampling import Sample
from ..spec import Case, Inputs, KernelSpec, Op
from .accuracy import PIECE, Verdict, compare_all, same_bits, upcast

Tensors = tuple[torch.Tensor, ...]
# One incoming gradient for each output that has one; None where an output is not used.
OutGrads = Sequence["torch.Tensor | None"]
NOISE_SAMPLES, NOISE_ELEMENTS = 6, 10**8
FEW_ELEMENTS = 10**5  # up to this size the error of an output may be small by chance, whatever the sizes of the others
NARROW = frozenset({torch.float32, torch.bfloat16, torch.float16})  # in fp32 if fp64 does not fit in GPU memory


def call(
    spec: KernelSpec, fn: Op, inputs: Inputs, out_grads: OutGrads | None = None, wrt: Sequence[str] | None = None
) -> tuple[Tensors, Tensors]:
    """(outputs, gradients) of one call. The gradients are those of `wrt`, by default `spec.grads`, in the latter's
    order.

    Without `out_grads` autograd is off and there are no gradients.
    """
    if out_grads is None:
        with torch.no_grad():
            return execute.outputs(fn(**inputs)), ()
    outputs, leaves = forward(spec, fn, inputs, wrt)
    return tuple(t.detach() for t in outputs), backward(outputs, leaves, out_grads)


def forward(spec: KernelSpec, fn: Op, inputs: Inputs, wrt: Sequence[str] | None = None) -> tuple[Tensors, Tensors]:
    """Outputs, with their autograd graph, and the leaves to differentiate, which alias the inputs. One tensor passed
    under two names is one leaf."""
    leaves = execute.leaves(spec, inputs)
    once = {id(t): t.detach() for t in leaves.values()}
    leaves = {n: once[id(t)].requires_grad_() for n, t in leaves.items() if wrt is None or n in wrt}
    return execute.outputs(fn(**{**inputs, **leaves})), tuple(leaves.values())


def backward(outputs: Tensors, leaves: Tensors, out_grads: OutGrads, again: bool = False) -> Tensors:
    """Gradients of the leaves; zeros where an output does not depend on a leaf. With `again` the graph is kept for
    another backward."""
    candidates = [t for t in outputs if t.is_floating_point()]
    if len(candidates) != len(out_grads):
        candidates = [t for t in candidates if t.requires_grad]  # the others are declared non-differentiable
    used = [(t, g) for t, g in zip(candidates, out_grads, strict=False) if g is not None and t.requires_grad]
    if not used:
        return tuple(torch.zeros_like(t) for t in leaves)
    return torch.autograd.grad([t for t, _ in used], leaves, [g for _, g in used], again, materialize_grads=True)


@dataclass(frozen=True)
class Expected:
    """Oracle and eager results, with the names of the outputs and gradients."""

    names: tuple[str, ...]
    oracle: Tensors
    eager: Tensors
    perturbed: Callable[[int], Tensors]

    def restricted(self, wrt: Sequence[str]) -> Expected:
        """The same with all outputs but only the gradients of `wrt`."""
        kept = [not n.startswith("gradient of ") or n.removeprefix("gradient of ") in wrt for n in self.names]

        def chosen(values: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(itertools.compress(values, kept))

        return Expected(
            chosen(self.names), chosen(self.oracle), chosen(self.eager), lambda seed: chosen(self.perturbed(seed))
        )

    def verdict(
        self,
        results: Sequence[torch.Tensor],
        case: Case,
        spec: KernelSpec,
        where: Sequence[torch.Tensor] | None = None,
        scale: Sequence[torch.Tensor] | None = None,
    ) -> Verdict:
        """Applies the rule of `accuracy` to all results.

        Eager may be accurate by chance where the result is the small difference of large numbers. So before a result is
        rejected for its error alone, the yardstick is raised to the error of the reference in fp64 with every
        intermediate result perturbed by a random ±1 fp32 epsilon, if that is larger than eager's (Monte Carlo
        arithmetic, Parker 1997). This shows how large the error of correct fp32 arithmetic may be. In every other
        sample all elements of a result are perturbed by the same amount: equal numbers have equal errors, which do not
        average out. The result of a GEMM is perturbed by half an epsilon of the inputs' dtype, to which it is rounded,
        and so are those of its operands that are not representable in that dtype. A log-softmax is perturbed operation
        by operation, since its sum has one error for the whole row. With 10⁸ elements eager is not accurate by chance:
        then this applies to outputs with few elements, such as a loss, and for the others to the rule for small values,
        with one sample. A reference that computes in fp32 never rounds what a GEMM in 16 bits has to; it is that error
        which does not become smaller with the value. A sample is computed in fp32 if fp64 does not fit in memory; if
        that does not fit either, torch.OutOfMemoryError is raised, because without it a correct result may be rejected.

        A sample of a large case takes seconds, so there are only as many, up to NOISE_SAMPLES, as acceptance takes.
        """

        def judge(noise: Sequence[Tensors], bin_noise: Sequence[Tensors] = ()) -> Verdict:
            given = self.oracle, self.eager, self.names, case.dtype, spec.tolerance, where, noise, scale, bin_noise
            return compare_all(results, *given)

        verdict = judge(())
        many = sum(t.numel() for t in self.oracle) > NOISE_ELEMENTS
        few = [not many or t.numel() <= FEW_ELEMENTS for t in self.oracle]
        noise: list[Tensors] = []
        bin_noise: list[Tensors] = []
        for seed in range(NOISE_SAMPLES if any(few) else 1):
            # Further samples only raise the limits: of an error, and of what may overflow in an output after it.
            if verdict.cause != "error" and not (seed and verdict.cause == "nonfinite"):
                break
            perturbed = self.perturbed(seed)
            if many and not seed:
                bin_noise = [perturbed]
            if any(few):  # eager's results stand for those of many elements
                noise.append(tuple(t if n else e for t, e, n in zip(perturbed, self.eager, few, strict=True)))
            verdict = judge(noise, bin_noise)
        return verdict


def expected(
    spec: KernelSpec,
    inputs: Inputs,
    out_grads: OutGrads | None = None,
    wrt: Sequence[str] | None = None,
    grads_only: bool = False,
) -> Expected:
    """Runs the reference twice. The oracle falls back to fp32 where fp64 does not fit into the GPU's memory."""
    outputs, grads = call(spec, spec.reference, inputs, out_grads, wrt)
    chosen = [n for n in execute.leaves(spec, inputs) if wrt is None or n in wrt] if grads else []
    names = (*(f"output {i}" for i in range(len(outputs))), *(f"gradient of {n}" for n in chosen))
    skip = len(outputs) if grads_only else 0
    eager = (*outputs, *grads)[skip:]
    del outputs, grads

    def upcast_call(dtype: torch.dtype) -> Tensors:
        once = {id(t): upcast(t, dtype) for t in inputs.values() if isinstance(t, torch.Tensor)}
        wide = {n: once.get(id(t), t) for n, t in inputs.items()}
        wide_grads = None if out_grads is None else [None if g is None else upcast(g, dtype) for g in out_grads]
        outputs, grads = call(spec, spec.reference, wide, wide_grads, wrt)
        return (*outputs, *grads)[skip:]

    def perturbed_in_fp32(seed: int) -> Tensors:
        with _Perturb(seed, _coarsest(inputs.values()), spec.product_error(inputs), NARROW):
            return upcast_call(torch.float32)

    def perturbed(seed: int) -> Tensors:
        with _Perturb(seed, _coarsest(inputs.values()), spec.product_error(inputs)):
            wide = _unless_out_of_memory(lambda: upcast_call(torch.float64))
        return perturbed_in_fp32(seed) if wide is None else wide

    oracle = _unless_out_of_memory(lambda: upcast_call(torch.float64))
    if oracle is None:
        return Expected(names[skip:], upcast_call(torch.float32), eager, perturbed_in_fp32)
    return Expected(names[skip:], oracle, eager, perturbed)


class Memory:
    """A cache of the expected results for the last few contents of the inputs, with copies of these contents, which
    are compared bit for bit: implementations checked on the same inputs need the oracle only once.

    Contents whose copies and results would take more than `most` bytes are not cached.
    """

    def __init__(self, sets: int = 3, most: int = 8 * 2**30) -> None:
        self._sets, self._most = sets, most
        self._kept: list[tuple[tuple[Any, ...], list[torch.Tensor], Expected]] = []

    def expected(
        self, spec: KernelSpec, inputs: Inputs, out_grads: OutGrads | None, wrt: Sequence[str] | None, grads_only: bool
    ) -> Expected:
        """`expected`, from the cache if possible."""
        values = [*inputs.values(), *(out_grads or ())]
        tensors = [t for t in values if isinstance(t, torch.Tensor)]
        plain = [None if isinstance(v, torch.Tensor) else v for v in values]
        asked = (spec.name, tuple(inputs), plain, wrt, grads_only, out_grads is None)
        for known, copies, truth in self._kept:
            if known == asked and same_bits(copies, tensors):
                return truth
        once = {id(t): t.clone() for t in tensors}  # one tensor under two names stays one
        made = expected(
            spec,
            {n: once.get(id(v), v) for n, v in inputs.items()},
            None if out_grads is None else [once.get(id(g), g) for g in out_grads],
            wrt,
            grads_only,
        )
        copies = [once[id(t)] for t in tensors]
        held = (*once.values(), *made.eager, *made.oracle * (1 + NOISE_SAMPLES))
        if sum(t.numel() * t.element_size() for t in held) > self._most:
            return made
        truth = Expected(made.names, made.oracle, made.eager, cache(made.perturbed))
        self._kept = [(asked, copies, truth), *self._kept[: self._sets - 1]]
        return truth


def judge(
    spec: KernelSpec,
    case: Case,
    inputs: Inputs,
    out_grads: OutGrads | None,
    results: Sequence[torch.Tensor],
    wrt: Sequence[str] | None = None,
    grads_only: bool = False,
    sample: Sample | None = None,
    memory: Memory | None = None,
) -> Verdict:
    """Compares results of one call with the reference; with a sample only its rows, the others having no gradient."""
    if memory is not None and sample is None:
        truth = memory.expected(spec, inputs, out_grads, wrt, grads_only)
    else:
        truth = expected_of(spec, inputs, out_grads, wrt, grads_only, sample)
    return hold_against(truth, results, case, spec, sample)


def expected_of(
    spec: KernelSpec,
    inputs: Inputs,
    out_grads: OutGrads | None,
    wrt: Sequence[str] | None = None,
    grads_only: bool = False,
    sample: Sample | None = None,
) -> Expected:
    """`expected`, of the sample's rows where there is a sample."""
    if sample is None:
        return expected(spec, inputs, out_grads, wrt, grads_only)
    few = None if out_grads is None else sample.outputs(out_grads)
    return expected(spec, sample.inputs(inputs), few, wrt, grads_only)


def hold_against(
    truth: Expected, results: Sequence[torch.Tensor], case: Case, spec: KernelSpec, sample: Sample | None
) -> Verdict:
    """Compares the sampled rows with `truth`; in all other rows finite inputs must give finite results."""
    if sample is None:
        return truth.verdict(results, case, spec)
    if len(results) == len(truth.names) and all(bool(t.isfinite().all()) for t in (*truth.oracle, *truth.eager)):
        verdict = _finite(truth.names, results)
        if not verdict.ok:
            return verdict
    return truth.verdict(sample.results(results, truth.names), case, spec)


def _finite(names: Sequence[str], results: Sequence[torch.Tensor]) -> Verdict:
    """Whether every element of the results is finite."""
    for name, tensor in zip(names, results, strict=True):
        if tensor.is_floating_point() and not all(bool(p.isfinite().all()) for p in tensor.flatten().split(PIECE)):
            return Verdict(False, f"{name} has nan or inf outside the rows that were sampled", "nonfinite")
    return Verdict(True)


def _unless_out_of_memory(compute: Callable[[], Tensors]) -> Tensors | None:
    """None if memory runs out, in which case PyTorch's cache is emptied. By then the exception, which would keep its
    frames' tensors alive, is gone."""
    try:
        return compute()
    except RuntimeError as error:
        if not execute.out_of_memory(error):
            raise
    torch.cuda.empty_cache()
    return None


def _coarsest(values: Iterable[Any]) -> torch.dtype:
    """The floating-point dtype with the largest epsilon among those of some tensors, and at least fp32's."""
    dtypes = {t.dtype for t in values if isinstance(t, torch.Tensor) and t.is_floating_point()}
    return max(dtypes - {torch.float64} | {torch.float32}, key=lambda dtype: torch.finfo(dtype).eps)


class _Perturb(TorchDispatchMode):
    """Perturbs every result in fp64, or in one of the dtypes `changed`, by a random relative amount of at most one fp32
    epsilon: each element by its own or, where the seed is odd, all by the same. GEMMs have inputs of `dtype`: their
    results, and operands that are not representable in it, are perturbed by half its epsilon if that is more. If
    `product_error` is larger still, all operands are perturbed by it, element by element, which models an error of each
    product."""

    PRODUCTS = frozenset({torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm})
    STEPS = get_decompositions([torch.ops.aten._log_softmax, torch.ops.aten._softmax])

    def __init__(
        self, seed: int, dtype: torch.dtype, product_error: float, changed: frozenset = frozenset({torch.float64})
    ) -> None:
        super().__init__()
        self._seed, self._dtype, self._terms, self._changed = seed, dtype, product_error, changed
        self._fp32 = torch.finfo(torch.float32).eps
        self._product = max(self._fp32, torch.finfo(dtype).eps / 2)
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.STEPS:
            with self:
                return self.STEPS[func](*args, **(kwargs or {}))
        amount = self._fp32
        if func.overloadpacket in self.PRODUCTS:
            amount = self._product
            args = tree_map_only(torch.Tensor, self._factor, args)
        out = func(*args, **(kwargs or {}))
        if func.is_view or func._schema.is_mutable:
            return out
        return tree_map_only(torch.Tensor, lambda tensor: self._change(tensor, amount), out)

    def _factor(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._terms > self._product:
            return self._change(tensor, self._terms, each=True)
        fits = torch.equal(tensor.to(self._dtype).to(tensor.dtype), tensor)
        return tensor if fits else self._change(tensor, self._product)

    def _change(self, tensor: torch.Tensor, amount: float, each: bool = False) -> torch.Tensor:
        if tensor.dtype not in self._changed:
            return tensor
        if tensor.device not in self._generators:
            self._generators[tensor.device] = torch.Generator(tensor.device).manual_seed(self._seed)
        generator = self._generators[tensor.device]
        shape = () if self._seed % 2 and not each else tensor.shape
        wide = torch.promote_types(tensor.dtype, torch.float32)
        factor = torch.rand(shape, dtype=wide, device=tensor.device, generator=generator)
        factor.mul_(2).sub_(1).mul_(amount).add_(1)  # in place: these tensors may be the largest
        return (tensor * factor).to(tensor.dtype)

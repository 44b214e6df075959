"""What is wrong with each broken adamw, and the controls."""

from __future__ import annotations

from functools import partial

import torch

from harness.spec import Op
from kernels.adamw.bench import flat, make_case, pieces
from kernels.adamw.reference import adamw_reference

from . import Wrong, wrappers
from .plain_adamw import adamw, check

# Two tensors of 185 elements: two blocks of 64 of the plain kernel and a rest.
CASES = (
    make_case("zoo", pieces(2, 0, 5, 37), torch.float32, lr=0.1),
    make_case("zoo-master", pieces(2, 0, 5, 37), torch.float16, master=True),
)
# The controls are not run on these, which differ in numbers alone.
LONG_CASES = (
    make_case("zoo-first", pieces(2, 0, 5, 37), torch.float32, lr=0.1, step=1, maximize=True, eps=0.1),
    make_case("zoo-scaled", pieces(2, 0, 5, 37), torch.float32, grad_scale=100.0),
)
FP32, MASTER, FIRST, SCALED = (case.name for case in (*CASES, *LONG_CASES))
FUZZ = {"rows": (0, 6), "cols": (1, 40)}
LIMITS: dict[str, float] = {}


def flattened(op) -> Op:
    """`flat` takes the scale for a tensor's; here it stays a number."""
    inner = flat(op)

    def step(**inputs):
        return inner(**inputs)

    return step


def _numbers(op):
    """`op` with the scale as a number: nothing here is captured in a CUDA graph."""

    def numbered(grad_scale=None, **options):
        return op(grad_scale=1.0 if grad_scale is None else 100.0, **options)

    return numbered


plain = flattened(_numbers(adamw))


def _fault(name: str, case: str, check: str, cause: str, on_gpu: tuple[str, str] | None = None) -> Wrong:
    return Wrong(name, flattened(_numbers(partial(adamw, fault=name))), case, check, cause, on_gpu)


class Keyed:
    """Keeps the list of gradients for each set of sizes, as a table of addresses does that looks at too little."""

    def __init__(self):
        self.known = {}

    def __call__(self, params, grads, **options):
        adamw(params, self.known.setdefault(tuple(p.shape for p in params), grads), **options)


def not_in_place(params, **options):
    """Updates copies of the parameters, and so not these."""
    adamw([p.clone() for p in params], **options)


GENERATORS: dict[torch.device, torch.Generator] = {}  # of its own, so that no global state gives it away


def rounded_at_random(params, **options):
    """Adds noise far below an error, from a generator that goes on from call to call."""
    adamw(params, **options)
    for param in params:
        noise = torch.empty_like(param).uniform_(
            generator=GENERATORS.setdefault(param.device, torch.Generator(param.device))
        )
        param.mul_(1 + 1e-7 * noise)


def checks_last(params, grads, exp_avgs, exp_avg_sqs, step, master_params=None, **options):
    adamw(params, grads, exp_avgs, exp_avg_sqs, step, master_params=master_params, **options, fault="no checks")
    check(params, grads, exp_avgs, exp_avg_sqs, master_params)


def returns_copies(**inputs):
    return tuple(t.clone() for t in plain(**inputs))


WRONG = (
    # In the formula.
    _fault("decay in the gradient", FP32, "accuracy", "error"),
    _fault("decay dropped", FP32, "accuracy", "error"),
    _fault("decay without the learning rate", FP32, "accuracy", "error"),
    _fault("m from before the step", FP32, "accuracy", "error"),
    _fault("g not squared", FP32, "accuracy", "error"),
    _fault("step counted from 0", FP32, "accuracy", "error"),
    _fault("no bias correction", FP32, "accuracy", "error"),
    _fault("bias of v taken for that of m", FP32, "accuracy", "error"),
    _fault("eps inside the root", FIRST, "accuracy", "error"),
    _fault("eps before the correction", FIRST, "accuracy", "error"),
    _fault("maximize ignored", FIRST, "accuracy", "error"),
    _fault("scale dropped", SCALED, "accuracy", "error"),
    _fault("gradient scaled in place", SCALED, "accuracy", "inputs"),
    # In what is written, and where.
    _fault("v not written", FP32, "accuracy", "error"),
    _fault("last element not written", FP32, "accuracy", "error"),
    _fault("nothing after the first block", FP32, "accuracy", "error"),
    _fault("writes past the end", FP32, "accuracy", "bounds"),
    _fault("strides of the gradient ignored", FP32, "strides", "error"),
    _fault("master not written", MASTER, "accuracy", "error"),
    _fault("master rounded like its copy", MASTER, "accuracy", "error"),
    # In the lists and tables.
    _fault("the next parameter's m", FP32, "accuracy", "error"),
    _fault("last parameter forgotten", FP32, "accuracy", "error"),
    Wrong(
        "table keyed by sizes alone", flattened(_numbers(Keyed())), FP32, "strides", "error", on_gpu=("replay", "error")
    ),
    Wrong("works on copies", flattened(_numbers(not_in_place)), FP32, "accuracy", "error"),
    Wrong("returns copies", returns_copies, FP32, "accuracy", "inputs"),
    Wrong("rounded at random without a seed", flattened(_numbers(rounded_at_random)), FP32, "repeat", "repeat"),
    # Around the kernel.
    _fault("no checks", FP32, "refusal", "accepted", on_gpu=("refusal", "launched")),
    Wrong("checks after the launch", flattened(_numbers(checks_last)), FP32, "refusal", "launched"),
    Wrong("nameless refusal", wrappers.nameless(plain), FP32, "refusal", "message"),
    Wrong("raises", wrappers.raising(plain), FP32, "accuracy", "raised"),
)

ON_A_GPU = (Wrong("side stream", wrappers.on_a_side_stream(wait=True)(plain), FP32, "stream", "late or error"),)


def reference(params, grads, exp_avgs, exp_avg_sqs, step, *, master_params=None, **options):
    """The reference itself, in place and behind the checks of a public function."""
    check(params, grads, exp_avgs, exp_avg_sqs, master_params)
    masters = [w for w in master_params or () if w is not None]
    new = adamw_reference(params, grads, exp_avgs, exp_avg_sqs, step, master_params=master_params, **options)
    for old, values in zip((params, exp_avgs, exp_avg_sqs, masters), new, strict=True):
        for tensor, value in zip(old, values, strict=True):
            tensor.copy_(value)


CONTROLS = {"plain": plain, "reference": flattened(reference)}

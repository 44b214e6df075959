"""Ops that update inputs in place: what the checks and the bench's `verify` make of right and wrong ones."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch

from harness import execute, on_cpu, options
from harness.commands import check
from harness.correctness.oracle import Memory
from harness.correctness.verify import verify
from harness.measure import timing, wall
from harness.spec import Case, Cost, KernelSpec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def reference(x, d, inplace=False):
    return x + d, d * 2


def right(x, d, inplace=False):
    for name, t in (("x", x), ("d", d)):
        if not t.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {t.dtype}")
    if x.shape != d.shape or x.device != d.device:
        raise ValueError("x and d must have one shape and device")
    return (x.add_(d) if inplace else x + d), d * 2


def returns_a_copy(x, d, inplace=False):
    y, twice = right(x, d, inplace)
    return y.clone(), twice


def leaves_x_alone(x, d, inplace=False):
    return right(x, d, False)


def also_changes_d(x, d, inplace=False):
    y, twice = right(x, d, inplace)
    if inplace:
        d.mul_(2)
    return y, twice


def writes_around_x(x, d, inplace=False):
    y, twice = right(x, d, inplace)
    if x.untyped_storage().nbytes() > x.numel() * x.element_size():
        torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage(), 0, (1,), (1,)).fill_(1.0)
    return y, twice


def make_inputs(case, device, generator):
    shape = (case.dims["rows"], 6)
    made = {n: torch.randn(shape, device=device, generator=generator).to(case.dtype) for n in ("x", "d")}
    return {**made, **case.params}


IN_PLACE = Case("in-place", dict(rows=9), torch.float32, dict(inplace=True), mutates=("x",))
SPEC = KernelSpec(
    name="accumulate",
    implementations={"eager": right},
    reference=reference,
    make_inputs=make_inputs,
    cost=lambda case, mode: Cost(1, 96 * case.dims["rows"]),
    cases=(Case("out-of-place", dict(rows=9), torch.float32, bench=True), IN_PLACE),
    grads=("x", "d"),
    unit="rows",
    items=lambda case: case.dims["rows"],
    fuzz={"rows": (0, 20)},
)


def failures(fn) -> dict[str, str]:
    """check -> cause of everything that the battery rejects."""
    items = check.plan(dataclasses.replace(SPEC, implementations={"fn": fn}), DEVICE, [IN_PLACE])
    outcomes = [check.run(item, DEVICE) for item in items]
    return {o.item.check: o.cause for o in outcomes if o.status == "fail"}


def test_what_is_updated_in_place_is_no_changed_input():
    assert failures(right) == {}


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        (returns_a_copy, "inputs"),
        (leaves_x_alone, "inputs"),
        (also_changes_d, "inputs"),
        (writes_around_x, "bounds"),
    ],
)
def test_the_battery_rejects(wrong, cause):
    assert failures(wrong)["accuracy"] == cause


def test_the_wall_clock_times_it_on_restored_data(monkeypatch):
    """Of the two sets of inputs that four rounds alternate between, every call finds the same values."""
    found, sample = [], wall._sample

    def sampled(*arguments):
        found.clear()
        times = sample(*arguments)
        monkeypatch.setattr(wall, "_sample", found.copy())
        return times

    def noting(x, d, inplace):
        found.append(tuple(x.flatten().tolist()))
        return right(x, d, inplace)

    monkeypatch.setattr(wall, "_sample", sampled)
    case = dataclasses.replace(IN_PLACE, bench=True)
    spec = dataclasses.replace(SPEC, implementations={"noting": noting}, cases=(case,))
    selection = options.Selection(spec, (case,), ("fwd",), ("noting",))
    (row,) = on_cpu.Group(selection, case, "fwd", timing.Budget().fixed(4, 0)).rows()
    assert (row["status"], row["reason"]) == ("ok", None) and row["columns"]["wall"]["n"] == 4
    assert len(wall._sample) == 8 and len(set(wall._sample)) == 2, "four rounds of it and of it once more"


def counting_spec() -> tuple[KernelSpec, list[torch.dtype]]:
    """SPEC, and the dtypes in which its reference has been asked."""
    asked: list[torch.dtype] = []

    def counted(x, d, inplace=False):
        asked.append(x.dtype)
        return reference(x, d, inplace)

    return dataclasses.replace(SPEC, reference=counted), asked


def test_implementations_of_other_bits_share_the_oracle():
    """Each leaves other bits in what it updates, which `restore` takes back before the answer that is judged."""
    (spec, asked), memory = counting_spec(), Memory()
    inputs = make_inputs(IN_PLACE, DEVICE, None)
    former = inputs["x"].clone()
    for n in range(5):

        def other(x, d, inplace, factor=1 + n * 2**-23):
            return x.add_(d * factor), d * 2

        run = execute.bind(spec, other, inputs, "fwd")
        restore = partial(inputs["x"].copy_, former)
        assert verify(spec, IN_PLACE, "fwd", inputs, run, seed=1, memory=memory, restore=restore).ok
    assert asked.count(torch.float64) == 3, "the inputs, new ones, and new ones with what is updated as it was"


def test_no_mode_with_autograd_is_run():
    assert {item.mode for item in check.plan(SPEC, "cpu", [IN_PLACE])} == {"fwd"}
    selection = options.Selection(SPEC, SPEC.cases, SPEC.modes, ("eager",))
    groups = [(case.name, mode) for case, mode in selection.groups()]
    assert groups == [("out-of-place", "fwd"), ("out-of-place", "bwd"), ("in-place", "fwd")]


def test_a_case_may_have_fewer_modes():
    forward = dataclasses.replace(SPEC.cases[0], modes=("fwd",))
    assert dataclasses.replace(SPEC, cases=(forward, IN_PLACE)).modes_of(forward) == ("fwd",)
    assert SPEC.modes_of(SPEC.cases[0]) == ("fwd", "bwd")


def test_a_case_without_a_mode_is_refused():
    with pytest.raises(ValueError, match="in-place"):
        dataclasses.replace(SPEC, modes=("bwd",))


def test_a_step_is_run_without_autograd():
    spec = dataclasses.replace(SPEC, modes=("step",), cases=(dataclasses.replace(IN_PLACE, bench=True),))
    assert {item.mode for item in check.plan(spec, "cpu")} == {"step"}
    inputs = make_inputs(IN_PLACE, DEVICE, None)
    x, d = execute.bind(spec, right, inputs, "step")()
    assert x.data_ptr() == inputs["x"].data_ptr() and not d.requires_grad


def trained(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of gradient descent on the mean of (x · weight)²; the loss, and the weight after it."""
    with torch.enable_grad():
        leaf = weight.detach().requires_grad_()
        loss = (x * leaf).square().mean()
        (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), weight - gradient


def test_a_training_step_is_planned_and_right():
    """As a whole, under no_grad like a step: what it differentiates is its own business."""
    case = Case("step-fp32", dict(rows=5, dim=7), torch.float32, bench=True)

    def make(case: Case, device: torch.device | str, generator: torch.Generator | None) -> dict[str, torch.Tensor]:
        shape = (case.dims["rows"], case.dims["dim"])
        x, weight = (torch.randn(n, device=device, generator=generator).to(case.dtype) for n in (shape, shape[1:]))
        return {"x": x, "weight": weight}

    spec = dataclasses.replace(
        SPEC,
        implementations={"eager": trained},
        reference=trained,
        make_inputs=make,
        modes=("train",),
        cases=(case, dataclasses.replace(case, name="small-fp32", bench=False)),
        grads=(),
    )
    items = check.plan(spec, "cpu")
    assert {item.mode for item in items} == {"train"} and {item.check for item in items} >= {"accuracy", "repeat"}
    wanted = [i for i in items if i.check in ("accuracy", "replay") and not i.skip]
    assert [check.run(item, "cpu").status for item in wanted] == ["pass"] * len(wanted) and len(wanted) == 2


@pytest.mark.parametrize(
    ("fn", "cause"), [(right, ""), (also_changes_d, "inputs"), (lambda x, d, inplace: (x.add_(d), d), "error")]
)
def test_verify_on_what_is_timed(fn, cause):
    inputs = make_inputs(IN_PLACE, DEVICE, None)
    run = execute.bind(SPEC, fn, inputs, "fwd")
    run()
    assert verify(SPEC, IN_PLACE, "fwd", inputs, run).cause == cause


def test_an_implementation_may_need_a_newer_gpu():
    spec = dataclasses.replace(SPEC, min_capability={"eager": (99, 0)})
    with pytest.raises(execute.Unavailable, match=r"compute capability 99\.0"):
        execute.load(spec, "eager", spec.cases[0], "fwd")
    outcome = check.run(check.plan(spec, DEVICE, [IN_PLACE])[0], DEVICE)
    assert (outcome.status, outcome.reason) == ("skip", "needs compute capability 99.0")
    with pytest.raises(ValueError, match="not implementations"):
        dataclasses.replace(SPEC, min_capability={"cuda": (9, 0)})


def test_the_oracle_is_asked_once_for_contents_that_it_has_seen():
    """By a second implementation; not for contents that differ in one bit, nor beyond what may be kept."""
    (spec, asked), memory = counting_spec(), Memory()
    inputs = make_inputs(IN_PLACE, DEVICE, None)
    for _ in range(4):
        run = execute.bind(spec, right, inputs, "fwd")
        run()
        assert verify(spec, IN_PLACE, "fwd", inputs, run, seed=1, memory=memory).ok
    assert asked.count(torch.float64) <= 4, "what the inputs were first, what the first call left, two new contents"
    run = execute.bind(spec, lambda x, d, inplace: (x.add_(d), d), inputs, "fwd")
    assert verify(spec, IN_PLACE, "fwd", inputs, run, seed=1, memory=memory).cause == "error"

    def times_asked(held: Memory, contents: dict) -> int:
        before = len(asked)
        held.expected(spec, contents, None, None, False)
        return len(asked) - before

    contents = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in inputs.items()}
    assert [times_asked(Memory(), contents), times_asked(Memory(most=0), contents)] == [2, 2]
    held, small = Memory(), Memory(most=0)
    assert [times_asked(held, contents) for _ in range(2)] == [2, 0]
    assert [times_asked(small, contents) for _ in range(2)] == [2, 2]
    contents["x"].view(torch.int32)[0, 0] ^= 1
    assert times_asked(held, contents) == 2
    assert times_asked(held, {**contents, "inplace": False}) == 2

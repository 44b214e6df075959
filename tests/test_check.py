"""What `check` plans, what it skips and says so, and what the command line makes of it."""

from __future__ import annotations

import dataclasses
import itertools
import types

import pytest
import torch

from harness import cli, execute, registry
from harness.commands import check
from harness.correctness import battery
from harness.spec import Case, Cost, KernelSpec


def scale(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    if not x.is_floating_point():
        raise TypeError(f"x must be floating point, got {x.dtype}")
    return x * factor


def make_inputs(case, device, generator):
    shape = (case.dims["rows"], case.dims["dim"])
    return {"x": torch.randn(shape, device=device, generator=generator).to(case.dtype), **case.params}


CASES = (
    Case("big-fp32", dict(rows=1 << 20, dim=64), torch.float32, bench=True),
    Case("1x1-fp32", dict(rows=1, dim=1), torch.float32),
    Case("40x7-fp32", dict(rows=40, dim=7), torch.float32),
    Case("5x7-fp32-triple", dict(rows=5, dim=7), torch.float32, dict(factor=3.0)),
    Case("5x7-bf16", dict(rows=5, dim=7), torch.bfloat16),
    Case("5x7-fp8", dict(rows=5, dim=7), torch.float8_e4m3fn),
    Case("5x7-hopper", dict(rows=5, dim=7), torch.float32, dict(factor=4.0), min_capability=(9, 0)),
    Case("5x7-two-gpus", dict(rows=5, dim=7), torch.float32, dict(factor=5.0), world_size=2),
    Case("wide-fp32", dict(rows=1, dim=1 << 20), torch.float32),
)
SPEC = KernelSpec(
    name="scale",
    implementations={"eager": scale},
    reference=scale,
    make_inputs=make_inputs,
    cost=lambda case, mode: Cost(1, 8 * case.dims["rows"] * case.dims["dim"]),
    cases=CASES,
    grads=("x",),
    unit="rows",
    items=lambda case: case.dims["rows"],
    fuzz={"rows": (0, 30), "dim": (1, 30)},
)


def planned(name: str, device: str = "cpu", **kwargs) -> dict[str, str | None]:
    return {item.case.name: item.skip for item in check.plan(SPEC, device, **kwargs) if item.check == name}


def test_accuracy_is_planned_for_every_case_with_a_reason_where_it_cannot_be_checked():
    reasons = planned("accuracy")
    assert list(reasons) == [case.name for case in CASES]
    assert reasons["40x7-fp32"] is None and reasons["1x1-fp32"] is None
    assert reasons["5x7-bf16"] == "Triton's interpreter computes bfloat16 wrongly"
    assert reasons["5x7-two-gpus"] == "needs 2 GPUs of one host: bench --gpus 2"
    assert reasons["5x7-fp8"] == "Triton's interpreter computes float8_e4m3fn wrongly"
    assert reasons["5x7-hopper"] == "needs a GPU of compute capability (9, 0)"
    assert reasons["big-fp32"] == reasons["wide-fp32"] == "bench cases and large ones are checked on a GPU"


def test_thorough_checks_take_one_case_of_a_kind_and_shrink_it():
    reasons = planned("strides")
    runnable = [name for name, reason in reasons.items() if reason is None]
    assert runnable == ["40x7-fp32.small", "5x7-fp32-triple"]
    assert [name for name, reason in planned("values").items() if reason is None] == ["40x7-fp32.small"]


def test_a_case_without_dimensions_is_planned():
    spec = dataclasses.replace(SPEC, cases=(Case("one", {}, torch.float32), CASES[0]), fuzz={})
    spec = dataclasses.replace(spec, make_inputs=lambda *_: {"x": torch.ones(())}, cost=lambda case, mode: Cost(1, 8))
    outcomes = [check.run(item, "cpu") for item in check.plan(spec, "cpu", spec.cases[:1])]
    assert {"accuracy", "strides"} <= {o.item.check for o in outcomes if o.status == "pass"}
    assert not [check.row(outcome) for outcome in outcomes if outcome.status == "fail"]


def test_checks_that_need_a_gpu_say_so():
    assert set(planned("graph").values()) == set(planned("stream").values()) == {"needs a GPU"}


def test_modes_and_cases_can_be_chosen():
    items = check.plan(SPEC, "cpu", [CASES[2]], modes=("fwd",))
    assert {item.mode for item in items} == {"fwd"} and "partial" not in {item.check for item in items}
    both = {(i.check, i.mode) for i in check.plan(SPEC, "cpu", [CASES[2]])}
    assert {("accuracy", "fwd"), ("accuracy", "bwd"), ("strides", "bwd")} <= both
    assert ("strides", "fwd") not in both


def test_a_case_of_the_forward_alone_has_no_backward():
    items = check.plan(SPEC, "cpu", [dataclasses.replace(CASES[2], modes=("fwd",))])
    assert {item.mode for item in items} == {"fwd"}
    assert {"accuracy", "strides"} <= {item.check for item in items}


def test_what_is_another_implementation_once_more_is_checked_once():
    both = {"first": scale, "second": scale}
    spec = dataclasses.replace(
        SPEC,
        implementations=both,
        alias_reason=lambda name, case, mode: "again" if (name, mode) == ("second", "fwd") else None,
    )
    items = check.plan(spec, "cpu", [CASES[2]])
    assert {(i.implementation, i.mode) for i in items} == {("first", "fwd"), ("first", "bwd"), ("second", "bwd")}


def test_names_are_unique_and_hold_the_case():
    names = [item.name for item in check.plan(SPEC, "cpu")]
    assert len(names) == len(set(names))
    assert "scale.bwd.40x7-fp32.eager-accuracy" in names


def test_everything_passes_for_what_is_right():
    outcomes = [check.run(item, "cpu") for item in check.plan(SPEC, "cpu", CASES[1:4])]
    assert not [check.row(outcome) for outcome in outcomes if outcome.status == "fail"]


@pytest.mark.parametrize("error", [ZeroDivisionError("division by zero"), SystemExit(0)], ids=["raise", "exit"])
def test_an_exception_is_an_outcome(error):
    def broken(x, factor=2.0):
        raise error

    spec = dataclasses.replace(SPEC, implementations={"broken": broken})
    outcome = check.run(check.plan(spec, "cpu", [CASES[2]])[0], "cpu")
    assert (outcome.status, outcome.cause) == ("fail", "raised")
    assert outcome.reason == f"{type(error).__name__}: {error}"


def test_determinism_that_is_not_declared_is_skipped():
    spec = dataclasses.replace(SPEC, determinism={"fwd": "none", "bwd": "run-to-run"})
    outcomes = {i.mode: check.run(i, "cpu") for i in check.plan(spec, "cpu", [CASES[2]]) if i.check == "repeat"}
    assert (outcomes["fwd"].status, outcomes["bwd"].status) == ("skip", "pass")
    assert "'none'" in outcomes["fwd"].reason


def test_determinism_on_request_is_tested_in_the_deterministic_mode():
    def unsteady(**inputs):
        noise = 0 if torch.get_deterministic_debug_mode() == 2 else 1e-3 * torch.rand(())
        return scale(**inputs) * (1 + noise)

    for declared, status in (("on request", "pass"), ("run-to-run", "fail")):
        spec = dataclasses.replace(SPEC, implementations={"eager": unsteady}, determinism={"fwd": declared})
        (item,) = [i for i in check.plan(spec, "cpu", [CASES[2]], ["fwd"]) if i.check == "repeat"]
        assert check.run(item, "cpu").status == status
    assert torch.get_deterministic_debug_mode() == 0


class Once(torch.autograd.Function):
    """Twice x; the backward writes the gradient over what was saved for it, unseen by autograd."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.full_like(x, 2.0))
        return x * 2

    @staticmethod
    def backward(ctx, incoming):
        (saved,) = ctx.saved_tensors
        return saved.data.mul_(incoming).clone()


def test_a_backward_that_writes_over_what_was_saved_is_found():
    spec = dataclasses.replace(SPEC, implementations={"eager": lambda x, factor=2.0: Once.apply(x)})
    (item,) = [i for i in check.plan(spec, "cpu", [CASES[2]]) if i.check == "interleave"]
    outcome = check.run(item, "cpu")
    assert (outcome.status, outcome.cause) == ("fail", "error")
    assert outcome.reason.startswith("a second backward of the same graph: gradient of x: ")


def test_the_path_outside_of_the_deterministic_mode_is_the_one_that_is_checked():
    """Although fresh memory is poisoned through that mode."""

    def wrong_by_default(**inputs):
        return scale(**inputs) * (1 if torch.are_deterministic_algorithms_enabled() else 2)

    spec = dataclasses.replace(SPEC, implementations={"eager": wrong_by_default})
    (item,) = [i for i in check.plan(spec, "cpu", [CASES[2]], ["fwd"]) if i.check == "accuracy"]
    assert (check.run(item, "cpu").status, check.run(item, "cpu").cause) == ("fail", "error")
    inputs = make_inputs(CASES[2], "cpu", torch.Generator().manual_seed(0))
    for mode, accepted in ((False, False), (True, True)):
        torch.use_deterministic_algorithms(mode)
        try:
            run = execute.bind(spec, wrong_by_default, inputs, "fwd")
            assert check.verify(spec, CASES[2], "fwd", inputs, run).ok is accepted
            assert torch.get_deterministic_debug_mode() == 2 * mode
        finally:
            torch.use_deterministic_algorithms(False)


def test_the_same_seed_gives_the_same_numbers():
    item = check.plan(SPEC, "cpu", [CASES[2]])[0]
    assert check.run(item, "cpu", seed=3).numbers == check.run(item, "cpu", seed=3).numbers
    assert check.run(item, "cpu", seed=3).numbers != check.run(item, "cpu", seed=4).numbers


def test_limits_keep_special_values_within_the_domain():
    def fragile(x, factor=2.0):
        if bool((x.nan_to_num(0.0).abs() > 50).any()):
            raise OverflowError("too large")
        return scale(x, factor)

    def outcome(**changes):
        spec = dataclasses.replace(SPEC, implementations={"fragile": fragile}, **changes)
        (item,) = (i for i in check.plan(spec, "cpu", [CASES[2]]) if i.check == "values")
        return check.run(item, "cpu")

    assert outcome().cause == "raised"
    assert outcome(limits={"x": 40.0}).status == "pass"


def test_a_case_that_masks_is_not_asked_about_what_is_not_finite():
    def fragile(x, factor=2.0):
        if not bool(x.isfinite().all()):
            raise OverflowError("not finite")
        return scale(x, factor)

    def outcome(**changes):
        spec = dataclasses.replace(SPEC, implementations={"fragile": fragile}, **changes)
        (item,) = (i for i in check.plan(spec, "cpu", [CASES[2]]) if i.check == "values")
        return check.run(item, "cpu")

    assert outcome().cause == "raised"
    assert outcome(finite_only=lambda case: case.dtype == torch.float32).status == "pass"
    assert outcome(finite_only=lambda case: case.dtype != torch.float32).cause == "raised"


@pytest.mark.parametrize("count", range(3, 8))
def test_any_three_inputs_are_differentiated_in_every_combination(count):
    names = "abcdefg"[:count]
    few, all_but_the_whole = battery.subsets(names, "cpu"), battery.subsets(names, "cuda")
    assert len(few) == 2 * count + 1 and len(all_but_the_whole) == 2**count - 1 and {*few} <= {*all_but_the_whole}
    for three in itertools.combinations(names, 3):
        found = {tuple(name in subset for name in three) for subset in [*few, tuple(names)]}
        assert found == set(itertools.product((False, True), repeat=3))


def test_a_failing_draw_is_told_and_made_small():
    def wrong(x, factor=2.0):
        return scale(x, factor) + (x.stride(-1) == 2 and x.shape[0] > 1)

    spec = dataclasses.replace(SPEC, implementations={"wrong": wrong})
    (item,) = (i for i in check.plan(spec, "cpu", [CASES[2]]) if i.check == "sizes")
    first, again = check.run(item, "cpu"), check.run(item, "cpu")
    assert first.cause == "error" and first.reason.startswith("dims {'rows': 2, 'dim': 1}, seed 0")
    assert first.reason == again.reason


@pytest.mark.parametrize("takes", ["contiguous rows", "nothing else"])
def test_an_implementation_may_refuse_inputs_that_are_not_the_cases(takes):
    """One that a user chooses; what "auto" takes has no exceptions, and nobody refuses the case itself."""

    def choosy(x, factor=2.0):
        if x.stride(-1) != 1 or (takes == "nothing else" and x.stride(0) != 7):
            raise RuntimeError('scale: backend="cuda" cannot run here: x is not contiguous')
        return scale(x, factor)

    def outcomes(name: str, of_check: str) -> set[str]:
        spec = dataclasses.replace(SPEC, implementations={name: choosy})
        items = [i for i in check.plan(spec, "cpu", [CASES[2]]) if i.check == of_check]
        return {check.run(i, "cpu").status for i in items}

    for of_check in ("strides", "sizes"):
        assert outcomes("cuda", of_check) == {"pass"}
        assert outcomes("auto", of_check) == {"fail"}


def test_a_check_of_which_everything_was_refused_is_skipped_and_that_of_the_case_fails():
    def never(x, factor=2.0):
        raise RuntimeError('scale: backend="cuda" cannot run here: no')

    spec = dataclasses.replace(SPEC, implementations={"cuda": never})
    found = {i.check: check.run(i, "cpu") for i in check.plan(spec, "cpu", [CASES[2]]) if not i.skip}
    assert found["accuracy"].status == found["replay"].status == "fail"
    assert found["strides"].status == "skip" and "it takes none of these inputs" in found["strides"].reason


@pytest.fixture
def toy_registry(monkeypatch):
    def use(spec: KernelSpec) -> None:
        monkeypatch.setattr(registry, "names", lambda: [spec.name])
        monkeypatch.setattr(registry, "load", lambda name: spec)

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    return use


def test_command_line_passes(toy_registry, capsys):
    toy_registry(SPEC)
    assert cli.main(["check", "--device", "cpu", "--case", "40x7-fp32", "--check", "accuracy", "--check", "graph"]) == 0
    printed = capsys.readouterr().out
    assert "pass  scale.fwd.40x7-fp32.eager-accuracy" in printed
    assert "needs a GPU" in printed and "2 pass, 0 fail, 2 skip" in printed


def test_command_line_fails(toy_registry, capsys):
    toy_registry(dataclasses.replace(SPEC, implementations={"wrong": lambda x, factor=2.0: x}))
    assert cli.main(["check", "--device", "cpu", "--case", "40x7-fp32", "--check", "accuracy", "--quiet"]) == 1
    printed = capsys.readouterr().out
    assert "fail  scale.fwd.40x7-fp32.wrong-accuracy" in printed and "[error]" in printed


def test_command_line_says_that_all_was_skipped(toy_registry, capsys):
    toy_registry(SPEC)
    assert cli.main(["check", "--device", "cpu", "--case", "40x7-fp32", "--check", "graph"]) == 0
    assert "nothing was checked on cpu: every check was skipped" in capsys.readouterr().out


def test_command_line_names_what_it_does_not_know(toy_registry, capsys):
    toy_registry(SPEC)
    assert cli.main(["check", "--device", "cpu", "--case", "41x7"]) == 2
    assert "40x7-fp32" in capsys.readouterr().err


def test_a_kernel_that_does_not_import_fails_alone(monkeypatch):
    from tests import test_specs

    def load(name: str) -> KernelSpec:
        if name == "broken":
            raise ImportError("no such thing")
        return SPEC

    monkeypatch.setattr(test_specs, "registry", types.SimpleNamespace(load=load))
    (broken,), *_ = test_specs._params("broken"), test_specs._params("scale")
    with pytest.raises(ImportError, match="no such thing"):
        test_specs.test_spec(*broken.values)

"""The bench without a GPU: what it decides before it measures."""

from __future__ import annotations

import dataclasses
import signal
from types import SimpleNamespace

import pytest
import torch

from harness import execute, options, record, registry
from harness.commands.bench import Group, Interrupt
from harness.spec import EAGER, Cost, Yardstick


def test_a_case_that_the_device_cannot_run_is_skipped_with_the_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    spec = registry.load("rmsnorm")
    case = dataclasses.replace(spec.cases[0], min_capability=(9, 0))
    selection = options.Selection(spec, (case,), ("fwd",), ("triton", "eager"))
    rows = Group(SimpleNamespace(device=torch.device("cuda", 0)), selection, case, "fwd").rows()
    assert [(row["implementation"], row["status"]) for row in rows] == [("triton", "skipped"), ("eager", "skipped")]
    assert {row["reason"] for row in rows} == {"needs compute capability 9.0"}


def test_an_implementation_that_is_another_one_once_more_is_not_timed():
    spec = registry.load("attention")
    case = next(case for case in spec.cases if case.bench and not case.modes)
    selection = options.Selection(spec, (case,), ("fwd",), ("auto", "triton-fused"))
    group = Group(SimpleNamespace(), selection, case, "fwd")
    for name in selection.implementations:
        with group._guarded(name):
            group._once(name)
    assert list(group.done) == ["triton-fused"]
    assert group.done["triton-fused"]["reason"] == "its forward is that of auto"


@pytest.mark.parametrize("kernel", registry.names())
def test_what_a_row_says_of_any_case_can_be_recorded(kernel):
    spec = registry.load(kernel)
    name = next(iter(spec.implementations))
    for case in spec.cases:
        selection = options.Selection(spec, (case,), spec.modes_of(case), (name,))
        group = Group(SimpleNamespace(), selection, case, spec.modes_of(case)[0])
        record.dumps(group._row(name, "skipped", "why"))


def test_incoming_gradients_are_those_of_the_outputs_that_autograd_reaches():
    spec = registry.load("rmsnorm")
    case = spec.case("33x257-fp16-residual")
    inputs = spec.make_inputs(case, "cpu", torch.Generator().manual_seed(0))
    grads = execute.out_grads(spec, case, spec.reference, inputs, "bwd", None)
    assert [g.shape for g in grads] == [inputs["x"].shape] * 2
    assert execute.out_grads(spec, case, spec.reference, inputs, "fwd", None) is None


@pytest.mark.parametrize(("message", "line"), [("one\ntwo", "one"), ("", "ValueError"), ("\n  ", "ValueError")])
def test_the_first_line_of_an_exception_is_never_missing(message, line):
    assert execute.first_line(ValueError(message)) == line


def test_eager_too_may_be_unfit_for_a_case():
    spec = registry.load("rmsnorm")
    case = spec.cases[0]
    unfit = dataclasses.replace(EAGER, supports=lambda case, mode: "too long" if case.dims["rows"] > 2 else None)
    spec = dataclasses.replace(spec, baselines=(unfit,))
    assert (
        execute.load(spec, "eager", dataclasses.replace(case, dims={**case.dims, "rows": 2}), "fwd") is spec.reference
    )
    with pytest.raises(execute.Unavailable, match="too long"):
        execute.load(spec, "eager", case, "fwd")


def test_a_yardstick_is_neither_ours_nor_a_peer_and_has_a_cost_of_its_own():
    copy = Yardstick("copy", load=lambda: lambda x, **_: x.clone(), cost=lambda case, mode: Cost(0, 123))
    spec = registry.load("rmsnorm")
    spec = dataclasses.replace(spec, baselines=(*spec.baselines, copy))
    selection = options.Selection(spec, spec.cases[:1], ("fwd",), ("triton", "eager", "copy"))
    group = Group(SimpleNamespace(), selection, spec.cases[0], "fwd")
    group._check("copy", lambda **inputs: None, {}, None, seed=0)  # or it would run it and find fault
    rows = {name: group._row(name, "ok", None) for name in selection.implementations}
    assert {name: row["kind"] for name, row in rows.items()} == {
        "triton": "ours",
        "eager": "baseline",
        "copy": "yardstick",
    }
    assert rows["copy"]["cost"]["bytes"] == 123 != rows["eager"]["cost"]["bytes"]
    assert execute.load(spec, "copy", spec.cases[0], "fwd")(x=torch.ones(2)).tolist() == [1, 1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_in_a_destructor_is_not_lost():
    class Dying:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        interrupt.raise_if_lost()
        Dying()  # Python prints the KeyboardInterrupt and goes on
        with pytest.raises(KeyboardInterrupt):
            interrupt.raise_if_lost()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_case_of_several_gpus_is_skipped_with_its_reason(monkeypatch):
    spec = registry.load("rmsnorm")
    case = dataclasses.replace(spec.cases[0], name="of-2", world_size=2)
    assert execute.unfit(case, (9, 0)) == "needs 2 GPUs of one host: bench --gpus 2"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    selection = options.Selection(spec, (case,), ("fwd",), ("triton",))
    (row,) = Group(SimpleNamespace(device=torch.device("cuda", 0)), selection, case, "fwd").rows()
    assert (row["status"], row["reason"]) == ("skipped", "needs 2 GPUs of one host: bench --gpus 2")

"""The bench without a GPU: what it decides before it measures."""

from __future__ import annotations

import dataclasses
import signal
from types import SimpleNamespace

import pytest
import torch

from harness import execute, options, record, registry
from harness.commands.bench import Group, Interrupt
from harness.measure.turns import Turns
from harness.roofline import Ceilings
from harness.rows import described
from harness.spec import COMPILED, COMPILED_MAX, EAGER, Cost, Peer, Yardstick


def a_session() -> SimpleNamespace:
    """What a group that runs nothing needs of a session."""
    return SimpleNamespace(device=torch.device("cuda", 0), turns=Turns(None, torch.device("cpu")))


def test_a_case_that_the_device_cannot_run_is_skipped_with_the_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    spec = registry.load("rmsnorm")
    case = dataclasses.replace(spec.cases[0], min_capability=(9, 0))
    selection = options.Selection(spec, (case,), ("fwd",), ("triton", "eager"))
    rows = Group(a_session(), selection, case, "fwd").rows()
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
    assert group.done["triton-fused"]["reason"] == "same forward as auto"


@pytest.mark.parametrize("kernel", registry.names())
def test_what_a_row_says_of_any_case_can_be_recorded(kernel):
    spec = registry.load(kernel)
    name = next(iter(spec.implementations))
    for case in spec.cases:
        selection = options.Selection(spec, (case,), spec.modes_of(case), (name,))
        group = Group(SimpleNamespace(), selection, case, spec.modes_of(case)[0])
        record.dumps(group._row(name, "skipped", "why"))


def test_stages_are_recorded_and_what_fails_there_is_a_warning():
    def stages(name, case, mode, device):
        if name == "triton":
            raise ValueError("no such stage\nat all")
        return {"norm": 2e-6} if name == "cuda" else None

    spec = dataclasses.replace(registry.load("rmsnorm"), stages=stages)
    selection = options.Selection(spec, spec.cases[:1], ("fwd",), ("triton",))
    group = Group(SimpleNamespace(device=torch.device("cpu")), selection, spec.cases[0], "fwd")
    for name in ("cuda", "eager", "triton"):
        group.done[name] = {"warnings": []}
        group._add_stages(name)
    assert group.done == {
        "cuda": {"warnings": [], "stages_us": {"norm": pytest.approx(2.0)}},
        "eager": {"warnings": []},
        "triton": {"warnings": ["no time by stage: ValueError: no such stage"]},
    }


def test_a_row_says_what_runs_where_the_spec_has_it_in_its_ablation():
    spec = registry.load("rmsnorm")
    name = next(iter(spec.implementations))
    declared = dataclasses.replace(spec, ablation={name: "ours"})
    assert described(declared, spec.cases[0], "fwd", name, "ok", None)["ablation"] == "ours"
    assert "ablation" not in described(declared, spec.cases[0], "fwd", "eager", "ok", None)
    with pytest.raises(ValueError, match="ablation names"):
        dataclasses.replace(spec, ablation={"nothing": "?"})


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
    spec = dataclasses.replace(spec, baselines=(unfit,), pytorch=())
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


@pytest.mark.parametrize(("flops", "long"), [(9e14, False), (2e15, True)])
def test_a_call_is_long_by_its_roofline(flops, long):
    spec = dataclasses.replace(registry.load("rmsnorm"), cost=lambda case, mode: Cost(flops, 1, pipe="bf16"))
    session = SimpleNamespace(ceilings=Ceilings(4e12, {"bf16": 1e15}))
    assert Group(session, options.Selection(spec, spec.cases[:1], ("fwd",), ()), spec.cases[0], "fwd")._long() == long


@pytest.mark.parametrize(
    ("asked", "captured", "flops", "timer"),
    [
        ("auto", True, 5e14, "graph"),
        ("auto", True, 2e15, "auto"),
        ("auto", False, 5e14, "auto"),
        ("events", True, 5e14, "events"),
    ],
)
def test_a_step_that_users_capture_is_timed_in_a_graph(asked, captured, flops, timer):
    spec = dataclasses.replace(registry.load("rmsnorm"), captured=captured, cost=lambda case, mode: Cost(flops, 0))
    ceilings = Ceilings(bandwidth=1e12, flops={"fp32": 1e15, "bf16": 1e15, "fp16": 1e15})
    session = SimpleNamespace(ceilings=ceilings, arguments=SimpleNamespace(timer=asked))
    selection = options.Selection(spec, spec.cases[:1], ("fwd",), ("triton",))
    assert Group(session, selection, spec.cases[0], "fwd")._timer() == timer


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
    (row,) = Group(a_session(), selection, case, "fwd").rows()
    assert (row["status"], row["reason"]) == ("skipped", "needs 2 GPUs of one host: bench --gpus 2")


def test_compile_max_is_the_reference_with_the_options_of_its_mode(monkeypatch):
    spec = registry.load("rmsnorm")
    spec = dataclasses.replace(spec, baselines=(EAGER, COMPILED, COMPILED_MAX), pytorch=())
    asked = []
    monkeypatch.setattr(torch, "compile", lambda fn, **options: asked.append((fn, options)) or fn)
    for name in ("compile", "compile-max"):
        execute.load(spec, name, spec.cases[0], "fwd")
    assert asked == [
        (spec.reference, {"dynamic": False, "options": None}),
        (
            spec.reference,
            {"dynamic": False, "options": torch._inductor.list_mode_options("max-autotune-no-cudagraphs")},
        ),
    ]


def _of_a_peer(**changes):
    spec = registry.load("rmsnorm")
    return dataclasses.replace(spec, baselines=(Peer("other", **changes),), pytorch=())


def test_a_peer_falls_back_to_the_first_configuration_that_runs():
    def fails(message):
        def op(*_):
            raise MemoryError(message)

        return lambda: op

    works = lambda: abs  # noqa: E731
    smaller = {"tiles of 64": fails("still"), "tiles of 32": works, "tiles of 16": fails("not tried")}
    spec = _of_a_peer(load=fails("out of resource\nand a stack"), configurations=smaller)
    found = execute.load_running(spec, "other", spec.cases[0], "fwd", lambda fn: fn(-1))
    assert found == (abs, {"name": "tiles of 32", "instead_of": "MemoryError: out of resource"})
    spec = _of_a_peer(load=works, configurations=smaller)
    assert execute.load_running(spec, "other", spec.cases[0], "fwd", lambda fn: fn(-1)) == (abs, None)
    spec = _of_a_peer(load=fails("first"), configurations={"tiles of 64": fails("second")})
    with pytest.raises(MemoryError, match="first"):
        execute.load_running(spec, "other", spec.cases[0], "fwd", lambda fn: fn(-1))


def test_an_absent_peer_is_skipped_and_nothing_smaller_is_tried():
    def absent():
        raise ImportError("No module named 'other'")

    spec = _of_a_peer(load=absent, configurations={"smaller": lambda: abs})
    with pytest.raises(execute.Unavailable, match="other is not installed"):
        execute.load_running(spec, "other", spec.cases[0], "fwd", lambda fn: None)


@pytest.mark.parametrize("kernel", registry.names())
def test_every_spec_says_what_its_pytorch_is_and_its_rows_do(kernel):
    spec = registry.load(kernel)
    assert spec.pytorch
    rows = {b.name: described(spec, spec.cases[0], spec.modes[0], b.name, "ok", None) for b in spec.baselines}
    assert {name for name, row in rows.items() if row.get("pytorch")} == set(spec.pytorch)
    assert "pytorch" not in described(spec, spec.cases[0], spec.modes[0], next(iter(spec.implementations)), "ok", None)


def test_a_pytorch_that_is_no_baseline_is_refused():
    with pytest.raises(ValueError, match=r"pytorch names \['torch'\], which are not baselines"):
        dataclasses.replace(registry.load("rmsnorm"), baselines=(EAGER,), pytorch=("torch",))


def test_compile_max_does_without_coordinate_descent_where_that_fails(monkeypatch):
    def compiled(fn, *, dynamic, options):
        def run(*_):
            if "coordinate_descent_tuning" in options:
                raise RuntimeError("no valid configs")

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    spec = dataclasses.replace(registry.load("rmsnorm"), baselines=(COMPILED_MAX,), pytorch=())
    _, configuration = execute.load_running(spec, "compile-max", spec.cases[0], "fwd", lambda fn: fn(1))
    assert configuration == {"name": "no coordinate descent", "instead_of": "RuntimeError: no valid configs"}


def test_peers_are_imported_before_the_gpu_is_taken_from_others(monkeypatch, tmp_path):
    """Where one cannot be, its row says so in the end."""
    order: list[str] = []
    turns = Turns(tmp_path / "gpu", torch.device("cpu"))
    monkeypatch.setattr(turns, "begin", lambda: order.append("begins"))

    def load(spec, name, case, mode):
        order.append(name)
        raise ImportError(name)

    monkeypatch.setattr(execute, "load", load)
    monkeypatch.setattr(execute, "unfit", lambda case, capability: "of another GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    spec = registry.load("rmsnorm")
    selection = options.Selection(spec, spec.cases[:1], ("fwd",), ("triton", "eager"))
    session = SimpleNamespace(
        device=torch.device("cuda", 0), turns=turns, journal=SimpleNamespace(begin=lambda *_: None)
    )
    group = Group(session, selection, spec.cases[0], "fwd")
    rows = group.rows()
    assert order == ["triton", "eager", "begins"] and [row["reason"] for row in rows] == ["of another GPU"] * 2
    assert group.spent().endswith("; GPU held for 0.0")
    group.compiled = {"triton": 0.1, "eager": 2.25}
    assert group.spent().endswith("; GPU held for 0.0 (eager 2.2)")

"""`tune`: a search that no failing or wrong candidate wins, and picks that hold against what is committed."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from harness import execute, options, registry, tuned
from harness.commands import tune
from harness.compiling.precompile import Wanted, nameable
from harness.measure.timing import Data, Measurement
from harness.on_gpu import Place, place
from harness.reporting import rows_json
from harness.spec import Case, Cost, KernelSpec, Tunable

MEDIAN_TIMES = tune.median_times


@dataclass(frozen=True)
class Config:
    block: int
    warps: int = 4


#: What a call takes with each block; others do not compile.
TIMES = {64: 10.0, 128: 8.0, 256: 8.2, 512: 7.0}
WRONG = 512

kernel = ModuleType("toy_kernel")
ran: list[int] = []


def _pick(n: int, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    return Config(128 if dtype == torch.float32 and capability >= (8, 0) else 64)


def _op(x: torch.Tensor) -> torch.Tensor:
    config = kernel.pick_config(x.numel(), x.dtype, (9, 0))
    if config.block not in TIMES:
        raise RuntimeError(f"out of resources with {config.block}")
    ran.append(config.block)
    return x * (2.1 if config.block == WRONG else 2.0)


CASE = Case("a", {"n": 8}, torch.float32, bench=True)
BLOCKS = (64, 128, 256, 512, 1024)
SPEC = KernelSpec(
    name="toy",
    implementations={"triton": _op},
    reference=lambda x: x * 2,
    make_inputs=lambda case, device, generator: {"x": torch.randn(8, device=device, generator=generator)},
    cost=lambda case, mode: Cost(1, 1),
    cases=(CASE,),
    grads=("x",),
    unit="elements",
    items=lambda case: 8,
    fuzz={},
    tunables=(Tunable(kernel, "pick_config", "fwd", lambda case: [Config(block) for block in BLOCKS]),),
)


@pytest.fixture(autouse=True)
def timed(monkeypatch):
    """A GPU on which a call takes what TIMES says, and a clock that runs slower from group to group."""
    state = SimpleNamespace(groups=[], drift=1.0, fails=set())

    def median_times(clock, binds, sets, data, column):
        medians = {}
        for index, bind in binds.items():
            ran.clear()
            bind(0)()
            if ran[-1] in state.fails:
                return {}, "", (index, "RuntimeError: cannot be captured")
            medians[index] = TIMES[ran[-1]] * state.drift
        state.groups.append(list(binds))
        state.drift *= 1.5
        return medians, "cold", None

    monkeypatch.setattr(kernel, "pick_config", _pick, raising=False)
    monkeypatch.setattr(tune, "median_times", median_times)
    monkeypatch.setattr(tune, "input_sets", lambda *_: 2)
    monkeypatch.setattr(tune, "new_clock", lambda device: None)
    return state


def _search(spec: KernelSpec = SPEC) -> dict:
    return tune.search(spec, spec.tunables[0], CASE, torch.device("cpu"), None)


def _by_block(row: dict) -> dict[int, tuple]:
    return {c["config"]["block"]: (c["median_us"], c["reason"]) for c in row["candidates"]}


def test_every_candidate_is_timed_or_has_its_reason():
    row = _search()
    assert row["picked"] == {"block": 128, "warps": 4}
    assert row["picked_us"] == 8.0
    assert row["arguments"] == [8, {"dtype": "float32"}, [9, 0]]
    found = _by_block(row)
    assert found[64] == (10.0, None)
    assert found[128] == (8.0, None)
    assert found[256] == (8.2, None)
    # Otherwise it would be the fastest.
    assert found[512] == (None, "gives a different result than the selected configuration")
    assert found[1024] == (None, "RuntimeError: out of resources with 1024")


def test_a_wrong_candidate_is_found_out_in_place_too():
    case = replace(CASE, mutates=("x",))
    spec = replace(SPEC, implementations={"triton": lambda x: x.copy_(_op(x))}, cases=(case,))
    found = _by_block(tune.search(spec, spec.tunables[0], case, torch.device("cpu"), None))
    assert found[256] == (8.2, None)
    assert found[512] == (None, "gives a different result than the selected configuration")


def test_a_drifting_clock_favours_no_group(timed, monkeypatch):
    monkeypatch.setattr(tune, "GROUP", 1)
    row = _search()
    assert timed.groups == [[0, 1], [0, 2]]  # the picked one, index 0, in each
    found = _by_block(row)
    assert found[64][0] / found[128][0] == pytest.approx(10.0 / 8.0)
    assert found[256][0] / found[128][0] == pytest.approx(8.2 / 8.0)


def test_a_candidate_that_fails_while_timed_has_its_reason_and_the_others_go_on(timed):
    timed.fails = {64}
    found = _by_block(_search())
    assert found[64] == (None, "RuntimeError: cannot be captured")
    assert found[256] == (8.2, None)


def test_a_picked_configuration_that_fails_is_an_error(timed):
    timed.fails = {128}
    with pytest.raises(ValueError, match="the selected configuration itself fails"):
        _search()


def test_a_tunable_may_have_cases_and_an_implementation_of_its_own(timed):
    elsewhere = replace(CASE, name="elsewhere")
    own = replace(SPEC.tunables[0], cases=(elsewhere,), implementation="other")
    spec = replace(SPEC, implementations={"triton": None, "other": _op}, tunables=(own,))
    selection = options.Selection(spec, spec.cases, ("fwd",), ("triton",))
    asked = Wanted(Namespace(function=None, case=None))
    assert asked.tunables(selection) == [(0, own)]
    assert asked.cases(selection, own) == (elsewhere,)
    assert Wanted(Namespace(function=None, case=["a"])).cases(selection, own) == spec.cases
    assert Wanted(Namespace(function=["pick_other"], case=None)).tunables(selection) == []
    assert _by_block(_search(spec))[256] == (8.2, None)


def test_cases_of_a_tunable_can_be_named(monkeypatch):
    """One of its own is for it alone, one of SPEC's for all."""
    elsewhere = replace(CASE, name="elsewhere")
    other, own = SPEC.tunables[0], replace(SPEC.tunables[0], cases=(elsewhere,))
    spec = replace(SPEC, tunables=(other, own))
    monkeypatch.setattr(options.registry, "load", lambda name: spec)

    def asked(case: str) -> list[list[str]]:
        arguments = Namespace(kernel=["toy"], case=[case], mode=None, impl=None, function=None)
        (selection,) = options.select(arguments, nameable)
        return [[c.name for c in Wanted(arguments).cases(selection, tunable)] for tunable in spec.tunables]

    assert asked("elsewhere") == [[], ["elsewhere"]]
    assert asked(CASE.name) == [[CASE.name], [CASE.name]]
    with pytest.raises(ValueError, match="unknown case 'nowhere'; known: .*elsewhere"):
        asked("nowhere")


def test_the_pick_function_is_put_back():
    _search()
    assert kernel.pick_config is _pick


def test_a_function_that_is_never_called_is_an_error(monkeypatch):
    monkeypatch.setattr(kernel, "pick_other", lambda: Config(64), raising=False)
    spec = replace(SPEC, tunables=(Tunable(kernel, "pick_other", "fwd", lambda case: []),))
    with pytest.raises(ValueError, match="pick_other is not called in mode fwd"):
        _search(spec)


def test_a_backward_is_tuned_with_the_same_incoming_gradients():
    tunable = replace(SPEC.tunables[0], mode="bwd")
    row = tune.search(replace(SPEC, tunables=(tunable,)), tunable, CASE, torch.device("cpu"), None)
    # In this toy the backward of the wrong candidate differs too: 2.1 dy for 2 dy.
    assert _by_block(row)[512][1] == "gives a different result than the selected configuration"
    assert _by_block(row)[64] == (10.0, None)


def test_what_is_updated_in_place_is_restored_while_candidates_are_timed(monkeypatch):
    case, seen = replace(CASE, mutates=("x",)), []

    def doubled(x):
        seen.append(x.clone())
        return x.mul_(kernel.pick_config(8, x.dtype, (9, 0)).block / 64)

    def median_times(clock, binds, sets, data, column):
        seen.clear()
        for run in (binds[0](0), binds[1](0), binds[0](0)):
            data.restore(0)
            run()
        return dict.fromkeys(binds, 1.0), "cold", None

    monkeypatch.setattr(tune, "median_times", median_times)
    spec = replace(SPEC, implementations={"triton": doubled}, cases=(case,))
    spec = replace(spec, tunables=(replace(SPEC.tunables[0], candidates=lambda case: [Config(128, 8)]),))
    tune.search(spec, spec.tunables[0], case, torch.device("cpu"), None)
    assert len(seen) == 3 and torch.equal(seen[0], seen[1]) and torch.equal(seen[1], seen[2])


def test_each_set_of_inputs_has_incoming_gradients_of_its_own(monkeypatch):
    """Gradients that all sets share would stay in L2."""
    given = []
    bind = execute.bind

    def noting(spec, op, inputs, mode, grads):
        given.append((inputs["x"].data_ptr(), grads[0].data_ptr()))
        return bind(spec, op, inputs, mode, grads)

    def median_times(clock, binds, sets, data, column):
        for index in range(sets):
            binds[0](index)
        return dict.fromkeys(binds, 1.0), "cold", None

    monkeypatch.setattr(execute, "bind", noting)
    monkeypatch.setattr(tune, "median_times", median_times)
    tunable = replace(SPEC.tunables[0], mode="bwd")
    tune.search(replace(SPEC, tunables=(tunable,)), tunable, CASE, torch.device("cpu"), None)
    assert len(set(given)) == len({grads for _, grads in given}) == 2


class _Clock:
    """The picked configuration takes so many µs cold in one measurement and the next, a candidate 0.9 of that, and
    both 3 µs less in a graph. One candidate cannot be captured."""

    def __init__(self, *picked: float, uncaptured: str = "") -> None:
        self.picked, self.uncaptured = iter(picked), uncaptured

    def measure(self, contenders, timer, sets, data):
        picked = next(self.picked)
        graph = timer == "graph" or (timer == "auto" and picked < 50)
        found = Measurement(warnings={c.name: [] for c in contenders})
        for contender in contenders:
            cold = picked * (1.0 if contender.name == "0" else 0.9)
            found.columns[contender.name] = {"cold": {"median_us": cold}, "warm": {"median_us": cold}}
            if graph and contender.name != self.uncaptured:
                found.columns[contender.name]["graph"] = {"median_us": cold - 3}
            elif graph:
                found.warnings[contender.name].append("no CUDA graph: it allocates")
        return found


def test_all_groups_of_candidates_are_compared_in_one_column(monkeypatch):
    monkeypatch.setattr(tune, "median_times", MEDIAN_TIMES)
    monkeypatch.setattr(tune, "GROUP", 1)
    medians, column = tune._timed([None] * 3, {}, 2, _Clock(49.0, 51.0), Data())
    assert column == "graph" and medians[0] == pytest.approx((46 + 48) / 2)
    assert medians[2] / medians[0] == pytest.approx((0.9 * 51 - 3) / 48)


def test_a_candidate_without_a_graph_does_not_change_the_column(monkeypatch):
    monkeypatch.setattr(tune, "median_times", MEDIAN_TIMES)
    reasons: dict[int, str] = {}
    medians, column = tune._timed([None] * 3, reasons, 2, _Clock(49.0, 49.0, uncaptured="1"), Data())
    assert column == "graph" and reasons == {1: "no CUDA graph: it allocates"} and set(medians) == {0, 2}


def _row(**times: float | None) -> dict:
    candidates = [
        {"config": {"block": int(b[1:]), "warps": 4}, "median_us": us, "reason": None if us else "did not compile"}
        for b, us in times.items()
    ]
    first = candidates[0]
    return {"kernel": "toy", "mode": "fwd", "case": "a", "function": "pick_config", "column": "cold"} | {
        "arguments": [8, {"dtype": "float32"}, [9, 0]],
        "picked": first["config"],
        "picked_us": first["median_us"],
        "candidates": candidates,
    }


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (_row(b128=8.0, b64=10.0), None),
        (_row(b128=10.0, b64=9.75), None),  # within the noise of the search
        (_row(b128=10.0, b64=9.6), r"\(10\.00 µs\), 4\.2 % slower than \{'block': 64, 'warps': 4\} \(9\.60 µs\)"),
        (_row(b64=10.0), "not among the measured candidates: tune again"),
        (_row(b128=None, b64=10.0), "which failed: did not compile"),
    ],
)
def test_todays_pick_is_judged_by_what_was_measured(tmp_path, row, message):
    file = tmp_path / "reports" / "h200" / "tune" / "toy.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"schema": tuned.SCHEMA, "rows": [row]}))
    assert tuned.files(tmp_path) == [file]
    wrong = tuned.behind(file, SPEC)
    assert len(wrong) == (message is not None)
    assert message is None or re.search(message, wrong[0])


def test_a_changed_pick_or_signature_shows(tmp_path, monkeypatch):
    file = tmp_path / "toy.json"
    file.write_text(json.dumps({"schema": tuned.SCHEMA, "rows": [_row(b128=8.0, b64=10.0)]}))
    assert tuned.behind(file, SPEC) == []
    monkeypatch.setattr(kernel, "pick_config", lambda n, dtype, capability: Config(64))
    assert "25.0 % slower than" in tuned.behind(file, SPEC)[0]
    monkeypatch.setattr(kernel, "pick_config", lambda n: Config(128))
    assert "positional argument" in tuned.behind(file, SPEC)[0]
    assert "tune again" in tuned.behind(file, replace(SPEC, tunables=()))[0]


def test_a_changed_pick_is_replayed_into_the_file(command, tmp_path, monkeypatch, capsys):
    file = tmp_path / "reports" / "h200" / "tune" / "toy.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"schema": tuned.SCHEMA, "rows": [_row(b128=8.0, b64=10.0)]}))
    monkeypatch.setattr(tuned, "files", lambda: [file])
    monkeypatch.setattr(kernel, "pick_config", lambda n, dtype, capability: Config(64))
    assert command(replay=True) == 1
    (row,) = rows_json.read(file, tuned.SCHEMA)["rows"]
    assert (row["picked"], row["picked_us"]) == ({"block": 64, "warps": 4}, 10.0)
    assert "25.0 %" in capsys.readouterr().out
    monkeypatch.setattr(kernel, "pick_config", lambda n, dtype, capability: Config(32))
    with pytest.raises(ValueError, match="not among the measured candidates: tune again"):
        command(replay=True)


def test_arguments_survive_the_file():
    arguments = (8, torch.bfloat16, (9, 0), None, True, 0.5, "x")
    assert tuple(map(tuned.decode, json.loads(json.dumps([tuned.encode(a) for a in arguments])))) == arguments
    with pytest.raises(TypeError, match="plain values"):
        tuned.encode(object())


def test_what_kernels_pick_today_holds_against_the_committed_measurements():
    wrong = [verdict for path in tuned.files() for verdict in tuned.behind(path, registry.load(path.stem))]
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def command(tmp_path, monkeypatch):
    monkeypatch.setattr(options.registry, "load", lambda name: SPEC)
    monkeypatch.setattr(tune, "place", lambda *_: Place(torch.device("cpu"), "h200", tmp_path))
    monkeypatch.setattr(tune.environment, "capture", lambda device: {"commit": "abc"})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def run(**given) -> int:
        selection = {"kernel": ["toy"], "case": None, "mode": None, "impl": None}
        return tune.main(Namespace(**{**selection, "function": None, "replay": False, **given}))

    return run


def test_the_command_writes_and_tells(command, tmp_path, capsys):
    assert command() == 0
    document = rows_json.read(tmp_path / "tune" / "toy.json", tuned.SCHEMA)
    assert (document["kernel"], document["gpu"], document["environments"]) == ("toy", "h200", [{"commit": "abc"}])
    assert [row["implementation"] for row in document["rows"]] == ["triton"]
    said = capsys.readouterr().out
    assert "5 candidates, 2 failed; the selected one is among the best" in said
    assert "block=128 warps=4" in said


def test_a_pick_that_is_behind_is_exit_code_1(command, monkeypatch, capsys):
    monkeypatch.setattr(kernel, "pick_config", lambda n, dtype, capability: Config(64))
    assert command() == 1
    assert "25.0 % slower than {'block': 128, 'warps': 4}" in capsys.readouterr().out


def test_a_case_that_the_implementation_cannot_take_is_skipped_and_an_alias_is_not(command, monkeypatch, capsys):
    narrow = replace(CASE, name="narrow")
    spec = replace(
        SPEC,
        cases=(CASE, narrow),
        unsupported_reason=lambda name, case, mode: "it takes wide rows" if case is narrow else None,
        alias_reason=lambda name, case, mode: "it is what auto takes",
    )
    monkeypatch.setattr(options.registry, "load", lambda name: spec)
    assert command(case=["a", "narrow"]) == 0
    said = capsys.readouterr().out
    assert "skipped toy fwd narrow pick_config: it takes wide rows" in said and "toy fwd a: 5 candidates" in said


def test_an_interrupt_keeps_the_rows_that_are_complete(command, tmp_path, monkeypatch):
    search = tune.search

    def twice(*arguments):
        yield search(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "_rows", lambda selection, where, wanted: twice(
        SPEC, SPEC.tunables[0], SPEC.cases[0], where.device, tune.new_clock(where.device)
    ))  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        command()
    assert len(rows_json.read(tmp_path / "tune" / "toy.json", tuned.SCHEMA)["rows"]) == 1


def test_nothing_to_tune_is_said(command, monkeypatch):
    monkeypatch.setattr(options.registry, "load", lambda name: replace(SPEC, tunables=()))
    with pytest.raises(ValueError, match="has tunables"):
        command()


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_without_a_gpu_it_is_said():
    with pytest.raises(ValueError, match="tune needs an NVIDIA GPU, and none was found"):
        place("tune", Namespace(gpu="auto", device=None, out=Path()), ())

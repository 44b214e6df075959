"""Benches of several ranks: gloo, two processes, no GPU. A rank that is slow, that fails, hangs or dies."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness import cli, environment, execute, options, record, registry, roofline
from harness.commands import bench, report
from harness.measure.timing import Budget
from harness.ranks import command, heartbeat, links, session, timing
from harness.ranks.group import Group
from harness.ranks.launch import LAUNCHER, Rank, launch
from harness.ranks.timing import Samples
from harness.reporting.entries import Records, Row
from harness.spec import Case

from . import fake_ring

ROUNDS = 5
BUDGET = Budget(min_rounds=ROUNDS, max_rounds=ROUNDS)
TIMEOUT = 60.0
HANGS = 4.0  # seconds until a step counts as one that hangs: some steps import modules


def arguments(timeout: float, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    return parser.parse_args(["--gpus", "2", "--device", "cpu", "--rank-timeout", str(timeout), *more])


def run(path: Path, *cases: str, timeout: float = TIMEOUT, resume: bool = False, device: str = "cpu") -> int:
    """A bench of some cases of the fake kernel. Returns how many rows of our own failed, and ranks."""
    chosen = tuple(fake_ring.SPEC.case(name) for name in cases)
    names = tuple(options.implementations(fake_ring.SPEC))
    selection = options.Selection(fake_ring.SPEC, chosen, ("fwd",), names)
    return command.bench(fake_ring.spec, selection, path, arguments(timeout, *["--resume"] * resume), device, BUDGET)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    path = tmp_path_factory.mktemp("honest")
    return path, run(path / "records" / "fake_ring.jsonl", "short", "long", "slow", "error")


@pytest.fixture(scope="module")
def honest(folder) -> tuple[Records, int]:
    path, failures = folder
    return record.load(path), failures


def row(records: Records, case: str, name: str) -> Row:
    (found,) = (r for r in records.rows if (r.case, r.implementation) == (case, name))
    return found


def test_all_ranks_time_the_same_calls_and_the_first_writes_the_record(honest) -> None:
    records, _ = honest
    (of_all,) = records.runs.values()
    assert (of_all.world_size, of_all.stop, of_all.gpu_folder) == (2, "complete", "cpu-x2")
    found = row(records, "short", "ring")
    assert (found.status, found["timer"], found.headline) == ("ok", "wall", "wall")
    assert found["columns"]["wall"]["n"] == ROUNDS
    assert len(found["several"]["rank_median_us"]) == 2
    assert set(found["ratios"]) == {"all_reduce"}
    assert found["noise"] and found["several"]["backend"] == "gloo"


def test_efficiency_is_that_of_one_gpu_on_the_whole_problem_in_the_same_rounds(honest) -> None:
    records, _ = honest
    several = row(records, "short", "ring")["several"]
    alone = several["alone"]
    assert alone["implementation"] == "mean" and alone["n"] == ROUNDS
    samples = row(records, "short", "ring")["columns"]["wall"]["samples_us"]
    ratios = sorted(one / (2 * two) for one, two in zip(alone["samples_us"], samples, strict=True))
    assert several["efficiency"]["median"] == pytest.approx(ratios[ROUNDS // 2], rel=1e-3)
    assert row(records, "short", "all_reduce")["several"]["efficiency"]
    assert row(records, "long", "ring")["several"]["alone_reason"] == "too long for one GPU"


def test_what_transfers_take_is_against_the_same_without_them(honest) -> None:
    records, _ = honest
    several = row(records, "short", "ring")["several"]
    assert several["exposed_us"]["median"] > 0 and several["local_median_us"] > 0
    assert "no version without transfers" in row(records, "short", "all_reduce")["several"]["exposed_reason"]
    assert several["axis"] == ["fp32", 1000]


def test_the_model_is_made_of_what_was_measured() -> None:
    asked: list[tuple[Any, ...]] = []

    def model(case: Case, *rest: Any) -> tuple[float, float, float]:
        asked.append((case.name, *rest))
        return 1e-3, 2e-4, 0.9

    spec = replace(fake_ring.SPEC, model=model)
    group: Any = SimpleNamespace(
        spec=spec, case=spec.case("short"), mode="fwd", limits=SimpleNamespace(link=1e9), me=SimpleNamespace(size=2)
    )
    columns = {"ring": {"median_us": 7.0}, "#alone": {"median_us": 10.0}}
    expected = {"us": 1e3, "exposed_us": 2e2, "efficiency": 0.9}
    assert Group._model(group, "ring", columns) == pytest.approx(expected)
    assert asked == [("short", "fwd", 2, None, pytest.approx(2 * 2000 / 10e-6), 1e9)]
    assert Group._model(group, "all_reduce", columns) is Group._model(group, "ring", {}) is None


def test_what_cannot_be_timed_says_so(honest) -> None:
    records, failures = honest
    assert row(records, "short", "off").status == "wrong"
    assert row(records, "short", "off")["reason"].startswith("rank 0: off by 1; rank 1: off by 1")
    assert row(records, "short", "eager").status == "skipped"
    assert "not installed" in row(records, "short", "absent")["reason"]
    assert failures == 5  # `off` in four cases, `ring` where it raises


def test_the_time_is_that_of_the_slowest_rank(honest) -> None:
    found = row(honest[0], "slow", "ring")
    _, slow = found["several"]["rank_median_us"]
    assert slow >= 1e6 * fake_ring.SLOW_SECONDS
    assert found["columns"]["wall"]["median_us"] >= slow * 0.999


def test_ranks_without_gpus_have_a_report_without_ceilings(folder) -> None:
    path, _ = folder
    written = {p.name for p in report.write(path)}
    assert "fake_ring-fwd-efficiency.svg" in written
    page = (path / "fake_ring.md").read_text()
    assert page.startswith("# fake_ring on 2 CPU\n")
    assert "![fake_ring fwd: efficiency over length](fake_ring-fwd-efficiency.svg)" in page
    assert "- No efficiency (too long for one GPU): long fwd." in page
    assert "wall-clock time on the CPU" in (path / "README.md").read_text()


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory):
    return _faulty(tmp_path_factory.mktemp("hung"), "hang", HANGS)


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory):
    return _faulty(tmp_path_factory.mktemp("died"), "die", TIMEOUT)


def _faulty(folder: Path, fault: str, timeout: float) -> SimpleNamespace:
    path = folder / "records" / "fake_ring.jsonl"
    failures = run(path, "short", fault, "long", timeout=timeout)
    return SimpleNamespace(path=path, failures=failures, records=record.load(path))


def test_a_rank_that_hangs_ends_the_run_by_its_name_and_step(hung) -> None:
    (of_all,) = hung.records.runs.values()
    hangs = "failed: no rank has made progress for 4 s; rank 1 blocks the others, in the step: fake_ring hang fwd"
    assert of_all.stop.startswith(hangs) and of_all.died


def test_a_rank_that_dies_ends_the_run_by_its_name_and_step(died) -> None:
    (of_all,) = died.records.runs.values()
    assert of_all.stop.startswith("failed: rank 1 was killed by SIGKILL in the step: fake_ring die fwd")


@pytest.mark.parametrize("which", ["hung", "died"])
def test_finished_rows_stay_and_no_process_is_left(which: str, request: pytest.FixtureRequest) -> None:
    faulty = request.getfixturevalue(which)
    assert row(faulty.records, "short", "ring").status == "ok"
    assert {r.case for r in faulty.records.rows} == {"short"}
    assert ranks_left() == []


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_launcher_that_is_interrupted_or_killed_leaves_no_process(how: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "records" / "fake_ring.jsonl"
    code = f"import pathlib, {__name__} as t; t.run(pathlib.Path({str(path)!r}), 'hang', timeout=600)"
    command_line = [sys.executable, "-c", code]
    launcher = subprocess.Popen(command_line, cwd=registry.ROOT, stderr=subprocess.PIPE, text=True)
    until(lambda: path.is_file() and '"start"' in path.read_text())
    assert len(ranks_left(launcher.pid)) >= 2
    launcher.send_signal(how)
    _, said = launcher.communicate(timeout=60)
    until(lambda: not ranks_left(launcher.pid))
    (of_all,) = record.load(path).runs.values()
    if how == signal.SIGINT:
        assert (launcher.returncode, of_all.stop) == (130, "interrupted") and "--resume continues" in said
    else:
        assert of_all.died


def until(happens: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_what_a_rank_died_of_is_not_tried_again(died) -> None:
    run(died.path, "short", "die", "long", resume=True)
    records = record.load(died.path)
    assert row(records, "die", "ring").status == "crashed"
    assert row(records, "long", "ring").status == "ok"
    assert len({r.run.id for r in records.rows}) == 2


def ranks_left(launcher: int | None = None) -> list[str]:
    """Processes that were started as ranks by a launcher, by default this process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
            command_line = (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        ours = f"{LAUNCHER}={launcher or os.getpid()}".encode() in variables
        if ours and b"resource_tracker" not in command_line:  # it ends with the launcher
            found.append(path.parent.name)
    return found


def test_without_a_gpu_ranks_check_and_nothing_is_timed() -> None:
    chosen = options.Selection(fake_ring.SPEC, (fake_ring.SPEC.case("short"),), ("fwd",), ("ring", "off", "all_reduce"))
    found = {name: (status, reason) for _, _, name, status, reason in command.checked(fake_ring.spec, chosen, TIMEOUT)}
    assert found["ring"] == found["all_reduce"] == ("ok", None)
    assert found["off"][0] == "wrong"


@pytest.fixture
def two_h200(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Two GPUs that are not there, and what would be launched on them."""
    launched: list[tuple] = []

    def take(*given, environment, **_):
        launched.append((*given, environment))
        return [[("fake_ring.fwd.short.ring", "ok", "")]] * 2 if given[1] is session.mark else [0, 0]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(environment, "target", lambda *_: (torch.device("cuda", 0), "h200"))
    monkeypatch.setattr(registry, "load", lambda name: fake_ring.SPEC)
    monkeypatch.setattr(registry, "names", lambda: ["fake_ring"])
    monkeypatch.setattr(command, "launch", take)
    return launched


def test_bench_and_profile_start_as_many_ranks_as_were_asked_for(two_h200, tmp_path: Path) -> None:
    assert cli.main(["bench", "--gpus", "2", "--out", str(tmp_path), "--impl", "ring"]) == 0
    assert cli.main(["profile", "--gpus", "2", "--keep", str(tmp_path)]) == 0
    (size, work, orders, _), (marked_size, marking, marked, traces, _) = two_h200
    assert (size, work, marked_size, marking) == (2, session.bench, 2, session.mark)
    assert orders.path == tmp_path / "records" / "fake_ring.jsonl" and orders.implementations == ("ring",)
    assert [case for case, _ in orders.groups] == ["short", "long", "slow", "error", "hang", "die"]
    assert (marked.implementations, traces) == (("ring", "off"), tmp_path)


def test_a_quick_bench_is_of_the_first_case(two_h200, tmp_path: Path) -> None:
    assert cli.main(["bench", "--gpus", "2", "--out", str(tmp_path), "--quick"]) == 0
    assert two_h200[0][2].groups == (("short", "fwd"),)


@pytest.mark.slow
def test_a_pass_for_profilers_has_a_range_for_all_that_the_bench_times(tmp_path: Path) -> None:
    orders = session.Orders(fake_ring.spec, "", Path(), (("short", "fwd"),), ("ring", "off"))
    found = launch(2, session.mark, orders, tmp_path, device="cpu", timeout=TIMEOUT)[0]
    assert [status for _, status, _ in found] == ["ok", "wrong"]
    assert {path.name for path in tmp_path.iterdir()} == {f"fake_ring-short-fwd-rank{r}.json.gz" for r in (0, 1)}
    trace = json.loads(gzip.decompress((tmp_path / "fake_ring-short-fwd-rank1.json.gz").read_bytes()))
    ranges = {event["name"] for event in trace["traceEvents"] if "fake_ring.fwd.short." in event.get("name", "")}
    assert ranges == {f"fake_ring.fwd.short.{name}" for name in ("ring", "ring#again", "ring#local", "#alone")}


def test_what_is_updated_in_place_is_restored_before_each_call(tmp_path: Path) -> None:
    path, names = tmp_path / "fake_in_place.jsonl", ("half", "other")
    groups = (("eight", "fwd"),)
    orders = session.Orders(fake_ring.in_place, record.new_run_id(), path, groups, names, budget=BUDGET)
    launch(2, session.bench, orders, device="cpu", timeout=TIMEOUT)
    rows = record.load(path).rows
    assert [(r.implementation, r.status, r.column()["n"]) for r in rows] == [("half", "ok", 5), ("other", "ok", 5)]
    assert rows[0].get("several")["efficiency"] and rows[0].get("noise"), "the A/A pair is of the first that is timed"
    traced = launch(2, session.mark, replace(orders, run_id=""), None, device="cpu", timeout=TIMEOUT)[0]
    assert [status for _, status, _ in traced] == ["ok", "ok"]


def test_what_compiles_itself_has_static_shapes_in_every_case(tmp_path: Path) -> None:
    path, groups = tmp_path / "fake_compiled.jsonl", (("of-8", "fwd"), ("of-12", "fwd"))
    orders = session.Orders(fake_ring.compiled, record.new_run_id(), path, groups, ("twice",), budget=BUDGET)
    launch(2, session.bench, orders, device="cpu", timeout=TIMEOUT)
    assert [(r.case, r.status, r.get("reason")) for r in record.load(path).rows] == [(c, "ok", None) for c, _ in groups]


@pytest.mark.parametrize("command_name", ["bench", "profile", "calibrate"])
def test_fewer_gpus_than_asked_for_are_an_error(command_name: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(environment, "target", lambda *_: (torch.device("cuda", 0), "h200"))
    assert cli.main([command_name, *["--kernel=rmsnorm"] * (command_name != "calibrate"), "--gpus", "2"]) == 2
    assert "--gpus 2: 1 GPUs found" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, there must be two")
def test_a_kernel_without_cases_of_several_gpus_says_so(capsys) -> None:
    assert cli.main(["bench", "--kernel", "rmsnorm", "--gpus", "2"]) == 2
    assert "no selected case is for that number of GPUs" in capsys.readouterr().err


def test_ranks_with_other_variables_are_started_apart() -> None:
    slow = {"NCCL_P2P_DISABLE": "1"}
    sharding = replace(fake_ring.SPEC.sharding, environment=lambda case: slow if case.name == "long" else {})
    spec = replace(fake_ring.SPEC, sharding=sharding)
    groups = [(spec.case(name), "fwd") for name in ("short", "long", "slow")]
    found = command.by_environment(spec, groups)
    assert {v: [case.name for case, _ in g] for v, g in found.items()} == {
        (): ["short", "slow"],
        (("NCCL_P2P_DISABLE", "1"),): ["long"],
    }


def test_peak_rates_are_those_of_the_slowest_card_and_limits_those_of_the_fastest(monkeypatch) -> None:
    def card(factor: float) -> dict[str, Any]:
        return dict.fromkeys(roofline.BANDWIDTHS, factor * 4000000000000.0) | {"flops": {"bf16": factor * 8e14}}

    monkeypatch.setattr(session, "gathered", lambda mine, me: [card(1.0), card(0.9), card(1.1)])
    monkeypatch.setattr(session.calibrate, "measure", lambda device: card(1.0))
    monkeypatch.setattr(session.links, "measure", lambda me: {"link": 4e11, "links": {}})
    monkeypatch.setattr(environment, "gpu", lambda device: {"key": None})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "card")
    found: Any = SimpleNamespace(me=SimpleNamespace(beat=SimpleNamespace(step=lambda _: None), device=None))
    session.Session._calibrate(found)
    assert found.measured["flops"] == {"bf16": pytest.approx(7.2e14)}
    assert found.ceilings.bandwidth == pytest.approx(3.6e12)
    assert (found.limits.bandwidth, found.limits.flops["bf16"]) == pytest.approx((4.4e12, 8.8e14))


def test_a_case_of_several_gpus_is_left_out_where_a_command_is_one_process() -> None:
    assert execute.several(fake_ring.SPEC.case("short")) == "needs 2 GPUs of one host: bench --gpus 2"


def test_the_slowest_of_each_round_counts() -> None:
    samples = Samples("cold")
    samples.add(["a", "b"], [[1.0, 5.0], [2.0, 4.0]])
    samples.add(["a", "b"], [[3.0, 5.0], [1.0, 9.0]])
    assert samples.slowest == {"a": [2.0, 3.0], "b": [5.0, 9.0]}
    assert samples.medians_of_ranks("b") == [5.0, 6.5]


def test_few_rounds_are_enough_where_they_take_long() -> None:
    clock = timing.Clock(Rank(0, 1, torch.device("cpu"), None), Budget(min_rounds=20, few_rounds=7, patience=8))
    found = Samples("cold", slowest={"ring": [1.0, 2.0, 3.0]})
    assert clock._stop(found, rounds=3, elapsed=9) is None
    assert clock._stop(found, rounds=2, elapsed=40) is None
    assert clock._stop(found, rounds=3, elapsed=40) == "time"


def test_what_takes_long_is_called_once_more_or_not_at_all(monkeypatch) -> None:
    """A long first call is the warm-up, and what takes very long is timed once, behind the rounds."""
    monkeypatch.setattr(timing, "gathered", lambda mine, rank: [mine])
    monkeypatch.setattr(timing, "torch", SimpleNamespace(zeros=lambda *_, **__: None))
    beat = SimpleNamespace(step=lambda _: None)
    clock: Any = timing.Clock(Rank(0, 1, torch.device("cpu"), beat), Budget().fixed(3))
    clock._exchange, clock.meet = lambda figures: [list(figures)], lambda: None
    calls: list[str] = []
    contenders = [
        timing.Contender("short", partial(calls.append, "short"), timing.Call(0.1, 0.1, 7)),
        timing.Contender("long", partial(calls.append, "long"), timing.Call(0.1, 5.0, 9)),
        timing.Contender("once", partial(calls.append, "once"), once=True),
    ]
    found = clock.measure(contenders, "")
    assert Counter(calls) == {"short": 4, "long": 3, "once": 1} and calls[-1] == "once"
    assert {name: len(samples) for name, samples in found.slowest.items()} == {"short": 3, "long": 3, "once": 1}
    assert found.peaks == {"short": [0], "long": [9], "once": [0]}
    alone = clock.measure(contenders[2:], "")
    assert alone.columns()["once"]["n"] == 1 and calls[-2:] == ["once", "once"]


def test_one_sample_of_one_gpu_is_held_against_every_round() -> None:
    group: Any = SimpleNamespace(me=SimpleNamespace(size=2), sharding=SimpleNamespace(alone={"mean": None}))
    samples = Samples("cold", slowest={"#alone": [12.0]})
    found = Group._efficiency(group, [6.0, 8.0, 5.0], samples, {"#alone": {"n": 1}})
    assert found["efficiency"] == {"median": 1.0, "ci95": [0.75, 1.2]} and found["alone"]["n"] == 1


def test_clocks_of_several_gpus_are_one_entry() -> None:
    one = {
        "sm_mhz": [1700, 1900],
        "temperature_c": [40, 50],
        "power_w": [300, 600],
        "throttle": ["sw_power_cap"],
        "throttled_samples": 2,
        "samples": 5,
    }
    two = {**one, "sm_mhz": [1500, 1800], "throttle": [], "throttled_samples": 0}
    found = timing.merged([one, two])
    assert (found["sm_mhz"], found["throttle"]) == ([1500, 1900], ["sw_power_cap"])
    assert (found["throttled_samples"], found["samples"]) == (2, 10)


def test_the_rank_that_does_not_wait_holds_up_the_others(tmp_path: Path) -> None:
    calls = 'File "/x/torch/distributed/c10d.py", line 1 in barrier', 'File "/x/k.py", line 9 in f'
    for rank, call in enumerate(calls):
        (tmp_path / f"rank-{rank}.stack").write_text(f"Current thread (most recent call first):\n  {call}\n")
    beats = [heartbeat.Beat(rank, 1, 7, "ring: sample 3") for rank in (0, 1)]
    assert [beat.rank for beat in heartbeat.behind(tmp_path, beats)] == [1, 0]
    assert heartbeat.behind(tmp_path, [replace(beats[0], count=6), beats[1]])[0].rank == 0
    assert heartbeat.behind(tmp_path, [replace(beats[0], count=6), replace(beats[1], failed=True)])[0].rank == 1
    assert 'rank 1, step 7: ring: sample 3 (in "/x/k.py", line 9 in f)' in heartbeat.report(tmp_path, beats)


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs of one host")


@pytest.mark.gpu
@two_gpus
def test_two_gpus_are_timed_by_events_and_held_against_their_links(tmp_path: Path) -> None:
    path = tmp_path / "records" / "fake_ring.jsonl"
    run(path, "short", "long", device="cuda")
    records = record.load(path)
    (of_all,) = records.runs.values()
    assert of_all.stop == "complete" and of_all.gpu_folder.endswith("-x2")
    assert of_all.ceilings["measured"]["link"] > 1e9
    found = row(records, "short", "ring")
    assert (found.status, found["timer"], found.headline) == ("ok", "events", "cold")
    assert found["several"]["efficiency"] and found["several"]["exposed_us"]
    assert len(found["several"]["outside_bytes"]) == 2 and found["peak_memory_bytes"] > 0
    assert found["clocks"]["samples"] > 0


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize(("fault", "said"), [("hang", "rank 1 blocks the others"), ("die", "rank 1 was killed by")])
def test_a_fault_on_two_gpus_names_the_rank_and_leaves_no_process(fault: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "records" / "fake_ring.jsonl"
    run(path, "short", fault, device="cuda", timeout=20)
    records = record.load(path)
    assert row(records, "short", "ring").status == "ok"
    assert said in next(iter(records.runs.values())).stop
    assert ranks_left() == []


@pytest.mark.gpu
@two_gpus
def test_links_are_measured_by_engine_direction_and_size() -> None:
    sizes = (2**20, 2**26)
    found = launch(2, links.measure, sizes, timeout=TIMEOUT)[0]
    assert set(found["links"]) == {"nccl", "peer reads"}
    for of in found["links"].values():
        for direction in ("one way", "both ways") if "reason" not in of else ():
            assert set(of[direction]) == {str(size) for size in sizes}
    assert found["link"] == max(max(of["both ways"].values()) for of in found["links"].values() if "reason" not in of)

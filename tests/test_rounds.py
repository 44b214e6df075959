"""The order of a round of timing, on a clock that needs no GPU: each launch takes as long as it is said to."""

from __future__ import annotations

import itertools
import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("pynvml")

from harness.measure.cupti import kernel_times
from harness.measure.gpu_state import Reading
from harness.measure.timing import (
    PROBE_SECONDS,
    Budget,
    Clock,
    ContenderFailed,
    Data,
    Measurement,
    input_sets,
    order_of,
)


class Machine:
    """A stream whose time goes by as work is queued, and a log of what happened."""

    def __init__(self) -> None:
        self.now, self.log, self.held = 0.0, [], False
        self.room, self.queued, self.holds = 1000, 0, []  # launches that a stream which is held takes

    def launch(self, name: str, ms: float, launches: int = 1):
        def run():
            assert self.held, "queued while the stream was not held"
            self.now += ms
            self.log.append(name)
            self.queued += launches
            self.gate.forced = self.gate.forced or self.queued > self.room
            return ()

        return run

    @contextmanager
    def hold(self, stream, timeout=None):
        self.held, self.queued = True, 0
        self.gate.forced = False
        self.holds.append(timeout)
        yield
        self.held = False


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            self.at = machine.now

        def elapsed_time(self, other):
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return machine


def reading(round: int) -> Reading:
    """It throttles in every third."""
    reasons = frozenset() if round % 3 else frozenset({"sw_power_cap"})
    return Reading(1980 if round % 3 else 1700, 50, 600.0, reasons)


def clock_of(machine: Machine, rounds: int) -> Clock:
    clock = object.__new__(Clock)
    clock.budget = Budget(min_rounds=rounds, max_rounds=rounds)
    readings: list[Reading] = []
    clock.monitor = SimpleNamespace(readings=readings, read=lambda: readings.append(reading(len(readings))))
    clock._stream = SimpleNamespace(synchronize=lambda: None)
    clock._gate = machine.gate = SimpleNamespace(hold=machine.hold, forced=False)
    clock._unheld, clock._apart = set(), False
    clock.flush = machine.launch("flush", 1000.0)
    return clock


def test_cold_flushes_before_each_call_and_outside_the_events(machine):
    clock = clock_of(machine, rounds=3)
    runs = {"a": machine.launch("a", 1.0), "b": machine.launch("b", 2.0)}
    found = clock._events([runs], Data(), cold=True)
    samples, stop = found.samples, found.stop
    assert (samples, stop) == ({"a": [1000.0] * 3, "b": [2000.0] * 3}, "converged")
    assert machine.log == [word for index in range(3) for name in order_of("ab", index) for word in ("flush", name)]


def test_each_round_has_an_order_of_its_own():
    names = list("abcd")
    orders = [order_of(names, index) for index in range(200)]
    assert all(sorted(order) == names for order in orders) and orders == [order_of(names, i) for i in range(200)]
    assert len({tuple(order) for order in orders}) == 24
    after = {(a, b) for order in orders for a, b in itertools.pairwise(order)}
    assert len(after) == 12  # everybody follows everybody else
    assert 30 < sum(order[0] == "a" for order in orders) < 70


def test_data_are_restored_before_each_call_and_stirred_before_each_round(machine):
    clock = clock_of(machine, rounds=2)
    data = Data(lambda index: machine.log.append(f"restore{index}"), lambda index: machine.log.append(f"stir{index}"))
    sets = [{"a": machine.launch("a0", 1.0)}, {"a": machine.launch("a1", 3.0)}]
    samples = clock._events(sets, data, cold=True).samples
    assert samples == {"a": [1000.0, 3000.0]}
    assert machine.log == ["stir0", "restore0", "flush", "a0", "stir1", "restore1", "flush", "a1"]


def test_warm_calls_each_once_more_untimed_and_alternates_the_inputs(machine):
    clock = clock_of(machine, rounds=2)
    sets = [{"a": machine.launch("a0", 1.0)}, {"a": machine.launch("a1", 3.0)}]
    samples = clock._events(sets, Data(), cold=False).samples
    assert samples == {"a": [1000.0, 3000.0]}
    assert machine.log == ["a0", "a0", "a1", "a1"]


def test_a_graph_is_divided_by_the_calls_in_it(machine, monkeypatch):
    clock = clock_of(machine, rounds=2)
    graphs = {
        "a": SimpleNamespace(replay=machine.launch("a", 4.0)),
        "b": SimpleNamespace(replay=machine.launch("b", 8.0)),
    }
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(clock, "_capture", lambda contender, sets, pool: (graphs[contender.name], []))
    contenders = [SimpleNamespace(name="a"), SimpleNamespace(name="b")]
    samples = clock._graphs(contenders, sets=4, data=Data(), result=Measurement()).samples
    assert samples == {"a": [1000.0, 1000.0], "b": [2000.0, 2000.0]}
    assert machine.log == [*order_of("ab", 0), *order_of("ab", 1)]


def test_what_cannot_be_captured_has_a_warning_and_the_others_a_graph(machine, monkeypatch):
    def captured(contender, sets, pool):
        if contender.name == "b":
            raise TypeError("a capture has no shape")
        return SimpleNamespace(replay=machine.launch("a", 4.0)), []

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    clock, result = clock_of(machine, rounds=2), Measurement(warnings={"a": [], "b": []})
    monkeypatch.setattr(clock, "_capture", captured)
    contenders = [SimpleNamespace(name="a"), SimpleNamespace(name="b")]
    assert clock._graphs(contenders, sets=4, data=Data(), result=result).samples == {"a": [1000.0, 1000.0]}
    assert result.warnings == {"a": [], "b": ["no CUDA graph: a capture has no shape"]}


@pytest.mark.parametrize("error", [RuntimeError, TypeError])
def test_what_cannot_be_captured_has_no_sustained_time(machine, monkeypatch, error):
    def run():
        raise error("not while capturing")

    clock = clock_of(machine, rounds=1)
    clock.stream = nullcontext
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr("harness.measure.timing.capture", lambda graph, stream: nullcontext())
    monkeypatch.setattr("harness.measure.timing.calls_within", lambda seconds, run: 3)
    assert clock.sustained(run, 1.0) is None


@pytest.mark.parametrize("in_place", [False, True])
def test_the_sets_of_a_graph_are_larger_than_twice_the_l2(in_place):
    """An in-place update of n bytes moves 2n: they are read and written."""
    size, l2, free = 655_360, 60 * 2**20, 100 * 2**30
    sets = input_sets(2 * size if in_place else size, l2, free, in_place)
    assert 2 * l2 < sets * size < 2.1 * l2
    assert input_sets(2 * size, l2, 80 * size, in_place) == 10, "a quarter of free memory, a copy included"


def test_what_cannot_be_queued_is_found_out_and_measured_outside_the_gate(machine):
    clock = clock_of(machine, rounds=2)
    queued = []

    def waits():
        queued.append(machine.held)
        machine.now += 5.0
        machine.log.append("waits")
        clock._gate.forced = machine.held  # what holds the stream has had to let go
        return ()

    runs = {"a": machine.launch("a", 1.0), "waits": waits, "b": machine.launch("b", 2.0)}
    clock.flush = lambda: None
    samples = clock._events([runs], Data(), cold=True).samples
    assert samples == {"a": [1000.0] * 2, "waits": [5000.0] * 2, "b": [2000.0] * 2}
    assert queued == [True, True, False, False]  # in the round, by itself, and then outside
    first, second = order_of(list(runs), 0), [name for name in order_of(list(runs), 1) if name != "waits"]
    again = [name for name in first if name != "waits"]
    assert machine.log == [*first, *first, *again, "waits", *second, "waits"]
    assert clock._unheld == {"waits"}


def test_a_round_that_the_queue_does_not_take_is_held_call_by_call(machine):
    """Only what is too much by itself is measured outside the gate; all of it is found out in one round."""
    clock = clock_of(machine, rounds=3)
    clock.flush = lambda: None
    machine.room = 1000
    launches = {"a": 400, "b": 700, "c": 1000}
    runs = {name: machine.launch(name, 1.0, number) for name, number in launches.items()}
    samples = clock._events([runs], Data(), cold=True).samples
    assert samples == {name: [1000.0] * 3 for name in runs} and not clock._unheld
    assert machine.holds == [None, *[PROBE_SECONDS] * 3, *[None] * 6]

    def long(name: str):
        def run():
            machine.now += 5.0
            clock._gate.forced = machine.held
            return ()

        return run

    machine.holds.clear()
    runs |= {name: long(name) for name in ("d", "e", "f")}
    clock._apart = False
    samples = clock._events([runs], Data(), cold=True).samples
    assert clock._unheld == {"d", "e", "f"} and samples["d"] == [5000.0] * 3 and samples["a"] == [1000.0] * 3
    assert machine.holds == [None, *[PROBE_SECONDS] * 6, *[None] * 9]


def test_the_first_flush_is_before_the_stream_is_held(machine):
    """The launch that loads its kernel waits for the device, and would open the gate and mark whoever comes next."""
    clock = clock_of(machine, rounds=1)
    held = []
    clock.flush = lambda: held.append(machine.held)
    clock._warm_up([])
    assert held == [False]


@pytest.mark.parametrize(("seconds", "rounds"), [(0.01, 20), (1.0, 9), (20.0, 7)])
def test_long_runs_are_sampled_less(machine, monkeypatch, seconds, rounds):
    """An interval of no width at all is never reached, so that a bound decides."""
    clock = clock_of(machine, rounds=1)
    clock.budget = Budget(seconds=0.0, width=0.0)
    monkeypatch.setattr("harness.measure.timing.time.perf_counter", lambda: machine.now)

    def one_round(index: int) -> dict[str, float]:
        machine.now += seconds
        return {"a": 1e6 * seconds + index % 3}

    clock.monitor.read()
    found = clock._sample(["a"], one_round)
    assert (len(found.samples["a"]), found.stop) == (rounds, "time")


def test_each_round_has_the_clock_and_the_throttling_it_was_measured_at(machine):
    clock = clock_of(machine, rounds=8)
    run = machine.launch("a", 1.0)
    result = Measurement()
    Clock._add(result, "cold", clock._events([{"a": run, "b": machine.launch("b", 2.0)}], Data(), cold=True))
    assert result.clocks["rounds"] == {
        "cold": {"sm_mhz": [1700, 1980, 1980, 1700, 1980, 1980, 1700, 1980], "throttled": [0, 3, 6]}
    }
    assert result.ratios("a", "cold")["b"]["unthrottled"] is None, "five rounds are too few"
    result.clocks["rounds"]["cold"]["throttled"].pop()
    assert result.ratios("a", "cold")["b"]["unthrottled"] == {"median": 2.0, "ci95": [2.0, 2.0], "n": 6}


def test_cupti_is_the_headline_of_who_asks_for_it():
    columns = {name: {"median_us": 5.0} for name in ("cold", "graph", "cupti")}
    measurement = Measurement(columns={"a": columns})
    assert [measurement.headline("a", timer) for timer in ("auto", "cupti", "graph")] == ["graph", "cupti", "graph"]


def test_cupti_reports_its_own_samples_or_an_error(machine, monkeypatch):
    """With a library in place of CUPTI that reports two kernels a call, or nothing."""
    enabled, activities = [], []
    cupti = SimpleNamespace(
        ActivityKind=SimpleNamespace(CONCURRENT_KERNEL=1, MEMCPY=2, MEMSET=3),
        activity_register_callbacks=lambda request, complete: setattr(cupti, "complete", complete),
        activity_enable=enabled.append,
        activity_disable=enabled.remove,
        activity_flush_all=lambda flag: (cupti.complete(list(activities)), activities.clear()),
    )
    monkeypatch.setitem(sys.modules, "cupti", SimpleNamespace(cupti=cupti))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monitor = clock_of(machine, rounds=1).monitor
    run = lambda: activities.extend([SimpleNamespace(start=0, end=2000), SimpleNamespace(start=3000, end=4500)])  # noqa: E731
    found = kernel_times({"a": run, "b": run}, lambda: None, [["a", "b"], ["b", "a"]], monitor)
    assert found == {"a": [3.5, 3.5], "b": [3.5, 3.5]}
    assert not enabled and len(monitor.readings) == 2
    with pytest.raises(ValueError, match="no kernel, copy or memset of silent"):
        kernel_times({"silent": lambda: None}, lambda: None, [["silent"]], monitor)
    assert not enabled
    monkeypatch.setitem(sys.modules, "cupti", None)
    with pytest.raises(ValueError, match="needs the package cupti-python"):
        kernel_times({"a": run}, lambda: None, [["a"]], monitor)


def test_a_call_that_fails_in_a_round_names_its_contender_unless_the_context_is_lost(machine):
    def fails(error):
        def run():
            raise error

        return run

    runs = {"a": machine.launch("a", 2.0), "b": fails(RuntimeError("tired"))}
    with pytest.raises(ContenderFailed, match="b: tired"):
        clock_of(machine, 4)._events([runs], Data(), cold=True)
    runs["b"] = fails(torch.AcceleratorError("illegal access"))  # perhaps of an earlier call
    with pytest.raises(torch.AcceleratorError):
        clock_of(machine, 4)._events([runs], Data(), cold=True)

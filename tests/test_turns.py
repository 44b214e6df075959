"""`bench --turns`: who has the GPU while torch.compile works on the host, and while Inductor times a choice."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch
from torch._inductor.runtime.benchmarking import benchmarker
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.select_algorithm import AlgorithmSelectorCache
from triton.runtime.jit import JITFunction

from harness.measure.turns import SLEEP_SECONDS, Turns

CPU = torch.device("cpu")


@pytest.fixture
def free(tmp_path):
    """Whether somebody else could have the GPU now."""

    def ask() -> bool:
        with (tmp_path / "gpu").open("a") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    return ask


def test_others_have_the_gpu_while_the_host_compiles_but_not_while_a_choice_is_timed(tmp_path, free, monkeypatch):
    seen = {}
    monkeypatch.setattr(benchmarker, "benchmark_gpu", lambda: seen.setdefault("choice", free()), raising=False)
    timed = staticmethod(lambda: benchmarker.benchmark_gpu())
    monkeypatch.setattr(AlgorithmSelectorCache, "benchmark_in_current_process", timed)

    def backend(module, inputs):
        seen["before"] = free()
        AlgorithmSelectorCache.benchmark_in_current_process()
        seen["after"] = free()
        return lambda *arguments: (seen.setdefault("run", free()), module(*arguments))[1]

    turns = Turns(tmp_path / "gpu", CPU)
    assert free()
    turns.take()
    torch._dynamo.reset()
    with turns.compiling():
        assert torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2)).tolist() == [1, 1]
        assert not free()
    assert seen == {"before": True, "choice": False, "after": True, "run": False}
    assert vars(AlgorithmSelectorCache)["benchmark_in_current_process"] is timed
    turns.give()
    assert free()


def test_others_have_the_gpu_while_a_configuration_of_a_tuned_kernel_compiles(tmp_path, free, monkeypatch):
    seen = []
    monkeypatch.setattr(CachingAutotuner, "_precompile_config", lambda tuner, config: seen.append((config, free())))
    turns = Turns(tmp_path / "gpu", CPU)
    turns.take()
    with turns.compiling():
        CachingAutotuner._precompile_config(None, "at a launch")
        assert not free()
    turns.give()
    turns.take()
    torch._dynamo.reset()
    with turns.compiling():
        compiled = torch.compile(
            lambda x: x + 1, backend=lambda m, _: (CachingAutotuner._precompile_config(None, "before"), m)[1]
        )
        compiled(torch.zeros(2))
    assert seen == [("at a launch", True), ("before", True)]
    assert not free()


def test_others_have_the_gpu_while_cuda_compiles_or_a_tuner_waits(tmp_path, free, monkeypatch):
    seen, slept = [], []
    driver, tuner, cute, clock = (
        ModuleType(name) for name in ("a.cuda_driver", "quack.autotuner", "cutlass.base_dsl.compiler", "time")
    )
    compiles = lambda self, function: seen.append((function, free())) or "code"  # noqa: E731
    cute.CompileCallable = type("CompileCallable", (), {"_compile": compiles})
    monkeypatch.setattr(JITFunction, "_do_compile", compiles)
    driver._compiled = lambda source: seen.append((source, free())) or b"code"
    tuner.time, clock.sleep, clock.monotonic = clock, lambda seconds: slept.append((seconds, free())), lambda: 7.0
    for module in (driver, tuner, cute):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    turns = Turns(tmp_path / "gpu", CPU)
    turns.take()
    with turns.compiling():
        assert driver._compiled("a.cu") == b"code" and not free()
        assert cute.CompileCallable()._compile("in CuTe") == "code" and not free()
        assert JITFunction._do_compile(None, "in Triton") == "code" and not free()
        assert tuner.time.monotonic() == 7.0
        tuner.time.sleep(0.05)
        tuner.time.sleep(3.0)
        assert not free()
    assert seen == [("a.cu", True), ("in CuTe", True), ("in Triton", True)]
    assert tuner.time is clock and cute.CompileCallable._compile is compiles and JITFunction._do_compile is compiles
    assert slept == [(SLEEP_SECONDS, True), (3.0, True)]


def test_what_was_waited_for_others_is_known(tmp_path):
    turns = Turns(tmp_path / "gpu", CPU)
    turns.take()
    assert turns.waited < 0.1
    turns.give()
    with (tmp_path / "gpu").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        threading.Timer(0.3, lambda: fcntl.flock(other, fcntl.LOCK_UN)).start()
        turns.take()
    assert 0.2 < turns.waited < 5.0
    turns.give()
    assert 0 < turns.had < 0.3


def test_who_began_first_is_next(tmp_path):
    """Whatever the order in which they ask; and one who has ended holds up nobody."""
    first, second, third = (Turns(tmp_path / "gpu", CPU) for _ in range(3))
    for turns in (first, second):
        turns.begin()
        turns.give()
    third.take()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / "gpu.queue" / f"{0:017.6f}-{ended.pid}").touch()
    order = []

    def ask(name, turns):
        turns.take()
        order.append(name)
        turns.give()

    threads = [threading.Thread(target=ask, args=pair) for pair in (("second", second), ("first", first))]
    for thread in threads:
        thread.start()
    while len(list((tmp_path / "gpu.queue").iterdir())) < 3:
        time.sleep(0.01)
    third.give()
    for thread in threads:
        thread.join()
    assert order == ["first", "second"]


def test_what_is_measured_of_the_gpu_does_for_all_for_a_while(tmp_path, monkeypatch):
    first, second, alone = Turns(tmp_path / "gpu", CPU), Turns(tmp_path / "gpu", CPU), Turns(None, CPU)
    made = iter(range(4))
    ask = [turns.once("ceilings", lambda: {"bytes": next(made)}) for turns in (first, second, alone, alone)]
    assert [found["bytes"] for found in ask] == [0, 0, 1, 2]
    assert first.once("other", lambda: "something else") == "something else"
    monkeypatch.setattr("harness.measure.turns.KEPT_SECONDS", 0.0)
    assert second.once("ceilings", lambda: {"bytes": next(made)}) == {"bytes": 3}


@pytest.mark.parametrize(("free_parts", "looks"), [([0.9], 1), ([0.1, 0.4, 0.6], 3), ([0.1] * 100, None)])
def test_a_case_begins_when_there_is_memory_for_it(tmp_path, free, monkeypatch, free_parts, looks):
    """And others have the GPU until then, but not for ever."""
    seen, slept = [], []
    monkeypatch.setattr("harness.measure.turns.ROOM_SECONDS", 60.0 if looks else 0.2)
    monkeypatch.setattr("harness.measure.turns.SLEEP_SECONDS", 0.05)
    turns = Turns(tmp_path / "gpu", CPU)
    monkeypatch.setattr(turns, "_free", lambda: seen.append(free()) or free_parts[len(seen) - 1])
    sleep = time.sleep
    monkeypatch.setattr("harness.measure.turns.time.sleep", lambda s: (slept.append(free()), sleep(s))[1])
    turns.begin()
    assert not free() and not any(seen) and all(slept)
    assert len(seen) == len(slept) + 1 == looks if looks else 2 <= len(seen) <= 6
    turns.give()


def test_without_a_file_there_is_nobody_to_wait_for():
    turns = Turns(None, CPU)
    turns.begin()
    turns.give()
    assert not turns.shared and turns.waited < 0.1


def test_threads_that_compile_at_a_time_release_the_gpu_and_take_it_back_once(tmp_path, free, monkeypatch):
    """As Inductor's do for the choices of its autotuner. While a choice is timed, which is called inside of a
    compilation, none releases it."""
    turns, seen = Turns(tmp_path / "gpu", CPU), []
    every, asking = threading.Barrier(8), threading.Lock()

    def compiled(wait: bool) -> bool:
        if wait:
            every.wait(timeout=60)
        with asking:  # who asks has the GPU for a moment
            seen.append(free())
        return seen[-1]

    monkeypatch.setattr(CachingAutotuner, "_precompile_config", staticmethod(compiled))
    monkeypatch.setattr(benchmarker, "benchmark_gpu", lambda: (free(), compile_one(False), free()), raising=False)
    turns.take()
    with turns.compiling():
        compile_one = CachingAutotuner._precompile_config
        with ThreadPoolExecutor(8) as pool:
            for _ in range(20):
                assert all(pool.map(compile_one, [True] * 8)) and not free()
        assert all(seen) and not free()
        assert benchmarker.benchmark_gpu() == (False, False, False) and not free()
        assert turns._without_gpu(benchmarker.benchmark_gpu)() == (False, False, False) and not free()
    turns.give()
    assert free()


def test_the_gpu_is_taken_back_where_compilation_fails(tmp_path, free):
    def backend(module, inputs):
        assert free()
        raise ValueError("no kernel")

    turns = Turns(tmp_path / "gpu", CPU)
    turns.take()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="no kernel"), turns.compiling():
        torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2))
    assert not free()
    torch.compile(lambda x: x + 2, backend=lambda module, inputs: module)(torch.zeros(2))
    assert not free()  # outside of the block compilation changes nothing


def test_a_reset_within_the_block_is_no_error(tmp_path, free):
    turns = Turns(tmp_path / "gpu", CPU)
    turns.take()
    with turns.compiling():
        torch._dynamo.reset()
    assert not free()


def test_without_a_file_nothing_is_locked_or_replaced():
    turns = Turns(None, CPU)
    turns.take()
    before = vars(AlgorithmSelectorCache)["benchmark_in_current_process"]
    with turns.compiling():
        assert vars(AlgorithmSelectorCache)["benchmark_in_current_process"] is before
    turns.give()

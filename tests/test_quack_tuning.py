"""QuACK's autotuner in two rounds: here a stand-in of its class, with what the rounds rely on."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from harness.measure import quack_tuning
from harness.measure.quack_tuning import FINALISTS, short_bench, two_rounds


class Autotuner:
    """Calls a function in the configuration that took the least time."""

    def __init__(self, fn, configs):
        self.fn, self.configs = fn, configs
        self.cache, self.cache_results = {}, True
        self._do_bench = self.pre_hook = None
        self.nargs, self.configs_timings = {}, {}

    def prune_configs(self, arguments):
        return [config for config in self.configs if config != "unfit"]

    def __call__(self, *args, **kwargs):
        key = tuple(kwargs.items())
        if key not in self.cache:
            self.nargs = dict(zip(("a", "b"), args, strict=False))
            bench = sys.modules["quack.autotuner"]._bench_cuda_graph_l2_rotate
            self.configs_timings = {c: [bench(c)] * 3 for c in self.prune_configs(kwargs)}
            self.cache[key] = min(self.configs_timings, key=self.configs_timings.get)
        return self.fn(self.cache[key], *args, **kwargs)


@pytest.fixture
def quack(monkeypatch):
    """The module; `seen` are the configurations that were timed, and by which bench."""
    module, seen = ModuleType("quack.autotuner"), []
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def own(config):
        seen.append(("own", config))
        return {7: 0.25, 9: 0.5}.get(config, 1.0)

    def short(config):
        seen.append(("short", config))
        return float(config)

    monkeypatch.setattr(quack_tuning, "short_bench", short)
    module.Autotuner, module._bench_cuda_graph_l2_rotate, module.seen = Autotuner, own, seen
    return module


def test_all_are_timed_shortly_and_the_fastest_as_quack_does(quack):
    prune, own = Autotuner.prune_configs, quack._bench_cuda_graph_l2_rotate
    tuner = Autotuner(
        lambda config, *args, **kwargs: (config, args, kwargs), ["unfit", *range(10, 4, -1), *range(11, 20)]
    )
    with two_rounds():
        assert tuner(1, b=2) == (7, (1,), {"b": 2})
        assert tuner(1, b=2)[0] == 7
    finalists = list(range(5, 5 + FINALISTS))
    assert quack.seen == [("short", c) for c in tuner.configs[1:]] + [("own", c) for c in finalists]
    assert Autotuner.prune_configs is prune and quack._bench_cuda_graph_l2_rotate is own
    assert list(tuner.cache.values()) == [7]


@pytest.mark.parametrize("what", ["few", "custom", "hooks"])
def test_what_has_few_configurations_or_a_bench_of_its_own_is_left_alone(quack, what):
    tuner = Autotuner(lambda config: config, list(range(5, 5 + (FINALISTS if what == "few" else 20))))
    tuner._do_bench, tuner.pre_hook = (print if what == "custom" else None), (print if what == "hooks" else None)
    with two_rounds():
        assert tuner() == 7
    assert {bench for bench, _ in quack.seen} == {"own"} and len(quack.seen) == len(tuner.configs)


def test_an_error_leaves_everything_as_it_was(quack, monkeypatch):
    def fails(config):
        raise RuntimeError("launch")

    prune, own = Autotuner.prune_configs, quack._bench_cuda_graph_l2_rotate
    monkeypatch.setattr(quack_tuning, "short_bench", fails)
    with pytest.raises(RuntimeError, match="launch"), two_rounds():
        Autotuner(lambda config: config, list(range(20)))()
    assert Autotuner.prune_configs is prune and quack._bench_cuda_graph_l2_rotate is own


def test_nothing_happens_without_quack(monkeypatch):
    monkeypatch.delitem(sys.modules, "quack.autotuner", raising=False)
    with two_rounds():
        assert "quack.autotuner" not in sys.modules


@pytest.mark.gpu
def test_a_short_bench_tells_what_takes_longer():
    sets = [[torch.randn(n, n, device="cuda") for _ in range(2)] for n in (512, 4096)]
    short, long = (short_bench(torch.matmul, [own], [{}], {}, quantiles=(0.5, 0.2, 0.8)) for own in sets)
    assert len(short) == 3 and 0 < 5 * short[0] < long[0]
    assert isinstance(short_bench(torch.matmul, sets[:1], [{}], {}), float)
    with pytest.raises(TypeError):
        short_bench(torch.matmul, sets[:1], [{}], {"config": SimpleNamespace()})

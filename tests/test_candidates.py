"""Code of one's own under the bench: from Python, from a file outside the checkout, and the example."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import harness
from harness import cli, options, record, registry
from harness.candidates import compiled, eager, hugging_face
from harness.candidates.calls import TRAINING, Call, with_weights_of
from harness.measure import timing, wall
from harness.roofline import Cost

if torch.cuda.is_available():
    pytest.skip("these are about a CPU and its wall clock", allow_module_level=True)

FEW = dict(samples=3, warmup=0, quiet=True)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch):
    """No kernel from outside is known, and one thread: the pool makes small tensors slower."""
    monkeypatch.setenv(registry.OUTSIDE, "{}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def power(x: torch.Tensor) -> torch.Tensor:
    return x.pow(2)


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dy):
        return 2.01 * ctx.saved_tensors[0] * dy


def draw(device: torch.device, generator: torch.Generator | None) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(8, 64, device=device, generator=generator)}


def test_an_answer_kept_in_the_timed_rounds_is_found_out() -> None:
    """By address and first element, from so late on that the checks before the timing do not see it."""
    kept: dict[object, torch.Tensor] = {}
    calls = []

    def keeping(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.data_ptr())
        if len(calls) < 20:
            return x * x
        key = (x.data_ptr(), x.dtype, x.requires_grad, float(x.detach().flatten()[0]))
        if key not in kept:
            kept[key] = x * x
        return kept[key].clone()

    found = harness.bench({"keeping": keeping}, draw, reference=square, **FEW)
    row = found.get("keeping")
    assert not found.ok and row.status == "wrong"
    assert row.reason.startswith("after timing: gave the answer to earlier inputs") and len(kept) >= 3


def test_a_candidate_has_statistics_ratios_errors_and_memory_in_both_modes() -> None:
    found = harness.bench({"power": power}, draw, reference=square, **FEW)
    assert found.ok and [(row.name, row.mode) for row in found] == [
        ("power", "inference"), ("eager", "inference"), ("power", "training"), ("eager", "training")
    ]  # fmt: skip
    for row in found:
        assert row.statistics is not None and row.statistics.timer == "wall"
        assert row.statistics.n == 3 == len(row.statistics.samples_us)
        assert row.statistics.min_us <= row.statistics.median_us <= row.statistics.max_us
        assert row.peak_bytes is not None and row.growth_bytes is not None
    mine = found.get("power", mode="training")
    low, high = mine.faster_than["eager"].ci95
    assert low <= mine.faster_than["eager"].median <= high
    assert mine.saved_bytes == 0 and mine.error is not None
    assert found.get("power").saved_bytes is None
    assert "wall-clock time on the CPU" in "\n".join(found.lines())
    assert json.loads(found.to_json())["rows"][0]["implementation"] == "power"


def test_a_wrong_candidate_and_a_wrong_gradient_have_no_time() -> None:
    candidates = {"cube": lambda x: x**3, "slope": WrongGradient.apply, "broken": lambda x: x @ x}
    found = harness.bench(candidates, draw, reference=square, **FEW)
    assert not found.ok
    status = {(row.name, row.mode): row.status for row in found if row.candidate}
    assert status == {
        ("cube", "inference"): "wrong",
        ("slope", "inference"): "ok",
        ("broken", "inference"): "error",
        ("cube", "training"): "wrong",
        ("slope", "training"): "wrong",
        ("broken", "training"): "error",
    }
    assert all(row.statistics is None for row in found if row.status != "ok")
    assert "output 1" in (found.get("slope", mode="training").reason or "")  # the gradient of x


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


class NoBias(nn.Sequential):
    """A backward that never reaches the last bias."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self[1](self[0](x))
        return nn.functional.linear(hidden, self[2].weight, self[2].bias.detach())


def test_modules_get_the_references_weights_and_their_gradients_are_checked() -> None:
    reference, candidate = mlp(), mlp()
    before = {name: t.clone() for name, t in candidate.state_dict().items()}
    candidates = {"mlp": candidate, "no-bias": NoBias(*mlp())}
    found = harness.bench(candidates, (torch.randn(4, 16),), reference=reference, **FEW)
    assert {(r.name, r.mode): r.status for r in found if r.candidate} == {
        ("mlp", "inference"): "ok",
        ("no-bias", "inference"): "ok",
        ("mlp", "training"): "ok",
        ("no-bias", "training"): "wrong",
    }
    assert all(torch.equal(t, before[name]) for name, t in candidate.state_dict().items())
    assert found.get("mlp", mode="training").saved_bytes == 4 * 4 * 32  # tanh's result, and no weight
    assert with_weights_of(reference, reference) is reference


def test_memory_alone_has_no_times() -> None:
    found = harness.bench({"power": power}, draw, reference=square, modes=("memory",), **FEW)
    assert [row.statistics for row in found] == [None] * 4
    assert all(row.peak_bytes is not None for row in found)
    assert not any("µs" in line for line in found.lines())


def test_cases_costs_and_arguments_of_every_kind() -> None:
    def scaled(x, factor=1.0, *, index=None):
        return x[index] * factor

    index = torch.tensor([2, 0, 1])
    cases = {
        "named": {"x": torch.randn(4, 8), "factor": 2.0, "index": index},
        "drawn": lambda device, generator: {"x": torch.randn(4, 8, generator=generator), "index": index},
    }
    found = harness.bench(
        {"same": scaled}, cases=cases, reference=scaled, cost=Cost(32, 4 * 7 * 8), modes=("inference",), **FEW
    )
    assert found.ok and {row.case for row in found} == {"named", "drawn"}
    assert found.rows[0].row["cost"] == {"flops": {"fp32": 32}, "bytes": 4 * 7 * 8}
    asked: list[str] = []

    def cost(inputs, mode):
        asked.append(mode)
        return Cost(0, inputs["x"].nbytes)

    harness.bench({"power": power}, draw, reference=square, cost=cost, **FEW)
    assert set(asked) == {"inference", "training"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(candidates={}), "candidates: at least one"),
        (dict(inputs=None), "either inputs or cases"),
        (dict(name="../up"), "name: must consist of letters"),
        (dict(name=""), "name: must consist of letters"),
        (dict(cases={"a": draw}), "either inputs or cases"),
        (dict(modes=("fast",)), "modes: unknown 'fast'; known: inference, training, memory"),
        (dict(modes=()), "modes: at least one"),
        (dict(baselines=("egaer",)), "unknown baseline 'egaer'; known: eager, compile, flash"),
        (dict(candidates={"eager": square}), "names .'eager'. are taken by baselines"),
        (dict(inputs={"x": 3}), "inputs must have at least one tensor"),
        (dict(samples=0), "at least 1 sample"),
    ],
)
def test_a_declaration_that_cannot_be_run_names_the_argument(changes, message) -> None:
    arguments = dict(candidates={"power": power}, inputs=draw, reference=square, **FEW)
    with pytest.raises(ValueError, match=message):
        harness.bench(**{**arguments, **changes})


def test_what_has_no_gradient_is_skipped_in_training_with_that_reason() -> None:
    found = harness.bench({"sign": lambda x: x > 0}, draw, reference=lambda x: x > 0, **FEW)
    status = {(row.name, row.mode): (row.status, row.reason) for row in found}
    reason = "nothing of the reference's result has a gradient"
    assert status["sign", "inference"] == ("ok", None)
    assert status["sign", "training"] == status["eager", "training"] == ("skipped", reason)


def test_inputs_of_no_known_kind_are_a_type_error() -> None:
    with pytest.raises(TypeError, match="inputs must be keyword arguments in a mapping"):
        harness.bench({"power": power}, 7, reference=square, **FEW)


def test_hugging_face_is_a_baseline_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    baselines = (eager(), hugging_face(lambda transformers: transformers.Layer))
    monkeypatch.setitem(sys.modules, "transformers", None)
    found = harness.bench({"power": power}, draw, reference=square, baselines=baselines, modes=("inference",), **FEW)
    skipped = found.get("hugging-face")
    assert skipped.status == "skipped" and "not installed" in (skipped.reason or "")
    layer = SimpleNamespace(Layer=lambda x: {"output": x * x, "cache": None})
    monkeypatch.setitem(sys.modules, "transformers", layer)
    found = harness.bench({"power": power}, draw, reference=square, baselines=baselines, modes=("inference",), **FEW)
    assert found.get("hugging-face").status == "ok"


def test_the_compiled_baseline_is_named_by_its_mode() -> None:
    assert [compiled().name, compiled("max-autotune").name] == ["compile", "compile-max-autotune"]


def test_a_call_in_fp64_leaves_the_module_as_it_is() -> None:
    model = mlp()
    call = Call(model, ("0.weight",))
    (wide,) = call(**{"0": torch.randn(4, 16, dtype=torch.float64)})
    assert wide.dtype == torch.float64 and next(model.parameters()).dtype == torch.float32
    grad = torch.ones(4, 16)
    results = call(**{TRAINING: True, "0": torch.randn(4, 16), "incoming gradient 0": grad})
    assert [tuple(t.shape) for t in results] == [(4, 16), (4, 16), (32, 16)]
    assert all(p.grad is None for p in model.parameters())


def test_a_fixed_number_of_samples_and_of_rounds_of_warm_up() -> None:
    fixed = timing.Budget().fixed(50, 10)
    assert (fixed.min_rounds, fixed.max_rounds, fixed.warmup_rounds) == (50, 50, 10)
    assert timing.Budget().fixed() == timing.Budget()
    calls: list[int] = []
    contender = timing.Contender("one", lambda index: lambda: calls.append(index))  # type: ignore[arg-type,return-value]
    found = wall.measure([contender], timing.Budget().fixed(4, 3))
    assert found.columns["one"]["wall"]["n"] == 4 and found.columns["one"]["wall"]["stop"] == "rounds"
    assert calls[:4] == [0] * 4  # bound, three of warm-up


def test_samples_without_a_number_are_50_and_warm_up_10() -> None:
    import argparse

    from harness.commands import bench

    parser = argparse.ArgumentParser()
    bench.configure(parser)
    arguments = parser.parse_args(["--samples", "--warmup"])
    assert (arguments.samples, arguments.warmup) == (50, 10)
    assert parser.parse_args([]).samples is None


OPS = "def double(x): return x + x\ndef double_reference(x): return 2 * x\n"
BENCH = """
import torch
from harness import Benchmark
from harness.spec import Case, Cost, EAGER, KernelSpec
from .ops import double, double_reference
SPEC = KernelSpec(
    name="double", implementations={"mine": double}, reference=double_reference, baselines=(EAGER,),
    make_inputs=lambda case, device, generator: {"x": torch.randn(case.dims["n"], device=device, generator=generator)},
    cost=lambda case, mode: Cost(case.dims["n"], 8 * case.dims["n"]), cases=(Case("few", {"n": 64}, torch.float32,
    bench=True),), grads=("x",), unit="elements", items=lambda case: case.dims["n"], fuzz={"n": (0, 100)},
)
TWICE = Benchmark("twice", {"mine": double}, double_reference, torch.randn(64), baselines=("eager",))
NUMBER = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder outside the checkout, which is also where the command is run."""
    folder = tmp_path / "my-kernel"
    folder.mkdir()
    (folder / "ops.py").write_text(OPS)
    (folder / "bench.py").write_text(BENCH)
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_bench_py_outside_the_checkout_is_timed_by_the_wall_clock(own: Path, capsys) -> None:
    assert cli.main(["bench", "--kernel", "my-kernel", "--samples", "3", "--warmup", "0"]) == 0
    shown = capsys.readouterr().out
    assert "double: wall-clock time on the CPU" in shown and "saved for the backward" in shown
    rows = record.load(own.parent / ".out" / "cpu").rows
    assert {(row.mode, row.implementation, row.status) for row in rows} == {
        ("fwd", "mine", "ok"), ("fwd", "eager", "ok"), ("bwd", "mine", "ok"), ("bwd", "eager", "ok")
    }  # fmt: skip
    assert all(row.column()["n"] == 3 and row["timer"] == "wall" for row in rows)
    assert rows[0].run.options["samples"] == 3
    assert registry.load("double") is registry.load("my-kernel")  # what a process started later asks for
    assert registry.folder("double") == own and ".my_kernel_" in registry.package("double")


def test_a_benchmark_in_a_file_prints_the_same_table_as_its_run(own: Path, capsys) -> None:
    assert cli.main(["bench", "--kernel", "my-kernel/bench.py:TWICE", "--mode", "fwd", "--quick"]) == 0
    head = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("case"))
    benchmark = sys.modules[registry.package("twice") + ".bench"].TWICE
    lines = benchmark.run(quick=True, quiet=True).lines()
    assert head.split() == next(line for line in lines if line.startswith("case")).split()


def test_what_is_wrong_with_a_path_is_said(own: Path, capsys) -> None:
    for name, message in (
        ("./nowhere", "no bench.py or Python file at ./nowhere"),
        ("my-kernel/bench.py:NONE", "has no NONE: a KernelSpec"),
        ("./my-kernel:NUMBER", "has no NUMBER: a KernelSpec"),
    ):
        assert cli.main(["bench", "--kernel", name]) == 2
        assert message in capsys.readouterr().err
    copy = own.parent / "copy"
    copy.mkdir()
    for file in own.glob("*.py"):
        (copy / file.name).write_text(file.read_text())
    assert cli.main(["list", "--kernel", "my-kernel", "--kernel", "./copy"]) == 2
    assert "more than one SPEC has the name 'double'" in capsys.readouterr().err


IN_PYTHON = """
import harness, torch
results = harness.bench({'a': torch.sin}, torch.ones(9), reference=torch.sin, quick=True)
assert results.ok
"""
WITH_COMPILE = """
import harness, torch
benchmark = harness.Benchmark(
    "softmax", {"mine": lambda x: torch.softmax(x, -1)},
    inputs=lambda device, generator: {"x": torch.randn(8, 64, device=device, generator=generator)},
    reference=lambda x: x.exp() / x.exp().sum(-1, keepdim=True), baselines=("eager", "compile"),
)
results = benchmark.run(samples=3, warmup=0)
assert results.ok and results.get("compile").status == "ok", results.get("compile").reason
assert "compile" in results.get("mine", mode="training").faster_than
"""
PATH = ["-m", "harness", "bench", "--kernel", "{own}", "--samples", "3", "--warmup", "0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [["-c", IN_PYTHON], ["-c", WITH_COMPILE], PATH], ids=["bench", "Benchmark with compile", "--kernel PATH"]
)
def test_from_an_empty_folder_with_the_checkout_on_the_path(own: Path, command: list[str]) -> None:
    """What docs/BENCH.md calls installed."""
    empty = own.parent / "empty"
    empty.mkdir()
    words = [word.replace("{own}", str(own)) for word in command]
    environment = {**os.environ, "PYTHONPATH": str(registry.ROOT)}
    done = subprocess.run([sys.executable, *words], cwd=empty, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "wall-clock time on the CPU" in done.stdout
    assert [path.name for path in empty.iterdir()] == ([".out"] if command is PATH else [])


EXAMPLE = registry.ROOT / "examples" / "benchmark.py"


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = [word for name in ("written-out", "eager", "flash", "hugging-face") for word in ("--impl", name)]
    few = ["--samples", "2", "--warmup", "0"]
    assert cli.main(["bench", "--kernel", f"{EXAMPLE}:BENCHMARK", *chosen, *few]) == 0
    assert "self-attention: wall-clock time on the CPU" in capsys.readouterr().out
    rows = {(row.mode, row.implementation): row for row in record.load(tmp_path / ".out").rows}
    assert all(rows[mode, name].ok for mode in ("fwd", "train") for name in ("written-out", "eager", "flash"))


def test_the_harness_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'benhc'"):
        getattr(harness, "benhc")  # noqa: B009
    assert options.implementations(harness.Benchmark("one", {"a": power}, square, draw).spec()) == ["a", "eager"]


def test_a_baselines_row_has_ratios_too() -> None:
    found = harness.bench({"power": power}, draw, reference=square, modes=("inference",), **FEW)
    (mine, theirs) = (found.get(name).statistics.samples_us for name in ("power", "eager"))
    ratio = found.get("eager").faster_than["power"]
    assert ratio.median == pytest.approx(sorted(a / b for a, b in zip(mine, theirs, strict=True))[1])
    assert list(found.get("power").faster_than) == ["eager"]


def test_a_case_may_end_like_the_name_of_a_mode() -> None:
    found = harness.bench(
        {"power": power}, cases={"after-training": draw}, modes=("inference",), reference=square, **FEW
    )
    assert found.get("power", case="after-training").mode == "inference"


def test_an_argument_named_training_is_the_users_own() -> None:
    seen = set()

    def scaled(x: torch.Tensor, training: bool = True) -> torch.Tensor:
        seen.add(training)
        return x * 2 if training else x

    found = harness.bench({"mine": scaled}, {"x": torch.randn(8, 8), "training": False}, reference=scaled, **FEW)
    assert found.ok and seen == {False}


def test_a_compiled_candidate_has_static_shapes_in_every_case() -> None:
    sizes = []

    def backend(graph, arguments):
        sizes.append([argument for argument in arguments if not isinstance(argument, torch.Tensor)])
        return graph.forward

    cases = {f"{rows}": lambda device, generator, rows=rows: {"x": torch.randn(rows, 8)} for rows in (3, 5, 7)}
    mine = torch.compile(square, backend=backend)
    harness.bench({"mine": mine}, reference=power, cases=cases, modes=("inference",), **FEW)
    assert len(sizes) >= 3 and not any(sizes), "a size that is an argument of the graph is dynamic"


def test_a_candidate_that_fails_in_a_later_call_loses_its_own_row_only() -> None:
    calls = []

    def tiring(x: torch.Tensor) -> torch.Tensor:
        calls.append(0)
        if len(calls) > 20:
            raise RuntimeError("tired")
        return x * x

    found = harness.bench(
        {"tiring": tiring, "power": power}, draw, reference=square, modes=("inference",), samples=200, quiet=True
    )
    assert (found.get("tiring").status, found.get("tiring").reason) == ("error", "RuntimeError: tired")
    assert found.get("power").status == found.get("eager").status == "ok"


def test_a_module_of_integers_is_compared_with_a_copy_in_fp64() -> None:
    """In bf16 itself the reference would be its own oracle, and a module that rounds less often wrong."""

    class Deep(nn.Module):
        def __init__(self, wide: bool) -> None:
            super().__init__()
            self.embedding = nn.Embedding(100, 256)
            self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))
            self.wide = wide

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for layer in self.layers:
                x = x.float() @ layer.weight.float().T + layer.bias.float() if self.wide else layer(x)
                x = torch.relu(x)
            return x.to(self.embedding.weight.dtype)

    torch.manual_seed(0)
    reference = Deep(wide=False).bfloat16()
    found = harness.bench(
        {"wide": Deep(wide=True).bfloat16()}, torch.randint(0, 100, (64,)), reference=reference, **FEW
    )
    assert found.ok, [row.reason for row in found]
    assert found.get("wide").row["error"]["eager_max"] > 0


def test_a_number_of_samples_that_is_refused_leaves_no_record(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1 sample"):
        harness.bench({"power": power}, draw, reference=square, samples=0, out=tmp_path, quiet=True)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_bench_says_so_and_keeps_what_it_measured(tmp_path: Path) -> None:
    def interrupted(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 4:
            raise KeyboardInterrupt
        return x * x

    cases = {"whole": torch.randn(8, 8), "cut": torch.randn(4, 8)}
    benchmark = harness.Benchmark("cut", {"mine": interrupted}, square, cases=cases, modes=("inference",))
    with pytest.raises(KeyboardInterrupt):
        benchmark.run(out=tmp_path, **FEW)
    records = record.load(tmp_path)
    assert {row.case for row in records.rows} == {"whole"}
    assert [run.stop for run in records.runs.values()] == ["interrupted"]


def test_a_selection_without_a_case_is_misuse(own: Path, capsys) -> None:
    chosen = ["--kernel", "my-kernel:TWICE", "--case", "inputs", "--mode", "train"]
    assert cli.main(["bench", *chosen, "--samples", "3"]) == 2
    assert "select nothing" in capsys.readouterr().err


def test_folders_whose_names_differ_in_a_hyphen_are_two(own: Path) -> None:
    other = own.with_name("my_kernel")
    other.mkdir()
    (other / "ops.py").write_text(OPS)
    (other / "bench.py").write_text(BENCH.replace('name="double"', 'name="other"'))
    assert [registry.load(f"./{folder.name}").name for folder in (own, other)] == ["double", "other"]

"""TransformerNP: options agree, the padding stays zero, the task is a Gaussian process, and the model learns it."""

from __future__ import annotations

import dataclasses
import gc
import math
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import kernels.adamw
from harness import record, registry, roofline
from harness.correctness.accuracy import Verdict
from harness.correctness.stand_in import checked
from harness.measure import memory
from kernels.train import TrainStep

from . import (
    KERNELS,
    STAGES,
    MeanPoolingNP,
    Rates,
    Sizes,
    TransformerNP,
    bench,
    constant_loss,
    feasibility,
    reference,
    require_flash,
    sample_task,
    stages,
    transformer_np,
)
from . import attention as attention_module
from . import layers as layers_module
from .bench import FULL, SPEC, TINY, make_inputs
from .feasibility import H100, H200, RATES
from .step import _flat_update, places, views
from .task import JITTER, _by_features, _exact

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAIN = dict(attention="sdpa", mlp="torch", heads_impl="torch", norm="torch", loss_impl="torch")
OURS_IN_BLOCKS = dict(heads_impl="torch", loss_impl="torch")
PEAK = Rates(matmul=7e14, attention=5e14, bandwidth=4e12, launch=1e-6)


@pytest.fixture(autouse=True)
def _one_thread():
    """A thread pool is slower for matrices of these sizes, especially if other processes use the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def small(**options) -> TransformerNP:
    return TINY.model(generator=generator(), **options).to(DEVICE)


def task(*sizes: int, kernel: str = "rbf") -> dict[str, torch.Tensor]:
    return {name: x.to(DEVICE) for name, x in sample_task(*sizes, kernel, generator=generator()).items()}


def test_ours_and_pytorchs_parts_agree() -> None:
    batch = task(1, 3, 2)
    ours, plain = small(), small(**PLAIN)
    losses = [model.loss(**batch) for model in (ours, plain)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    for loss in losses:
        loss.backward()
    for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("checkpoint", ["block", "attention"])
@pytest.mark.parametrize("parts", [PLAIN, {**PLAIN, "attention": "auto"}, OURS_IN_BLOCKS])
def test_checkpoints_change_nothing(checkpoint: str, parts: dict[str, str]) -> None:
    """On a GPU, a forward that keeps nothing may be another kernel, which rounds other intermediate results."""
    batch, two = task(2, 4, 3), dataclasses.replace(TINY, layers=2)
    models = [two.model(generator=generator(), checkpoint=kind, **parts).to(DEVICE) for kind in ("none", checkpoint)]
    for model in models:
        model.loss(**batch).backward()
    exact = dict(rtol=0, atol=0) if DEVICE == "cpu" else dict(rtol=1e-4, atol=1e-5)
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(a.grad, b.grad, **exact)


def _named(ops: list[str], text: str) -> int:
    return sum(text in op and "backward" not in op for op in ops)


@pytest.mark.parametrize(("checkpoint", "calls"), [("none", 1), ("block", 2), ("attention", 1)])
def test_pytorchs_attention_is_computed_again_by_block_alone(checkpoint: str, calls: int) -> None:
    ops: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            ops.append(str(op))
            return op(*args, **kwargs or {})

    model = small(checkpoint=checkpoint, **PLAIN)
    with Seen():
        model.loss(**task(1, 4, 3)).backward()
    assert _named(ops, "attention") == calls


def test_what_a_checkpoint_of_ours_computes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With "attention", neither attention nor the MLP's second GEMM is computed again. Three rows of the model's width
    are saved; without a checkpoint six rows, the hidden, and the rows of the context."""
    calls = {"attention": 0, "fused_mlp": 0}
    rows = [torch.randn(2, 24, TINY.d_model, device=DEVICE, requires_grad=True) for _ in range(2)]

    def counted(name: str, function):
        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(attention_module, "attention", counted("attention", attention_module.attention))
    monkeypatch.setattr(layers_module, "fused_mlp", counted("fused_mlp", layers_module.fused_mlp))
    sizes, batch, kept = dataclasses.replace(TINY, layers=3), task(2, 16, 8), {}
    for kind, times in (("none", 1), ("block", 2), ("attention", 1)):
        model = sizes.model(generator=generator(), checkpoint=kind, weight_gradients="inline", **OURS_IN_BLOCKS)
        model = model.to(DEVICE)
        calls.update(attention=0, fused_mlp=0)
        model.loss(**batch).backward()
        assert calls == dict.fromkeys(calls, times * sizes.layers), kind
        kept[kind] = memory.saved_bytes(lambda model=model: model.blocks[0](*rows, 16)[1], (model, *rows))
    assert kept["block"] < kept["attention"] < 0.5 * kept["none"], kept


def test_targets_see_the_context_alone() -> None:
    """The result does not depend on other targets, nor on the order of the context."""
    batch, model = task(1, 6, 4), small(**PLAIN)
    x, y, targets = batch["x_context"], batch["y_context"], batch["x_target"]
    mean = model(x, y, targets)[1]
    torch.testing.assert_close(model(x, y, targets[:, :2])[1], mean[:, :2])
    torch.testing.assert_close(model(x.flip(1), y.flip(1), targets)[1], mean)
    assert not torch.allclose(model(x, y + 1, targets)[1], mean)


def test_padding_stays_zero() -> None:
    model = small(**PLAIN)
    step = TrainStep(model.loss, torch.optim.AdamW(model.parameters(), lr=0.1), clip=1.0)
    for _ in range(3):
        step(**task(2, 5, 3))
    hidden = TINY.d_ff
    for module in (model.blocks[0].mlp, model.heads):
        assert module.up.shape[-2] == 16 and not module.up[..., hidden:, :].any()
        assert not module.down[..., hidden:].any()
    odd = dataclasses.replace(TINY, padding=1).model(generator=generator(), **PLAIN).to(DEVICE)
    state = {name: value[tuple(map(slice, odd.state_dict()[name].shape))] for name, value in model.state_dict().items()}
    odd.load_state_dict(state)
    torch.testing.assert_close(odd.loss(**task(2, 5, 3)), model.loss(**task(2, 5, 3)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(attention="none"), "attention must be one of"),
        (dict(mlp="triton"), "mlp must be torch, fused or auto"),
        (dict(heads_impl="triton"), "heads_impl must be torch, fused or auto"),
        (dict(checkpoint="all"), "checkpoint must be one of none, block, attention"),
        (dict(norm="layer"), "norm must be one of"),
        (dict(loss_impl="mse"), "loss_impl must be one of"),
        (dict(heads=3), "d_model must be a multiple of heads"),
    ],
)
def test_unknown_options(options: dict, message: str) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        TransformerNP(1, 16, **{"heads": 2, "d_ff": 8, **options})


@pytest.mark.parametrize("name", KERNELS)
def test_functions_have_the_covariance_of_their_kernel(name: str) -> None:
    """For both sampling methods: the mean product of the values at two points, over many functions."""
    x = torch.tensor([0.0, 0.3, 0.8], dtype=torch.float64).expand(4000, 3)
    expected = KERNELS[name]((x[0][:, None] - x[0]).abs())
    for draw, rows in ((_exact, 4000), (_by_features, 1000)):
        y = draw(x[:rows], name, generator())
        found = (y[:, :, None] * y[:, None]).mean(0)
        assert (found - expected).abs().max() < 5 * math.sqrt(2 / rows) + JITTER


def test_tasks_of_many_points() -> None:
    batch = sample_task(1, 3000, 10, "matern32", generator=generator())
    assert batch["x_context"].shape == (1, 3000, 1) and batch["y_target"].shape == (1, 10)
    assert all(value.dtype == torch.float32 and value.isfinite().all() for value in batch.values())
    with pytest.raises(ValueError, match="kernel must be one of"):
        sample_task(1, 2, 2, "linear")


def _trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, kernel: str) -> tuple[float, float]:
    """(mean loss of the last tenth of the steps, loss of the best constant Gaussian on the same tasks)."""
    warm = steps // 10
    schedule = lambda step: min(1, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))  # noqa: E731
    step = TrainStep(model.loss, optimizer, clip=1.0, schedule=schedule, history=steps)
    source, constants = generator(1), []
    for _ in range(steps):
        batch = {name: x.to(DEVICE) for name, x in sample_task(16, 24, 16, kernel, generator=source).items()}
        constants.append(float(constant_loss(batch["y_target"])))
        step(**batch)
    last = steps // 10
    return float(step.losses()[-last:].mean()), sum(constants[-last:]) / last


def _of_pytorch(model: torch.nn.Module, steps: int, kernel: str, lr: float = 3e-3) -> tuple[float, float]:
    """The losses of `_trained` in fp32 with PyTorch's AdamW."""
    model = model.to(DEVICE)
    return _trained(model, torch.optim.AdamW(model.parameters(), lr=lr), steps, kernel)


def test_the_loss_falls_below_a_reference_models() -> None:
    """The loss is below that of a neural process with mean pooling instead of attention, trained in the same way on the
    same tasks. That loss is itself below the best constant Gaussian's."""
    model = TransformerNP(2, 32, 2, 64, 3, generator=generator(), padding=1, **PLAIN)
    found, constant = _of_pytorch(model, 120, "rbf")
    pooled, _ = _of_pytorch(MeanPoolingNP(64, 2, 3, generator=generator()), 120, "rbf")
    assert found < pooled - 0.3 and pooled < constant - 0.1, (found, pooled, constant)


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_every_process_is_learnt(name: str) -> None:
    model = TransformerNP(3, 64, 4, 128, 5, generator=generator(), padding=1, **PLAIN)
    found, constant = _of_pytorch(model, 600, name)
    pooled, _ = _of_pytorch(MeanPoolingNP(64, 3, 5, generator=generator()), 600, name)
    assert found < min(pooled - 0.1, constant - 0.3), (found, pooled, constant)


@pytest.mark.gpu(min_capability=(8, 0))
@pytest.mark.parametrize("checkpoint", ["none", "attention"])
def test_ours_in_bf16_learns_as_pytorchs_fp32_does(checkpoint: str) -> None:
    """The same model on the same tasks: ridgeline's kernels, with bf16 weights and fp32 masters in the optimizer,
    compared with PyTorch's parts in fp32, and with the reference model."""
    sizes = Sizes(layers=2, d_model=128, heads=2, d_ff=200, components=4)
    ours = sizes.model(generator=generator(), checkpoint=checkpoint).to(DEVICE, torch.bfloat16)
    optimizer = kernels.adamw.AdamW(ours.parameters(), lr=1e-3, master_weights=True)
    found, constant = _trained(ours, optimizer, 300, "rbf")
    plain, _ = _of_pytorch(sizes.model(generator=generator(), **PLAIN), 300, "rbf", lr=1e-3)
    pooled, _ = _of_pytorch(MeanPoolingNP(128, 3, 4, generator=generator()), 300, "rbf", lr=1e-3)
    assert found < plain + 0.1 and found < min(pooled, constant) - 0.2, (found, plain, pooled, constant)


@pytest.mark.parametrize("parts", [PLAIN, {**OURS_IN_BLOCKS, "weight_gradients": "deferred"}])
def test_stages(parts: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = dataclasses.replace(TINY, layers=3).model(generator=generator(), **parts).to(DEVICE)
    model.flatten_parameters()
    seen = []

    def differentiated(results, inputs, *modules):
        grads = plain(results, inputs, *modules)
        if not (DEVICE == "cuda" and torch.cuda.is_current_stream_capturing()):
            assert all(grad is not None and grad.isfinite().all() for grad in grads)
        seen.append(len(results))
        return grads

    stages_module = sys.modules[stages.__module__]  # in the package, that name is the function
    plain = stages_module._differentiated
    monkeypatch.setattr(stages_module, "_differentiated", differentiated)
    optimizer = torch.optim.AdamW(model.parameters(), capturable=DEVICE == "cuda")
    found = stages(model, optimizer, 5, 3, 2, repeats=2)
    assert max(seen) == (4 if "weight_gradients" in parts else 2)  # two layers together, the last one separately
    assert tuple(found) == STAGES and all(seconds > 0 for name, seconds in found.items() if name != "layers")
    assert found["layers"] == 0  # layers are one launch only on a GPU, and for a larger width
    assert all(p.grad is None for p in model.parameters())


def test_a_stage_is_the_median_of_its_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of two, which is what the bench has for many points."""
    stages_module, seconds = sys.modules[stages.__module__], iter((1.0, 3.0))
    monkeypatch.setattr(stages_module, "_by_the_host", lambda run: next(seconds))
    assert stages_module._median("mlp", lambda: None, torch.device("cpu"), 2) == 2.0


@pytest.mark.skipif(DEVICE != "cpu", reason="the case is fp32, for which PyTorch has flash attention only on the CPU")
def test_stages_that_the_bench_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bench records stages of ours and of PyTorch's parts, but not of implementations that share stages with these,
    of compiled ones, or if stages are computed again."""
    monkeypatch.setattr(bench, "stages", partial(stages, repeats=1))
    case, device = SPEC.case("tiny-5-3-b2-fp32"), torch.device(DEVICE)
    for name in ("auto", "torch-flash"):
        found = bench.stage_seconds(name, case, "train", device)
        assert found is not None and tuple(found) == STAGES
        none = {"layers"} if name == "torch-flash" else {"layers", "loss"}
        assert {stage for stage, seconds in found.items() if not seconds} == none
    for name in ("torch-mlp", "torch-flash-compile", "fp8"):
        assert bench.stage_seconds(name, case, "train", device) is None
    assert bench.stage_seconds("auto", SPEC.case("tiny-3-2-b1-checkpoint-block-fp32"), "train", device) is None
    assert set(SPEC.ablation) >= {"auto", *bench.ABLATIONS}


@pytest.mark.parametrize(("name", "same"), [("64-500-b1-bf16", False), ("64-500-b64-bf16", True)])
def test_what_is_fused_of_few_rows_is_timed_where_auto_has_it(name: str, same: bool) -> None:
    case = SPEC.case(name)
    for implementation in ("apart-layers", "inline-gradients", "apart-projections"):
        assert bool(SPEC.skip_reason(implementation, case, "train")) == same
    assert SPEC.skip_reason("auto", case, "train") is SPEC.skip_reason("torch-mlp", case, "train") is None
    assert case.dims["layers"] - 1 == len(FULL.model(dtype=torch.bfloat16).blocks[:-1])


def test_the_ablation_says_what_a_replaced_part_takes_with_it() -> None:
    """The fusions for few rows require our attention, MLP and norm, and our embedding our MLP."""
    for name, options in bench.ABLATIONS.items():
        model = TINY.model(**{option: value for option, value in options.items() if option != "optimizer"})
        fused = model.may_defer and model.weight_gradients != "inline"
        assert fused != ("no fusion for few rows" in bench.ABLATION_TEXTS[name]), name
        assert model.fused_embedding != ("embedding" in bench.ABLATION_TEXTS[name]), name


def _step_seconds(step: TrainStep, batch: dict[str, torch.Tensor]) -> float:
    """The median of 25 captured steps, by CUDA events."""
    seconds = []
    for _ in range(30):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step(**batch)
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    assert step.captured, step.reason
    return sorted(seconds[5:])[12]


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("batch", [1, 64])
def test_stages_make_up_the_step(batch: int) -> None:
    """In CUDA graphs, as for the step: their sum is most of its time, even if launches take longer than kernels."""
    model = FULL.model().to(DEVICE, torch.bfloat16)
    optimizer = kernels.adamw.AdamW(model.parameters(), master_weights=True)
    found = sum(stages(model, optimizer, 64, 500, batch).values())
    seconds = _step_seconds(TrainStep(model.loss, optimizer, clip=1.0), task(batch, 64, 500))
    assert 0.75 * seconds < found < 1.2 * seconds, (found, seconds)


def test_cost_counts_what_a_model_multiplies() -> None:
    case = next(c for c in SPEC.cases if c.dtype == torch.float32 and not c.params)
    inputs = make_inputs(case, "cpu", generator())
    model = dataclasses.replace(TINY, padding=1).model(generator=generator(), **PLAIN)
    # The counter does not support the CPU's flash attention.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model.loss(*(inputs[n] for n in ("x_context", "y_context", "x_target", "y_target"))).backward()
    d = case.dims
    rows, answers = d["batch"] * (d["context"] + d["targets"]), d["batch"] * d["targets"]
    # The gradient of the points is not needed; with the scores in memory none are computed again.
    unneeded = 2 * rows * 3 * d["d_model"] + 0.5 * 4 * answers * d["context"] * d["d_model"]
    assert SPEC.cost(case, "train").total_flops - unneeded == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_feasibility_follows_the_sizes() -> None:
    base = feasibility(10_000, 1000, 4, PEAK)
    assert base.fits(141 << 30) and not base.fits(base.peak_bytes - 1)
    cost = SPEC.cost(SPEC.case("10000-1000-b4-bf16"), "train")
    floor = roofline.floor_seconds(cost, roofline.get("h200").ceilings).seconds
    assert floor < base.step_seconds < 5 * floor
    block = feasibility(10_000, 1000, 4, PEAK, checkpoint="block")
    assert block.memory["activations"] + block.memory["recomputed"] < 0.5 * base.memory["activations"]
    assert base.step_seconds < block.step_seconds < 1.4 * base.step_seconds
    attention = feasibility(10_000, 1000, 4, PEAK, checkpoint="attention")
    assert block.peak_bytes < attention.peak_bytes < base.peak_bytes
    twice = feasibility(10_000, 1000, 8, PEAK)
    assert twice.memory["activations"] == 2 * base.memory["activations"]
    wrong = (((0, 1, 1), {}), ((1, 1, 1), dict(checkpoint="all")), ((1, 1, 1), dict(layers_impl="whole")))
    none = (((1, 1, 1), dict(sizes=dataclasses.replace(FULL, layers=0), checkpoint=name)) for name in ("none", "block"))
    for arguments, options in (*wrong, *none):
        with pytest.raises(ValueError, match="feasibility:"):
            feasibility(*arguments, PEAK, **options)


def test_rates_of_other_gpus_are_scaled_by_their_data_sheets() -> None:
    base = roofline.get("h200")
    for name, rates in RATES.items():
        gpu = roofline.get(name)
        flops = gpu.ceilings.flops["bf16"] / base.ceilings.flops["bf16"]
        bandwidth = gpu.ceilings.bandwidth / base.ceilings.bandwidth
        measured = {"h200": H200, "h100": H100}
        expected = measured[name] if name in measured else H200.scaled(flops, bandwidth, gpu.sms)
        assert dataclasses.astuple(rates) == pytest.approx(dataclasses.astuple(expected), rel=1e-3)
        assert feasibility(64, 500, 64, name) == feasibility(64, 500, 64, rates)
    with pytest.raises(ValueError, match="rates must be Rates or one of"):
        feasibility(64, 500, 64, "b200")


@pytest.mark.parametrize("checkpoint", ["attention", "block"])
def test_the_readme_says_what_a_checkpoint_costs(checkpoint: str) -> None:
    cells = []
    for shape in ((64, 500, 64), (10_000, 1000, 4), (200_000, 5000, 1)):
        found, whole = (feasibility(*shape, "h200", checkpoint=kind) for kind in (checkpoint, "none"))
        kept, all_kept = (f.memory["activations"] + f.memory["recomputed"] for f in (found, whole))
        time, size = found.step_seconds / whole.step_seconds, kept / all_kept
        assert size < 0.5 and (checkpoint == "block" or time < 1.25)
        cells.append(f"{time:.2f}× time, {size:.2f}× bytes")
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    (line,) = [x for x in text.splitlines() if x.startswith(f"| `{checkpoint}` | ") and "× time" in x]
    assert line.endswith(f"| {' | '.join(cells)} |")


def _recorded() -> list:
    """Each measured step in the committed records of GPUs that have rates, and how its layers were launched. A run
    without an ablation of that is older than layers in one launch: its `auto` is "apart"."""
    found = []
    for path in sorted(registry.ROOT.glob("reports/*/records/transformer_np.jsonl")):
        rows = [row for row in record.load(path).rows if not row.host and row.run.gpu_folder in RATES]
        ablated = {(row.run.id, row.case) for row in rows if row.implementation == "apart-layers"}
        for row in (row for row in rows if row.ok and row.implementation in ("auto", "apart-layers")):
            newer = row.implementation == "auto" and (row.run.id, row.case) in ablated
            how = "auto" if newer else "apart"
            found.append(pytest.param(row, how, id=f"{path.parts[-3]}-{row.case}-{row.implementation}"))
    return found


@pytest.mark.parametrize(("row", "layers_impl"), _recorded())
def test_feasibility_follows_the_records(row, layers_impl: str) -> None:
    """Compares the prediction with the time in a CUDA graph of every recorded step."""
    d = row["dims"]
    given = {name: d[name] for name in ("layers", "d_model", "heads", "d_ff", "components", "padding")}
    sizes = dataclasses.replace(FULL, **given)
    shape = d["context"], d["targets"], d["batch"]
    checkpoint = row.get("params", {}).get("checkpoint", "none")
    found = feasibility(*shape, row.run.gpu_folder, sizes=sizes, checkpoint=checkpoint, layers_impl=layers_impl)
    column = "graph" if row.column("graph") else None
    assert found.step_seconds == pytest.approx(row.seconds(column), rel=0.1)


def test_which_backend_runs() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = require_flash(64, 500, dtype=torch.float32, device=DEVICE)
    assert found in ("flash_attention", "cudnn_attention", "efficient_attention", "math")
    assert bool(caught) == (found in ("efficient_attention", "math"))
    if DEVICE == "cpu":
        with pytest.warns(UserWarning, match="falls back to math"), sdpa_kernel(SDPBackend.MATH):
            require_flash(64, 500, dtype=torch.float32, device=DEVICE)


def test_the_sizes_of_the_issue() -> None:
    sizes = Sizes()
    found, length = places(sizes)
    assert length == found[-1][1] + 64 and 36e6 < length < 39e6
    assert registry.package("transformer_np") == "workloads.transformer_np"
    assert transformer_np.__name__ == SPEC.name


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_optimizers_agree(dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's fused AdamW, and the one to be compiled, here uncompiled; gaps between parameters do not change."""
    case = next(c for c in SPEC.cases if c.dtype == torch.float32 and not c.params)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    _flat_update.cache_clear()
    found = []
    for optimizer in ("torch", "torch-compile"):
        inputs = {**make_inputs(case, "cpu", generator()), "dtype": dtype}
        before = inputs["weights"].clone()
        results = transformer_np(**inputs, **PLAIN, optimizer=optimizer)
        used = torch.zeros_like(before, dtype=torch.bool)
        for view in views(used, TINY).values():
            view.fill_(True)
        assert torch.equal(results[1][~used], before[~used]) and not torch.equal(results[1][used], before[used])
        found.append(results)
    _flat_update.cache_clear()
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("checkpoint", ["none", "block", "attention"])
def test_a_compiled_step_with_attention_that_is_not(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpointed block that is not compiled as a whole reads its parameters again in the backward."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile(function, backend="eager"))

    @torch.compiler.disable
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    case = next(c for c in SPEC.cases if c.dtype == torch.float32 and not c.params)
    options = {**PLAIN, "attention": attend, "checkpoint": checkpoint, "optimizer": "torch"}
    found = [
        transformer_np(**make_inputs(case, DEVICE, torch.Generator(DEVICE).manual_seed(0)), **options, compile=how)
        for how in (None, "default")
    ]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu(min_capability=(8, 0))
def test_bf16_follows_fp32() -> None:
    batch = task(2, 70, 30)
    found = [small(dtype=dtype).loss(**batch) for dtype in (None, torch.bfloat16)]
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu(min_capability=(8, 0))
def test_weights_in_bf16_follow_fp32() -> None:
    """With fp32 weights in the optimizer, and targets that are not rounded."""
    batch, losses = task(2, 70, 30), []
    for dtype in (torch.float32, torch.bfloat16):
        model = small().to(dtype)
        optimizer = kernels.adamw.AdamW(model.parameters(), lr=1e-3, master_weights=dtype == torch.bfloat16)
        step = TrainStep(model.loss, optimizer, clip=1.0)
        for _ in range(10):
            step(**batch)
        losses.append(step.losses())
    torch.testing.assert_close(*losses, rtol=3e-2, atol=3e-2)


@pytest.mark.gpu(min_capability=(8, 0))
@pytest.mark.parametrize("checkpoint", ["none", "block", "attention"])
def test_a_captured_step_is_the_eager_one(checkpoint: str) -> None:
    """With ridgeline's implementation of all parts, and ridgeline's AdamW."""
    sizes = Sizes(layers=2, d_model=128, heads=2, d_ff=200, components=4)
    batch, losses = task(2, 70, 30), []
    for capture in (True, False):
        model = sizes.model(generator=generator(), dtype=torch.bfloat16, checkpoint=checkpoint).to(DEVICE)
        step = TrainStep(model.loss, kernels.adamw.AdamW(model.parameters(), lr=1e-3), capture, clip=1.0)
        for _ in range(12):
            step(**batch)
        assert step.captured == capture, step.reason
        losses.append(step.losses())
    torch.testing.assert_close(*losses, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize(("context", "targets", "batch"), [(64, 500, 64), (10_000, 1000, 1)])
@pytest.mark.parametrize("checkpoint", ["none", "block", "attention"])
def test_feasibility_of_memory_is_within_five_percent(context: int, targets: int, batch: int, checkpoint: str) -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()  # memory of other tests in this process
    model = Sizes().model(dtype=torch.bfloat16, checkpoint=checkpoint).to(DEVICE)
    step = TrainStep(model.loss, kernels.adamw.AdamW(model.parameters()), capture=False)
    made = task(batch, context, targets)
    for _ in range(2):
        step(**made)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step(**made)
    torch.cuda.synchronize()
    predicted = feasibility(context, targets, batch, PEAK, checkpoint=checkpoint).peak_bytes
    assert predicted == pytest.approx(torch.cuda.max_memory_allocated() - before, rel=0.05)


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("shape", [(64, 500, 1), (64, 500, 64), (10_000, 1000, 1), (10_000, 1000, 4)])
@pytest.mark.parametrize("checkpoint", ["none", "attention"])
def test_feasibility_of_time_is_within_ten_percent(shape: tuple[int, int, int], checkpoint: str) -> None:
    key = roofline.identify(torch.cuda.get_device_name())
    if key not in RATES:
        pytest.skip(f"there are no rates of {torch.cuda.get_device_name()}")
    model = FULL.model(checkpoint=checkpoint).to(DEVICE, torch.bfloat16)
    model.flatten_parameters()
    step = TrainStep(model.loss, kernels.adamw.AdamW(model.parameters(), master_weights=True), clip=1.0)
    context, targets, batch = shape
    predicted = feasibility(*shape, key, checkpoint=checkpoint).step_seconds
    assert predicted == pytest.approx(_step_seconds(step, task(batch, context, targets)), rel=0.1)


@pytest.mark.slow
@pytest.mark.gpu(min_capability=(8, 0))
def test_ten_thousand_replays() -> None:
    """Memory does not grow, and the losses are those of 300 steps without a graph."""
    batches, losses = [task(1, 64, 500) for _ in range(8)], []
    for capture, steps in ((True, 10_000), (False, 300)):
        model = Sizes().model(generator=generator(), dtype=torch.bfloat16).to(DEVICE)
        optimizer = kernels.adamw.AdamW(model.parameters(), lr=1e-4)
        step = TrainStep(model.loss, optimizer, capture, clip=1.0, history=steps)
        used = []
        for index in range(steps):
            step(**batches[index % len(batches)])
            if index in (100, steps - 1):
                torch.cuda.synchronize()
                used.append(torch.cuda.memory_reserved())
        assert used[0] == used[-1] and step.captured == capture, step.reason
        losses.append(step.losses())
    assert losses[0].isfinite().all() and len(losses[0]) == 10_000
    torch.testing.assert_close(losses[0][:300], losses[1], rtol=1e-2, atol=1e-2)


def test_what_stands_in_for_many_points() -> None:
    """The stand-in is of the same kind, and small enough for the oracle; cases of few points need none."""
    for case in SPEC.cases:
        found = SPEC.stand_in(case)
        assert (found is not None) == (case.dims["context"] > 300)
        if found is not None:
            assert all(found.case.dims[name] <= size for name, size in case.dims.items())
            assert (found.case.params, found.case.dtype, found.case.bench) == (case.params, case.dtype, False)


def _of_many_points(change) -> Verdict:
    """The verdict of the checks on a step of a timed case whose results `change` has modified."""
    timed = next(case for case in SPEC.cases if case.name == "tiny-5-3-b2-fp32")
    smaller = dataclasses.replace(timed, name="smaller", dims={**timed.dims, "context": 2})
    declared = SPEC.stand_in(dataclasses.replace(timed, dims={**timed.dims, "context": 10_000}))
    assert declared is not None
    spec = dataclasses.replace(SPEC, stand_in=lambda case: dataclasses.replace(declared, case=smaller))

    def step(**inputs):
        results = transformer_np(**inputs, **PLAIN, optimizer="torch")
        return change(*results) if inputs["y_context"].shape[1] == 5 else results

    inputs = make_inputs(timed, DEVICE, torch.Generator(DEVICE).manual_seed(0))
    before = {name: inputs[name].clone() for name in timed.mutates}
    return checked(
        spec, timed, "train", inputs, step, None, restore=lambda: [inputs[n].copy_(t) for n, t in before.items()]
    )


def test_the_loss_of_many_points_is_checked() -> None:
    assert _of_many_points(lambda *results: results).ok
    wrong = _of_many_points(lambda loss, *others: (loss * 1.01, *others))
    assert "output 0 of the part that is checked of the whole: the relative error is 0.01" in wrong.reason
    wrong = _of_many_points(lambda loss, weights, *others: (loss, weights * math.inf, *others))
    assert "output 1 has nan or inf" in wrong.reason


def test_the_oracle_attends_to_few_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 2, 3, 7, 4, dtype=torch.float64)
    whole = reference._attend(q, k, v)
    monkeypatch.setattr(reference, "SCORES", 2 * 2 * 3 * 7)
    with torch.no_grad():
        torch.testing.assert_close(reference._attend(q, k, v), whole)
        monkeypatch.setattr(reference, "FP64_SCORES", 2 * 3 * 7 * 7 - 1)
        in_fp32 = reference._attend(q, k, v)
    assert in_fp32.dtype == torch.float64 and not torch.equal(in_fp32, whole)
    torch.testing.assert_close(in_fp32, whole, rtol=1e-5, atol=1e-6)

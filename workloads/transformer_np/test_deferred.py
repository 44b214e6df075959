"""Tests that deferred weight gradients equal those of each layer's backward, and that autograd sees no difference."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

import kernels.adamw
from kernels.train import TrainStep

from . import TransformerNP, deferred, sample_task, transformer_np, weight_gradients
from .bench import SPEC, TINY, make_inputs
from .step import _flat_update, views

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
THREE = dataclasses.replace(TINY, layers=3)
WAYS = [("deferred", "apart"), ("deferred", "joint"), ("overlapped", "apart"), ("overlapped", "joint")]
TIGHT = dict(rtol=1e-4, atol=1e-6)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def made(how: str = "inline", projections: str = "auto", flat: bool = True, **options) -> TransformerNP:
    model = THREE.model(generator=generator(), weight_gradients=how, projections=projections, **options).to(DEVICE)
    if flat:
        model.flatten_parameters()
    return model


def task(batch: int = 2) -> dict[str, torch.Tensor]:
    return {name: x.to(DEVICE) for name, x in sample_task(batch, 5, 3, "rbf", generator=generator()).items()}


def gradients(model: TransformerNP, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    model.loss(**batch).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(found: dict, expected: dict, **tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        assert (grad is None) == (expected[name] is None), name
        if grad is not None:
            text = lambda message, name=name: f"{name}: {message}"  # noqa: E731
            torch.testing.assert_close(grad, expected[name], msg=text, **(tolerance or TIGHT))


@pytest.mark.parametrize(("how", "projections"), WAYS)
@pytest.mark.parametrize("batch", [1, 2])
def test_gradients_are_those_of_each_layer(how: str, projections: str, batch: int) -> None:
    models = made(), made(how, projections)
    torch.testing.assert_close(*(model.loss(**task(batch)) for model in models), **TIGHT)
    expected, found = (gradients(model, task(batch)) for model in models)
    assert_same(found, expected)


def test_each_kind_is_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers are deferred, as the last one has a separate backward. Joint q, k and v are one kind. One copy stacks
    the operands that are not consecutive in memory, another one the norms' partial sums."""
    counts: dict[str, int] = {}

    def count(name: str) -> None:
        function = getattr(torch, name)

        def counted(*args, **options):
            counts[name] = counts.get(name, 0) + 1
            return function(*args, **options)

        monkeypatch.setattr(torch, name, counted)

    for name in ("bmm", "mm", "stack"):
        count(name)
    for how, projections, expected in (
        ("deferred", "joint", {"bmm": 4, "stack": 2}),
        ("deferred", "apart", {"bmm": 5, "stack": 3}),  # the context's rows have a different shape
        ("overlapped", "joint", {"mm": 8}),
    ):
        model = made(how, projections)
        loss = model.loss(**task(1))
        counts.clear()
        loss.backward()
        assert {n: c for n, c in counts.items() if n in expected} == expected, (how, projections, counts)


def test_weights_that_lie_together_are_one() -> None:
    flat, loose = made(), made(flat=False)
    for model, together in ((flat, True), (loose, False)):
        attention = model.blocks[0].attention
        stacked = deferred.stacked_weights(attention.q.weight.detach(), attention.kv.weight.detach())
        assert (stacked is not None) == together
    attention = flat.blocks[0].attention
    stacked = deferred.stacked_weights(attention.q.weight.detach(), attention.kv.weight.detach())
    assert torch.equal(stacked, torch.cat((attention.q.weight, attention.kv.weight)))
    assert_same(gradients(made("deferred", "joint", flat=False), task()), gradients(made(), task()))


def test_flat_parameters_keep_their_dtypes() -> None:
    model = made(flat=False).half()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = parameter.float() + 1e-6
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    model.flatten_parameters()
    for parameter, before in zip(model.parameters(), expected, strict=True):
        assert parameter.dtype == before.dtype and torch.equal(parameter, before)
    attention = model.blocks[0].attention
    assert deferred.stacked_weights(attention.q.weight.detach(), attention.kv.weight.detach()) is not None


def test_flat_parameters_are_the_same() -> None:
    flat, loose = made(), made(flat=False)
    assert all(torch.equal(a, b) for a, b in zip(flat.parameters(), loose.parameters(), strict=True))
    assert len({p.untyped_storage().data_ptr() for p in flat.parameters()}) == 1
    assert all(p.data_ptr() % 16 == 0 and p.is_leaf for p in flat.parameters())
    loose.load_state_dict(flat.state_dict())


@pytest.mark.parametrize("how", ["deferred", "overlapped"])
def test_hooks_and_accumulation(how: str) -> None:
    """Hooks see complete gradients; a second backward, also through the same graph, accumulates to the first."""
    expected, model, seen = gradients(made(), task()), made(how), {}
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        parameter.register_hook(lambda grad, name=name: seen.__setitem__(name, grad.clone()))
    loss = model.loss(**task())
    loss.backward(retain_graph=True)
    assert_same(seen, expected)
    assert_same({n: p.grad for n, p in parameters.items()}, expected)
    loss.backward()
    assert_same({n: p.grad for n, p in parameters.items()}, {n: 2 * g for n, g in expected.items()})
    assert_same(gradients(model, task()), {n: 3 * g for n, g in expected.items()})


def test_some_of_the_gradients() -> None:
    """Frozen weights get no gradient; `grad` of some parameters returns these, even if none belongs to a GEMM."""
    models = made(), made("deferred", "joint")
    for model in models:
        for name in ("0.attention.q.weight", "1.mlp.up", "1.attention.out.weight"):
            model.blocks.get_parameter(name).requires_grad_(False)
    assert_same(*(gradients(model, task()) for model in models))
    for name in ("blocks.0.norm.weight", "blocks.1.attention.kv.weight", "embed.0.weight"):
        found = [torch.autograd.grad(m.loss(**task()), [m.get_parameter(name)])[0] for m in models]
        torch.testing.assert_close(*found, **TIGHT)
    for model in models:
        model.requires_grad_(False).embed.requires_grad_()
        model.zero_grad()
    assert_same(*(gradients(model, task()) for model in models))


def test_weights_are_rounded_to_the_products() -> None:
    """fp32 weights and GEMMs in fp16: gradients pass through the cast."""
    models = (made(h, dtype=torch.float16) for h in ("inline", "deferred"))
    expected, found = (gradients(model, task()) for model in models)
    assert all(grad.dtype == torch.float32 for grad in found.values())
    assert_same(found, expected, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize(("how", "projections"), WAYS[1:3])
def test_losses_of_training_are_the_same(how: str, projections: str) -> None:
    losses = []
    for model in (made(), made(how, projections)):
        step = TrainStep(model.loss, torch.optim.AdamW(model.parameters(), lr=1e-2), clip=1.0)
        for _ in range(4):
            step(**task())
        losses.append(step.losses())
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_deferred_is_inline() -> None:
    def modes(**options) -> list[bool]:
        model = made("deferred", **options)
        rows = model.embedded(*(task()[name] for name in ("x_context", "y_context", "x_target")))
        return [place is not None for place in model.places(rows)]

    assert modes() == [True] * 2
    for options in (dict(checkpoint="block"), dict(attention="sdpa"), dict(mlp="torch"), dict(norm="torch")):
        assert modes(**options) == [False] * 2
    with torch.no_grad():
        assert modes() == [False] * 2


@pytest.mark.parametrize("part", ["", "norm", "mlp", "attention", "attention.norm", "attention.out"])
@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_modules_with_hooks_are_called(part: str, register: str) -> None:
    """A call that defers gradients runs the parts of a block without calling their modules."""
    model, seen = made("deferred"), []
    handle = getattr(model.blocks[0].get_submodule(part), register)(lambda *_: seen.append(part))
    assert_same(gradients(model, task()), gradients(made(), task()))
    assert seen == [part]
    handle.remove()
    assert model.unwrapped()
    model.blocks[1] = torch.nn.Sequential(model.blocks[1])
    assert not model.unwrapped()


@pytest.mark.skipif(DEVICE != "cpu", reason="a group of one process over gloo has no GPU")
@pytest.mark.parametrize("gathered", [False, True])
def test_shards_of_blocks_have_their_gradients(gathered: bool, tmp_path: Path) -> None:
    """Also if the weights stay gathered after a backward, as to accumulate gradients: FSDP reduces the gradients of a
    block when those of its inputs are there."""
    expected = [2 * grad for grad in gradients(made(), task()).values()]
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = made("auto", flat=False)
        mesh = init_device_mesh("cpu", (1,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        register_fsdp_forward_method(fully_shard(model, mesh=mesh), "loss")
        model.set_reshard_after_backward(not gathered)
        for _ in range(2):
            model.loss(**task()).backward()
        for module in (model, *model.blocks):
            module.reshard()
        for parameter, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), grad, rtol=1e-4, atol=1e-5)
    finally:
        torch.distributed.destroy_process_group()


def test_the_rules() -> None:
    """At (64, 500) gradients are deferred for a batch of 1 to 6; q, k and v are one GEMM for a batch of 1 to 3."""
    how = [weight_gradients.pick_weight_gradients(11, 564 * batch, 512, 1408, 2) for batch in (1, 6, 7, 64)]
    assert how == ["deferred", "deferred", "inline", "inline"]
    assert weight_gradients.pick_weight_gradients(1, 8, 512, 1408, 2) == "inline"
    found = [weight_gradients.pick_projections(batch, 500) for batch in (1, 3, 4)]
    assert found == ["joint", "joint", "apart"]


@pytest.mark.parametrize("option", ["weight_gradients", "projections"])
def test_unknown_ways(option: str) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=f"{option} must be one of auto"):
        TransformerNP(1, 16, 2, 8, **{option: "none"})


def step_inputs(dtype: torch.dtype | None = None) -> dict:
    case = next(c for c in SPEC.cases if c.dtype == torch.float32 and not c.params)
    three = dataclasses.replace(case, dims={**case.dims, "layers": 3})
    return {**make_inputs(three, DEVICE, torch.Generator(DEVICE).manual_seed(0)), "dtype": dtype}


@pytest.mark.parametrize(("how", "projections"), WAYS[:3])
def test_steps_agree(how: str, projections: str) -> None:
    """In the step, weights are already in one buffer."""
    found = [
        transformer_np(**step_inputs(), weight_gradients=h, projections=p)
        for h, p in (("inline", "auto"), (how, projections))
    ]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["ours", "torch", "torch-compile"])
def test_rounding_in_the_optimizer(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as rounding at the beginning of each step; elements that no GEMM reads are not changed. Bit for bit on
    the CPU: on a GPU, AdamW with master weights is another kernel, in which other sums may be fused multiply-adds."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    _flat_update.cache_clear()
    apart, together = step_inputs(torch.float16), step_inputs(torch.float16)
    together["rounded"] = together["weights"].half()
    for _ in range(2):
        losses = [transformer_np(**inputs, optimizer=optimizer)[0] for inputs in (apart, together)]
        assert torch.equal(*losses)
    exact = dict(rtol=0, atol=0) if DEVICE == "cpu" else dict(rtol=1e-6, atol=1e-8)
    for state in ("weights", "exp_avg"):
        torch.testing.assert_close(apart[state], together[state], **exact)
    sizes, before = together["sizes"], step_inputs(torch.float16)["weights"].half()
    copies, weights, first = (views(t, sizes) for t in (together["rounded"], together["weights"], before))
    for name, copy in copies.items():
        exact = name.endswith("norm.weight") or name == "heads.bias"
        assert torch.equal(copy, first[name] if exact else weights[name].half()), name
    _flat_update.cache_clear()


def test_a_wrong_copy_is_refused() -> None:
    inputs = step_inputs(torch.float16)
    for rounded, error, message in (
        (inputs["weights"], TypeError, "rounded must be None or a tensor of dtype torch.float16, got torch.float32"),
        (inputs["weights"].half()[1:], ValueError, r"rounded must be \[\d+\] on"),
    ):
        with pytest.raises(error, match=message):
            transformer_np(**inputs, rounded=rounded)
    with pytest.raises(TypeError, match="rounded must be None"):
        transformer_np(**{**inputs, "dtype": None}, rounded=inputs["weights"].half())


@pytest.mark.gpu(min_capability=(8, 0))
@pytest.mark.parametrize(("how", "projections"), WAYS)
def test_a_captured_step_is_the_inline_one(how: str, projections: str) -> None:
    """Replays of a graph, which includes the gradients' side stream, compared with a step without a graph."""
    sizes = dataclasses.replace(THREE, d_model=128, d_ff=200)
    batch = {name: x.to(DEVICE) for name, x in sample_task(1, 70, 30, "rbf", generator=generator()).items()}
    losses = []
    for capture, options in ((True, dict(weight_gradients=how, projections=projections)), (False, {})):
        if not options:
            options = dict(weight_gradients="inline")
        model = sizes.model(generator=generator(), **options).to(DEVICE, torch.bfloat16)
        model.flatten_parameters()
        optimizer = kernels.adamw.AdamW(model.parameters(), lr=1e-4, master_weights=True)  # 1e-3 amplifies rounding
        step = TrainStep(model.loss, optimizer, capture, clip=1.0)
        for _ in range(12):
            step(**batch)
        assert step.captured == capture, step.reason
        losses.append(step.losses())
    torch.testing.assert_close(*losses, rtol=1e-2, atol=1e-2)

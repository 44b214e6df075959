"""All layers in one launch: which layers are supported, that it compiles, and on a GPU that it is correct."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from harness.compiling import nvrtc, sass
from harness.registry import load

from . import TransformerNP, sample_task, transformer_np, whole
from .bench import FULL, TINY
from .model import EPS
from .sm90 import layers as launches
from .weight_gradients import places

HOPPER = (9, 0)
SOURCES = Path(launches.__file__).parent
SMALL = dataclasses.replace(FULL, layers=3, d_ff=570, components=3, padding=64)  # 9 panels of the hidden
#: batch, context, targets, layers before the last, hidden
SHAPES = {
    "the step's": (1, 64, 500, 11, 1408),
    "one row each": (1, 1, 1, 1, 512),
    "whole tiles": (1, 64, 128, 2, 1408),
    "ragged tiles, two sequences": (2, 40, 70, 3, 576),
    "a row beyond a tile, four sequences": (4, 63, 65, 2, 1024),
    "most of the hidden but for a panel": (1, 17, 300, 2, 1344),
    "one group of the hidden, three layers": (1, 64, 100, 3, 512),
    "17 panels of the hidden": (1, 33, 70, 2, 1088),
    "one layer": (1, 64, 100, 1, 1408),
}


def model(sizes=SMALL, flat: bool = True, dtype: torch.dtype = torch.bfloat16, device: str = "cuda", **options):
    made = sizes.model(generator=torch.Generator().manual_seed(0), **options).to(device, dtype)
    if flat:
        made.flatten_parameters()
    return made


def task(batch: int, context: int, targets: int, device: str = "cuda") -> dict[str, torch.Tensor]:
    found = sample_task(batch, context, targets, "rbf", generator=torch.Generator().manual_seed(1))
    return {name: x.to(device) for name, x in found.items()}


def test_the_rule() -> None:
    """(64, 500) is one launch with a batch of 1; a context of more than 64 rows, 15 clusters of 64 rows,
    or no sequence, are not."""
    found = [whole.pick_layers(*shape) for shape in ((1, 64, 500), (1, 64, 832), (7, 64, 64), (1, 1, 1))]
    assert found == ["whole"] * 4
    apart = (2, 64, 500), (1, 64, 833), (1, 65, 500), (8, 64, 64), (0, 64, 500)
    assert [whole.pick_layers(*shape) for shape in apart] == ["apart"] * 5


def test_weights_that_lie_alike() -> None:
    made = model(device="cpu")
    weights = [block.weights() for block in made.blocks[:-1]]
    found = whole.weights_of(weights)
    assert found is not None and found.layers == 2
    for i, layer in enumerate(weights):
        pitch, gamma_pitch = i * found.pitch, i * found.gamma_pitch
        qkv = torch.cat((layer["q"], layer["kv"])).detach()
        for stored, expected, step in (
            (found.qkv, qkv, pitch),
            (found.down, layer["down"], pitch),
            (found.mlp_gamma, layer["before mlp"], gamma_pitch),
        ):
            moved = stored.as_strided(stored.shape, stored.stride(), stored.storage_offset() + step)
            assert torch.equal(moved, expected)
    assert whole.weights_of([block.weights() for block in model(flat=False, device="cpu").blocks[:-1]]) is None
    other = [dict(layer) for layer in weights]
    other[1]["up"] = other[1]["up"].clone()
    assert whole.weights_of(other) is None
    other[1]["up"] = weights[0]["up"]
    assert whole.weights_of(other) is None
    assert whole.weights_of(weights[:1]) is not None
    for kind in ("out", "up", "down", "before attention", "before mlp"):
        assert whole.weights_of([{**weights[0], kind: weights[0][kind].float()}]) is None, kind


def test_where_it_cannot_be() -> None:
    asked = model(device="cpu", layers_impl="whole")
    with pytest.raises(RuntimeError, match="layers_impl must not be 'whole' here: it needs a GPU"):
        asked.loss(**task(1, 4, 4, "cpu"))
    for backward in ("separate", "fused"):  # the rows of the bench with this name run this backward in every layer
        named = model(device="cpu", layers_impl="whole", attention=backward)
        with pytest.raises(RuntimeError, match=f"attention must be 'auto', got '{backward}'"):
            named.loss(**task(1, 4, 4, "cpu"))
    assert "in one buffer" in whole.missing(torch.zeros(1, 8, 512), 4, 8, None)
    with torch.device("meta"), pytest.raises(ValueError, match="layers_impl must be one of auto, whole, apart"):
        TransformerNP(1, 16, 2, 8, layers_impl="none")


def test_the_ablation_has_it_for_few_rows() -> None:
    spec = load("transformer_np")
    few, many = (spec.case(name) for name in ("64-500-b1-bf16", "64-500-b64-bf16"))
    assert spec.skip_reason("apart-layers", few, "train") is None
    assert "same version as auto" in spec.skip_reason("apart-layers", many, "train")


@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)
@pytest.mark.parametrize("exact_norms", [False, True])
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_it_compiles(which: str, exact_norms: bool) -> None:
    """It compiles without spills, with two waits in each main loop and one for each other group of wgmmas: ptxas adds a
    wait after each wgmma whose accumulators it cannot keep in their registers."""
    saves = ("SAVE=1",) if which == "forward" else ()
    defines = (*launches.common_defines(1408, exact_norms), *saves)
    cubin = nvrtc.compiled(SOURCES / f"layers_{which}.cu", "sm_90a", defines)
    usage = sass.inspect(cubin, f"transformer_np_layers_{which}")
    assert usage.spills == 0 and usage.stack == 0
    early = usage.early_arrivals, usage.early_own_reads
    assert usage.mma["HGMMA"] and usage.wgmma_waits == {"forward": 12, "backward": 16}[which] and early == (0, {})


def reference(x: torch.Tensor, weights: list[dict[str, torch.Tensor]], context: int) -> torch.Tensor:
    """The layers in plain PyTorch, in the dtype of the inputs."""
    heads = launches.HEADS
    for layer in weights:
        n = F.rms_norm(x, x.shape[-1:], layer["before attention"], EPS)
        q = (n @ layer["q"].mT).unflatten(-1, (heads, -1)).transpose(1, 2)
        k, v = (n[:, :context] @ layer["kv"].mT).unflatten(-1, (2, heads, -1)).permute(2, 0, 3, 1, 4)
        attended = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
        x = x + attended.transpose(1, 2).flatten(2) @ layer["out"].mT
        n = F.rms_norm(x, x.shape[-1:], layer["before mlp"], EPS)
        x = x + F.silu(n @ layer["up"].mT) @ layer["down"].mT
    return x


def distance(found: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    """The norm of the difference, relative to the expected norm, or to `least` if that is greater."""
    return ((found.double() - expected).norm() / expected.norm().clamp_min(least)).item()


@pytest.mark.gpu(min_capability=HOPPER)
@pytest.mark.parametrize("exact_norms", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rows_and_gradients(shape: tuple[int, ...], exact_norms: bool) -> None:
    """Compares with fp64. Rows and gradients are rounded to bf16 four times per layer. With one key the scores have no
    gradient; the rounding errors in its place are small compared to the gradient of the values."""
    batch, context, targets, layers, hidden = shape
    sizes = dataclasses.replace(FULL, layers=layers + 1, d_ff=hidden, components=2, padding=64)
    made = model(sizes)
    weights = [dict(block.weights()) for block in made.blocks[:-1]]
    norms = torch.rand(layers, 2, 512, device="cuda", dtype=torch.float32 if exact_norms else torch.bfloat16) + 0.5
    for layer, gammas in zip(weights, norms, strict=True):
        for kind, gamma in zip(("before attention", "before mlp"), gammas, strict=True):
            layer[kind] = gamma.requires_grad_() if exact_norms else layer[kind]
    x = torch.randn(batch, context + targets, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    found = whole.weights_of(weights)
    assert whole.missing(x, context, 8, found) is None
    y = whole.layers(x, found, places(weights), context, EPS)
    dy = torch.randn_like(y)
    leaves = [x, *(w for layer in weights for w in layer.values())]
    grads = torch.autograd.grad(y, leaves, dy)
    with torch.no_grad():
        assert torch.equal(whole.layers(x, found, None, context, EPS), y)
    exact = [{kind: w.detach().double().requires_grad_() for kind, w in layer.items()} for layer in weights]
    x64 = x.detach().double().requires_grad_()
    y64 = reference(x64, exact, context)
    grads64 = torch.autograd.grad(y64, [x64, *(w for layer in exact for w in layer.values())], dy.double())
    assert distance(y, y64) < 0.01
    names = ["x", *(kind for layer in weights for kind in layer)]
    values = dict(zip(names, grads64, strict=False))["kv"].norm().item()
    for name, grad, expected in zip(names, grads, grads64, strict=True):
        least = 0.3 * values if name == "q" and context == 1 else 0.0
        assert grad.isfinite().all() and distance(grad, expected, least) < 0.03, name


@pytest.mark.gpu(min_capability=HOPPER)
def test_what_is_not_finite_stays_where_it_belongs() -> None:
    """A target's NaN stays in its row, also where the box of the context's cluster has that row; a context's in its
    sequence. The gradient of a target's NaN is that of its row and of the context."""
    weights = [dict(block.weights()) for block in model(SMALL).blocks[:-1]]
    joined = whole.weights_of(weights)
    assert joined is not None
    x = torch.randn(2, 40 + 70, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        y = whole.layers(x, joined, places(weights), 40, EPS)
        return y.detach(), torch.autograd.grad(y, x, dy)[0]

    y, dx = run()
    others = torch.arange(110, device="cuda") != 50
    dy[0, 50] = torch.nan
    found_dx = run()[1]
    assert torch.equal(found_dx[1], dx[1]) and torch.equal(found_dx[0, 40:][others[40:]], dx[0, 40:][others[40:]])
    assert found_dx[0, 50].isnan().all() and found_dx[0, :40].isnan().all()
    x.data[0, 50] = torch.nan
    found_y = run()[0]
    assert torch.equal(found_y[1], y[1]) and torch.equal(found_y[0, others], y[0, others])
    assert found_y[0, 50].isnan().all()
    x.data[0, 3] = torch.nan
    found_y = run()[0]
    assert torch.equal(found_y[1], y[1]) and found_y[0].isnan().all()


@pytest.mark.gpu(min_capability=HOPPER)
def test_a_gradient_on_another_boundary() -> None:
    weights = [dict(block.weights()) for block in model(SMALL).blocks[:-1]]
    x = torch.randn(1, 80, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    found = whole.weights_of(weights)
    assert found is not None
    dy = torch.randn(x.numel() + 1, device="cuda", dtype=torch.bfloat16)[1:].view(x.shape)
    ours, want = (
        torch.autograd.grad(whole.layers(x, found, places(weights), 30, EPS), x, gradient)[0]
        for gradient in (dy, dy.clone())
    )
    assert torch.equal(ours, want)


@pytest.mark.gpu(min_capability=HOPPER)
@torch.no_grad()
def test_one_layer_whose_norms_differ_in_dtype() -> None:
    """The loss is that of layers apart: one kernel reads the weights of both norms in one dtype."""
    losses = []
    for how in ("auto", "apart"):
        made = model(dataclasses.replace(SMALL, layers=2), layers_impl=how)
        made.blocks[0].norm.float()
        losses.append(made.loss(**task(1, 64, 100)))
    assert torch.equal(*losses)


@pytest.mark.gpu(min_capability=HOPPER)
def test_no_sequence() -> None:
    made, points = model(), task(1, 64, 100)
    for x in made(*(points[name][:0] for name in ("x_context", "y_context", "x_target"))):
        assert x.shape == (0, 100, SMALL.components)


@pytest.mark.gpu(min_capability=HOPPER)
def test_repeats_agree_bit_for_bit() -> None:
    """Replays of one CUDA graph: the `written` counters start at zero each time."""
    made, batch = model(FULL), task(1, 64, 500)
    parameters = list(made.parameters())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        eager = torch.autograd.grad(made.loss(**batch), parameters)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = torch.autograd.grad(made.loss(**batch), parameters)
    for _ in range(50):
        for grad in captured:
            grad.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, eager, strict=True))


@pytest.mark.gpu(min_capability=HOPPER)
@pytest.mark.parametrize("shape", [(1, 64, 500), (3, 20, 130)])
def test_a_model_has_the_gradients_of_layers_apart(shape: tuple[int, int, int]) -> None:
    """Compares both with fp64: the error is at most 1.2 times that of layers apart."""
    exact = model(
        dtype=torch.float64, attention="sdpa", mlp="torch", heads_impl="torch", norm="torch", loss_impl="torch"
    )
    expected = torch.autograd.grad(exact.loss(**{n: x.double() for n, x in task(*shape).items()}), exact.parameters())
    far = []
    for how in ("whole", "apart"):
        made = model(layers_impl=how)
        grads = torch.autograd.grad(made.loss(**task(*shape)), list(made.parameters()))
        far.append([distance(grad, want) for grad, want in zip(grads, expected, strict=True)])
    for name, ours, theirs in zip(dict(made.named_parameters()), *far, strict=True):
        assert ours < 1.2 * theirs + 2e-3, (name, ours, theirs)


@pytest.mark.gpu(min_capability=HOPPER)
def test_the_step_takes_it() -> None:
    """By default, with the step's layout of the weights. The loss equals that of layers apart."""
    spec = load("transformer_np")
    case = spec.case("64-500-b1-bf16")
    losses = {}
    for how in ("auto", "apart"):
        inputs = spec.make_inputs(case, torch.device("cuda"), torch.Generator("cuda").manual_seed(0))
        losses[how] = torch.stack([transformer_np(**inputs, layers_impl=how)[0] for _ in range(5)])
    torch.testing.assert_close(losses["auto"], losses["apart"], rtol=1e-2, atol=1e-2)
    inputs = spec.make_inputs(case, torch.device("cuda"), torch.Generator("cuda").manual_seed(0))
    transformer_np(**inputs, layers_impl="whole")


@pytest.mark.gpu(min_capability=HOPPER)
@pytest.mark.parametrize(
    ("options", "shape", "reason"),
    [
        (dict(flat=False), (1, 4, 4), "in one buffer"),
        (dict(dtype=torch.float16), (1, 4, 4), "bfloat16"),
        (dict(sizes=dataclasses.replace(TINY, layers=3)), (1, 4, 4), "d_model 512"),
        ({}, (1, 65, 4), "1 to 64 rows"),
        (dict(weight_gradients="inline"), (1, 4, 4), "deferred weight gradients"),
        (dict(weight_gradients="overlapped"), (1, 4, 4), "deferred weight gradients"),
        (dict(checkpoint="block"), (1, 4, 4), "no checkpointing"),
        (dict(attention="separate"), (1, 4, 4), "attention must be 'auto'"),
    ],
)
def test_what_it_does_not_take(options: dict, shape: tuple[int, int, int], reason: str) -> None:
    """Unsupported layers raise an error if "whole" was requested, and otherwise run apart."""
    with pytest.raises(RuntimeError, match=reason):
        model(layers_impl="whole", **options).loss(**task(*shape))
    assert model(layers_impl="auto", **options).loss(**task(*shape)).isfinite()

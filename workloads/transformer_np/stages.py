"""The time of each stage of a step, measured separately, in an NVTX range with the stage's name."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch

from . import whole
from .model import EPS, Block, TransformerNP
from .weight_gradients import Place

STAGES = ("layers", "attention", "mlp", "heads", "loss", "optimizer")
ENOUGH = 1e-3  # seconds of a graph for which its launch overhead, some microseconds, is negligible
COPIES = 64

Run = Callable[[], object]


def stages(
    model: TransformerNP,
    optimizer: torch.optim.Optimizer,
    context: int,
    targets: int,
    batch: int,
    repeats: int = 10,
) -> dict[str, float]:
    """Measures the seconds of each of STAGES in one step, forward and backward, on random rows of the step's shapes.

    Attention and MLP include their norms and residual sums, and are summed over all layers, each with its own weights;
    the last layer computes only the targets. The heads include the last norm. The update is without clipping. Layers
    that are one launch are "layers"; attention and MLP are then those of the last layer. A loss that is fused with the
    heads is included in their time, and is itself 0. Nothing is computed again: `checkpoint` is ignored.

    On a GPU each stage is captured in one CUDA graph for all its layers, a short stage several times. So its kernels
    are timed, as in a captured step, and not the host. The result is the median of `repeats` replays, by CUDA events;
    without a GPU by the host's clock. Each replay is an NVTX range "stage.<name>", so that `nsys` finds it.

    The optimizer updates the parameters with random gradients some dozens of times: pass a model that is not needed
    afterwards. On a GPU it must be capturable (ridgeline's AdamW; PyTorch's with `capturable=True`).
    """
    device = next(model.parameters()).device
    found = dict.fromkeys(STAGES, 0.0)
    checkpoints = [block.checkpoint for block in model.blocks]
    try:
        for block in model.blocks:
            block.checkpoint = "none"
        with torch.enable_grad():
            for name, run in _parts(model, optimizer, context, targets, batch).items():
                found[name] = _median(name, run, device, repeats)
    finally:
        for block, checkpoint in zip(model.blocks, checkpoints, strict=True):
            block.checkpoint = checkpoint
        model.zero_grad(set_to_none=True)
    return found


def _parts(
    model: TransformerNP, optimizer: torch.optim.Optimizer, context: int, targets: int, batch: int
) -> dict[str, Run]:
    parameter = next(model.parameters())
    dtype = model.dtype or parameter.dtype
    width, components = model.norm.weight.shape[0], model.heads.bias.shape[0]

    def rows(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, device=parameter.device, dtype=dtype, requires_grad=True)

    everything, answers = ([rows(batch, n, width) for _ in range(2)] for n in (context + targets, targets))
    y = torch.randn(batch, targets, device=parameter.device)
    mixture = [rows(batch, targets, components, dtype=torch.float32) for _ in range(3)]

    inner = model.blocks[:-1]
    weights = model.whole_layers(everything[0], context, model.places(everything[0]))

    def layers() -> None:
        assert weights is not None
        given, places = everything[0].detach().requires_grad_(), model.places(everything[0])
        made = whole.layers(given, weights, [place for place in places if place is not None], context, EPS)
        _differentiated((made,), [given], *inner)

    def apart() -> list[tuple[Block, Place | None, bool]]:
        """(layer, its place for deferred gradients, whether it is the last) of each layer outside `layers`."""
        places = [*model.places(everything[0]), None] if len(model.blocks) else []
        found = [(b, p, b is model.blocks[-1]) for b, p in zip(model.blocks, places, strict=True)]
        return found if weights is None else found[-1:]

    def attention() -> None:
        together = _Together()
        for block, place, last in apart():
            if place is None:
                made = block.attention(*everything, context, context if last else 0)
                _differentiated(made, everything, block.attention)
            else:
                given = [rows.detach().requires_grad_() for rows in everything]
                made = block.deferring_attention(*given, context, place, model.projections)
                together.add(made, given, block.attention)
        together.differentiate()

    def mlp() -> None:
        together = _Together()
        for block, place, last in apart():
            if place is None:
                given = answers if last else everything
                x, total = block.norm(*given)
                _differentiated((block.mlp(x), total), given, block.norm, block.mlp)
            else:
                given = [rows.detach().requires_grad_() for rows in everything]
                together.add(block.deferring_mlp(*given, place), given, block.norm, block.mlp)
        together.differentiate()

    def heads() -> None:
        x, _ = model.norm(*answers)
        made = (model.heads.negative_log_density(x, y),) if model.fused_loss else (model.heads(x),)
        _differentiated(made, answers, model.norm, model.heads)

    def loss() -> None:
        _differentiated((model.negative_log_density(*mixture, y),), mixture)

    def update() -> None:
        optimizer.step()

    for each in model.parameters():
        each.grad = torch.randn_like(each)
    parts: dict[str, Run] = {"layers": layers, "attention": attention, "mlp": mlp, "heads": heads, "loss": loss}
    parts["optimizer"] = update
    if model.fused_loss:
        del parts["loss"]
    if weights is None:
        del parts["layers"]
    if not len(model.blocks):
        del parts["attention"], parts["mlp"]
    return parts


class _Together:
    """Layers whose weight gradients come from one autograd node, so that one backward must pass all of them."""

    def __init__(self) -> None:
        self.results: list[torch.Tensor] = []
        self.inputs: list[torch.Tensor] = []

    def add(self, results: tuple[torch.Tensor, ...], inputs: list[torch.Tensor], *modules: torch.nn.Module) -> None:
        self.results += results
        self.inputs += [*inputs, *(parameter for module in modules for parameter in module.parameters())]

    def differentiate(self) -> None:
        if self.results:
            _differentiated(tuple(self.results), self.inputs)


def _differentiated(
    results: tuple[torch.Tensor, ...], inputs: list[torch.Tensor], *modules: torch.nn.Module
) -> tuple[torch.Tensor, ...]:
    """The gradients, not accumulated as `backward()` would do. The incoming gradients are the results themselves: these
    have the right shape, and no launch is needed to fill them."""
    wanted = [*inputs, *(parameter for module in modules for parameter in module.parameters())]
    return torch.autograd.grad(results, wanted, [result.detach() for result in results])


def _median(name: str, run: Run, device: torch.device, repeats: int) -> float:
    if device.type != "cuda":
        run()  # compiles
        return statistics.median([_by_the_host(run) for _ in range(repeats)])
    with torch.cuda.device(device):
        once = _replays(name, _captured(run, 1), repeats)
        copies = min(COPIES, math.ceil(ENOUGH / once))
        return once if copies == 1 else _replays(name, _captured(run, copies), repeats) / copies


def _captured(run: Run, copies: int) -> torch.cuda.CUDAGraph:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # compiles, and allocates what is cached
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(copies):
            run()
    return graph


def _replays(name: str, graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in events:
        with torch.cuda.nvtx.range(f"stage.{name}"):
            begin.record()
            graph.replay()
            end.record()
    torch.cuda.synchronize()
    return statistics.median([begin.elapsed_time(end) / 1e3 for begin, end in events])


def _by_the_host(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start

"""Where the time of a step goes: each stage by itself, in an NVTX range of its name."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from . import whole
from .model import EPS, Block, TransformerNP
from .weight_gradients import Place

STAGES = ("layers", "attention", "mlp", "heads", "loss", "optimizer")
ENOUGH = 1e-3  # seconds of a graph beside which a launch of it, some microseconds, does not count
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
    """Seconds of each of STAGES in one step, on random rows of the step's shapes, forward and backward: of attention
    and MLP with their norms and residual sums and of all layers, each with its own weights, the last of which answers
    the targets alone; of the heads with the last norm; of the loss; and of one update, without clipping. Layers that
    are one launch are "layers", and attention and MLP are those of the last layer. A loss that is fused with the heads
    is a part of theirs, and 0 by itself. Nothing is computed again: `checkpoint` does not count.

    On a GPU each stage is captured in a CUDA graph, all its layers in one, and a short one several times: what is timed
    are its kernels, as in a captured step, and not the host. The median of `repeats` replays, by CUDA events; without a
    GPU by the host's clock. Each replay is an NVTX range "stage.<name>", so that `nsys` finds it.

    The optimizer updates the parameters by random gradients, some dozens of times: take a model that is not needed
    afterwards. On a GPU it must be one that can be captured (ridgeline's AdamW; PyTorch's with `capturable=True`).
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
        """Each layer that is no part of `layers`, where it leaves the gradients of its weights, and whether it is the
        last."""
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
    """Layers whose weights' gradients come from one node, so that one backward must pass them all."""

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
    """The gradients, which nothing adds to those of before, as `backward()` would. Those that come in are the results
    themselves: of their shape, and no launch fills them."""
    wanted = [*inputs, *(parameter for module in modules for parameter in module.parameters())]
    return torch.autograd.grad(results, wanted, [result.detach() for result in results])


def _median(name: str, run: Run, device: torch.device, repeats: int) -> float:
    if device.type != "cuda":
        run()  # compiles
        return _middle([_by_the_host(run) for _ in range(repeats)])
    with torch.cuda.device(device):
        once = _replays(name, _captured(run, 1), repeats)
        copies = min(COPIES, math.ceil(ENOUGH / once))
        return once if copies == 1 else _replays(name, _captured(run, copies), repeats) / copies


def _captured(run: Run, copies: int) -> torch.cuda.CUDAGraph:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # compiles, and makes what is made once
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
    return _middle([begin.elapsed_time(end) / 1e3 for begin, end in events])


def _by_the_host(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _middle(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 2]

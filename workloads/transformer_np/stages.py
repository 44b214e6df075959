"""Where the time of a step goes: each stage by itself, in an NVTX range of its name."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from .model import TransformerNP

STAGES = ("attention", "mlp", "heads", "loss", "optimizer")


def stages(
    model: TransformerNP,
    optimizer: torch.optim.Optimizer,
    context: int,
    targets: int,
    batch: int,
    repeats: int = 10,
) -> dict[str, float]:
    """Seconds of each of STAGES in one step, on random rows of the step's shapes, forward and backward: of attention
    and MLP with their norms and of all layers, the last of which answers the targets alone, of the heads with the last
    norm, of the loss, and of one update. A loss that is fused with the heads is a part of theirs, and 0 by itself. The
    median of `repeats`, by CUDA events on a GPU; without one by the host's clock.

    Each repeat is an NVTX range "stage.<name>", so that `nsys` or `ncu --nvtx` finds it. What lies between stages, the
    residual sums and the embedding, is in none. The optimizer makes `repeats` + 1 updates of the parameters.
    """
    parameter = next(model.parameters())
    device, dtype = parameter.device, model.dtype or parameter.dtype
    width, layers = model.norm.weight.shape[0], len(model.blocks)
    components = model.heads.bias.shape[0]

    def rows(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)

    x, y = rows(batch, context + targets, width), torch.randn(batch, targets, device=device)
    block, answers = model.blocks[0], rows(batch, targets, width)
    mixture = [rows(batch, targets, components, dtype=torch.float32) for _ in range(3)]

    def heads() -> None:
        rows, _ = model.norm(answers)
        (model.heads.negative_log_density(rows, y) if model.fused_loss else model.heads(rows).sum()).backward()

    def attention(start: int) -> Callable[[], object]:
        return lambda: block.attention(x, None, context, start)[0].sum().backward()

    def mlp(rows: torch.Tensor) -> Callable[[], object]:
        return lambda: block.mlp(block.norm(rows)[0]).sum().backward()

    parts: dict[str, list[tuple[Callable[[], object], int]]] = {
        "attention": [(attention(0), layers - 1), (attention(context), 1)],
        "mlp": [(mlp(x), layers - 1), (mlp(answers), 1)],
        "heads": [(heads, 1)],
        "loss": [(lambda: model.negative_log_density(*mixture, y).backward(), 1)],
        "optimizer": [(optimizer.step, 1)],
    }
    if model.fused_loss:
        del parts["loss"]
    found = dict.fromkeys(STAGES, 0.0)
    for name, runs in parts.items():
        found[name] = sum(times * _median(name, run, device, repeats) for run, times in runs if times)
    model.zero_grad(set_to_none=True)
    return found


def _median(name: str, part: Callable[[], object], device: torch.device, repeats: int) -> float:
    part()  # compiles
    seconds = []
    for _ in range(repeats):
        if device.type != "cuda":
            start = time.perf_counter()
            part()
            seconds.append(time.perf_counter() - start)
            continue
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.nvtx.range(f"stage.{name}"):
            begin.record()
            part()
            end.record()
        torch.cuda.synchronize(device)
        seconds.append(begin.elapsed_time(end) / 1e3)
    return sorted(seconds)[repeats // 2]

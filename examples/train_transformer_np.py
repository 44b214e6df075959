"""Trains a transformer neural process on functions of a Gaussian process, each step in one CUDA graph.

    python -m examples.train_transformer_np --size full --steps 2000 --out loss.svg      # from the checkout's root

The chart shows the loss over the steps of this model and, for comparison, of the same model in PyTorch's modules (same
tasks, same initial weights, of which ours are rounded to bf16) and of a neural process with mean pooling instead of
attention; also the loss of the one Gaussian that best fits all targets of a batch of tasks, which a model reaches that
ignores x and the context. `--record` writes the losses as JSON after each training, and continues the file if it
exists, so that seeds may be spread over several calls. `python -m harness report` makes a page of
reports/<gpu>/training/transformer_np.json. Without a GPU the size is small, the kernels are left out, since they are
slow in Triton's interpreter, and no step is captured.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported

from kernels.adamw import AdamW  # noqa: E402
from kernels.train import TrainStep  # noqa: E402
from workloads.transformer_np import (  # noqa: E402
    KERNELS,
    MeanPoolingNP,
    TransformerNP,
    constant_loss,
    require_flash,
    sample_task,
)

SIZES = {
    "small": dict(layers=2, d_model=32, heads=2, d_ff=64, components=3, padding=8),
    "full": dict(layers=12, d_model=512, heads=8, d_ff=1365, components=10),
}
POOLED = {"small": dict(width=64, layers=2, components=3), "full": dict(width=512, layers=4, components=10)}
TASKS = {"small": dict(batch=16, context=24, targets=16), "full": dict(batch=16, context=64, targets=500)}
PLAIN = dict(attention="sdpa", mlp="torch", heads_impl="torch", norm="torch", loss_impl="torch")
RATES = {"small": 3e-3, "full": 3e-4}
KINDS = {
    "torch": "PyTorch's parts, weights in fp32, products in bf16, fused AdamW",
    "ours": "ridgeline's kernels, weights in bf16 with fp32 ones in the optimizer",
    "mean pooling": "a neural process with mean pooling for attention, in fp32",
}
BOUND = "the best constant Gaussian"
HELD_OUT = 16  # batches
POINTS = 40  # of a curve
WARM_UP = 20  # steps that are not timed: the first compile, and are captured
TOGETHER = 64  # tasks that are drawn at once: a GPU factorises a hundred matrices in the time of a dozen

Task = dict[str, torch.Tensor]


def built(kind: str, size: str, seed: int, device: torch.device) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    drawn = torch.Generator().manual_seed(seed)
    if kind == "ours":
        ours = TransformerNP(**SIZES[size], generator=drawn).to(device, torch.bfloat16)
        ours.flatten_parameters()
        return ours, AdamW(ours.parameters(), lr=RATES[size], master_weights=True)
    if kind == "torch":
        products = torch.bfloat16 if ON_GPU else None
        model: torch.nn.Module = TransformerNP(**SIZES[size], **PLAIN, dtype=products, generator=drawn)
    else:
        model = MeanPoolingNP(**POOLED[size], generator=drawn)
    model = model.to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=RATES[size], fused=ON_GPU, capturable=ON_GPU)


def trained(kind: str, size: str, tasks: list[Task], held_out: list[Task], seed: int) -> dict[str, Any]:
    """What the record has of a training."""
    from rich.progress import track

    device = tasks[0]["x_context"].device
    model, optimizer = built(kind, size, seed, device)
    warm = max(1, len(tasks) // 20)

    def schedule(step: int) -> float:
        """A linear warm-up, then half a cosine."""
        return min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / len(tasks)))

    step = TrainStep(model.loss, optimizer, clip=1.0, schedule=schedule, history=len(tasks))
    synchronize()
    start = begin = time.perf_counter()
    timed = len(tasks)
    for index, task in enumerate(track(tasks, description=f"{kind}, seed {seed}")):
        if index == WARM_UP:
            synchronize()
            begin, timed = time.perf_counter(), len(tasks) - index
        step(**task)
    synchronize()
    end = time.perf_counter()
    with torch.no_grad():
        loss = mean(float(model.loss(**task)) for task in held_out)
    graphs = "steps in CUDA graphs" if step.captured else f"no CUDA graph: {step.reason}"
    parts = {"warm-up": begin - start, "steps": end - begin, "tasks held out": time.perf_counter() - end}
    print(f"{kind}: {graphs}; {', '.join(f'{name} {seconds:.1f} s' for name, seconds in parts.items())}", flush=True)
    return {"loss": loss, "ms_a_step": 1e3 * (end - begin) / timed, "curve": curve_of(step.losses().tolist())}


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def tasks_of(size: str, kernel: str, count: int, seed: int, device: torch.device) -> list[Task]:
    source, batch = torch.Generator(device).manual_seed(seed), TASKS[size]["batch"]
    tasks: list[Task] = []
    for first in range(0, count, TOGETHER):
        sizes = {**TASKS[size], "batch": batch * min(TOGETHER, count - first)}
        drawn = sample_task(**sizes, kernel=kernel, generator=source, device=device)
        parts = zip(*(tensor.split(batch) for tensor in drawn.values()), strict=True)
        tasks += [dict(zip(drawn, part, strict=True)) for part in parts]
    return tasks


def curve_of(losses: list[float]) -> list[tuple[int, float]]:
    """Up to POINTS means over steps in a row, each with its last step."""
    width = -(-len(losses) // POINTS)
    parts = [losses[at : at + width] for at in range(0, len(losses), width)]
    return [(min((n + 1) * width, len(losses)), mean(part)) for n, part in enumerate(parts)]


def mean(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values)


def head_of(size: str, kernel: str, steps: int, constant: float) -> dict[str, Any]:
    """What the trainings of a record have in common."""
    return {
        "schema": 1,
        "device": torch.cuda.get_device_name() if ON_GPU else "CPU",
        "torch": torch.__version__,
        "steps": steps,
        "model": {**SIZES[size], **TASKS[size], "covariance": kernel},
        "plain": "torch",
        "kinds": KINDS,
        "other_models": ["mean pooling"],
        "bounds": {BOUND: round(constant, 6)},
    }


def opened(path: Path | None, head: dict[str, Any]) -> dict[str, Any]:
    """The record of `path`, of these settings; a new one where there is none. ValueError for other settings."""
    if path is None or not path.exists():
        return {**head, "results": {}}
    record = json.loads(path.read_text())
    if other := {name: record.get(name) for name, value in head.items() if record.get(name) != value}:
        raise ValueError(f"{path} is of other settings: {other}, and not {head}")
    return record


def draw(curves: dict[str, list[tuple[int, float]]], constant: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for kind, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), label=kind)
    axes.axhline(constant, color="black", linestyle="--", label=BOUND)
    axes.set(xlabel="step", ylabel="negative log-likelihood of a target")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "losses"}):  # the same losses give the same bytes
        figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def run(options: argparse.Namespace, write: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Trains with what the record lacks of each seed and kind, and has it written after each. Returns the record."""
    device = torch.device("cuda" if ON_GPU else "cpu")
    if ON_GPU:
        task = TASKS[options.size]
        print("PyTorch would run", require_flash(task["context"], task["targets"], task["batch"]))
    held_out = tasks_of(options.size, options.kernel, HELD_OUT, 0, device)
    constant = mean(float(constant_loss(task["y_target"])) for task in held_out)
    record = opened(options.record, head_of(options.size, options.kernel, options.steps, constant))
    results, kinds = record["results"], [kind for kind in KINDS if ON_GPU or kind != "ours"]
    for seed in options.seeds:
        missing = [kind for kind in kinds if str(seed) not in results.get(kind, {})]
        if not missing:
            continue
        begin = time.perf_counter()
        tasks = tasks_of(options.size, options.kernel, options.steps, 1 + seed, device)
        synchronize()
        print(f"seed {seed}: tasks drawn in {time.perf_counter() - begin:.1f} s")
        for kind in missing:
            results.setdefault(kind, {})[str(seed)] = trained(kind, options.size, tasks, held_out, seed)
            write(record)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="full" if ON_GPU else "small")
    parser.add_argument("--steps", type=int, default=2000 if ON_GPU else 300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--kernel", choices=tuple(KERNELS), default="rbf", help="covariance of the functions")
    parser.add_argument("--out", type=Path, default=Path("loss.svg"), help="the chart, of the first seed")
    parser.add_argument("--record", type=Path, help="file for the losses, as JSON; continued if it exists")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")

    def write(record: dict[str, Any]) -> None:
        if options.record:
            options.record.parent.mkdir(parents=True, exist_ok=True)
            part = options.record.with_suffix(".part")  # an interruption leaves a whole file
            part.write_text(json.dumps(record, indent=1) + "\n")
            part.replace(options.record)

    record = run(options, write)
    constant, first = record["bounds"][BOUND], str(options.seeds[0])
    draw({kind: seeds[first]["curve"] for kind, seeds in record["results"].items()}, constant, options.out)
    for kind, seeds in record["results"].items():
        loss, step = (mean(found[name] for found in seeds.values()) for name in ("loss", "ms_a_step"))
        print(f"{kind}: loss on held-out tasks {loss:.3f}, {step:.2f} ms a step")
    print(f"{BOUND}: {constant:.3f}; chart in {options.out}")


if __name__ == "__main__":
    main()

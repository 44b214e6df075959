"""A transformer neural process learns functions of a Gaussian process, each step one CUDA graph.

    python -m examples.train_transformer_np --size full --steps 2000 --out loss.svg      # from the checkout's root

The chart has the loss of each step, that of a neural process with mean pooling for attention, trained likewise, and
that of the one Gaussian that fits the targets of a task best: what a model reaches that takes no notice of x. Without a
GPU the size is small, PyTorch's own layers are used, which are faster on a CPU than the kernels in Triton's
interpreter, and there is no graph.
"""

import argparse
import math
import os
from pathlib import Path

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
TASKS = {"small": dict(batch=16, context=24, targets=16), "full": dict(batch=64, context=64, targets=500)}
PLAIN = dict(attention="sdpa", mlp="torch", heads_impl="torch", norm="torch", loss_impl="torch")
RATES = {"small": 3e-3, "full": 3e-4}


POOLED = {"small": dict(width=64, layers=2, components=3), "full": dict(width=512, layers=4, components=10)}


def built(size: str, steps: int, device: torch.device) -> TrainStep:
    if ON_GPU:
        model = TransformerNP(**SIZES[size]).to(device, torch.bfloat16)
        optimizer = AdamW(model.parameters(), lr=RATES[size], master_weights=True)
    else:
        model = TransformerNP(**SIZES[size], **PLAIN).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATES[size])
    return stepping(model, optimizer, steps)


def pooled(size: str, steps: int, device: torch.device) -> TrainStep:
    """The reference model, in fp32."""
    model = MeanPoolingNP(**POOLED[size]).to(device)
    return stepping(model, torch.optim.AdamW(model.parameters(), lr=RATES[size]), steps)


def stepping(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> TrainStep:
    warm = max(1, steps // 20)

    def schedule(step: int) -> float:
        """A linear warm-up, then half a cosine."""
        return min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))

    return TrainStep(model.loss, optimizer, clip=1.0, schedule=schedule, history=steps)


def trained(size: str, steps: int, kernel: str, device: torch.device) -> tuple[list[float], list[float], list[float]]:
    """The loss of every step, the reference model's, and that of the best constant Gaussian on their tasks."""
    from rich.progress import track

    torch.manual_seed(0)
    step, reference, constants = built(size, steps, device), pooled(size, steps, device), []
    if ON_GPU:
        task = TASKS[size]
        print("PyTorch would run", require_flash(task["context"], task["targets"], task["batch"]))
    source = torch.Generator(device).manual_seed(1)
    for _ in track(range(steps), description=f"{size}, {kernel}"):
        batch = sample_task(**TASKS[size], kernel=kernel, generator=source, device=device)
        constants.append(constant_loss(batch["y_target"]))
        step(**batch)
        reference(**batch)
    print("steps in CUDA graphs" if step.captured else f"no CUDA graph: {step.reason}")
    return step.losses().tolist(), reference.losses().tolist(), torch.stack(constants).tolist()


def draw(losses: list[float], references: list[float], constants: list[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    width = max(1, len(losses) // 50)
    axes.plot(losses, color="0.8", linewidth=0.7, label="TransformerNP, each step")
    axes.plot(means(losses, width), label=f"TransformerNP, mean of {width} steps")
    axes.plot(means(references, width), label="mean pooling for attention, likewise")
    axes.axhline(sum(constants) / len(constants), color="black", linestyle="--", label="the best constant Gaussian")
    axes.set(xlabel="step", ylabel="negative log-likelihood of a target")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "losses"}):  # the same losses give the same bytes
        figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def means(losses: list[float], width: int) -> list[float]:
    """Of each loss and those before it, `width` together."""
    return [sum(losses[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(losses))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="full" if ON_GPU else "small")
    parser.add_argument("--steps", type=int, default=2000 if ON_GPU else 300)
    parser.add_argument("--kernel", choices=tuple(KERNELS), default="rbf", help="covariance of the functions")
    parser.add_argument("--out", type=Path, default=Path("loss.svg"))
    arguments = parser.parse_args()
    device = torch.device("cuda" if ON_GPU else "cpu")
    curves = trained(arguments.size, arguments.steps, arguments.kernel, device)
    draw(*curves, arguments.out)
    last = max(1, len(curves[0]) // 10)
    found, reference, constant = (sum(values[-last:]) / last for values in curves)
    print(f"loss of the last {last} steps {found:.3f}, of the best constant {constant:.3f}")
    print(f"with mean pooling for attention {reference:.3f}; chart in {arguments.out}")


if __name__ == "__main__":
    main()

"""What a training step of TransformerNP will take, in bytes and seconds, before it is run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .model import CHECKPOINTS
from .step import Sizes, places


@dataclass(frozen=True)
class Rates:
    """What a GPU reaches: FLOP/s of matrix products and of attention, bytes/s of DRAM, and seconds of a launch that is
    not hidden (in a CUDA graph about 1 µs). The defaults are none: take them from `harness calibrate` or a record."""

    matmul: float
    attention: float
    bandwidth: float
    launch: float = 0.0


@dataclass(frozen=True)
class Feasibility:
    """Bytes at the peak, by what they are for, and seconds of a step, by stage."""

    memory: dict[str, int]
    seconds: dict[str, float]

    @property
    def peak_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    def fits(self, available_bytes: int) -> bool:
        return self.peak_bytes <= available_bytes


def feasibility(
    context: int,
    targets: int,
    batch: int,
    rates: Rates,
    *,
    sizes: Sizes | None = None,
    dtype: torch.dtype = torch.bfloat16,
    checkpoint: str = "none",
) -> Feasibility:
    """Predicted peak memory and time of one step of training with AdamW. A pure function; nothing is allocated.

    With T = B(M + N) rows, C = B·M, R = B·N, s bytes of `dtype`, d = d_model, f = d_ff padded, h heads, K components,
    L layers and P parameters, in bytes:

        state          12 P                     fp32 weights and two moments
        gradients       4 P                     fp32; and s P of rounded weights where s < 4, which the backward reads
        activations    L · kept + d s T         kept of a layer is (6 d + 2 f) s T + 2 d s C + (4 h + 8) T
        recomputed     checkpoint "block" keeps d s T, and one layer's whole is there beside; "attention" keeps
                       (3 d + 2 f) s T + 4 T, and one layer's attention is there beside
        heads          2 K f s R + 2 d s R      hidden before and after SiLU; and K f s R for a gradient of it

    and in seconds, ×3 for products forward and backward and ×3.5 for scores; checkpoint "block" adds one more forward
    of all layers, "attention" one of their attention:

        attention      (4 d² T + 4 d² C) L / matmul + 4 M T d L / attention      projections, then scores and sums
        mlp            4 d f T L / matmul
        heads          2 R K f (d + 3) / matmul
        elementwise    bytes of norms, SiLU and residuals, (14 d + 6 f) s T L, / bandwidth
        optimizer      40 P / bandwidth         read and write three states, read the gradient thrice, write casts
        launches       (30 L + 60) · launch

    Raises ValueError for an unknown checkpoint or sizes below 1.
    """
    if checkpoint not in CHECKPOINTS:
        raise ValueError(f"feasibility: checkpoint must be one of {', '.join(CHECKPOINTS)}, got {checkpoint!r}")
    if min(context, targets, batch) < 1:
        raise ValueError(f"feasibility: context, targets and batch must be positive, got {context, targets, batch}")
    sizes = Sizes() if sizes is None else sizes
    size, parameters = dtype.itemsize, places(sizes)[1]
    rows, keys, answers = batch * (context + targets), batch * context, batch * targets
    d, layers, components = sizes.d_model, sizes.layers, sizes.components
    f = -(-sizes.d_ff // sizes.padding) * sizes.padding

    whole = (6 * d + 2 * f) * size * rows + 2 * d * size * keys + (4 * sizes.heads + 8) * rows
    attention = 3 * d * size * rows + 2 * d * size * keys + (4 * sizes.heads + 4) * rows
    kept, beside = {
        "none": (whole, 0),
        "block": (d * size * rows, whole),
        "attention": (whole - attention, attention),
    }[checkpoint]
    memory = {
        "state": 12 * parameters,
        "gradients": (4 + (size if size < 4 else 0)) * parameters,
        "activations": layers * kept + d * size * rows,
        "recomputed": beside,
        "heads": 3 * components * f * size * answers + 2 * d * size * answers,
    }

    again = {"none": (0, 0), "block": (1, 1), "attention": (1, 0)}[checkpoint]
    projections = (4 * d * d * rows + 4 * d * d * keys) * layers / rates.matmul
    scores = 4 * context * rows * d * layers / rates.attention
    mlp = 4 * d * f * rows * layers / rates.matmul
    elementwise = (14 * d + 6 * f) * size * rows * layers / rates.bandwidth
    seconds = {
        "attention": (3 + again[0]) * projections + (3.5 + again[0]) * scores,
        "mlp": (3 + again[1]) * mlp,
        "heads": 3 * 2 * answers * components * f * (d + 3) / rates.matmul,
        "elementwise": elementwise * (1 + again[1] / 3),
        "optimizer": 40 * parameters / rates.bandwidth,
        "launches": (30 * layers + 60) * rates.launch,
    }
    return Feasibility(memory, seconds)

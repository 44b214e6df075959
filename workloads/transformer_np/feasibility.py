"""What a training step of TransformerNP will take, in bytes and seconds, before it is run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .model import CHECKPOINTS
from .step import Sizes, places

CHUNK = 8448  # rows of which heads_mlp has the hidden's gradient in memory
CUBLAS_WORKSPACE = 32 << 20  # of each stream, on Hopper


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
    L layers and P parameters, in bytes, for ridgeline's kernels:

        state          12 P                     fp32 weights and two moments
        workspace      2 · 32 MiB               of cuBLAS, on two streams
        rounded        s P where s < 4          weights in `dtype`, which the backward reads
        activations    (L − 1) · kept + last + 2 d s T
                                                kept of a layer is (6 d + f) s T + 2 d s C + 4 h T, where B > 1 with one
                                                more d s C, a copy of the context's rows; of the last layer, which
                                                answers the targets alone, 2 d s T + (4 d + f) s R + 2 d s C + 4 h R
        recomputed     checkpoint "block" keeps d s T, and one layer's whole is there beside; "attention" keeps
                       (3 d + f) s T, and of the last layer d s T + (2 d + f) s R
        heads          2 d s R                  their input, before and after its norm
        backward       the larger of that of the heads, K f s min(R, 8192) + d s R + K f d s, and with more than 8192
                       rows 4 K f d; and that of a layer, (4 + s) K f d + f s T + 2 d s T
        gradients      4 P, less what is freed by then: nothing but for very few points

    and in seconds, ×3 for products forward and backward and ×3.5 for scores; checkpoint "block" adds one more forward
    of all layers, "attention" one of their attention:

        attention      (4 d² A + 4 d² C L) / matmul + 4 M A d / attention      projections, then scores and sums, with
                                                A = (L − 1) T + R: the last layer answers the targets alone
        mlp            4 d f A / matmul
        heads          2 R K f (d + 3) / matmul
        elementwise    bytes of norms with residuals, and of SiLU, (16 d + 6 f) s A, / bandwidth
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

    copies = 3 if batch > 1 else 2
    whole = (6 * d + f) * size * rows + copies * d * size * keys + 4 * sizes.heads * rows
    whole_last = (2 * d * rows + (4 * d + f) * answers + 2 * d * keys) * size + 4 * sizes.heads * answers
    kept, last, beside = {
        "none": (whole, whole_last, 0),
        "block": (d * size * rows, d * size * rows, whole),
        "attention": ((3 * d + f) * size * rows, (d * rows + (2 * d + f) * answers) * size, 0),
    }[checkpoint]
    of_heads = components * f * d
    of_layers = parameters - of_heads
    chunk = components * f * size * min(answers, CHUNK)
    heads_backward = chunk + d * size * answers + (size + (4 if answers > CHUNK else 0)) * of_heads
    layer_backward = (4 + size) * of_heads + (f + 2 * d) * size * rows
    memory = {
        "state": 12 * parameters,
        "workspace": 2 * CUBLAS_WORKSPACE,
        "rounded": (of_heads + of_layers // (layers if checkpoint == "block" else 1)) * size if size < 4 else 0,
        "activations": (layers - 1) * kept + last + 2 * d * size * rows,
        "recomputed": beside,
        "heads": 2 * d * size * answers,
        "backward": layer_backward if checkpoint == "block" else max(heads_backward, layer_backward),
    }
    freed = sum(memory.values()) - memory["state"] - memory["workspace"]
    memory["gradients"] = max(0, 4 * parameters - freed)

    again = {"none": (0, 0), "block": (1, 1), "attention": (1, 0)}[checkpoint]
    asking = (layers - 1) * rows + answers
    projections = 4 * d * d * (asking + layers * keys) / rates.matmul
    scores = 4 * context * asking * d / rates.attention
    mlp = 4 * d * f * asking / rates.matmul
    elementwise = (16 * d + 6 * f) * size * asking / rates.bandwidth
    seconds = {
        "attention": (3 + again[0]) * projections + (3.5 + again[0]) * scores,
        "mlp": (3 + again[1]) * mlp,
        "heads": 3 * 2 * answers * components * f * (d + 3) / rates.matmul,
        "elementwise": elementwise * (1 + again[1] / 3),
        "optimizer": 40 * parameters / rates.bandwidth,
        "launches": (30 * layers + 60) * rates.launch,
    }
    return Feasibility(memory, seconds)

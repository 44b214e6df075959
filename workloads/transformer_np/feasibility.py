"""Prediction of the memory, in bytes, and the time, in seconds, of a training step of TransformerNP."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from . import whole
from .model import CHECKPOINTS
from .sm90 import layers as launches
from .step import Sizes, places
from .weight_gradients import pick_weight_gradients

CHUNK = 8448  # rows for which heads_mlp holds the hidden's gradient in memory at once
CUBLAS_WORKSPACE = 32 << 20  # bytes per stream, on Hopper
TILE = 128


@dataclass(frozen=True)
class Rates:
    """The rates that a GPU reaches in a step.

    matmul     FLOP/s of a GEMM whose tiles fill all SMs
    attention  FLOP/s of attention, forward and backward, over many keys
    bandwidth  bytes/s of DRAM
    launch     seconds of overhead per kernel in a CUDA graph: its start, and its last CTAs
    operands   bytes/s at which attention over few keys reads and writes q, k, v, its output and their gradients;
               0 means `bandwidth`
    sms        number of SMs, which is the number of tiles in a wave
    layer      seconds of a layer, forward and backward without its weights' gradients, if all layers are one launch;
               0 for a GPU without these kernels
    """

    matmul: float
    attention: float
    bandwidth: float
    launch: float = 0.0
    operands: float = 0.0
    sms: int = 132
    layer: float = 0.0

    def scaled(self, flops: float, bandwidth: float, sms: int) -> Rates:
        """The rates of another GPU, not a Hopper, scaled by the ratios of the data sheets' figures."""
        return Rates(
            self.matmul * flops,
            self.attention * flops,
            self.bandwidth * bandwidth,
            self.launch,
            self.operands * bandwidth,
            sms,
        )


#: Rates of an H200 from reports/h200/records, bf16. matmul: the value that predicts the steps of (64, 500), B 64, with
#: and without checkpoints, within 6 %; fused_mlp's GEMMs of 205 000 rows of 512 reach 690 to 730 TFLOP/s in addition to
#: their pass over the hidden. attention: b1-h8-q205000-k200000-d64, long enough to be power-limited like a step.
#: bandwidth: adamw and rmsnorm. operands: attention, b64-h8-q564-k64-d64, 249 MB in 149 us. launch: transformer_np of
#: one task of (64, 500), most of whose kernels are at this floor. layer: the H100's; it is latency-bound, not
#: memory-bound.
H200 = Rates(matmul=7.2e14, attention=5.55e14, bandwidth=4.25e12, launch=3e-6, operands=1.67e12, layer=46e-6)
#: Rates of an H100 from reports/h100/records: attention and bandwidth of the same cases. matmul and operands are the
#: values that predict MLP and attention of the step of (64, 500), B 64, in which its clock is higher than the H200's.
#: layer: from an exploration (EXPERIMENTS.md), 220 and 273 us for 11 layers, two launches and two fills of counters.
H100 = Rates(matmul=7.0e14, attention=5.6e14, bandwidth=3.02e12, launch=3e-6, operands=1.67e12, layer=46e-6)
#: The A100 has no record of transformer_np: its rates are scaled by the data sheets' dense bf16 FLOP/s and bandwidth.
RATES = {"h200": H200, "h100": H100, "a100-80": H200.scaled(312 / 989.4, 2039 / 4800, 108)}


@dataclass(frozen=True)
class Feasibility:
    """Bytes of peak memory, by purpose, and seconds of a step, by stage."""

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
    rates: Rates | str,
    *,
    sizes: Sizes | None = None,
    dtype: torch.dtype = torch.bfloat16,
    checkpoint: str = "none",
    layers_impl: str = "auto",
) -> Feasibility:
    """Predicts peak memory and time of one training step with AdamW, in a CUDA graph. Pure; nothing is allocated.
    `rates` are those of a GPU, or its name in RATES: "h200", "h100" or "a100-80". `layers_impl` is "apart" or "auto",
    as for the model; "auto" assumes flattened weights.

    With T = B(M + N) rows, C = B·M, R = B·N, s bytes of `dtype`, d = d_model, f = d_ff padded, h heads, K components,
    L layers and P parameters, in bytes, for ridgeline's kernels:

        state          12 P                     fp32 weights and two moments
        workspace      2 · 32 MiB               of cuBLAS, on two streams
        rounded        s P if s < 4             weights in `dtype`, which the backward reads; with checkpoint "block"
                                                only those of one layer and the heads
        activations    (L − 1) · kept + last + d s T
                                                d s T is the embedding's hidden. A layer saves
                                                (6 d + f) s T + 2 d s C + 4 h T; if B > 1, another d s C, a copy of the
                                                context's rows. The last layer, which computes only the targets,
                                                saves 2 d s T + (4 d + f) s R + 2 d s C + 4 h R. checkpoint "block"
                                                saves d s T; "attention" 3 d s T + 4 h T, and in the last layer
                                                d s T + 2 d s R + 4 h R
        recomputed     "block": all of one layer; "attention": (d + f) s T
        heads          2 d s R                  their input, before and after its norm
        backward       the larger of the heads', K f s min(R, 8448) + d s R + K f d s, and with more than 8448 rows
                       another 4 K f d; and of a layer's, (4 + s) K f d + f s T + 2 d s T
        gradients      4 P, less the memory that is freed by then: 0 except for very few points

    Memory is that of layers apart; layers in one launch need some per cent less at the peak.

    Seconds are by the stages of `stages`, and "rest": `_Clock` has the time of a GEMM and of a pass, `_layer` and
    `_others` count those of a step. They are within 10 % of the measured times for the steps in the records.

    Raises ValueError for an unknown checkpoint, layers_impl or GPU, or sizes below 1.
    """
    if layers_impl not in ("auto", "apart"):
        raise ValueError(f"feasibility: layers_impl must be auto or apart, got {layers_impl!r}")
    if checkpoint not in CHECKPOINTS:
        raise ValueError(f"feasibility: checkpoint must be one of {', '.join(CHECKPOINTS)}, got {checkpoint!r}")
    if min(context, targets, batch) < 1:
        raise ValueError(f"feasibility: context, targets and batch must be positive, got {context, targets, batch}")
    sizes = Sizes() if sizes is None else sizes
    if sizes.layers < 1:
        raise ValueError(f"feasibility: sizes must have at least one layer, got {sizes.layers}")
    if isinstance(rates, str):
        if rates not in RATES:
            raise ValueError(f"feasibility: rates must be Rates or one of {', '.join(RATES)}, got {rates!r}")
        rates = RATES[rates]
    together = layers_impl == "auto" and dtype == torch.bfloat16 and rates.layer > 0
    step = _Step(sizes, context, targets, batch, dtype.itemsize, checkpoint, together)
    return Feasibility(_memory(step), _seconds(step, _Clock(rates)))


@dataclass(frozen=True)
class _Step:
    """The sizes of a step, named by the letters of `feasibility`."""

    sizes: Sizes
    context: int
    targets: int
    batch: int
    size: int
    checkpoint: str
    together: bool  # whether layers may be one launch

    @property
    def rows(self) -> int:
        return self.batch * (self.context + self.targets)

    @property
    def keys(self) -> int:
        return self.batch * self.context

    @property
    def answers(self) -> int:
        return self.batch * self.targets

    @property
    def hidden(self) -> int:
        return -(-self.sizes.d_ff // self.sizes.padding) * self.sizes.padding

    @property
    def deferred(self) -> bool:
        """Whether the weight gradients of all layers but the last are computed together, as by default."""
        d, layers = self.sizes.d_model, self.sizes.layers - 1
        how = pick_weight_gradients(layers, self.rows, d, self.hidden, self.size)
        return self.checkpoint == "none" and how == "deferred"

    @property
    def whole(self) -> bool:
        """Whether all layers but the last are one launch."""
        s = self.sizes
        taken = launches.missing_sizes(s.d_model, s.heads, self.hidden, self.context, self.targets) is None
        picked = whole.pick_layers(self.batch, self.context, self.targets) == "whole"
        return self.together and self.deferred and picked and taken

    @property
    def parameters(self) -> int:
        return places(self.sizes)[1]


def _memory(step: _Step) -> dict[str, int]:
    d, f, size, heads = step.sizes.d_model, step.hidden, step.size, step.sizes.heads
    rows, keys, answers, layers = step.rows, step.keys, step.answers, step.sizes.layers
    copies = 3 if step.batch > 1 else 2
    whole = (6 * d + f) * size * rows + copies * d * size * keys + 4 * heads * rows
    whole_last = (2 * d * rows + (4 * d + f) * answers + 2 * d * keys) * size + 4 * heads * answers
    kept, last, beside = {
        "none": (whole, whole_last, 0),
        "block": (d * size * rows, d * size * rows, whole),
        "attention": (
            3 * d * size * rows + 4 * heads * rows,
            (d * rows + 2 * d * answers) * size + 4 * heads * answers,
            (d + f) * size * rows,
        ),
    }[step.checkpoint]
    of_heads = step.sizes.components * f * d
    of_layers = step.parameters - of_heads
    chunk = step.sizes.components * f * size * min(answers, CHUNK)
    heads_backward = chunk + d * size * answers + (size + (4 if answers > CHUNK else 0)) * of_heads
    layer_backward = (4 + size) * of_heads + (f + 2 * d) * size * rows
    memory = {
        "state": 12 * step.parameters,
        "workspace": 2 * CUBLAS_WORKSPACE,
        "rounded": (of_heads + of_layers // (layers if step.checkpoint == "block" else 1)) * size if size < 4 else 0,
        "activations": (layers - 1) * kept + last + d * size * rows,
        "recomputed": beside,
        "heads": 2 * d * size * answers,
        "backward": max(heads_backward - beside, layer_backward),
    }
    freed = sum(memory.values()) - memory["state"] - memory["workspace"]
    memory["gradients"] = max(0, 4 * step.parameters - freed)
    return memory


class _Clock:
    """The seconds that kernels take."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates

    def product(self, m: int, n: int, k: int, split: bool = True) -> float:
        """Seconds of the GEMM [m, k] · [k, n]: entire waves of 128 × 128 tiles. With fewer tiles than SMs, split-K is
        assumed, but not all kernels use it."""
        waves = -(-m // TILE) * -(-n // TILE) / self.rates.sms
        idle = math.ceil(waves) / waves if waves > 1 or not split else 1.0
        return self.rates.launch + 2 * m * n * k * idle / self.rates.matmul

    def gradients(self, m: int, n: int, k: int, deferred: bool = False) -> float:
        """Seconds of the gradients of both operands of that GEMM. The gradient of the weights is a sum over m in split
        parts, which another launch adds; if deferred, it is part of a batched GEMM."""
        launches = 0 if deferred else 2
        return self.product(m, k, n) + launches * self.rates.launch + 2 * m * n * k / self.rates.matmul

    def a_pass(self, size: float, launches: int = 1) -> float:
        return launches * self.rates.launch + size / self.rates.bandwidth

    def scores(self, queries: int, context: int, keys: int, d: int, size: int, backward: bool) -> float:
        """Seconds of attention's two GEMMs, or of the backward's five, with a launch for sums of several CTAs."""
        flops = (2.5 if backward else 1) * 4 * queries * context * d
        moved = (2 if backward else 1) * 2 * (queries + keys) * d * size
        operands = self.rates.operands or self.rates.bandwidth
        return (2 if backward else 1) * self.rates.launch + max(flops / self.rates.attention, moved / operands)


def _layer(step: _Step, clock: _Clock, queries: int, deferred: bool = False) -> dict[str, float]:
    """Seconds of a layer with that many query rows: attention and MLP, each with the norm before it."""
    d, f, s, rows, keys = step.sizes.d_model, step.hidden, step.size, step.rows, step.keys
    products, up, down = ((queries, d, d), (keys, 2 * d, d), (queries, d, d)), (queries, f, d), (queries, d, f)
    copied = clock.a_pass(2 * d * s * keys) if step.batch > 1 else 0.0
    projected = copied + sum(clock.product(*sizes) for sizes in products[:2])
    norm, mlp_norm, act = (clock.a_pass(size) for size in (4 * d * s * rows, 4 * d * s * queries, 2 * f * s * queries))
    scores = [clock.scores(queries, step.context, keys, d, s, backward) for backward in (False, True)]
    attention = norm + projected + scores[0] + clock.product(*products[2])
    mlp = mlp_norm + clock.product(*up) + act + clock.product(*down)
    again = {
        "none": (0.0, 0.0),
        "block": (attention, mlp),
        "attention": (norm / 2 + projected, mlp_norm / 2 + clock.product(*up)),
    }[step.checkpoint]
    norm_backward = [clock.a_pass(4 * d * s * n, launches=1 if deferred else 2) for n in (rows, queries)]
    attention_backward = sum(clock.gradients(*sizes, deferred) for sizes in products) + scores[1] + norm_backward[0]
    mlp_backward = sum(clock.gradients(*sizes, deferred) for sizes in (up, down))
    mlp_backward += clock.a_pass(4 * f * s * queries) + norm_backward[1]
    return {"attention": attention + attention_backward + again[0], "mlp": mlp + mlp_backward + again[1]}


def _others(step: _Step, clock: _Clock) -> dict[str, float]:
    """Seconds of the other stages. Heads with the loss: their backward computes the hidden again, for at most CHUNK
    rows at a time. The optimizer: it reads and writes three states, reads gradients twice, and rounds the weights. The
    embedding."""
    d, s, parameters = step.sizes.d_model, step.size, step.parameters
    wide = step.sizes.components * step.hidden
    chunks, rest = divmod(step.answers, CHUNK)
    heads = clock.a_pass(8 * d * s * step.answers, launches=3) + clock.product(step.answers, wide, d)
    for rows in [CHUNK] * chunks + [rest] * (rest > 0):
        heads += clock.product(rows, wide, d) + clock.a_pass(2 * wide * s * rows, launches=4)
        heads += clock.product(rows, d, wide, split=False) + clock.product(wide, d, rows)
    updated = parameters * (24 + 2 * s + (4 + s if s < 4 else 0))
    embedded = clock.product(step.rows, d, d) + clock.gradients(step.rows, d, d)
    return {
        "heads": heads,
        "optimizer": clock.a_pass(updated, launches=6),
        "rest": embedded + clock.a_pass(8 * d * s * step.rows, launches=10),
    }


def _seconds(step: _Step, clock: _Clock) -> dict[str, float]:
    layers, last = step.sizes.layers, _layer(step, clock, step.answers)
    if step.whole:
        weights = 2 * step.rows * step.sizes.d_model * (4 * step.sizes.d_model + 2 * step.hidden)
        together = (layers - 1) * (clock.rates.layer + weights / clock.rates.matmul)
        return {"layers": together, **last, **_others(step, clock)}
    inner = _layer(step, clock, step.rows, step.deferred)
    stages = {name: (layers - 1) * inner[name] + last[name] for name in inner}
    return {**stages, **_others(step, clock)}

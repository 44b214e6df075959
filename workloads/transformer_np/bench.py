"""The declaration of transformer_np: cases, cost, peers. `python -m harness bench --kernel transformer_np`.

A row is one training step: forward, backward, clipping, AdamW. The harness's column "graph" has the step in one CUDA
graph, the others have it without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch

from harness.spec import EAGER, Case, Cost, Inputs, KernelSpec, Op, Peer, StandIn
from kernels.adamw import AdamW

from .layers import rounded_up
from .ranges import stage_ranges
from .reference import loss_reference, transformer_np_reference
from .stages import stages
from .step import Sizes, places, transformer_np
from .weight_gradients import pick_projections, pick_weight_gradients
from .whole import pick_layers

BF16, FP32 = torch.bfloat16, torch.float32
MUTATED = ("weights", "exp_avg", "exp_avg_sq", "step")
SHAPES = ((64, 500), (10_000, 1000), (200_000, 5000))
#: For each number of context points, the batch with which all rows of the table fit in 80 GB.
BATCHES = {64: 64, 10_000: 4, 200_000: 1}
FULL = Sizes()
TINY = Sizes(layers=1, d_model=16, heads=2, d_ff=12, components=3, padding=8)
HOST = Sizes(layers=2, d_model=128, heads=2, d_ff=200, components=4, padding=64)
#: The largest sizes of a case whose step is computed in fp64.
STAND_IN = {"layers": 2, "context": 300, "targets": 200, "batch": 2}
LONG = 10_000  # context points above which a stage takes seconds
LOSS_ERROR = 2e-3  # relative error of the loss, a mean over all targets, with GEMM outputs rounded to bf16
RECOMPILES = 128
STOCK: dict[str, Any] = dict(mlp="torch", heads_impl="torch", norm="torch", loss_impl="torch")
#: Ours with one part replaced by PyTorch's, to measure the gain of each part. The fusions for few rows require
#: ridgeline's attention, MLP and norm, so without one of these the row is to be compared with `inline-gradients`.
ABLATIONS: dict[str, dict[str, str]] = {
    "torch-attention": dict(attention="sdpa"),
    "torch-mlp": dict(mlp="torch"),
    "torch-heads": dict(heads_impl="torch"),
    "torch-norm": dict(norm="torch"),
    "separate-loss": dict(loss_impl="separate"),
    "torch-loss": dict(loss_impl="torch"),
    "torch-adamw": dict(optimizer="torch"),
    # The fusions for few rows: all layers; then, with layers apart, the weight gradients of layers, and q, k and v.
    "apart-layers": dict(layers_impl="apart"),
    "inline-gradients": dict(layers_impl="apart", weight_gradients="inline"),
    "apart-projections": dict(layers_impl="apart", projections="apart"),
}
ABLATION_TEXTS = {
    "torch-flash": "PyTorch's parts, flash attention",
    "torch-flash-compile": "the same, compiled",
    "torch-cudnn-compile": "cuDNN's attention, compiled",
    "torch-attention": "ours, but PyTorch's attention, and no fusion for few rows",
    "torch-mlp": "ours, but PyTorch's MLP and embedding, and no fusion for few rows",
    "torch-heads": "ours, but PyTorch's heads, and the loss apart",
    "torch-norm": "ours, but PyTorch's norm, a pass for each residual sum, and no fusion for few rows",
    "separate-loss": "ours, but heads and loss apart",
    "torch-loss": "ours, but heads apart, and PyTorch's loss",
    "torch-adamw": "ours, but PyTorch's fused AdamW",
    "apart-layers": "ours, but launches for each layer",
    "inline-gradients": "the same, and no fusion for few rows: gradients of weights in each layer's backward, q apart",
    "apart-projections": "ours, but launches for each layer, and q by a product of its own",
    "auto": "ours",
}
NO_AUTOTUNED_GRAPH = "max-autotune-no-cudagraphs"  # the harness has a separate column for CUDA graphs


def _case(
    context: int, targets: int, batch: int, checkpoint: str = "none", sizes: Sizes = FULL, dtype: torch.dtype = BF16
) -> Case:
    words = (
        *{FULL: (), TINY: ("tiny",), HOST: ("host",)}[sizes],
        f"{context}-{targets}",
        f"b{batch}",
        *(() if checkpoint == "none" else ("checkpoint", checkpoint)),
        {BF16: "bf16", FP32: "fp32"}[dtype],
    )
    own = {name: getattr(sizes, name) for name in ("layers", "d_model", "heads", "d_ff", "components", "padding")}
    dims = dict(batch=batch, context=context, targets=targets, **own)
    params = {} if checkpoint == "none" else {"checkpoint": checkpoint}
    return Case("-".join(words), dims, dtype, params, bench=sizes == FULL, mutates=MUTATED)


CASES = (
    *(
        _case(context, targets, batch, checkpoint)
        for checkpoint in ("none", "attention")
        for context, targets in SHAPES
        for batch in sorted({1, BATCHES[context]})
    ),
    *(_case(context, targets, BATCHES[context], "block") for context, targets in SHAPES[:2]),
    # For the checks.
    _case(5, 3, 2, sizes=TINY, dtype=FP32),
    _case(3, 2, 1, "block", TINY, FP32),
    _case(3, 2, 2, "attention", TINY, FP32),
    _case(70, 30, 2, sizes=TINY),
)


def sizes_of(case: Case) -> Sizes:
    d = case.dims
    return Sizes(d["layers"], d["d_model"], d["heads"], d["d_ff"], d["components"], padding=d["padding"])


def make_inputs(case: Case, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    """Inputs with the weights of a new model, moments as of gradients of norm 1, and random points."""
    sizes, d = sizes_of(case), case.dims
    found, length = places(sizes)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    weights = normal(length)
    with torch.device(device):
        model = sizes.model(generator=generator)
    for (_, at, shape), parameter in zip(found, model.parameters(), strict=True):
        weights[at : at + prod(shape)] = parameter.detach().flatten()
    return {
        "x_context": normal(d["batch"], d["context"], 1),
        "y_context": normal(d["batch"], d["context"]),
        "x_target": normal(d["batch"], d["targets"], 1),
        "y_target": normal(d["batch"], d["targets"]),
        "weights": weights,
        "exp_avg": normal(length) / length**0.5,
        "exp_avg_sq": (normal(length).abs() + 0.1) / length,
        "step": torch.full((), 10.0, device=device),
        "sizes": sizes,
        "dtype": None if case.dtype == FP32 else case.dtype,
        **case.params,
    }


def stand_in(case: Case) -> StandIn | None:
    """The stand-in of a case of many points. Every check runs on fewer points and two layers; of the case itself only
    the loss, and that all results are finite, are checked."""
    if case.dims["context"] <= STAND_IN["context"]:
        return None
    dims = {name: min(size, STAND_IN.get(name, size)) for name, size in case.dims.items()}
    smaller = replace(case, name=f"{case.name}-smaller", dims=dims, bench=False)

    def inputs(timed: Inputs) -> Inputs:
        names = ("x_context", "y_context", "x_target", "y_target", "sizes", "dtype")
        return {**{name: timed[name] for name in names}, "weights": timed["weights"].clone()}

    def results(found: tuple[torch.Tensor, ...], timed: Inputs) -> tuple[torch.Tensor, ...]:
        return found[:1]

    return StandIn(smaller, inputs, loss_reference, results, LOSS_ERROR)


def cost(case: Case, mode: str) -> Cost:
    """Counts the forward's GEMMs three times, those of attention three and a half times; weights and moments are read
    and written. Not counted are the padding of the MLPs, recomputation for a checkpoint, and work of the last layer
    that only the context's rows would need."""
    s, d = sizes_of(case), case.dims
    rows, keys, answers = (
        d["batch"] * (d["context"] + d["targets"]),
        d["batch"] * d["context"],
        d["batch"] * d["targets"],
    )
    width, hidden = s.d_model, s.d_ff
    asking = (s.layers - 1) * rows + answers  # in the last layer the context's rows are only keys and values
    layers = 4 * width * width * (asking + s.layers * keys) + 4 * width * hidden * asking
    scores = 4 * asking * d["context"] * width
    embedding = 2 * rows * width * (s.x_dim + 2 + width)
    mixture = 2 * answers * s.components * hidden * (width + 3)
    flops = 3 * (layers + embedding + mixture) + 3.5 * scores
    parameters = sum(prod(shape) for _, _, shape in places(s)[0])
    data = 4 * (rows * (s.x_dim + 1))
    return Cost(flops=flops, bytes=24 * parameters + data, pipe={BF16: "bf16", FP32: "fp32"}[case.dtype])


def stage_seconds(implementation: str, case: Case, mode: str, device: torch.device) -> dict[str, float] | None:
    """Seconds of each stage of ours and of PyTorch's, with the weights in the GEMMs' dtype. Without torch.compile,
    which would compile a stage differently from a step. None for other implementations, such as ours with a part
    replaced, whose stage is PyTorch's, and if stages are computed again."""
    parts: dict[str, dict[str, str]] = {"auto": {}, "torch-flash": dict(attention="sdpa-flash", **STOCK)}
    if implementation not in parts or case.params:
        return None
    d, long = case.dims, case.dims["context"] > LONG
    with torch.device(device):
        model = sizes_of(case).model(**parts[implementation]).to(case.dtype)
    model.flatten_parameters()
    if implementation == "auto":
        optimizer: torch.optim.Optimizer = AdamW(model.parameters(), master_weights=case.dtype != FP32)
    else:
        # This optimizer supports only gradients in the parameters' dtype. As in the step, it updates fp32 weights. The
        # conversion of the gradients is in none of the stages.
        exact = [torch.nn.Parameter(parameter.detach().float()) for parameter in model.parameters()]
        optimizer = torch.optim.AdamW(exact, fused=True, capturable=True)
        for parameter in exact:
            parameter.grad = torch.randn_like(parameter)
    return stages(model, optimizer, d["context"], d["targets"], d["batch"], repeats=2 if long else 10)


def _unsupported(implementation: str, case: Case, mode: str) -> str | None:
    if implementation == "fp8":
        return "attention in fp8 has no backward"
    if implementation != "auto" and case.dtype == FP32:
        return "checked in fp32 by the tests of attention itself"
    if implementation in ABLATIONS and case.params:
        return "ablations are timed only without checkpointing"
    return None


def _alias(implementation: str, case: Case, mode: str) -> str | None:
    s, d = sizes_of(case), case.dims
    rows, hidden = d["batch"] * (d["context"] + d["targets"]), rounded_up(s.d_ff, s.padding)
    if implementation == "apart-layers" and pick_layers(d["batch"], d["context"], d["targets"]) == "apart":
        return "same version as auto"
    if implementation not in ("inline-gradients", "apart-projections"):
        return None
    if pick_weight_gradients(s.layers - 1, rows, s.d_model, hidden, case.dtype.itemsize) == "inline":
        return "same version as auto"
    if implementation == "apart-projections" and pick_projections(d["batch"], d["targets"]) == "apart":
        return "same version as auto"
    return None


def _stock(attention: Any, compile: str | None = None) -> Callable[[], Op]:
    """The same step in PyTorch: with its RMSNorm and losses, fused or compiled AdamW, and the hidden padded."""

    def load() -> Op:
        if compile is not None:  # past torch.compile's limit a function runs uncompiled; all cases of all peers count
            limit = torch._dynamo.config.recompile_limit
            torch._dynamo.config.recompile_limit = max(limit, RECOMPILES)
        optimizer = "torch" if compile is None else "torch-compile"
        return partial(transformer_np, attention=attention, compile=compile, optimizer=optimizer, **STOCK)

    return load


def _fa4(compile: str | None = None) -> Callable[[], Op]:
    def load() -> Op:
        from flash_attn.cute import flash_attn_func

        @torch.compiler.disable
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)))  # its layout is [B, S, H, D]
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

        return _stock(attend, compile)()

    return load


def _half(case: Case, mode: str) -> str | None:
    return None if case.dtype == BF16 else "this attention supports only float16 and bfloat16"


SPEC = KernelSpec(
    name="transformer_np",
    implementations={
        "auto": transformer_np,
        "separate": partial(transformer_np, attention="separate"),
        "fused": partial(transformer_np, attention="fused"),
        "fp8": partial(transformer_np, attention="fp8"),
        **{name: partial(transformer_np, **options) for name, options in ABLATIONS.items()},
    },
    baselines=(
        EAGER,
        Peer("torch-flash", load=_stock("sdpa-flash"), supports=_half),
        Peer("torch-flash-compile", load=_stock("sdpa-flash", "default"), supports=_half),
        Peer("torch-cudnn-compile", load=_stock("sdpa-cudnn", "default"), supports=_half),
        Peer(
            "torch-flash-compile-max",
            load=_stock("sdpa-flash", NO_AUTOTUNED_GRAPH),
            configurations={"default": _stock("sdpa-flash", "default")},
            supports=_half,
        ),
        Peer(
            "torch-cudnn-compile-max",
            load=_stock("sdpa-cudnn", NO_AUTOTUNED_GRAPH),
            configurations={"default": _stock("sdpa-cudnn", "default")},
            supports=_half,
        ),
        Peer("torch-fa4-compile", load=_fa4("default"), configurations={"eager": _fa4()}, supports=_half),
    ),
    pytorch=("torch-flash-compile", "torch-cudnn-compile"),
    reference=transformer_np_reference,
    make_inputs=make_inputs,
    stand_in=stand_in,
    cost=cost,
    cases=CASES,
    grads=(),
    modes=("train",),
    determinism={"train": "on request"},
    # Weights and intermediate results are rounded to `dtype`.
    product_error=lambda inputs: 0.0 if inputs["dtype"] is None else torch.finfo(inputs["dtype"]).eps / 2,
    unit="tokens",
    items=lambda case: case.dims["batch"] * (case.dims["context"] + case.dims["targets"]),
    fuzz={"context": (1, 8), "targets": (1, 8)},
    unsupported_reason=_unsupported,
    alias_reason=_alias,
    captured=True,
    stages=stage_seconds,
    stage_ranges=stage_ranges,
    ablation=ABLATION_TEXTS,
    host_cases=(_case(8, 8, 1, sizes=HOST),),
    needs=("adamw", "attention", "fused_mlp", "gmm_logprob", "heads_gmm", "heads_mlp", "rmsnorm"),
)

"""The declaration of fused_mlp: cases, cost, peers. `python -m harness bench --kernel fused_mlp`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from harness.spec import COMPILED, COMPILED_MAX, EAGER, Case, Cost, Inputs, KernelSpec, Op, Peer, Tunable

from . import configs, fused_mlp
from .reference import fused_mlp_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _case(
    rows: int,
    dim: int,
    hidden: int,
    dim_out: int,
    dtype: torch.dtype,
    activation: str = "silu",
    suffix: str = "",
    **params,
) -> Case:
    """`gated` has a w_gate, `biased` both biases. A bench case has no suffix, is bf16 and at least 512 wide."""
    short = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
    gated = "gated" if params.get("gated") else ""
    words = f"{rows}x{dim}x{hidden}x{dim_out}", gated, activation, short, suffix
    bench = dtype == BF16 and dim >= 512 and not suffix
    dims = dict(rows=rows, dim=dim, hidden=hidden, dim_out=dim_out)
    return Case("-".join(filter(None, words)), dims, dtype, dict(activation=activation, **params), bench)


# GELU in its tanh form, the only one that every peer has.
NARROW = tuple(
    _case(rows, 512, 1365, 512, BF16, activation)
    for rows in (564, 11_000, 36_096, 44_000, 205_000)
    for activation in ("silu", "gelu_tanh")
)
WIDE = tuple(
    case
    for dim, hidden in ((4096, 11008), (5120, 13824), (8192, 28672))
    for rows in (512, 1024, 2048, 4096, 8192)
    for case in (
        _case(rows, dim, hidden, dim, BF16, "gelu_tanh"),
        _case(rows, dim, hidden, dim, BF16, "silu", gated=True),
    )
)
SMALL = (
    # Typical failures: default options first, then others, no rows, sizes of one, several tiles. Every check runs on
    # each case, so these are few: test_fused_mlp.py tests the other activations, and so do the GPU's cases.
    _case(11, 8, 18, 12, FP32),
    _case(10, 8, 18, 12, FP32, "gelu", gated=True, biased=True),
    _case(9, 6, 18, 10, FP16, "gelu_tanh", save="input"),
    _case(0, 8, 7, 5, FP32),
    _case(1, 1, 1, 1, FP32),
    _case(67, 33, 70, 41, FP32),
)
ON_GPU = (
    # Tiles with and without remainders, and unaligned rows. bf16 runs on the GPU only: the interpreter is wrong.
    _case(300, 128, 512, 256, BF16, "silu", "tiles", biased=True),
    _case(517, 256, 683, 256, BF16, "gelu", "odd"),
    _case(517, 256, 683, 256, BF16, "silu", "odd", gated=True, save="input"),
    _case(1500, 264, 700, 136, BF16, "relu_sq", "eighths", gated=True, biased=True),
    _case(1200, 131, 263, 97, BF16, "relu", "primes", biased=True),
)
CASES = (*NARROW, *WIDE, *SMALL, *ON_GPU)
CUDA_CASES = tuple(replace(case, min_capability=(9, 0)) for case in (*NARROW, *WIDE))
NARROW_ON_HOPPER = tuple(replace(case, min_capability=(9, 0)) for case in NARROW)
HOST_CASES = (_case(4, 64, 200, 64, BF16, "silu", "host"),)


def make_inputs(case: Case, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    """Random inputs, with weights scaled so that the activation's argument and y have variances of about 1."""
    rows, dim, hidden, dim_out = (case.dims[name] for name in ("rows", "dim", "hidden", "dim_out"))
    params = dict(case.params)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=case.dtype, device=device, generator=generator)

    inputs: Inputs = {
        "x": normal(rows, dim),
        "w1": normal(hidden, dim).mul_(dim**-0.5),
        "w2": normal(dim_out, hidden).mul_(hidden**-0.5),
    }
    if params.pop("biased", False):
        inputs |= {"b1": normal(hidden), "b2": normal(dim_out)}
    if params.pop("gated", False):
        inputs["w_gate"] = normal(hidden, dim).mul_(dim**-0.5)
    return {**inputs, **params}


def cost(case: Case, mode: str) -> Cost:
    """Compulsory traffic. Forward: x, the weights, y. Backward: dy, x, the weights, and a gradient of each. Saving or
    recomputing activations is a choice of the implementation and does not count."""
    rows, dim, hidden, dim_out = (case.dims[name] for name in ("rows", "dim", "hidden", "dim_out"))
    products = 2 if case.params.get("gated") else 1
    weights = hidden * (products * dim + dim_out) + (hidden + dim_out) * case.params.get("biased", False)
    passes, elements = {
        "fwd": (1, rows * (dim + dim_out) + weights),
        "bwd": (2, rows * (2 * dim + dim_out) + 2 * weights),
    }[mode]
    pipe = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[case.dtype]
    flops = 2 * passes * rows * hidden * (products * dim + dim_out)
    return Cost(flops=flops, bytes=elements * case.dtype.itemsize, pipe=pipe)


Tensors = tuple[torch.Tensor, ...]


class _Beforehand:
    """A peer that requires its own layout of the weights. They are converted once for each set of weights, outside the
    timed region. `lay_out` takes w1, w2 and w_gate, if there is one; `back` turns gradients of the results of `lay_out`
    into those of the weights, as views; `op` takes x, the results of `lay_out`, and options."""

    def __init__(self, op: Op, lay_out: Callable[..., Tensors], back: Callable[..., Tensors]) -> None:
        self.op, self.lay_out, self.back = op, lay_out, back
        self.made: dict[tuple, tuple[Tensors, Tensors]] = {}

    def __call__(self, x, w1, w2, *, w_gate=None, activation="silu", save="activations"):
        weights = (w1, w2) if w_gate is None else (w1, w2, w_gate)
        return _Call.apply(self, activation, x, *weights)

    def laid_out(self, weights: Tensors) -> Tensors:
        key = tuple((w.data_ptr(), w._version, w.shape) for w in weights)
        if key not in self.made:
            if len(self.made) == 8:
                del self.made[next(iter(self.made))]
            # The weights are kept alive, so that no others are allocated at their addresses.
            self.made[key] = tuple(w.detach() for w in weights), self.lay_out(*weights)
        return self.made[key][1]


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx, peer, activation, x, *weights):
        laid_out = peer.laid_out(weights)
        if not any(ctx.needs_input_grad):
            return peer.op(x, *laid_out, activation=activation)
        ctx.leaves = [t.detach().requires_grad_() for t in (x, *laid_out)]
        with torch.enable_grad():
            ctx.y = peer.op(*ctx.leaves, activation=activation)
        ctx.back, ctx.hidden = peer.back, weights[0].shape[0]
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, dy):
        dx, *grads = torch.autograd.grad(ctx.y, ctx.leaves, dy, retain_graph=True)
        return None, None, dx, *ctx.back(ctx.hidden, *grads)


def _pad(multiple: int, w1: torch.Tensor, w2: torch.Tensor, *w_gate: torch.Tensor) -> Tensors:
    """The weights with the hidden dimension padded with zeros to a multiple of `multiple`."""
    more = -w1.shape[0] % multiple
    return F.pad(w1, (0, 0, 0, more)), F.pad(w2, (0, more)), *(F.pad(w, (0, 0, 0, more)) for w in w_gate)


def _cut(hidden: int, dw1: torch.Tensor, dw2: torch.Tensor, *dw_gate: torch.Tensor) -> Tensors:
    return dw1[:hidden], dw2[:, :hidden], *(dw[:hidden] for dw in dw_gate)


def _padded(function: Op) -> Op:
    def op(x, w1, w2, w_gate=None, **options):
        return function(x, w1, w2, w_gate=w_gate, **options)

    return _Beforehand(op, partial(_pad, 128), _cut)


def _padded_supports(case: Case, mode: str) -> str | None:
    if case.params.get("biased") or case in SMALL + ON_GPU:
        return "compared only in the timed cases"
    return None if case.dims["hidden"] % 128 else "hidden needs no padding, so this equals eager or compile"


def _quack() -> Op:
    from quack.mlp import mlp_func

    names = {"silu": "silu", "gelu_tanh": "gelu_tanh_approx", "relu": "relu", "relu_sq": "relu_sq"}
    gated_names = {"silu": "swiglu", "gelu_tanh": "geglu", "relu": "reglu"}

    def op(x, w1, w2, activation):
        gated = w1.shape[0] != w2.shape[1]
        return mlp_func(x, w1, w2, (gated_names if gated else names)[activation], tuned=True)

    def lay_out(w1, w2, *w_gate):
        w1, w2, *w_gate = _pad(8, w1, w2, *w_gate)
        return (torch.stack((*w_gate, w1), 1).flatten(0, 1) if w_gate else w1), w2

    def back(hidden, dw1, dw2):
        if dw1.shape[0] == dw2.shape[1]:
            return _cut(hidden, dw1, dw2)
        return dw1[1::2][:hidden], dw2[:, :hidden], dw1[::2][:hidden]

    return _Beforehand(op, lay_out, back)


def _quack_supports(case: Case, mode: str) -> str | None:
    """Why QuACK cannot run a case, or None. It requires rows of whole 16-byte vectors; the hidden is padded for it."""
    if case.params.get("biased") or case in SMALL + ON_GPU:
        return "compared only in the timed cases"
    return "does not support the exact GELU" if case.params["activation"] == "gelu" else None


def _backend(case: Case) -> str | None:
    """The backend that "auto" uses for all GEMMs on Hopper; None if that is a mixture of versions."""
    rows, dim, hidden, dim_out = (case.dims[n] for n in ("rows", "dim", "hidden", "dim_out"))
    use = configs.pick_versions("auto", rows, dim, hidden, case.dtype, hopper=True)
    if use.narrow and max(dim, dim_out) <= configs.MAX_NARROW and dim % 8 == dim_out % 8 == 0:
        return "narrow"
    return "two_gemms" if use == configs.Versions(False, False, False, False) else None


def _unsupported_reason(implementation: str, case: Case, mode: str) -> str | None:
    if implementation == "fused" and case.dims["dim_out"] > configs.MAX_FUSED_OUT:
        return f"supports at most {configs.MAX_FUSED_OUT} columns of y, which it keeps in registers"
    if implementation == "narrow" and max(case.dims["dim"], case.dims["dim_out"]) > configs.MAX_NARROW:
        return f"supports at most {configs.MAX_NARROW} columns of x and y, which it keeps in registers"
    return "supports only float16 and bfloat16" if implementation in ("cuda", "narrow") and case.dtype == FP32 else None


def _alias_reason(implementation: str, case: Case, mode: str) -> str | None:
    if implementation == _backend(case):
        return "same version as auto"
    # In mode "bwd" the checks also run the forward, which "auto" computes by each version for some cases.
    return "same backward as auto" if implementation in ("fused", "two_gemms") and mode == "bwd" else None


def _product_candidates(case: Case) -> list[configs.ProductConfig]:
    """Candidates with at most 128 accumulators a thread."""
    shapes = ((64, 64, 4, 2), (64, 128, 4, 2), (128, 128, 4, 2), (128, 128, 8, 1), (128, 256, 8, 1), (256, 128, 8, 1))
    return [
        configs.ProductConfig(m, n, k, raster, stages, warps, ctas)
        for m, n, warps, ctas in shapes
        for k in (32, 64)
        for raster in (4, 8, 16)
        for stages in (3, 4)
    ]


def _cuda_candidates(case: Case) -> list[configs.CudaConfig]:
    return [
        configs.CudaConfig(width, configs.cuda_stages(width), raster, cluster)
        for width in (256, 192, 176, 160, 128)
        for raster in (2, 4, 8, 16)
        for cluster in (1, 2)
    ]


def _narrow_candidates(case: Case) -> list[configs.NarrowConfig]:
    """Candidates that fit into shared memory together with the backward's epilogue tiles, of two tensors."""
    return [
        configs.NarrowConfig(columns, stages, a_stages, cluster)
        for columns, stages, a_stages in ((128, 8, 2), (128, 8, 4), (128, 9, 2), (64, 12, 4), (64, 16, 4), (64, 16, 8))
        for cluster in (1, 2, 4)
    ]


def _weights_candidates(case: Case) -> list[configs.WeightsConfig]:
    return [
        configs.WeightsConfig(n, k, r, splits, 8, stages, warps)
        for n, k, warps in ((128, 128, 4), (128, 128, 8), (128, 256, 8), (256, 128, 8))
        for r in (32, 64)
        for splits in (1, 2, 3, 6, 12)
        for stages in (3, 4)
    ]


def _fused_candidates(case: Case) -> list[configs.FusedConfig]:
    return [
        configs.FusedConfig(m, h, k, splits, stages, warps)
        for m, warps in ((16, 4), (32, 4), (32, 8), (64, 8))
        for h in (32, 64)
        for k in (64, 128)
        for splits in (1, 3, 7, 14, 22)
        for stages in (1, 2, 3)
    ]


SPEC = KernelSpec(
    name="fused_mlp",
    implementations={
        "auto": fused_mlp,
        "fused": partial(fused_mlp, backend="fused"),
        "two_gemms": partial(fused_mlp, backend="two_gemms"),
        "cuda": partial(fused_mlp, backend="cuda"),
        "narrow": partial(fused_mlp, backend="narrow"),
    },
    min_capability={"cuda": (9, 0), "narrow": (9, 0)},
    unsupported_reason=_unsupported_reason,
    alias_reason=_alias_reason,
    baselines=(
        EAGER,
        COMPILED,
        COMPILED_MAX,
        Peer("padded", load=lambda: _padded(fused_mlp_reference), supports=_padded_supports),
        Peer(
            "padded-compile",
            load=lambda: _padded(torch.compile(fused_mlp_reference, dynamic=False)),
            supports=_padded_supports,
        ),
        Peer("quack", load=_quack, supports=_quack_supports),
    ),
    pytorch=("eager",),  # the reference is the code that a PyTorch user would write
    reference=fused_mlp_reference,
    make_inputs=make_inputs,
    cost=cost,
    cases=CASES,
    grads=("x", "w1", "w2", "b1", "b2", "w_gate"),
    determinism={"fwd": "run-to-run", "bwd": "run-to-run"},
    unit="rows",
    items=lambda case: case.dims["rows"],
    fuzz={"rows": (0, 20), "dim": (1, 20), "hidden": (1, 20), "dim_out": (1, 20)},
    tunables=(
        Tunable(configs, "pick_hidden_config", "fwd", _product_candidates, implementation="two_gemms"),
        Tunable(configs, "pick_rows_config", "fwd", _product_candidates, implementation="two_gemms"),
        Tunable(configs, "pick_dhidden_config", "bwd", _product_candidates),
        Tunable(configs, "pick_weights_config", "bwd", _weights_candidates),
        Tunable(configs, "pick_cuda_config", "fwd", _cuda_candidates, CUDA_CASES, "cuda"),
        Tunable(configs, "pick_narrow_config", "bwd", _narrow_candidates, NARROW_ON_HOPPER, "narrow"),
        Tunable(configs, "pick_fused_config", "fwd", _fused_candidates, NARROW[:4], implementation="fused"),
    ),
    host_cases=HOST_CASES,
)

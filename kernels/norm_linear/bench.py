"""The declaration of norm_linear: cases, cost, baselines. `python -m harness bench --kernel norm_linear`."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from harness.spec import COMPILED, COMPILED_MAX, EAGER, Case, Cost, Inputs, KernelSpec, Peer, Tunable

from . import configs
from .op import norm_linear
from .reference import norm_linear_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _case(rows: int, dim: int, cols: int, dtype: torch.dtype, suffix: str = "", bench: bool = False, **params) -> Case:
    short = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
    dims = dict(rows=rows, dim=dim, cols=cols)
    name = "-".join(filter(None, (f"{rows}x{dim}x{cols}", params.get("activation", ""), short, suffix)))
    return Case(name, dims, dtype, params, bench)


CASES = (
    # TransformerNP at 564 rows: q, k and v; the first matrix of the MLP.
    _case(564, 512, 1536, BF16, "residual", bench=True, residual=True),
    _case(564, 512, 1408, BF16, "residual", bench=True, residual=True, activation="silu"),
    # Llama-2 7B, q, k and v of a few tokens and of many.
    _case(64, 4096, 12288, BF16, bench=True),
    _case(2048, 4096, 12288, BF16, bench=True),
    # Boundary cases: nothing, one of everything, primes, several tiles, fp16 with its own statistics.
    _case(11, 24, 18, FP32),
    _case(10, 24, 18, FP32, "residual", residual=True, activation="gelu", eps=0.1),
    _case(9, 20, 18, FP16, "residual", residual=True, activation="silu"),
    _case(9, 21, 18, FP16, "eps", eps=1e-5),  # with parameters of its own, so that every check is made in fp16 too
    _case(0, 8, 7, FP32),
    _case(1, 1, 1, FP32),
    _case(67, 33, 70, FP32),
    _case(131, 67, 131, FP16),
    # In bf16, which the interpreter computes wrongly.
    _case(300, 128, 512, BF16, "tiles", residual=True),
    _case(517, 259, 683, BF16, "odd", residual=True, activation="gelu_tanh"),
)


def make_inputs(case: Case, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    """A weight such that y has a variance of about 1."""
    rows, dim, cols = (case.dims[name] for name in ("rows", "dim", "cols"))
    params = dict(case.params)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=case.dtype, device=device, generator=generator)

    inputs: Inputs = {"x": normal(rows, dim), "norm_weight": normal(dim), "weight": normal(cols, dim).mul_(dim**-0.5)}
    if params.pop("residual", False):
        inputs["residual"] = normal(rows, dim)
    return {**inputs, **params}


def cost(case: Case, mode: str) -> Cost:
    """Forward: x, the weights and y; a residual and h. Backward: the gradients of the results, and of x and the
    weights, and the inputs again."""
    rows, dim, cols = (case.dims[name] for name in ("rows", "dim", "cols"))
    residual, weights = bool(case.params.get("residual")), dim + cols * dim
    rows_of_x = (1 + residual) * rows * dim  # x and a residual, or h and what has its shape
    if mode == "fwd":
        elements = rows_of_x + weights + rows * cols + residual * rows * dim
    else:
        elements = 2 * (rows_of_x + weights) + rows * cols + residual * rows * dim
    pipe = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[case.dtype]
    flops = {"fwd": 2, "bwd": 4}[mode] * rows * dim * cols
    return Cost(flops=flops, bytes=elements * case.dtype.itemsize, pipe=pipe)


def _torch(x, norm_weight, weight, residual=None, *, eps=1e-6, activation=None):
    """What a PyTorch user would write: F.rms_norm and F.linear."""
    h = x if residual is None else x + residual
    y = F.linear(F.rms_norm(h, h.shape[-1:], norm_weight, eps), weight)
    if activation == "silu":
        y = F.silu(y)
    elif activation is not None:
        y = F.gelu(y, approximate="tanh" if activation == "gelu_tanh" else "none")
    return y if residual is None else (y, h)


def _product_candidates(case: Case) -> list[configs.ProductConfig]:
    """128 sums a thread at most, and 200 KiB of buffers."""
    first = case.dtype == FP16
    return [
        configs.ProductConfig(m, n, k, stages, warps, first)
        for m, n in ((32, 64), (32, 128), (64, 32), (64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 256))
        for k in (32, 64, 128)
        for stages in (3, 4, 5, 6)
        for warps in (4, 8)
        if m * n <= 32 * warps * 128 and stages * k * (2 * m + n) * 2 <= 200 << 10
    ]


SPEC = KernelSpec(
    name="norm_linear",
    implementations={"triton": norm_linear},
    baselines=(EAGER, COMPILED, COMPILED_MAX, Peer("torch", load=lambda: _torch)),
    pytorch=("torch",),
    reference=norm_linear_reference,
    make_inputs=make_inputs,
    cost=cost,
    cases=CASES,
    grads=("x", "norm_weight", "weight", "residual"),
    # y times its gradient stands for the sum that the norm's gradient takes: where y overflows in fp16, that is not
    # finite (`norm_linear` says so).
    limits={"norm_weight": 10.0},
    unit="rows",
    items=lambda case: case.dims["rows"],
    fuzz={"rows": (0, 20), "dim": (1, 40), "cols": (1, 40)},
    host_cases=(replace(_case(4, 64, 192, BF16), name="4x64x192-bf16-host"),),
    tunables=(
        Tunable(configs, "pick_fwd_config", "fwd", _product_candidates),
        Tunable(configs, "pick_bwd_config", "bwd", _product_candidates),
    ),
)

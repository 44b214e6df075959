"""The declaration of heads_mlp: cases, cost, peers. `python -m harness bench --kernel heads_mlp`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from harness.spec import COMPILED, COMPILED_MAX, EAGER, Case, Cost, Inputs, KernelSpec, Op, Peer, Tunable

from . import configs, heads_mlp
from .configs import heads_backward, heads_forward
from .reference import heads_mlp_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _case(
    rows: int,
    dim: int,
    heads: int,
    hidden: int,
    dim_out: int,
    dtype: torch.dtype,
    activation: str = "silu",
    suffix: str = "",
) -> Case:
    """A case. Those that are bf16 and have no suffix are bench cases."""
    short = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
    words = f"{rows}x{dim}-{heads}x{hidden}x{dim_out}", short, suffix
    dims = dict(rows=rows, dim=dim, heads=heads, hidden=hidden, dim_out=dim_out)
    name = "-".join(filter(None, words))
    return Case(name, dims, dtype, dict(activation=activation), bench=dtype == BF16 and not suffix)


TIMED = tuple(_case(rows, 512, 10, 1365, 3, BF16) for rows in (564, 5_000, 205_000))
CASES = (
    # Ten heads of a transformer neural process: each has (logit, mean, log of the standard deviation) of a component.
    *TIMED,
    # Typical failures: default options first, then no rows, sizes of one, several tiles. Every check runs on each case,
    # so these are few: test_heads_mlp.py tests the other activations, and so do the GPU's cases.
    _case(11, 8, 2, 18, 3, FP32),
    _case(9, 6, 2, 18, 5, FP16),
    _case(0, 8, 2, 7, 3, FP32),
    _case(1, 1, 1, 1, 1, FP32),
    _case(67, 71, 2, 70, 17, FP32),
    # On a GPU: tiles with and without remainders, unaligned rows, two chunks.
    _case(517, 256, 4, 683, 3, BF16, "gelu", "odd"),
    _case(1200, 131, 3, 263, 7, BF16, "relu", "primes"),
    _case(9000, 128, 2, 130, 3, BF16, "gelu_tanh", "chunks"),
)
HOST_CASES = (_case(4, 64, 4, 96, 3, BF16, "silu", "host"),)


def make_inputs(case: Case, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    """Random inputs, with weights scaled so that the activation's argument and y have variances of about 1."""
    rows, dim, heads, hidden, dim_out = (case.dims[n] for n in ("rows", "dim", "heads", "hidden", "dim_out"))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=case.dtype, device=device, generator=generator)

    return {
        "x": normal(rows, dim),
        "w1": normal(heads, hidden, dim).mul_(dim**-0.5),
        "w2": normal(heads, dim_out, hidden).mul_(hidden**-0.5),
        **case.params,
    }


def cost(case: Case, mode: str) -> Cost:
    """Compulsory traffic. Forward: x, the weights, y. Backward: dy, x, the weights, and a gradient of each.
    Recomputation in the backward is a choice of the implementation and does not count."""
    rows, dim, heads, hidden, dim_out = (case.dims[n] for n in ("rows", "dim", "heads", "hidden", "dim_out"))
    weights = heads * hidden * (dim + dim_out)
    passes, elements = {
        "fwd": (1, rows * (dim + heads * dim_out) + weights),
        "bwd": (2, rows * (2 * dim + heads * dim_out) + 2 * weights),
    }[mode]
    pipe = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[case.dtype]
    return Cost(flops=2 * passes * rows * weights, bytes=elements * case.dtype.itemsize, pipe=pipe)


def _padded() -> Op:
    """The compiled reference, with the hidden padded with zeros to a multiple of 128. Each set of weights is padded
    once, outside the timed region. The weights' gradients are views of those of the padded weights."""
    op = torch.compile(heads_mlp_reference, dynamic=False)
    made: dict[tuple, tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = {}

    def pad(*weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        key = tuple((w.data_ptr(), w._version, w.shape) for w in weights)
        if key not in made:
            if len(made) == 8:
                del made[next(iter(made))]
            more = -weights[0].shape[1] % 128
            # The weights are kept alive, so that no others are allocated at their addresses.
            kept = tuple(w.detach() for w in weights)
            made[key] = kept, (F.pad(kept[0], (0, 0, 0, more)), F.pad(kept[1], (0, more)))
        return made[key][1]

    class Padded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, activation, x, w1, w2):
            if not any(ctx.needs_input_grad):
                return op(x, *pad(w1, w2), activation)
            ctx.leaves = [t.detach().requires_grad_() for t in (x, *pad(w1, w2))]
            ctx.hidden = w1.shape[1]
            with torch.enable_grad():
                ctx.y = op(*ctx.leaves, activation)
            return ctx.y.detach()

        @staticmethod
        def backward(ctx, dy):
            dx, dw1, dw2 = torch.autograd.grad(ctx.y, ctx.leaves, dy, retain_graph=True)
            return None, dx, dw1[:, : ctx.hidden], dw2[:, :, : ctx.hidden]

    return lambda x, w1, w2, activation: Padded.apply(activation, x, w1, w2)


def _padded_supports(case: Case, mode: str) -> str | None:
    return None if case in TIMED else "compared only in the timed cases"


def _fwd_candidates(case: Case) -> list[configs.FwdConfig]:
    """With a resident x, shared memory holds 128 rows and 32 columns of the hidden, or 64 and 64."""
    again = [
        configs.FwdConfig(m, h, k, heads, False, stages, warps)
        for m, h, warps in ((64, 128, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8))
        for k in (32, 64, 128)
        for heads in (1, 5, 10)
        for stages in (3, 4)
    ]
    resident = [
        configs.FwdConfig(m, h, 512, heads, True, stages, warps)
        for m, h, warps in ((64, 32, 4), (64, 64, 4), (128, 32, 8))
        for heads in (1, 5, 10)
        for stages in (1, 2, 3)
    ]
    return again + resident


def _dhidden_candidates(case: Case) -> list[heads_backward.DhiddenConfig]:
    return [
        heads_backward.DhiddenConfig(m, h, k, tiles, stages, warps)
        for m, h, warps in ((64, 64, 4), (64, 128, 4), (128, 64, 8), (128, 128, 8))
        for k in (32, 64)
        for tiles in (1, 4, 16)
        for stages in (3, 4)
    ]


def _tile_candidates(case: Case) -> list[heads_backward.TileConfig]:
    return [
        heads_backward.TileConfig(m, n, k, stages, warps)
        for m, n, warps in ((64, 64, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8), (256, 128, 8))
        for k in (32, 64)
        for stages in (3, 4)
    ]


def _cuda_candidates(case: Case) -> list[heads_forward.CudaConfig]:
    return [
        heads_forward.CudaConfig(heads, cluster, stages)
        for heads in (1, 2, 5, 10)
        for cluster in (1, 2)
        for stages in (11, 13)
    ]


def _dhidden_cuda_candidates(case: Case) -> list[heads_backward.CudaConfig]:
    return [heads_backward.CudaConfig(tiles, 2, stages) for tiles in (5, 7, 11, 22, 33, 66) for stages in (9, 11)]


def _products_candidates(case: Case) -> list[heads_backward.ProductsConfig]:
    return [
        heads_backward.ProductsConfig(heads, True, cluster, beside, ahead, stages=4)
        for heads in (1, 2, 3, 5, 10)
        for cluster, beside in ((1, False), (2, False), (2, True))
        for ahead in (0, 1, 2, 3)
    ]


def _in_cuda(case: Case) -> bool:
    """Whether the version for Hopper supports a case with the layout of `make_inputs`."""
    dim = case.dims["dim"]
    fits = dim <= heads_forward.MAX_DIM and dim % 8 == 0 and case.dims["dim_out"] <= heads_forward.MAX_OUT
    return bool(case.dtype != FP32 and case.dims["rows"] and fits)


def _unsupported_reason(implementation: str, case: Case, mode: str) -> str | None:
    if implementation == "cuda" and not _in_cuda(case):
        return "requires a 16-bit dtype, at most 512 columns of x, a multiple of 8, and at most 8 columns of y"
    return None


def _alias_reason(implementation: str, case: Case, mode: str) -> str | None:
    """The checks skip "cuda", because they use layouts that it does not support. test_sm90.py checks it."""
    if implementation == "cuda":
        return "checked by its own tests, and timed as auto where auto selects it"
    if implementation == "triton" and mode == "bwd":
        return "same backward as auto"
    taken = configs.pick_backend("auto", case.dims["rows"], possible=_in_cuda(case))
    return "same version as auto" if implementation == taken else None


CUDA_CASES = tuple(replace(case, min_capability=(9, 0)) for case in TIMED if case.dims["rows"] > heads_forward.MIN_ROWS)

SPEC = KernelSpec(
    name="heads_mlp",
    implementations={
        "auto": heads_mlp,
        "triton": partial(heads_mlp, backend="triton"),
        "cuda": partial(heads_mlp, backend="cuda"),
    },
    # Below 9.0 "auto" is "triton".
    min_capability={"triton": (9, 0), "cuda": (9, 0)},
    unsupported_reason=_unsupported_reason,
    alias_reason=_alias_reason,
    baselines=(
        EAGER,
        replace(COMPILED, supports=_padded_supports),
        replace(COMPILED_MAX, supports=_padded_supports),
        Peer("padded", load=_padded, supports=_padded_supports),
    ),
    pytorch=("eager",),
    reference=heads_mlp_reference,
    make_inputs=make_inputs,
    cost=cost,
    cases=CASES,
    grads=("x", "w1", "w2"),
    determinism={"fwd": "run-to-run", "bwd": "run-to-run"},
    unit="rows",
    items=lambda case: case.dims["rows"],
    fuzz={"rows": (0, 20), "dim": (1, 20), "heads": (1, 3), "hidden": (1, 20), "dim_out": (1, 5)},
    # In Triton 3.6, tiles of 128 x 256 and 128 x 128, which are the fastest, spill. In CUDA C++ GELU spills with 256 or
    # 384 columns of x and its tanh form with 64, once per unit of work or tile.
    spills={"_heads_mlp_fwd_kernel": 12, "_heads_dhidden_kernel": 112, "heads_dhidden": 16},
    tunables=(
        Tunable(configs, "pick_fwd_config", "fwd", _fwd_candidates, TIMED, implementation="triton"),
        Tunable(heads_forward, "pick_cuda_config", "fwd", _cuda_candidates, CUDA_CASES),
        Tunable(heads_backward, "pick_cuda_config", "bwd", _dhidden_cuda_candidates, CUDA_CASES),
        Tunable(heads_backward, "pick_products_config", "bwd", _products_candidates, CUDA_CASES[:2]),
        Tunable(heads_backward, "pick_dhidden_config", "bwd", _dhidden_candidates, TIMED),
        Tunable(heads_backward, "pick_dx_config", "bwd", _tile_candidates, TIMED),
        Tunable(heads_backward, "pick_dw1_config", "bwd", _tile_candidates, TIMED),
    ),
    host_cases=HOST_CASES,
)

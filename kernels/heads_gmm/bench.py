"""The declaration of heads_gmm: cases, cost, peers. `python -m harness bench --kernel heads_gmm`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from harness.spec import COMPILED, COMPILED_MAX, EAGER, Case, Cost, Inputs, KernelSpec, Op, Peer, Tunable

from . import configs, heads_gmm
from .configs import heads_backward, heads_forward
from .reference import heads_gmm_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _case(rows: int, dim: int, heads: int, hidden: int, dtype: torch.dtype, suffix: str = "", **params) -> Case:
    """A case. `biased`: with a bias; `extreme`: see make_inputs. TIMED and AGAIN are bench cases."""
    short = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
    name = "-".join(filter(None, (f"{rows}x{dim}-{heads}x{hidden}", short, suffix)))
    dims = dict(rows=rows, dim=dim, heads=heads, hidden=hidden)
    params = {"activation": "silu", "reduction": "mean", "biased": True, **params}
    return Case(name, dims, dtype, params, bench=dtype == BF16 and suffix in ("", "again"))


ROWS = (564, 5_000, 205_000)
TIMED = tuple(_case(rows, 512, 10, 1365, BF16) for rows in ROWS)
# TIMED saves the parameters, since the peers save all intermediate results. With AGAIN the backward recomputes them.
AGAIN = tuple(_case(rows, 512, 10, 1365, BF16, "again", save="input") for rows in ROWS)
CASES = (
    # Ten components of a transformer neural process, as in heads_mlp.
    *TIMED,
    *AGAIN,
    # Typical failures: default options first, then no rows, sizes of one, several tiles, extreme standard deviations.
    _case(11, 8, 2, 18, FP32, "none", reduction="none"),
    _case(9, 6, 2, 18, FP16, "sum", reduction="sum", biased=False),
    _case(0, 8, 2, 7, FP32, "sum", reduction="sum"),  # the mean of no rows is NaN, which opcheck cannot compare
    _case(1, 1, 1, 1, FP32, "one"),
    _case(67, 71, 3, 70, FP32, "kept", save="parameters"),
    _case(37, 8, 5, 12, FP32, "extreme", reduction="none", extreme=True),
    # On a GPU: tiles with and without remainders, two chunks, unaligned rows.
    _case(517, 256, 4, 683, BF16, "odd", activation="gelu"),
    _case(1200, 131, 3, 263, BF16, "primes", activation="relu", reduction="none"),
    _case(9000, 128, 2, 130, BF16, "chunks", activation="gelu_tanh", save="parameters"),
    _case(9000, 128, 3, 130, BF16, "chunks-again", reduction="none", biased=False),
)
HOST_CASES = (_case(4, 64, 4, 96, BF16, "host"),)


def make_inputs(case: Case, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    """Random inputs, with weights scaled so that the activation's argument and the means have variances of about 1, and
    the logarithms of the standard deviations of a quarter. `extreme`: the latter have variances of about 60, and means
    and y are a few times 1e4."""
    rows, dim, heads, hidden = (case.dims[n] for n in ("rows", "dim", "heads", "hidden"))
    params = dict(case.params)
    biased, extreme = params.pop("biased"), params.pop("extreme", False)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=case.dtype, device=device, generator=generator)

    x, w1 = normal(rows, dim), normal(heads, hidden, dim).mul_(dim**-0.5)
    # The mean square of silu(z) is 0.36.
    w2, y = normal(heads, 3, hidden).mul_((0.36 * max(1, hidden)) ** -0.5), normal(rows)
    w2[:, 2] *= 8.0 if extreme else 0.5
    if extreme:
        w2[:, 1] *= 1e4
        y *= 1e4
    return {"x": x, "w1": w1, "w2": w2, "y": y, "bias": 0.1 * normal(heads, 3) if biased else None, **params}


def cost(case: Case, mode: str) -> Cost:
    """Compulsory traffic. Forward: x, the weights, y. Backward: x, the weights, y, and a gradient of each.
    Recomputation in the backward is a choice and does not count; nor do the mixture's 22 FLOPs a component, compared
    with 1.4 million."""
    rows, dim, heads, hidden = (case.dims[n] for n in ("rows", "dim", "heads", "hidden"))
    weights = heads * hidden * (dim + 3)
    inputs = rows * (dim + 1) + weights + (3 * heads if case.params["biased"] else 0)
    passes, elements = {"fwd": (1, inputs), "bwd": (2, 2 * inputs)}[mode]
    loss = 4 * (rows if case.params["reduction"] == "none" else 1)
    pipe = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[case.dtype]
    return Cost(flops=2 * passes * rows * weights, bytes=elements * case.dtype.itemsize + loss, pipe=pipe)


def _padded() -> Op:
    """The compiled reference, with the hidden padded with zeros to a multiple of 128. Each set of weights is padded
    once, outside the timed region. The weights' gradients are views of those of the padded weights."""
    op = torch.compile(heads_gmm_reference, dynamic=False)
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
        def forward(ctx, options, x, w1, w2, y, bias):
            if not any(ctx.needs_input_grad):
                return op(x, *pad(w1, w2), y, bias, **options)
            ctx.leaves = [t.detach().requires_grad_() for t in (x, *pad(w1, w2), y, bias)]
            ctx.hidden = w1.shape[1]
            with torch.enable_grad():
                ctx.loss = op(*ctx.leaves, **options)
            return ctx.loss.detach()

        @staticmethod
        def backward(ctx, dloss):
            dx, dw1, dw2, dy, dbias = torch.autograd.grad(ctx.loss, ctx.leaves, dloss, retain_graph=True)
            return None, dx, dw1[:, : ctx.hidden], dw2[:, :, : ctx.hidden], dy, dbias

    return lambda x, w1, w2, y, bias, **options: Padded.apply(options, x, w1, w2, y, bias)


def _padded_supports(case: Case, mode: str) -> str | None:
    return None if case in TIMED + AGAIN else "compared only in the timed cases"


def _fwd_candidates(case: Case) -> list[configs.FwdConfig]:
    return [
        configs.FwdConfig(m, h, k, heads, stages, warps)
        for m, h, warps in ((64, 128, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8))
        for k in (32, 64)
        for heads in (1, 5, 10)
        for stages in (3, 4)
    ]


def _dhidden_candidates(case: Case) -> list[heads_backward.DhiddenConfig]:
    return [
        heads_backward.DhiddenConfig(m, h, k, tiles, stages, warps)
        for m, h, warps in ((64, 64, 4), (64, 128, 4), (128, 64, 8), (128, 128, 8))
        for k in (32, 64)
        for tiles in (1, 4)
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


def _in_cuda(case: Case) -> bool:
    """Whether the version for Hopper supports a case with the layout of `make_inputs`."""
    dim = case.dims["dim"]
    fits = dim <= heads_forward.MAX_DIM and dim % 8 == 0
    return bool(case.dtype != FP32 and case.dims["rows"] and fits)


def _unsupported_reason(implementation: str, case: Case, mode: str) -> str | None:
    if implementation == "cuda" and not _in_cuda(case):
        return "requires a 16-bit dtype, and at most 512 columns of x, a multiple of 8"
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
    name="heads_gmm",
    implementations={
        "auto": heads_gmm,
        "triton": partial(heads_gmm, backend="triton"),
        "cuda": partial(heads_gmm, backend="cuda"),
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
    reference=heads_gmm_reference,
    make_inputs=make_inputs,
    cost=cost,
    cases=CASES,
    grads=("x", "w1", "w2", "y", "bias"),
    determinism={"fwd": "run-to-run", "bwd": "run-to-run"},
    unit="rows",
    items=lambda case: case.dims["rows"],
    # In CUDA C++ GELU spills with 256 or 384 columns of x and its tanh form with 64, once per unit of work or tile. In
    # Triton the tile of 128 x 256 for many rows spills 16 or 20 bytes. 128 x 128 does not spill, but 128 x 256 was the
    # fastest of those measured (configs.pick_fwd_config). `_heads_dhidden_kernel` spills as in heads_mlp.
    spills={"heads_dhidden": 16, "_heads_gmm_fwd_kernel": 20, "_heads_dhidden_kernel": 112},
    fuzz={"rows": (0, 20), "dim": (1, 12), "heads": (1, 4), "hidden": (1, 20)},
    tunables=(
        Tunable(configs, "pick_fwd_config", "fwd", _fwd_candidates, TIMED, implementation="triton"),
        Tunable(heads_forward, "pick_cuda_config", "fwd", _cuda_candidates, CUDA_CASES),
        Tunable(heads_backward, "pick_cuda_config", "bwd", _dhidden_cuda_candidates, CUDA_CASES),
        Tunable(heads_backward, "pick_dhidden_config", "bwd", _dhidden_candidates, TIMED),
    ),
    host_cases=HOST_CASES,
)

"""The declaration of grouped_gemm: cases, cost, peers. `python -m harness bench --kernel grouped_gemm`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from functools import partial

import torch

from harness.spec import EAGER, Case, Cost, Inputs, KernelSpec, Op, Peer, Tunable

from . import configs, grouped_gemm
from .reference import grouped_gemm_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _case(
    groups: int, rows: int, n: int, k: int, dtype: torch.dtype, split: str = "random", suffix: str = "", **params
) -> Case:
    """`split`: the distribution of rows over the groups. All but "random" leave no rows past the last offset, and are
    the same in each call; a bench case has one of these and no suffix. With `only_weights` x has no gradient, and only
    the backward is run."""
    short = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
    only = "wgrad" if params.get("only_weights") else ""
    name = "-".join(
        filter(None, (f"g{groups}-{rows}x{n}x{k}", split if split != "random" else "", only, short, suffix))
    )
    modes = ("bwd",) if only else ()
    params |= {"split": split} if split != "random" else {}
    dims = dict(groups=groups, rows=rows, n=n, k=k)
    timed = split != "random" and not suffix and dtype == BF16
    return Case(name, dims, dtype, params, bench=timed, modes=modes)


CASES = (
    # Eight large experts as in Mixtral; many small ones as in DeepSeek's MoE, whose projections are 2048 -> 1408 and
    # back. A collapsed router sends all rows to one group ("onehot").
    *(_case(8, 8192, 4096, 4096, BF16, split) for split in ("equal", "zipf", "onehot")),
    *(_case(64, 32768, 1408, 2048, BF16, split) for split in ("equal", "zipf", "onehot")),
    _case(64, 32768, 2048, 1408, BF16, "zipf"),
    *(_case(128, 32768, 1408, 2048, BF16, split) for split in ("equal", "zipf", "onehot")),
    # The gradient of the weights alone.
    _case(8, 8192, 4096, 4096, BF16, "equal", only_weights=True),
    _case(8, 8192, 4096, 4096, BF16, "zipf", only_weights=True),
    *(_case(groups, 32768, 1408, 2048, BF16, "zipf", only_weights=True) for groups in (64, 128)),
    # Typical failures: default options first, then no rows, sizes of one, more groups than rows, primes, several tiles,
    # the bias, equal groups, and all groups but one empty.
    _case(3, 40, 24, 20, FP32),
    _case(4, 50, 20, 24, FP32, bias=True),
    _case(3, 50, 24, 16, FP16),
    _case(3, 40, 16, 24, FP16, bias=True),
    _case(2, 0, 8, 8, FP32),
    _case(1, 1, 1, 1, FP32),
    _case(29, 23, 17, 19, FP32),
    _case(5, 211, 131, 67, FP32),
    _case(5, 307, 37, 257, FP16, bias=True),
    _case(4, 96, 32, 32, FP32, "equal"),
    _case(3, 60, 24, 16, FP32, "zipf"),
    _case(4, 97, 32, 32, FP32, "onehot"),
    _case(40, 100, 16, 16, FP32, "zipf"),
    _case(4, 50, 20, 24, FP32, only_weights=True),
    # On a GPU: tiles of 128 rows with and without remainders.
    _case(7, 1500, 264, 136, BF16),
    _case(7, 1500, 512, 256, BF16, bias=True),
    _case(9, 2311, 509, 331, BF16, "zipf", "odd"),
    _case(7, 1500, 520, 392, FP16, "zipf", "tiles"),
)


def group_sizes(case: Case) -> list[int]:
    """The number of rows of each group, for a split that is not random."""
    groups, rows = case.dims["groups"], case.dims["rows"]
    split = case.params.get("split")
    if split == "onehot":
        return [rows if group == groups // 2 else 0 for group in range(groups)]
    # Zipf's law by the rank of a group. Ranks are permuted so that adjacent groups differ.
    shares = [1.0 if split == "equal" else 1 / (1 + group * 37 % groups) for group in range(groups)]
    ends = [round(rows * share / sum(shares)) for share in itertools.accumulate(shares)]
    return [end - start for start, end in itertools.pairwise([0, *ends])]


def make_inputs(case: Case, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    """Random inputs; y has a variance of 1. Random offsets leave rows past the last one, and groups without rows."""
    d, params = case.dims, dict(case.params)
    index = torch.int64 if case.dtype == FP32 else torch.int32

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=case.dtype, device=device, generator=generator)

    if params.pop("split", None):
        ends = torch.tensor(list(itertools.accumulate(group_sizes(case))), dtype=index)
        # copy_ rather than a transfer, because the ahead-of-time build has a GPU in name only.
        offsets = torch.empty(ends.shape, dtype=index, device=device).copy_(ends)
    else:
        ends = torch.randint(0, d["rows"] + 1, (d["groups"],), dtype=index, device=device, generator=generator)
        offsets = ends.sort().values
    inputs: Inputs = {
        "constant" if params.pop("only_weights", False) else "x": normal(d["rows"], d["k"]),
        "weights": normal(d["groups"], d["n"], d["k"]).mul_(d["k"] ** -0.5),
        "offsets": offsets,
    }
    if params.pop("bias", False):
        inputs["bias"] = normal(d["groups"], d["n"])
    return {**inputs, **params}


def _of_constant(op: Op) -> Op:
    """The op with an additional name for x, `constant`, which the harness gives no gradient."""

    @functools.wraps(op)
    def run(weights, offsets, x=None, constant=None, **options):
        if constant is None:
            return op(x, weights, offsets, **options)
        try:
            return op(constant, weights, offsets, **options)
        except (TypeError, ValueError) as error:  # restores the name that the argument has here
            raise type(error)(re.sub(r"\bx\b", "constant", str(error))) from error

    return run


def cost(case: Case, mode: str) -> Cost:
    """Compulsory traffic. Forward: x, y and the weights of groups that have rows. Backward: dy, x, dx, those weights,
    all gradients; for the weights' gradient alone dy, x and that gradient."""
    groups, rows, n, k = (case.dims[name] for name in ("groups", "rows", "n", "k"))
    used = sum(size > 0 for size in group_sizes(case)) if "split" in case.params else min(groups, rows)
    weights, bias = n * k, n * case.params.get("bias", False)
    forward = rows * (n + k) + used * (weights + bias)
    backward = rows * (n + 2 * k) + used * weights + groups * (weights + bias)
    if case.params.get("only_weights"):
        backward = rows * (n + k) + groups * weights
    products, elements = {"fwd": (1, forward), "bwd": (2, backward)}[mode]
    products = 1 if case.params.get("only_weights") else products
    pipe = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[case.dtype]
    size = case.dtype.itemsize
    return Cost(flops=2 * products * rows * n * k, bytes=elements * size + 8 * groups, pipe=pipe)


def extra_bytes(case: Case, mode: str) -> dict[str, int]:
    d = case.dims
    if case.params.get("only_weights"):
        return {"the weights": -d["groups"] * d["n"] * d["k"] * case.dtype.itemsize}
    idle = sum(size == 0 for size in group_sizes(case)) if "split" in case.params else 0
    return {"weights of groups without rows": -idle * d["n"] * d["k"] * case.dtype.itemsize}


def _torch() -> Op:
    from torch.nn.functional import grouped_mm

    def function(x, weights, offsets):
        return grouped_mm(x, weights.mT, offs=offsets)

    return function


class _Looped(torch.autograd.Function):
    """One cuBLAS GEMM for each group, with sizes that the host knows."""

    @staticmethod
    def forward(ctx, x, weights, ends):
        ctx.save_for_backward(x, weights)
        ctx.ends = ends
        y = x.new_empty(x.shape[0], weights.shape[1])
        for group, (start, end) in enumerate(itertools.pairwise(ends)):
            if end > start:
                torch.mm(x[start:end], weights[group].mT, out=y[start:end])
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weights = ctx.saved_tensors
        dx, dweights = torch.empty_like(x) if ctx.needs_input_grad[0] else None, torch.empty_like(weights)
        for group, (start, end) in enumerate(itertools.pairwise(ctx.ends)):
            if end > start:
                if dx is not None:
                    torch.mm(dy[start:end], weights[group], out=dx[start:end])
                torch.mm(dy[start:end].mT, x[start:end], out=dweights[group])
            else:
                dweights[group].zero_()
        return dx, dweights, None


def _loop() -> Op:
    made: list[list[int]] = []

    def function(x, weights, offsets):
        if not made:
            made.append([0, *offsets.tolist()])
        return _Looped.apply(x, weights, made[0])

    return function


def _quack() -> Op:
    from quack.gemm_interface import gemm

    class Quack(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weights, ends):
            ctx.save_for_backward(x, weights, ends)
            return gemm(x, weights.mT, cu_seqlens_m=ends)

        @staticmethod
        def backward(ctx, dy):
            x, weights, ends = ctx.saved_tensors
            dx = gemm(dy, weights, cu_seqlens_m=ends) if ctx.needs_input_grad[0] else None
            return dx, gemm(dy.mT, x, cu_seqlens_k=ends), None

    made: list[torch.Tensor] = []

    def function(x, weights, offsets):
        if not made:
            made.append(torch.nn.functional.pad(offsets, (1, 0)))
        return Quack.apply(x, weights, made[0])

    return function


def _deep_gemm() -> Op:
    from deep_gemm import m_grouped_bf16_gemm_nt_contiguous

    made: list[torch.Tensor] = []

    def function(x, weights, offsets):
        if not made:
            row = torch.arange(x.shape[0], dtype=offsets.dtype, device=x.device)
            made.append(torch.searchsorted(offsets, row, right=True).int())
        y = x.new_empty(x.shape[0], weights.shape[1])
        m_grouped_bf16_gemm_nt_contiguous(x, weights, y, made[0])
        return y

    return function


def _fixed(case: Case, mode: str) -> str | None:
    """For peers that preprocess the offsets once, as a model would for its forward and backward."""
    return None if case.bench or case in HOST_CASES else "reads the offsets once, but here each call has others"


def _aligned(case: Case, mode: str) -> str | None:
    if mode != "fwd":
        return "has no backward"
    if reason := _fixed(case, mode):
        return reason
    return (
        "requires groups that begin at multiples of 128 rows" if any(size % 128 for size in group_sizes(case)) else None
    )


def _takes(case: Case, mode: str) -> str | None:
    """For peers that require bf16 in rows of whole 16-byte vectors, no bias, and no rows past the last offset."""
    return None if case.bench or case in HOST_CASES else "does not support rows past the last offset, or a bias"


def _rows_candidates(case: Case) -> list[configs.RowsConfig]:
    shapes = ((128, 64, 4, 2), (128, 64, 8, 1), (256, 64, 8, 1), (192, 64, 8, 1), (256, 32, 8, 1))
    return [
        configs.RowsConfig(n, k, raster, stages, warps, ctas)
        for n, k, warps, ctas in shapes
        if n & (n - 1) == 0
        for raster in (4, 8, 16)
        for stages in (3, 4)
    ]


def _weights_candidates(case: Case) -> list[configs.WeightsConfig]:
    return [
        configs.WeightsConfig(n, k, r, raster, stages, warps)
        for n, k, warps in ((128, 128, 4), (128, 128, 8), (128, 256, 8), (256, 128, 8))
        for r in (32, 64)
        for raster in (4, 8, 16)
        for stages in (3, 4)
    ]


def _cuda_candidates(case: Case) -> list[configs.CudaConfig]:
    shared = [configs.CudaConfig(*own) for own in itertools.product((3, 4), (2, 4, 8, 16, 32), (1, 2))]
    turns = [
        configs.CudaConfig(configs.cuda_stages(width), raster, cluster, width)
        for width in (192, 176, 160, 128)
        for raster in (2, 4, 8)
        for cluster in (1, 2)
    ]
    return [*shared, *turns]


def _in_cuda(case: Case) -> bool:
    """Whether the version for Hopper supports a case with the layout of `make_inputs`."""
    groups, rows, n, k = (case.dims[name] for name in ("groups", "rows", "n", "k"))
    large = rows and configs.pick_block_m(rows, groups, case.dtype, (9, 0)) == 128
    return bool(case.dtype != FP32 and large and n % 8 == 0 and k % 8 == 0)


def _unsupported_reason(implementation: str, case: Case, mode: str) -> str | None:
    if implementation == "cuda" and not _in_cuda(case):
        return "requires a 16-bit dtype, N and K multiples of 8, and more than 64 rows per group on average"
    return None


def _alias_reason(implementation: str, case: Case, mode: str) -> str | None:
    """The checks skip "cuda", because they use layouts that it does not support. test_sm90.py checks it."""
    if implementation == "triton":
        d = case.dims
        wide = case.dtype != FP32 and d["rows"] > 64 * d["groups"] and d["n"] % 8 == d["k"] % 8 == 0
        return None if wide else "same version as auto"
    return "checked by its own tests, and timed as auto where auto selects it" if implementation == "cuda" else None


WHOLE = tuple(case for case in CASES if case.bench and not case.modes)
CUDA_CASES = tuple(dataclasses.replace(case, min_capability=(9, 0)) for case in WHOLE)
HOST_CASES = (dataclasses.replace(_case(4, 256, 64, 64, BF16, "equal", "host"), bench=False),)

SPEC = KernelSpec(
    name="grouped_gemm",
    implementations={
        "auto": _of_constant(grouped_gemm),
        "triton": _of_constant(partial(grouped_gemm, backend="triton")),
        "cuda": _of_constant(partial(grouped_gemm, backend="cuda")),
    },
    # Below 9.0 "auto" is "triton".
    min_capability={"triton": (9, 0), "cuda": (9, 0)},
    unsupported_reason=_unsupported_reason,
    alias_reason=_alias_reason,
    baselines=(
        EAGER,
        Peer("torch", load=lambda: _of_constant(_torch()), supports=_takes),
        Peer("loop", load=lambda: _of_constant(_loop()), supports=_fixed),
        Peer("quack", load=lambda: _of_constant(_quack()), supports=_fixed),
        Peer("deepgemm", load=lambda: _of_constant(_deep_gemm()), supports=_aligned),
    ),
    pytorch=("torch",),
    reference=_of_constant(grouped_gemm_reference),
    make_inputs=make_inputs,
    cost=cost,
    extra_bytes=extra_bytes,
    cases=CASES,
    grads=("x", "weights", "bias"),
    determinism={"fwd": "run-to-run", "bwd": "run-to-run"},
    unit="rows",
    items=lambda case: case.dims["rows"],
    fuzz={"groups": (1, 9), "rows": (0, 70), "n": (1, 40), "k": (1, 40)},
    tunables=(
        Tunable(configs, "pick_rows_config", "fwd", _rows_candidates, WHOLE, implementation="triton"),
        Tunable(configs, "pick_weights_config", "bwd", _weights_candidates, WHOLE, implementation="triton"),
        Tunable(configs, "pick_cuda_rows_config", "fwd", _cuda_candidates, CUDA_CASES),
        Tunable(configs, "pick_cuda_weights_config", "bwd", _cuda_candidates, CUDA_CASES),
    ),
    host_cases=HOST_CASES,
)

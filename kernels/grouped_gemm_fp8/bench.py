"""The declaration of grouped_gemm_fp8: cases, cost, peers. `python -m harness bench --kernel grouped_gemm_fp8`.

A case calls one of the two public functions: with `wgrad` that of the weights' gradient. fp8 operands are bytes here,
which the callables view as float8: most operations of the checks are undefined for float8. A case's dtype is that of
the operands, with results in bf16 or, for the gradient, fp32. In cases for Triton's interpreter, where kernels decode
the bytes, it is that of the result, fp16.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from harness import execute
from harness.spec import EAGER, Case, Cost, Inputs, KernelSpec, Op, Peer, Tunable, Yardstick

from . import configs, grouped_gemm_fp8, grouped_gemm_fp8_wgrad
from .operands import BLOCK, FIRST_CAPABILITY, blocks
from .reference import grouped_gemm_fp8_reference, grouped_gemm_fp8_wgrad_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
UNIT = 16  # N and K are multiples of it, and for the weights' gradient T


def _case(
    groups: int, rows: int, n: int, k: int, split: str = "random", dtype: torch.dtype | None = None, **params: Any
) -> Case:
    """A case named by G, T x N x K. `split`: the distribution of rows over the groups; all but "random" leave no rows
    past the last offset. `formats` of the two operands, by default e4m3 for both. `dtype`: fp16 for fp16 results."""
    formats, bench = params.pop("formats", "e4m3"), params.pop("bench", False)
    wgrad = params.pop("wgrad", False)
    words = [f"g{groups}-{rows}x{n}x{k}", "wgrad" if wgrad else "", split if split != "random" else ""]
    words += ["" if dtype is None else "fp16", formats]
    of_rows = {"rows16": rows // UNIT} if wgrad else {"rows": rows}
    dims = {"groups": groups, **of_rows, "n16": n // UNIT, "k16": k // UNIT}
    options = {"split": split, "formats": formats, "wgrad": wgrad}
    own = dtype or FORMATS[formats.split(".")[0]]
    least = (0, 0) if dtype else FIRST_CAPABILITY
    return Case("-".join(filter(None, words)), dims, own, options, bench, min_capability=least)


CASES = (
    # Eight large experts as in Mixtral; many small ones as in DeepSeek's MoE. "padded" is Zipf's law in multiples of
    # 128 rows, as a mixture pads its groups for block scales.
    *(_case(8, 8192, 4096, 4096, split, bench=True) for split in ("equal", "zipf")),
    *(_case(64, 32768, 2048, 1408, split, bench=True) for split in ("equal", "zipf", "padded")),
    _case(8, 8192, 4096, 4096, "equal", bench=True, wgrad=True),
    *(_case(64, 32768, 2048, 1408, split, bench=True, wgrad=True) for split in ("equal", "zipf", "padded")),
    # Typical failures: default options first, partial blocks in every dimension, formats, no rows, sizes of one, equal
    # groups, and all groups but one empty.
    _case(3, 40, 48, 208, dtype=FP16),
    _case(4, 50, 144, 272, dtype=FP16, formats="e4m3.e5m2"),
    _case(2, 0, 32, 32, dtype=FP16),
    _case(3, 5, 32, 0, dtype=FP16),
    _case(1, 1, 16, 16, dtype=FP16),
    _case(29, 23, 16, 32, "zipf", dtype=FP16, formats="e5m2"),
    _case(4, 97, 32, 160, "onehot", dtype=FP16),
    _case(3, 400, 48, 32, dtype=FP16, wgrad=True),
    _case(4, 272, 144, 48, dtype=FP16, formats="e5m2.e4m3", wgrad=True),
    _case(2, 0, 32, 32, dtype=FP16, wgrad=True),
    _case(1, 16, 16, 16, dtype=FP16, wgrad=True),
    _case(3, 384, 16, 32, "equal", dtype=FP16, wgrad=True),
    _case(4, 384, 32, 16, "onehot", dtype=FP16, wgrad=True),
    # On a GPU: several tiles with and without remainders, results in bf16 and fp32.
    _case(7, 1501, 528, 1424),
    _case(5, 1500, 512, 1024, "zipf", formats="e4m3.e5m2"),
    _case(40, 700, 528, 400, "zipf"),
    _case(7, 1504, 528, 400, wgrad=True),
    _case(5, 2560, 512, 256, "padded", formats="e5m2.e4m3", wgrad=True),
)


def group_sizes(case: Case) -> list[int]:
    """The number of rows of each group, for a split that is not random."""
    groups, rows, split = case.dims["groups"], rows_of(case), case.params["split"]
    if split == "onehot":
        return [rows if group == groups // 2 else 0 for group in range(groups)]
    # Zipf's law by the rank of a group. Ranks are permuted so that adjacent groups differ.
    shares = [1.0 if split == "equal" else 1 / (1 + group * 37 % groups) for group in range(groups)]
    unit = BLOCK if split == "padded" else 1
    ends = [unit * round(rows / unit * share / sum(shares)) for share in itertools.accumulate(shares)]
    return [end - start for start, end in itertools.pairwise([0, *ends])]


def rows_of(case: Case) -> int:
    return UNIT * case.dims["rows16"] if case.params["wgrad"] else case.dims["rows"]


def sizes(case: Case) -> tuple[int, int, int, int]:
    """G, T, N and K."""
    return case.dims["groups"], rows_of(case), UNIT * case.dims["n16"], UNIT * case.dims["k16"]


def _offsets(case: Case, device: torch.device | str, generator: torch.Generator | None) -> torch.Tensor:
    """The offsets of a case. Random ones leave rows past the last one, and groups without rows."""
    groups, rows, _, _ = sizes(case)
    if case.params["split"] == "random":
        ends = torch.randint(0, rows + 1, (groups,), dtype=torch.int32, device=device, generator=generator)
        return ends.sort().values
    known = torch.tensor(list(itertools.accumulate(group_sizes(case))), dtype=torch.int32)
    # copy_ rather than a transfer, because the ahead-of-time build has a GPU in name only.
    return torch.empty(known.shape, dtype=torch.int32, device=device).copy_(known)


def make_inputs(case: Case, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    """Random inputs; the result has a variance of about 1. Scales come first, because the checks write special values
    into the first input. In timed cases 1x128 scales are column-major on 16-byte boundaries, as from
    `fp8(..., mn_major_scales=True)`."""
    if torch.device(device).type == "cuda" and torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        raise execute.Unavailable("needs compute capability {}.{}".format(*FIRST_CAPABILITY))
    groups, rows, n, k = sizes(case)
    formats = tuple(FORMATS[name] for name in (case.params["formats"].split(".") * 2)[:2])

    def codes(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        x = torch.randn(shape, dtype=FP32, device=device, generator=generator)
        return x.mul_(64).to(dtype).view(torch.uint8)

    def scale(shape: tuple[int, ...], least: float) -> torch.Tensor:
        if case.bench and len(shape) == 2:
            columns = torch.rand((shape[1], (shape[0] + 3) // 4 * 4), dtype=FP32, device=device, generator=generator)
            return columns.t()[: shape[0]].add_(1).mul_(least)
        return torch.rand(shape, dtype=FP32, device=device, generator=generator).add_(1).mul_(least)

    terms = rows / groups if case.params["wgrad"] else k
    of_a, of_b = 1 / 96, 1 / 96 / math.sqrt(max(terms, 1))
    if case.params["wgrad"]:
        inputs: Inputs = {
            "scale_dy": scale((n, blocks(rows)), of_a),
            "scale_x": scale((k, blocks(rows)), of_b),
            "dy_t": codes((n, rows), formats[0]),
            "x_t": codes((k, rows), formats[1]),
        }
    else:
        inputs = {
            "scale_x": scale((rows, blocks(k)), of_a),
            "scale_w": scale((groups, blocks(n), blocks(k)), of_b),
            "x": codes((rows, k), formats[0]),
            "weights": codes((groups, n, k), formats[1]),
        }
    out_dtype = FP16 if case.dtype == FP16 else FP32 if case.params["wgrad"] else BF16
    return {**inputs, "offsets": _offsets(case, device, generator), "formats": formats, "out_dtype": out_dtype}


def cost(case: Case, mode: str) -> Cost:
    """Compulsory traffic. Forward: x, y, weights of groups that have rows, their scales. Gradient: dy, x, dweights."""
    groups, rows, n, k = sizes(case)
    flops = 2 * rows * n * k
    if case.params["wgrad"]:
        scales, operands, out = blocks(rows) * (n + k), rows * (n + k), groups * n * k
    else:
        used = groups - _idle(case)
        scales = rows * blocks(k) + used * blocks(n) * blocks(k)
        operands, out = rows * k + used * n * k, rows * n
    width = 2 if case.dtype == FP16 or not case.params["wgrad"] else 4
    return Cost(flops=flops, bytes=operands + width * out + 4 * scales + 4 * groups, pipe="fp8")


def _idle(case: Case) -> int:
    """A lower bound on the number of groups without rows."""
    if case.params["split"] == "random":
        return max(0, case.dims["groups"] - rows_of(case))
    return sum(size == 0 for size in group_sizes(case))


def extra_bytes(case: Case, mode: str) -> dict[str, int]:
    _, _, n, k = sizes(case)
    idle = 0 if case.params["wgrad"] else _idle(case)
    return {"weights of groups without rows": -idle * (n * k + 4 * blocks(n) * blocks(k))}


def _of_bytes(forward: Op, gradient: Op) -> Op:
    """The op of a case, with operands given as bytes and their formats."""

    def run(offsets, formats, **inputs):
        if "dy_t" in inputs:
            codes = inputs.pop("dy_t").view(formats[0]), inputs.pop("x_t").view(formats[1])
            return gradient(*codes, inputs.pop("scale_dy"), inputs.pop("scale_x"), offsets, **inputs)
        codes = inputs.pop("x").view(formats[0]), inputs.pop("weights").view(formats[1])
        return forward(*codes, inputs.pop("scale_x"), inputs.pop("scale_w"), offsets, **inputs)

    return run


def _loop() -> Op:
    """One cuBLAS GEMM for each group, with sizes that the host knows and column-major scales."""
    from torch.nn.functional import ScalingType, scaled_mm

    line, square = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    made: list[list[int]] = []

    def ends(offsets):
        if not made:
            made.append([0, *offsets.tolist()])
        return enumerate(itertools.pairwise(made[0]))

    def columns(scale):
        return scale.t().contiguous().t()

    def forward(x, weights, scale_x, scale_w, offsets, out_dtype):
        y = torch.empty(x.shape[0], weights.shape[1], dtype=out_dtype, device=x.device)
        scale_w = torch.nn.functional.pad(scale_w, (0, -scale_w.shape[2] % 4))
        for group, (start, end) in ends(offsets):
            if end > start:
                of_rows = columns(scale_x[start:end])
                w, of_weight = weights[group].t(), scale_w[group].t()
                y[start:end] = scaled_mm(x[start:end], w, of_rows, line, of_weight, square, output_dtype=out_dtype)
        return y

    def gradient(dy_t, x_t, scale_dy, scale_x, offsets, out_dtype):
        shape = offsets.shape[0], dy_t.shape[0], x_t.shape[0]
        dweights = torch.zeros(shape, dtype=out_dtype, device=x_t.device)
        for group, (start, end) in ends(offsets):
            if end > start:
                of_dy, of_x = (columns(s[:, start // BLOCK : end // BLOCK]) for s in (scale_dy, scale_x))
                dy, x = dy_t[:, start:end].contiguous(), x_t[:, start:end].contiguous()
                dweights[group] = scaled_mm(dy, x.t(), of_dy, line, of_x, line, output_dtype=out_dtype)
        return dweights

    return _of_bytes(forward, gradient)


def _deep_gemm() -> Op:
    from deep_gemm import m_grouped_fp8_gemm_nt_contiguous

    made: list[torch.Tensor] = []

    def forward(x, weights, scale_x, scale_w, offsets, out_dtype):
        if not made:
            row = torch.arange(x.shape[0], dtype=offsets.dtype, device=x.device)
            made.append(torch.searchsorted(offsets, row, right=True).int())
        y = torch.empty(x.shape[0], weights.shape[1], dtype=out_dtype, device=x.device)
        m_grouped_fp8_gemm_nt_contiguous((x, scale_x), (weights, scale_w), y, made[0])
        return y

    def gradient(*_, **__):
        raise NotImplementedError("the weights' gradient")

    return _of_bytes(forward, gradient)


def _aligned(case: Case, mode: str) -> str | None:
    """For peers that preprocess the offsets once, as a model would."""
    if not case.bench and case not in HOST_CASES:
        return "reads the offsets once, but here each call has others"
    return (
        "requires groups that begin at multiples of 128 rows"
        if any(size % BLOCK for size in group_sizes(case))
        else None
    )


def _deep_gemm_takes(case: Case, mode: str) -> str | None:
    return (
        "compared only in the forward GEMM, not in the weights' gradient"
        if case.params["wgrad"]
        else _aligned(case, mode)
    )


def _dense() -> Callable[..., torch.Tensor]:
    """The grouped GEMM of the same sizes in bf16, with random operands that are created once."""
    from torch.nn.functional import grouped_mm

    made: dict[tuple, torch.Tensor] = {}

    def operand(like: torch.Tensor) -> torch.Tensor:
        key = (tuple(like.shape), like.device)
        if key not in made:
            made[key] = torch.randn(like.shape, dtype=BF16, device=like.device)
        return made[key]

    def function(offsets, **inputs):
        if "dy_t" in inputs:
            return grouped_mm(operand(inputs["dy_t"]), operand(inputs["x_t"]).t(), offs=offsets)
        return grouped_mm(operand(inputs["x"]), operand(inputs["weights"]).mT, offs=offsets)

    return function


def _dense_cost(case: Case, mode: str) -> Cost:
    groups, rows, n, k = sizes(case)
    return Cost(flops=2 * rows * n * k, bytes=2 * (rows * (n + k) + groups * n * k), pipe="bf16")


def _timed(case: Case, mode: str) -> str | None:
    if not case.bench and case not in HOST_CASES:
        return "compared only in the timed cases"
    # A group of another size fails a device-side assertion, after which the process can run no kernel.
    ragged = case.params["wgrad"] and any(size % 8 for size in group_sizes(case))
    return "its weights' gradient requires groups of a multiple of 8 rows" if ragged else None


# The time that the same layer would take in bf16.
DENSE = Yardstick("bf16", load=_dense, cost=_dense_cost, supports=_timed)


def _rows_candidates(case: Case) -> list[configs.RowsConfig]:
    shapes = ((128, 8, 1), (128, 4, 1), (64, 4, 2), (64, 8, 1))
    return [
        configs.RowsConfig(n, 128, raster, stages, warps, ctas)
        for n, warps, ctas in shapes
        for raster in (4, 8, 16)
        for stages in (3, 4, 5)
        if (128 + n) * 128 * stages * ctas <= 220 << 10
    ]


def _weights_candidates(case: Case) -> list[configs.WeightsConfig]:
    return [
        configs.WeightsConfig(n, k, raster, stages, warps)
        for n, k, warps in ((128, 128, 8), (64, 128, 4), (128, 64, 4))
        for raster in (4, 8, 16)
        for stages in (3, 4)
    ]


def _cuda_candidates(case: Case) -> list[configs.CudaConfig]:
    shapes = ((128, 4), (192, 3)) if case.params["wgrad"] else ((128, 4), (128, 6), (192, 4), (192, 5))
    return [
        configs.CudaConfig(stages, raster, cluster, block_n, turns)
        for block_n, stages in shapes
        for turns in (False, True)
        for cluster in (1, 2)
        for raster in (4, 8, 16, 32)
    ]


def _alias_reason(implementation: str, case: Case, mode: str) -> str | None:
    """Equals "auto": Triton for a forward with at most 64 rows a group, else CUDA C++ where it can run."""
    groups, rows, n, k = sizes(case)
    of_cuda = bool(rows and n and k) and (case.params["wgrad"] or rows > 64 * groups)
    return "same version as auto" if implementation == ("cuda" if of_cuda else "triton") else None


_BENCHED = tuple(dataclasses.replace(case, min_capability=(9, 0)) for case in CASES if case.bench)
FORWARDS = tuple(case for case in _BENCHED if not case.params["wgrad"])
GRADIENTS = tuple(case for case in _BENCHED if case.params["wgrad"])
HOST_CASES = (dataclasses.replace(_case(2, 256, 256, 256, "equal"), name="g2-256x256x256-e4m3-host"),)

SPEC = KernelSpec(
    name="grouped_gemm_fp8",
    implementations={
        "auto": _of_bytes(grouped_gemm_fp8, grouped_gemm_fp8_wgrad),
        **{
            backend: _of_bytes(
                partial(grouped_gemm_fp8, backend=backend), partial(grouped_gemm_fp8_wgrad, backend=backend)
            )
            for backend in ("triton", "cuda")
        },
    },
    # Below 9.0 "auto" is "triton".
    min_capability={"triton": (9, 0), "cuda": (9, 0)},
    alias_reason=_alias_reason,
    # The reference reads the offsets on the host, which torch.compile cannot trace in one graph.
    baselines=(
        EAGER,
        Peer("loop", load=_loop, supports=_aligned),
        Peer("deepgemm", load=_deep_gemm, supports=_deep_gemm_takes),
        DENSE,
    ),
    pytorch=("loop",),
    reference=_of_bytes(grouped_gemm_fp8_reference, grouped_gemm_fp8_wgrad_reference),
    make_inputs=make_inputs,
    cost=cost,
    extra_bytes=extra_bytes,
    cases=CASES,
    grads=(),
    modes=("fwd",),
    determinism={"fwd": "run-to-run"},
    # Hopper's tensor cores truncate sums of fp8 products to 13 fractional bits: see fp8_matmul.
    product_error=lambda inputs: 2**-12,
    limits={"scale_x": 1e30, "scale_w": 1e30, "scale_dy": 1e30},
    unit="rows",
    items=rows_of,
    fuzz={"groups": (1, 5), "rows": (0, 40), "rows16": (0, 17), "n16": (0, 9), "k16": (0, 17)},
    tunables=(
        Tunable(configs, "pick_rows_config", "fwd", _rows_candidates, FORWARDS, implementation="triton"),
        Tunable(configs, "pick_weights_config", "fwd", _weights_candidates, GRADIENTS, implementation="triton"),
        Tunable(configs, "pick_cuda_rows_config", "fwd", _cuda_candidates, FORWARDS, implementation="cuda"),
        Tunable(configs, "pick_cuda_weights_config", "fwd", _cuda_candidates, GRADIENTS, implementation="cuda"),
    ),
    compile_targets=((9, 0),),
    host_cases=HOST_CASES,
)

"""The declaration of fp8_matmul: cases, cost, peers. `python -m harness bench --kernel fp8_matmul`.

fp8 operands are bytes here, which the callables view as float8: most operations of the checks are undefined for float8.
A case's dtype is that of a, with results in bf16. In cases for Triton's interpreter, where kernels decode the bytes, it
is that of the result, fp16. fp32 results have no more correct bits on Hopper: see README.

Cases with `quantise` begin with both operands in bf16, which `fp8` quantises in the same call.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from functools import partial

import torch

from harness import execute, registry
from harness.spec import EAGER, Case, Cost, Inputs, KernelSpec, Op, Peer, Tunable, Yardstick

from . import configs, fp8_matmul
from .op import FIRST_CAPABILITY
from .reference import fp8_matmul_reference
from .scaling import BLOCKED, LINE, ROW, SQUARE, TENSOR, blocks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
GRANULARITIES = {TENSOR: ("tensor",) * 2, ROW: ("row",) * 2, SQUARE: ("1x128", "128x128"), LINE: ("1x128",) * 2}
UNIT = 16  # K and N are multiples of it


def _case(
    m: int, k: int, n: int, scaling: str, dtype: torch.dtype | None = None, bench: bool = False, **params
) -> Case:
    """A case named by M x K x N. `formats` of a and b, by default e4m3 for both. `dtype`: fp16 for fp16 results."""
    formats = params.pop("formats", "e4m3")
    short = {None: "", FP16: "fp16"}[dtype]
    words = [f"{m}x{k}x{n}", short, formats, scaling, *(v if isinstance(v, str) else p for p, v in params.items())]
    own = BF16 if params.get("quantise") else dtype or FORMATS[formats.split(".")[0]]
    options = {"scaling": scaling, "formats": formats, **params}
    dims = {"m": m, "k16": k // UNIT, "n16": n // UNIT}
    least = (0, 0) if dtype else FIRST_CAPABILITY
    return Case("-".join(filter(None, words)), dims, own, options, bench, min_capability=least)


CASES = (
    *(_case(8192, 8192, 8192, scaling, bench=True) for scaling in (TENSOR, ROW, SQUARE, LINE)),
    *(_case(8192, 8192, 8192, scaling, bench=True, fast_accum=True) for scaling in (TENSOR, ROW)),
    # A projection of DeepSeek-V3's attention, and a layer of an MLP (Llama-2 7B): forward and the weights' gradient.
    _case(4096, 7168, 2112, SQUARE, bench=True),
    *(_case(8192, 4096, 11008, scaling, bench=True) for scaling in (TENSOR, ROW, SQUARE)),
    _case(11008, 8192, 4096, LINE, bench=True),
    *(_case(8192, 4096, 11008, scaling, bench=True, quantise=True) for scaling in (ROW, SQUARE)),
    _case(8192, 4096, 11008, ROW, bench=True, fast_accum=True, quantise=True),
    # Few rows, where the reads of b are the bound.
    *(_case(m, 8192, 8192, SQUARE, bench=True) for m in (1, 16, 64)),
    *(_case(16, 8192, 8192, scaling, bench=True) for scaling in (ROW, LINE)),
    # Typical failures: default options first, partial blocks in every dimension, formats, the smallest sizes, no rows.
    _case(33, 208, 48, ROW, FP16),
    _case(19, 160, 32, TENSOR, FP16, formats="e5m2", bias=True),
    _case(40, 336, 144, SQUARE, FP16, formats="e4m3.e5m2"),
    _case(37, 272, 48, LINE, FP16, bias=True),
    _case(1, 16, 16, ROW, FP16),
    _case(1, 16, 16, SQUARE, FP16, formats="e4m3.e5m2"),
    _case(0, 32, 32, ROW, FP16),
    _case(3, 0, 32, LINE, FP16, bias=True),
    _case(5, 48, 0, SQUARE, FP16, formats="e4m3.e5m2"),
    # On a GPU: several tiles with and without remainders, results in bf16.
    _case(1500, 1424, 528, TENSOR, bias=True),
    _case(1501, 1024, 512, ROW, formats="e5m2.e4m3"),
    _case(1501, 1424, 528, ROW, fast_accum=True),
    _case(1500, 1424, 528, SQUARE, bias=True),
    _case(1501, 1024, 528, LINE, formats="e4m3.e5m2"),
    _case(257, 2064, 400, LINE),
    _case(300, 1424, 528, SQUARE, quantise=True),
    _case(301, 1024, 528, ROW, quantise=True, bias=True),
)


def make_inputs(case: Case, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    """Random inputs; the result has a variance of about 1. Scales come first, because the checks write special values
    into the first input. In timed cases 1x128 scales are column-major on 16-byte boundaries, as from
    `fp8(..., mn_major_scales=True)`."""
    if torch.device(device).type == "cuda" and torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        raise execute.Unavailable("needs compute capability {}.{}".format(*FIRST_CAPABILITY))
    m, k, n = sizes(case)
    params = dict(case.params)
    scaling = params.pop("scaling")
    formats = params.pop("formats")
    if params.pop("quantise", False):
        return _to_quantise(case, scaling, params, device, generator)
    format_a, format_b = (FORMATS[(formats.split(".") * 2)[index]] for index in (0, 1))

    def codes(rows: int, dtype: torch.dtype) -> torch.Tensor:
        x = torch.randn((rows, k), dtype=FP32, device=device, generator=generator)
        return x.mul_(64).to(dtype).view(torch.uint8)

    def scale(shape: tuple[int, ...], least: float, of_lines: bool) -> torch.Tensor:
        if case.bench and of_lines:
            columns = torch.rand((shape[1], (shape[0] + 3) // 4 * 4), dtype=FP32, device=device, generator=generator)
            return columns.t()[: shape[0]].add_(1).mul_(least)
        return torch.rand(shape, dtype=FP32, device=device, generator=generator).add_(1).mul_(least)

    shape_a, shape_b = scale_shapes(case)
    inputs: Inputs = {
        "scale_a": scale(shape_a, 1 / 96, scaling in BLOCKED),
        "scale_b": scale(shape_b, 1 / 96 / math.sqrt(max(k, 1)), scaling == LINE),
        "a": codes(m, format_a),
        "b": codes(n, format_b),
    }
    if params.pop("bias", False):
        inputs["bias"] = torch.randn(n, dtype=FP32 if case.dtype == FP16 else BF16, device=device, generator=generator)
    out_dtype = FP16 if case.dtype == FP16 else BF16
    return {**inputs, "formats": (format_a, format_b), "out_dtype": out_dtype, **params}


def _to_quantise(case: Case, scaling: str, params: dict, device, generator) -> Inputs:
    m, k, n = sizes(case)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=BF16, device=device, generator=generator)

    inputs: Inputs = {"a": normal(m, k), "b": normal(n, k).mul_(max(k, 1) ** -0.5)}
    if params.pop("bias", False):
        inputs["bias"] = normal(n)
    return {**inputs, "scaling": scaling, **params}


def sizes(case: Case) -> tuple[int, int, int]:
    """M, K and N."""
    return case.dims["m"], UNIT * case.dims["k16"], UNIT * case.dims["n16"]


def scale_shapes(case: Case) -> tuple[tuple[int, ...], tuple[int, ...]]:
    m, k, n = sizes(case)
    return {
        TENSOR: ((), ()),
        ROW: ((m, 1), (n, 1)),
        SQUARE: ((m, blocks(k)), (blocks(n), blocks(k))),
        LINE: ((m, blocks(k)), (n, blocks(k))),
    }[case.params["scaling"]]


def cost(case: Case, mode: str) -> Cost:
    m, k, n = sizes(case)
    scales = sum(math.prod(shape) for shape in scale_shapes(case))
    bias = n * (4 if case.dtype == FP16 else 2) * case.params.get("bias", False)
    if case.params.get("quantise"):
        return Cost(flops=2 * m * k * n, bytes=2 * (m * k + n * k + m * n) + bias, pipe="fp8")
    return Cost(flops=2 * m * k * n, bytes=m * k + n * k + 2 * m * n + 4 * scales + bias, pipe="fp8")


def _of_bytes(op: Op) -> Op:
    """The op with operands given as bytes and their formats or, if `scaling` is given, quantised first."""

    def run(a, b, scale_a=None, scale_b=None, formats=None, scaling=None, **options):
        if scaling is not None:
            _check_fit(a, b, options.get("bias"))
            return op(*_quantised(a, b, scaling), **options)
        return op(a.view(formats[0]), b.view(formats[1]), scale_a, scale_b, **options)

    return run


def _check_fit(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Rejects operands that do not fit each other, which the op would do after their quantisation was launched."""
    for name, tensor in (("b", b), ("bias", bias)):
        if tensor is not None and tensor.device != a.device:
            raise ValueError(f"{name} must be on a's device {a.device}, got {tensor.device}")
    for name, tensor in (("a", a), ("b", b), ("bias", bias)):
        if tensor is not None and not tensor.is_floating_point():
            raise TypeError(f"{name} must be of a floating-point dtype, got {tensor.dtype}")
    if a.shape[-1] != b.shape[-1] or (bias is not None and bias.shape != b.shape[:1]):
        shapes = [None if t is None else tuple(t.shape) for t in (a, b, bias)]
        raise ValueError(f"a [M, K], b [N, K] and bias [N] do not fit each other: {shapes}")


@functools.cache
def _fp8() -> tuple[Op, Op]:
    """`fp8` and its reference, through the registry: kernels do not import each other."""
    spec = registry.load("fp8")
    return next(iter(spec.implementations.values())), spec.reference


def _quantised(a: torch.Tensor, b: torch.Tensor, scaling: str) -> tuple[torch.Tensor, ...]:
    fp8, _ = _fp8()
    of_a, of_b = GRANULARITIES[scaling]
    options = {"mn_major_scales": True} if of_a == "1x128" else {}
    (a, scale_a), (b, scale_b) = fp8(a, granularity=of_a, **options), fp8(b, granularity=of_b)
    return a, b, scale_a, scale_b


@_of_bytes
def _product(a, b, scale_a, scale_b, bias=None, out_dtype=BF16, fast_accum=False):
    return fp8_matmul_reference(a, b, scale_a, scale_b, bias, out_dtype)


def _reference(**inputs) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Operands of any dtype are quantised in fp32, to the same bits as by `fp8`. The GEMM of fp64 operands is in
    fp64."""
    if "scaling" not in inputs:
        return _product(**inputs)
    a, b, scaling = (inputs[name] for name in ("a", "b", "scaling"))
    wide = torch.promote_types(a.dtype, FP32)
    (a, scale_a), (b, scale_b) = (
        _fp8()[1](t.float(), granularity=g) for t, g in zip((a, b), GRANULARITIES[scaling], strict=True)
    )
    bias = inputs.get("bias")
    return fp8_matmul_reference(a, b, scale_a.to(wide), scale_b.to(wide), bias)


def _scaled_mm() -> Op:
    """PyTorch's scaled_mm: cuBLAS, and CUTLASS for scales of rows."""
    from torch.nn.functional import ScalingType, scaled_mm

    kinds = {
        TENSOR: (ScalingType.TensorWise, ScalingType.TensorWise),
        ROW: (ScalingType.RowWise, ScalingType.RowWise),
        SQUARE: (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128),
        LINE: (ScalingType.BlockWise1x128, ScalingType.BlockWise1x128),
    }

    @_of_bytes
    def function(a, b, scale_a, scale_b, bias=None, out_dtype=BF16, fast_accum=False):
        scaling = _scaling(a, b, scale_b)
        if scaling == ROW:
            scale_b = scale_b.t()
        if scaling == SQUARE:  # expects the transpose, with columns padded to a multiple of four elements
            if scale_b.shape[1] % 4:
                scale_b = torch.nn.functional.pad(scale_b, (0, -scale_b.shape[1] % 4))
            scale_b = scale_b.t()
        if scaling in BLOCKED and scale_a.stride(1) != a.shape[0]:  # expects dense column-major scales
            scale_a = scale_a.t().contiguous().t()
        of_a, of_b = kinds[scaling]
        return scaled_mm(
            a, b.t(), scale_a, of_a, scale_b, of_b, bias=bias, output_dtype=out_dtype, use_fast_accum=fast_accum
        )

    return function


def _scaling(a: torch.Tensor, b: torch.Tensor, scale_b: torch.Tensor) -> str:
    if scale_b.dim() == 0:
        return TENSOR
    if scale_b.shape[0] != b.shape[0]:
        return SQUARE
    return ROW if scale_b.shape[1] == 1 else LINE


def _deep_gemm() -> Op:
    from deep_gemm import fp8_gemm_nt

    @_of_bytes
    def function(a, b, scale_a, scale_b, bias=None, out_dtype=BF16):
        y = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
        fp8_gemm_nt((a, scale_a), (b, scale_b), y)
        return y

    return function


def _timed(case: Case) -> bool:
    """Whether peers are timed in a case: they require quantised operands."""
    if case.params.get("quantise"):
        return False
    return case.bench or case in HOST_CASES


def _torch_takes(case: Case, mode: str) -> str | None:
    if not _timed(case):
        return "compared only in the timed cases"
    return None


def _deep_gemm_takes(case: Case, mode: str) -> str | None:
    if not _timed(case):
        return "compared only in the timed cases"
    return None if case.params["scaling"] == SQUARE else "compared only with 1x128 scales of a and 128x128 scales of b"


def _dense() -> Callable[..., torch.Tensor]:
    """The GEMM of the same sizes in bf16: of the case's bf16 operands, else of random ones that are created once."""
    made: dict[tuple, torch.Tensor] = {}

    def operand(like: torch.Tensor) -> torch.Tensor:
        if like.dtype == BF16:
            return like
        key = (tuple(like.shape), like.device)
        if key not in made:
            made[key] = torch.randn(like.shape, dtype=BF16, device=like.device)
        return made[key]

    return lambda a, b, **_: operand(a) @ operand(b).t()


def _dense_cost(case: Case, mode: str) -> Cost:
    m, k, n = sizes(case)
    return Cost(flops=2 * m * k * n, bytes=2 * (m * k + n * k + m * n), pipe="bf16")


# The time that the same layer would take in bf16.
DENSE = Yardstick("bf16", load=_dense, cost=_dense_cost)


def _candidates(case: Case) -> list[configs.Config]:
    m = case.dims["m"]
    if m <= 64:
        tiles = [(max(16, m), n, w) for n in (32, 64, 128) for w in (4, 8)]
    elif case.params.get("fast_accum"):
        tiles = [(128, 256, 8), (128, 128, 4), (128, 128, 8), (256, 128, 8)]
    else:
        tiles = [(128, 128, 8), (64, 128, 4), (128, 64, 4), (64, 256 if case.params["scaling"] == ROW else 128, 8)]
    return [
        configs.Config(block_m, block_n, block_k, group_m, warps, stages)
        for block_m, block_n, warps in dict.fromkeys(tiles)
        for block_k in (64, 128)
        for group_m in (4, 8, 16)
        for stages in ((4, 6, 8) if m <= 64 else (3, 4, 5))
        if (block_m + block_n) * block_k * stages <= 220 << 10
    ]


def _cuda_candidates(case: Case) -> list[configs.CudaConfig]:
    if case.params.get("fast_accum"):
        tiles = [(256, False, stages) for stages in (3, 4)]
    else:
        tiles = [(128, turns, stages) for turns in (False, True) for stages in (4, 5, 6)]
        if case.params["scaling"] in (SQUARE, LINE):
            tiles += [(192, turns, stages) for turns in (False, True) for stages in (4, 5)]
    return [
        configs.CudaConfig(stages, raster, cluster, block_n, turns)
        for cluster in (1, 2)
        for raster in (4, 8, 16)
        for block_n, turns, stages in tiles
    ]


def _few_candidates(case: Case) -> list[configs.FewConfig]:
    number = {SQUARE: 2, LINE: 3}.get(case.params["scaling"], 1)
    tile_m = next(size for size in (8, 16, 32, 64, 128) if case.dims["m"] <= size)
    most = [
        configs.few_config(tile_m, groups, splits, number)
        for groups in ((1, 2, 4) if tile_m <= 64 else (1, 2))
        for splits in (1, 2, 4, 8)
    ]
    return [
        dataclasses.replace(config, stages=stages)
        for config in most
        for stages in (3, 4, 5, 6, 8)
        if stages <= config.stages
    ]


def _alias_reason(implementation: str, case: Case, mode: str) -> str | None:
    chosen = configs.pick_backend("auto", possible=True)
    return "same version as auto" if implementation == chosen else None


ALONE = tuple(case for case in CASES if case.bench and not case.params.get("quantise"))
ON_HOPPER = tuple(dataclasses.replace(case, min_capability=(9, 0)) for case in ALONE)
CUDA_CASES = tuple(case for case in ON_HOPPER if case.dims["m"] > configs.FEW_ROWS)
FEW_CASES = tuple(case for case in ON_HOPPER if case.dims["m"] <= configs.FEW_ROWS)
HOST_CASES = (dataclasses.replace(_case(256, 256, 256, ROW), name="256x256x256-e4m3-row-host"),)

SPEC = KernelSpec(
    name="fp8_matmul",
    implementations={
        "auto": _of_bytes(fp8_matmul),
        "triton": _of_bytes(partial(fp8_matmul, backend="triton")),
        "cuda": _of_bytes(partial(fp8_matmul, backend="cuda")),
    },
    # Below 9.0 "auto" is "triton".
    min_capability={"triton": (9, 0), "cuda": (9, 0)},
    alias_reason=_alias_reason,
    baselines=(
        EAGER,
        Peer("torch", load=_scaled_mm, supports=_torch_takes),
        Peer("deepgemm", load=_deep_gemm, supports=_deep_gemm_takes),
        DENSE,
    ),
    pytorch=("torch",),
    reference=_reference,
    make_inputs=make_inputs,
    cost=cost,
    cases=CASES,
    grads=(),
    modes=("fwd",),
    determinism={"fwd": "run-to-run"},
    # Hopper's tensor cores truncate sums of fp8 products to 13 fractional bits. A sum near 0 may thus have the wrong
    # sign, which an infinite scale would turn into an infinity of the wrong sign.
    product_error=lambda inputs: 2**-12,
    limits={"scale_a": 1e30, "scale_b": 1e30},
    unit="rows",
    items=lambda case: case.dims["m"],
    fuzz={"m": (0, 20), "k16": (0, 17), "n16": (0, 9)},
    spills={"_fp8_tile_kernel": 24},  # a kernel of kernels/fp8, which quantises operands
    tunables=(
        Tunable(configs, "pick_config", "fwd", _candidates, ALONE, implementation="triton"),
        Tunable(configs, "pick_cuda_config", "fwd", _cuda_candidates, CUDA_CASES, implementation="cuda"),
        Tunable(configs, "pick_few_config", "fwd", _few_candidates, FEW_CASES, implementation="cuda"),
    ),
    compile_targets=((9, 0),),
    host_cases=HOST_CASES,
)

"""The declaration of sparse_matmul: cases, cost, peers. `python -m harness bench --kernel sparse_matmul`.

The callables take the two tensors of a compressed weight as `values` and `metadata`. fp8 tensors are bytes here, which
the callables view as float8: most operations of the checks are not defined for float8. The dtype of such a case is that
of x, with results in bf16; or it is the result's, fp16, in cases that Triton's interpreter computes, where kernels
decode the bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from harness import execute
from harness.spec import COMPILED, COMPILED_MAX, EAGER, Case, Cost, Inputs, KernelSpec, Op, Peer, Tunable, Yardstick

from . import Compressed, compress, configs, prune, sparse_matmul
from .formats import BLOCK_K, metadata_shape
from .op_fp8 import FIRST_CAPABILITY
from .reference import activated, compressed, decompressed, kept, pruned, sparse_matmul_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
TENSOR, ROW = "tensor", "row"  # granularities of a scale
CHUNK = 4  # K is a multiple of it


def _case(
    m: int, k: int, n: int, dtype: torch.dtype, bench: bool = False, bias: bool = False, activation: str | None = None
) -> Case:
    """Named M x K x N."""
    short = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
    name = "-".join(filter(None, (f"{m}x{k}x{n}", short, "bias" if bias else "", activation or "")))
    params = {"bias": bias, "activation": activation} if bias or activation else {}
    return Case(name, {"m": m, "k4": k // CHUNK, "n": n}, dtype, params, bench)


def _case8(
    m: int, k: int, n: int, scaling: str, dtype: torch.dtype | None = None, bench: bool = False, **params
) -> Case:
    """A case in fp8, where K is a multiple of 64. `formats` are those of x and the weight, by default both e4m3. With
    `dtype` fp16 the result is fp16."""
    formats = params.pop("formats", "e4m3")
    words = (f"{m}x{k}x{n}", "fp16" if dtype else "", formats, scaling, *params.values())
    own, least = (dtype, (0, 0)) if dtype else (FORMATS[formats.split(".")[0]], FIRST_CAPABILITY)
    dims, options = {"m": m, "k4": k // CHUNK, "n": n}, {"scaling": scaling, "formats": formats, **params}
    return Case("-".join(filter(None, words)), dims, own, options, bench, min_capability=least, modes=("fwd",))


def _case_of(function: str, n: int, k: int, dtype: torch.dtype, bench: bool = False) -> Case:
    """A case of "compress" or "prune" for a weight [n, k]."""
    short = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
    dims = {"n": n, "k4": k // CHUNK}
    return Case(f"{function}-{n}x{k}-{short}", dims, dtype, {"function": function}, bench, modes=("fwd",))


SIZES = ((4096, 4096, 4096), (8192, 8192, 8192), (4096, 4096, 11008))
WEIGHTS = ((8192, 8192), (11008, 4096))
CASES = (
    *(_case(m, k, n, BF16, bench=True) for m, k, n in SIZES),
    *(_case8(m, k, n, TENSOR, bench=True) for m, k, n in SIZES),
    _case8(8192, 8192, 8192, ROW, bench=True),
    *(_case_of(function, n, k, BF16, True) for function in ("compress", "prune") for n, k in WEIGHTS),
    # Boundary cases: partial tiles in every dimension, empty; the first has no options.
    _case(5, 24, 20, FP32),
    _case(19, 32, 17, FP16, bias=True, activation="gelu_tanh"),
    _case(0, 8, 3, FP32, bias=True),
    _case(3, 0, 4, FP32, bias=True, activation="relu"),
    _case8(5, 64, 20, TENSOR, FP16),
    _case8(19, 192, 24, ROW, FP16, formats="e5m2.e4m3", activation="gelu_tanh"),
    _case8(21, 128, 40, ROW, FP16, formats="e4m3.e5m2"),
    _case8(0, 64, 8, ROW, FP16),
    _case8(3, 0, 8, TENSOR, FP16, activation="relu"),
    # On a GPU: several tiles with and without remainders.
    _case(300, 1032, 257, BF16, bias=True, activation="relu_sq"),
    _case(256, 1024, 512, BF16, bias=True, activation="gelu"),
    _case8(301, 1088, 272, ROW, activation="relu_sq"),
    _case8(256, 1024, 512, TENSOR, formats="e5m2"),
    _case_of("compress", 21, 72, FP32),
    _case_of("compress", 37, 132, FP16),
    _case_of("prune", 37, 132, FP16),
    _case_of("prune", 21, 72, FP32),
)


def make_inputs(case: Case, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    """Inputs whose GEMM has variance 1; a weight of 2:4 sparsity for `compress`, a dense one for `prune`."""
    if "scaling" in case.params:
        return _make_inputs8(case, device, generator)
    m, k, n = sizes(case)
    params = dict(case.params)
    if function := params.get("function"):
        w = torch.randn((n, k), dtype=case.dtype, device=device, generator=generator)
        return {"w": pruned(w)[0] if function == "compress" else w, **params}

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=case.dtype, device=device, generator=generator)

    inputs: Inputs = {
        "x": normal(m, k),
        "values": normal(n, k // 2).mul_((2 / max(k, 1)) ** 0.5),
        "metadata": _metadata(n, k, device, generator),
    }
    if params.pop("bias", False):
        inputs["bias"] = normal(n)
    return {**inputs, **params}


def _make_inputs8(case: Case, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    """Inputs in fp8. Scales come first, because the checks write special values into the first input."""
    if torch.device(device).type == "cuda" and torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        raise execute.Unavailable("needs compute capability {}.{} in 8 bits".format(*FIRST_CAPABILITY))
    m, k, n = sizes(case)
    params = dict(case.params)
    shape_x, shape_w = {TENSOR: ((), ()), ROW: ((m, 1), (n,))}[params.pop("scaling")]
    of_x, of_w = (FORMATS[name] for name in (params.pop("formats").split(".") * 2)[:2])

    def codes(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        x = torch.randn((rows, columns), dtype=FP32, device=device, generator=generator)
        return x.mul_(64).to(dtype).view(torch.uint8)

    def scale(shape: tuple[int, ...], least: float) -> torch.Tensor:
        return torch.rand(shape, dtype=FP32, device=device, generator=generator).add_(1).mul_(least)

    return {
        "scale_x": scale(shape_x, 1 / 96),
        "scale_w": scale(shape_w, 1 / 96 / math.sqrt(max(k / 2, 1))),
        "x": codes(m, k, of_x),
        "values": codes(n, k // 2, of_w),
        "metadata": _metadata(n, k, device, generator),
        "formats": (of_x, of_w),
        "out_dtype": FP16 if case.dtype == FP16 else BF16,
        **params,
    }


def _metadata(n: int, k: int, device: torch.device | str, generator: torch.Generator | None) -> torch.Tensor:
    """Random metadata: four codes per word, each with positions i < j, as int16."""

    def below(high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(high, shape, device=device, generator=generator)

    chunks = (*metadata_shape(n, k), 4)
    first = below(3, chunks)
    code = first + 4 * (first + 1 + below(6, chunks) % (3 - first))
    word = code[..., 0] + 16 * code[..., 1] + 256 * code[..., 2] + 4096 * code[..., 3]
    return (word - 65536 * (word // 32768)).to(torch.int16)


def sizes(case: Case) -> tuple[int, int, int]:
    """M, K and N. For fp8 K is rounded up to a multiple of 64. Cases without x have M = 0."""
    depth = CHUNK * case.dims["k4"]
    return case.dims.get("m", 0), -(-depth // BLOCK_K) * BLOCK_K if "scaling" in case.params else depth, case.dims["n"]


def _words(case: Case) -> int:
    _, k, n = sizes(case)
    blocks_k, blocks_n, words = metadata_shape(n, k)
    return blocks_k * blocks_n * words


def cost(case: Case, mode: str) -> Cost:
    """Useful FLOPs: those of the kept elements, half of the dense GEMM's. Sparse tensor cores execute them in the time
    of as many dense FLOPs. Backward: dy, x, the weight, all gradients, and the pre-activation."""
    m, k, n = sizes(case)
    if function := case.params.get("function"):  # one comparison per element; the mask has one byte per element
        written = n * k // 2 * case.dtype.itemsize + 2 * _words(case)
        written = written if function == "compress" else n * k * (case.dtype.itemsize + 1)
        return Cost(n * k, n * k * case.dtype.itemsize + written)
    if scaling := case.params.get("scaling"):
        scales = m + n if scaling == ROW else 2
        return Cost(m * k * n, m * k + n * k // 2 + 2 * _words(case) + 2 * m * n + 4 * scales, pipe="fp8")
    half, bias = m * k * n, n * case.params.get("bias", False)
    products = {"fwd": 1, "bwd": 2}[mode]
    forward = m * k + n * k // 2 + bias + m * n
    elements = forward if mode == "fwd" else forward + m * k + n * k // 2 + bias
    size = case.dtype.itemsize
    saved = sum(extra_bytes(case, mode).values())
    pipe = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[case.dtype]
    return Cost(flops=products * half, bytes=elements * size + 2 * _words(case) + saved, pipe=pipe)


def extra_bytes(case: Case, mode: str) -> dict[str, int]:
    if mode != "bwd" or not case.params.get("activation"):
        return {}
    return {"the activation's argument": case.dims["m"] * case.dims["n"] * case.dtype.itemsize}


def _once_a_weight(make: Callable[..., Any]) -> Callable[..., Any]:
    """Caches the result of `make` for values and metadata, as long as the values exist unchanged. The first argument
    may also be a scale."""
    made = WeakTensorKeyDictionary()

    def get(values: torch.Tensor, metadata: Any) -> Any:
        version, found = made.get(values, (None, None))
        if version != values._version:
            found = make(values.detach(), metadata)
            made[values] = (values._version, found)
        return found

    return get


class _Dense(torch.autograd.Function):
    """Returns the dense weight of these values; the backward gathers its gradient at the kept positions."""

    @staticmethod
    def forward(ctx, values, weight, columns):
        ctx.columns = columns
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, dweight):
        return dweight.gather(1, ctx.columns), None, None


def _torch() -> Op:
    """A cuBLAS GEMM with the dense pruned weight, as a PyTorch user would write. In fp8 it uses fast accumulation, as
    our kernels do."""
    weights = _once_a_weight(lambda v, m: (decompressed(v, m), kept(m, v.shape[0], 2 * v.shape[1])))
    weights8 = _once_a_weight(_dense8)

    def function(x, values, metadata, bias=None, activation=None, scale_x=None, scale_w=None, formats=None, **options):
        if formats is not None:
            columns = weights8(values, metadata).view(formats[1]).t()
            scale_w = scale_w[None] if scale_w.dim() else scale_w
            z = torch._scaled_mm(x.view(formats[0]), columns, scale_x, scale_w, bias, use_fast_accum=True, **options)
            return activated(z, activation)
        return activated(F.linear(x, _Dense.apply(values, *weights(values, metadata)), bias), activation)

    return function


def _dense8(values: torch.Tensor, metadata: torch.Tensor) -> torch.Tensor:
    """The dense weight as bytes. The position of a code does not depend on the format, so e4m3 serves for both."""
    return decompressed(values.view(FORMATS["e4m3"]), metadata).view(torch.uint8)


def _cusparselt(vector: bool = True) -> Op:
    """cuSPARSELt with the algorithm that its search selects in the first call with a shape. In fp8 it has a scale per
    row of the weight (`vector`), which remains on the GPU. A single scale is read on the host by PyTorch, so that each
    call synchronises."""
    _need_cusparselt()
    weights = _once_a_weight(lambda values, metadata: torch._cslt_compress(decompressed(values, metadata)))
    weights8 = _once_a_weight(lambda v, m: torch._cslt_compress(_dense8(v, m).view(FORMATS["e4m3"])))
    scales = _once_a_weight(lambda scale_w, scale_x: (scale_w * scale_x).reshape(1))
    rows_scales = _once_a_weight(lambda scale_w, given: (scale_w * given[0]).expand(given[1]).contiguous())
    found: dict[tuple, int] = {}

    def function(x, values, metadata, bias=None, activation=None, scale_x=None, scale_w=None, formats=None, **options):
        packed = (weights if formats is None else weights8)(values, metadata)
        columns = (x if formats is None else x.view(formats[0])).t()
        options |= {"bias": bias, "transpose_result": True}
        if formats is not None:
            rows = values.shape[0]
            options["alpha"] = rows_scales(scale_w, (scale_x, rows)) if vector else scales(scale_w, scale_x)
        key = (values.shape, x.shape, x.dtype, bias is None)
        if key not in found:
            found[key] = torch._cslt_sparse_mm_search(packed, columns, **options)
        return activated(torch._cslt_sparse_mm(packed, columns, alg_id=found[key], **options), activation)

    return function


def _need_cusparselt() -> None:
    if not torch.backends.cusparselt.is_available():
        raise ImportError("this PyTorch has no cuSPARSELt")


def _cusparselt_compress() -> Op:
    """Its result has a different layout, so only the times can be compared."""
    _need_cusparselt()
    return lambda w, function: torch._cslt_compress(w)


def _copy_cost(case: Case, mode: str) -> Cost:
    _, k, n = sizes(case)
    return Cost(flops=0, bytes=2 * n * k * case.dtype.itemsize)


def _has_no_product(case: Case, mode: str) -> str | None:
    return None if "function" in case.params else "compared only with compress and prune"


def _compresses(case: Case, mode: str) -> str | None:
    return None if case.bench and case.params.get("function") == "compress" else "only compresses, in 16 bits"


# compress and prune are compared with a copy of the weight, compress also with cuSPARSELt's compression.
COPY = Yardstick("copy", load=lambda: lambda w, function: w.clone(), cost=_copy_cost, supports=_has_no_product)
CUSPARSELT_COMPRESS = Yardstick("cusparselt-compress", load=_cusparselt_compress, cost=cost, supports=_compresses)


def _cusparselt_takes(case: Case, mode: str) -> str | None:
    if "function" in case.params:
        return "compared only with GEMMs; its compression has a row of its own"
    if mode != "fwd":
        return "has no backward"
    if "scaling" in case.params and (case.params["scaling"] != TENSOR or case.params["formats"] != "e4m3"):
        return "supports only e4m3 with one scale per tensor"
    return None if case.bench or case in HOST_CASES else "requires multiples of 32: compared only in the timed cases"


FUNCTIONS: dict[str, Op] = {"compress": compress, "prune": prune}
REFERENCES: dict[str, Op] = {"compress": compressed, "prune": pruned}


def _of_tensors(op: Op, functions: Mapping[str, Op] = FUNCTIONS) -> Op:
    """Adapts the op to the two tensors of a compressed weight, and to bytes with their formats. A case with `function`
    calls that function of the folder instead."""

    def run(x=None, values=None, metadata=None, bias=None, activation=None, formats=None, **options):
        if function := options.get("function"):
            return functions[function](options["w"])
        if formats is not None:
            x, values = x.view(formats[0]), values.view(formats[1])
        return op(x, Compressed(values, metadata), bias, activation, **options)

    return run


def _candidates(order: Callable[[int, int, int], tuple[int, int, int]]) -> Callable[[Case], list[configs.Config]]:
    """Candidate tiles and K-blocks; `order` returns (block_m, block_n, block_k) from the tile and the K-block."""

    def candidates(case: Case) -> list[configs.Config]:
        return [
            configs.Config(*order(a, b, step), group, warps, stages)
            for a, b, warps in ((128, 128, 4), (128, 128, 8), (128, 256, 8), (256, 128, 8), (64, 128, 4))
            for step in (32, 64)
            for group in (4, 8, 16)
            for stages in (2, 3, 4)
        ]

    return candidates


def _cuda_candidates(case: Case) -> list[configs.CudaConfig]:
    return [
        configs.CudaConfig(stages, raster, cluster)
        for cluster in (1, 2, 4)
        for raster in (2, 4, 8, 16)
        for stages in (4, 5)
    ]


def _unsupported_reason(implementation: str, case: Case, mode: str) -> str | None:
    _, k, n = sizes(case)
    if implementation != "auto" and "function" in case.params:
        return "compress and prune have only one version"
    if "scaling" in case.params:
        return "requires N a multiple of 8 in fp8" if implementation == "cuda" and n % 8 else None
    if implementation == "cuda" and (case.dtype == FP32 or k % 16 or n % 8):
        return "requires a 16-bit dtype, K a multiple of 16 and N a multiple of 8"
    return None


def _alias_reason(implementation: str, case: Case, mode: str) -> str | None:
    """Always a reason for "cuda": the generic checks try layouts that it does not support. test_sm90.py checks it."""
    if implementation == "triton":
        return "same version as auto" if case.dtype == FP32 or sizes(case)[0] <= 64 else None
    return "checked by its own tests, and timed as auto where auto selects it" if implementation == "cuda" else None


def _timed(case: Case, mode: str) -> str | None:
    if "function" in case.params:
        return "compared only with GEMMs: here it would be the reference"
    return None if case.bench or "scaling" not in case.params else "compared only in the timed cases"


def _of_16_bits(case: Case, mode: str) -> str | None:
    return "in fp8 the reference is a GEMM in fp32" if "scaling" in case.params else None


PRODUCTS = tuple(case for case in CASES if case.bench and "function" not in case.params)
CUDA_CASES = tuple(dataclasses.replace(case, min_capability=(9, 0)) for case in PRODUCTS)
WIDE_CASES = tuple(case for case in PRODUCTS if "scaling" not in case.params)
FP8_CASES = tuple(case for case in PRODUCTS if "scaling" in case.params)
HOST_CASES = (dataclasses.replace(_case(128, 128, 128, BF16), name="128x128x128-bf16-host"),)

SPEC = KernelSpec(
    name="sparse_matmul",
    implementations={
        "auto": _of_tensors(sparse_matmul),
        "triton": _of_tensors(partial(sparse_matmul, backend="triton")),
        "cuda": _of_tensors(partial(sparse_matmul, backend="cuda")),
    },
    # On other GPUs "auto" is "triton".
    min_capability={"triton": (9, 0), "cuda": (9, 0)},
    unsupported_reason=_unsupported_reason,
    alias_reason=_alias_reason,
    baselines=(
        EAGER,
        dataclasses.replace(COMPILED, supports=_of_16_bits),
        dataclasses.replace(COMPILED_MAX, supports=_of_16_bits),
        Peer("torch", load=_torch, supports=_timed),
        Peer(
            "cusparselt",
            load=_cusparselt,
            configurations={"a scale that the host reads": partial(_cusparselt, vector=False)},
            supports=_cusparselt_takes,
        ),
        CUSPARSELT_COMPRESS,
        COPY,
    ),
    pytorch=("torch",),
    reference=_of_tensors(sparse_matmul_reference, REFERENCES),
    make_inputs=make_inputs,
    cost=cost,
    extra_bytes=extra_bytes,
    cases=CASES,
    grads=("x", "values", "bias"),
    determinism={"fwd": "run-to-run", "bwd": "run-to-run"},
    # The sparse tensor cores skip pruned elements: an inf of x there does not reach y.
    finite_only=lambda case: case.dtype != FP32,
    # Hopper's tensor cores truncate fp8 accumulators to 13 bits after the binary point. So a sum near 0 may have the
    # wrong sign, which with an infinite scale would decide the result.
    product_error=lambda inputs: 2**-12 if "formats" in inputs else 0.0,
    limits={"scale_x": 1e30, "scale_w": 1e30},
    unit="rows",
    items=lambda case: case.dims.get("m", case.dims["n"]),
    fuzz={"m": (0, 20), "k4": (0, 9), "n": (0, 20)},
    tunables=(
        Tunable(configs, "pick_fwd_config", "fwd", _candidates(lambda a, b, step: (a, b, step)), WIDE_CASES, "triton"),
        Tunable(configs, "pick_fp8_config", "fwd", _candidates(lambda a, b, step: (a, b, 64)), FP8_CASES, "triton"),
        Tunable(configs, "pick_dx_config", "bwd", _candidates(lambda a, b, step: (a, step, b)), WIDE_CASES, "triton"),
        Tunable(
            configs, "pick_dvalues_config", "bwd", _candidates(lambda a, b, step: (step, a, b)), WIDE_CASES, "triton"
        ),
        Tunable(configs, "pick_cuda_config", "fwd", _cuda_candidates, CUDA_CASES, implementation="cuda"),
    ),
    host_cases=HOST_CASES,
)

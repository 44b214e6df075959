"""The declaration of sparse_matmul: cases, cost, peers. `python -m harness bench --kernel sparse_matmul`.

The callables take the two tensors of a compressed weight as `values` and `metadata`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from harness.spec import COMPILED, COMPILED_MAX, EAGER, Case, Cost, Inputs, KernelSpec, Op, Peer, Tunable

from . import Compressed, configs, sparse_matmul
from .formats import metadata_shape
from .reference import activated, decompressed, kept, sparse_matmul_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TRITON = "triton"
CHUNK = 4  # K is a multiple of it


def _case(
    m: int, k: int, n: int, dtype: torch.dtype, bench: bool = False, bias: bool = False, activation: str | None = None
) -> Case:
    """Named M x K x N."""
    short = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
    name = "-".join(filter(None, (f"{m}x{k}x{n}", short, "bias" if bias else "", activation or "")))
    params = {"bias": bias, "activation": activation} if bias or activation else {}
    return Case(name, {"m": m, "k4": k // CHUNK, "n": n}, dtype, params, bench)


CASES = (
    *(_case(m, k, n, BF16, bench=True) for m, k, n in ((4096, 4096, 4096), (8192, 8192, 8192), (4096, 4096, 11008))),
    # What goes wrong: plain first, tails in every dimension, nothing.
    _case(5, 24, 20, FP32),
    _case(19, 32, 17, FP16, bias=True, activation="gelu_tanh"),
    _case(0, 8, 3, FP32, bias=True),
    _case(3, 0, 4, FP32, bias=True, activation="relu"),
    # On a GPU: several tiles with and without remainders.
    _case(300, 1032, 257, BF16, bias=True, activation="relu_sq"),
    _case(256, 1024, 512, BF16, bias=True, activation="gelu"),
)


def make_inputs(case: Case, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    """Products of variance 1."""
    m, k, n = sizes(case)
    params = dict(case.params)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=case.dtype, device=device, generator=generator)

    def below(high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(high, shape, device=device, generator=generator)

    # Four codes in a word, each of positions i < j; that of 16 bits with its sign.
    chunks = (*metadata_shape(n, k), 4)
    first = below(3, chunks)
    code = first + 4 * (first + 1 + below(6, chunks) % (3 - first))
    word = code[..., 0] + 16 * code[..., 1] + 256 * code[..., 2] + 4096 * code[..., 3]
    inputs: Inputs = {
        "x": normal(m, k),
        "values": normal(n, k // 2).mul_((2 / max(k, 1)) ** 0.5),
        "metadata": (word - 65536 * (word // 32768)).to(torch.int16),
    }
    if params.pop("bias", False):
        inputs["bias"] = normal(n)
    return {**inputs, **params}


def sizes(case: Case) -> tuple[int, int, int]:
    """M, K and N."""
    return case.dims["m"], CHUNK * case.dims["k4"], case.dims["n"]


def _words(case: Case) -> int:
    _, k, n = sizes(case)
    blocks_k, blocks_n, words = metadata_shape(n, k)
    return blocks_k * blocks_n * words


def cost(case: Case, mode: str) -> Cost:
    """Useful FLOPs: those of the elements that are kept, half of the dense product's. Sparse tensor cores need the time
    of as many dense ones. Backward: dy, x, the weight, all gradients, and the activation's argument."""
    m, k, n = sizes(case)
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
    """What `make` makes of values and metadata, kept for as long as the values live unchanged."""
    made = WeakTensorKeyDictionary()

    def get(values: torch.Tensor, metadata: torch.Tensor) -> Any:
        version, found = made.get(values, (None, None))
        if version != values._version:
            found = make(values.detach(), metadata)
            made[values] = (values._version, found)
        return found

    return get


class _Dense(torch.autograd.Function):
    """The dense weight that was made of these values; its gradient where they are kept."""

    @staticmethod
    def forward(ctx, values, weight, columns):
        ctx.columns = columns
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, dweight):
        return dweight.gather(1, ctx.columns), None, None


def _torch() -> Op:
    """A product of cuBLAS with the pruned weight as it is: what a PyTorch user would write."""
    weights = _once_a_weight(lambda v, m: (decompressed(v, m), kept(m, v.shape[0], 2 * v.shape[1])))

    def function(x, values, metadata, bias=None, activation=None):
        return activated(F.linear(x, _Dense.apply(values, *weights(values, metadata)), bias), activation)

    return function


def _cusparselt() -> Op:
    """cuSPARSELt with the algorithm that its search finds for a shape."""
    if not torch.backends.cusparselt.is_available():
        raise ImportError("this PyTorch has no cuSPARSELt")
    weights = _once_a_weight(lambda values, metadata: torch._cslt_compress(decompressed(values, metadata)))
    found: dict[tuple, int] = {}

    def function(x, values, metadata, bias=None, activation=None):
        packed, columns = weights(values, metadata), x.t()
        key = (values.shape, x.shape, x.dtype, bias is None)
        if key not in found:
            found[key] = torch._cslt_sparse_mm_search(packed, columns, bias=bias, transpose_result=True)
        z = torch._cslt_sparse_mm(packed, columns, bias=bias, transpose_result=True, alg_id=found[key])
        return activated(z, activation)

    return function


def _cusparselt_takes(case: Case, mode: str) -> str | None:
    if mode != "fwd":
        return "has a forward alone"
    return None if case.bench or case in HOST_CASES else "takes 16 bits in multiples of 32, compared where it is timed"


def _of_tensors(op: Op) -> Op:
    """The op on the two tensors of a compressed weight."""

    def run(x, values, metadata, bias=None, activation=None):
        return op(x, Compressed(values, metadata), bias, activation)

    return run


def _candidates(order: Callable[[int, int, int], tuple[int, int, int]]) -> Callable[[Case], list[configs.Config]]:
    """Tiles and steps of each product; `order` makes (block_m, block_n, block_k) of its own two and its step."""

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
    if implementation == "cuda" and (case.dtype == FP32 or k % 16 or n % 8):
        return "it takes 16-bit dtypes, K a multiple of 16 and N of 8"
    return None


def _alias_reason(implementation: str, case: Case, mode: str) -> str | None:
    """Of "cuda" nothing is checked here: the checks try layouts that it does not take, and test_sm90.py has its own."""
    if implementation == "triton":
        return "it is what auto takes" if case.dtype == FP32 or case.dims["m"] <= 64 else None
    return "it is checked by tests of its own; auto takes it where it can" if implementation == "cuda" else None


CUDA_CASES = tuple(dataclasses.replace(case, min_capability=(9, 0)) for case in CASES if case.bench)
HOST_CASES = (dataclasses.replace(_case(128, 128, 128, BF16), name="128x128x128-bf16-host"),)

SPEC = KernelSpec(
    name="sparse_matmul",
    implementations={
        "auto": _of_tensors(sparse_matmul),
        "triton": _of_tensors(partial(sparse_matmul, backend="triton")),
        "cuda": _of_tensors(partial(sparse_matmul, backend="cuda")),
    },
    # Elsewhere the first is the second.
    min_capability={"triton": (9, 0), "cuda": (9, 0)},
    unsupported_reason=_unsupported_reason,
    alias_reason=_alias_reason,
    baselines=(
        EAGER,
        COMPILED,
        COMPILED_MAX,
        Peer("torch", load=_torch),
        Peer("cusparselt", load=_cusparselt, supports=_cusparselt_takes),
    ),
    pytorch=("torch",),
    reference=_of_tensors(sparse_matmul_reference),
    make_inputs=make_inputs,
    cost=cost,
    extra_bytes=extra_bytes,
    cases=CASES,
    grads=("x", "values", "bias"),
    determinism={"fwd": "run-to-run", "bwd": "run-to-run"},
    # The sparse tensor cores do not multiply what is pruned: an inf of x there does not reach y.
    finite_only=lambda case: case.dtype != FP32,
    unit="rows",
    items=lambda case: case.dims["m"],
    fuzz={"m": (0, 20), "k4": (0, 9), "n": (0, 20)},
    tunables=(
        Tunable(
            configs, "pick_fwd_config", "fwd", _candidates(lambda a, b, step: (a, b, step)), implementation="triton"
        ),
        Tunable(
            configs, "pick_dx_config", "bwd", _candidates(lambda a, b, step: (a, step, b)), implementation="triton"
        ),
        Tunable(
            configs, "pick_dvalues_config", "bwd", _candidates(lambda a, b, step: (step, a, b)), implementation="triton"
        ),
        Tunable(configs, "pick_cuda_config", "fwd", _cuda_candidates, CUDA_CASES, implementation="cuda"),
    ),
    host_cases=HOST_CASES,
)

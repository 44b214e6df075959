"""The declaration of swiglu: cases, cost, peers. `python -m harness bench --kernel swiglu`."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
import torch.nn.functional as F

from harness.spec import COMPILED, COMPILED_MAX, EAGER, Case, Cost, Inputs, KernelSpec, Peer, Tunable

from . import configs, swiglu
from .activation import ACTIVATIONS
from .reference import swiglu_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _case(rows: int, dim: int, dtype: torch.dtype, activation: str = "silu", bench: bool = False, **params) -> Case:
    """`layout` is "packed", or "halves": gate and up are two views of one tensor."""
    short = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
    words = (f"{rows}x{dim}", short, activation, params.get("layout"), "wide" if "spread" in params else None)
    name = "-".join(word for word in words if word)
    return Case(name, dict(rows=rows, dim=dim), dtype, dict(activation=activation, **params), bench)


CASES = (
    # MLP widths of Llama-2 7B, 13B and 70B, and TransformerNP's 1365; one case fits in L2.
    _case(2048, 11008, BF16, bench=True),
    _case(16384, 11008, BF16, bench=True),
    _case(16384, 11008, BF16, bench=True, layout="packed"),
    _case(8192, 13824, BF16, bench=True, layout="packed"),
    _case(8192, 28672, BF16, bench=True),
    _case(205000, 1365, BF16, bench=True),
    _case(205000, 1365, BF16, bench=True, layout="packed"),
    _case(16384, 11008, BF16, "gelu_tanh", bench=True),
    _case(16384, 11008, BF16, "gelu", bench=True, layout="packed"),
    _case(8192, 11008, FP32, bench=True),
    # Boundary cases: empty, one element, primes, one off a power of two, more than one tile, large values.
    _case(0, 64, FP32),
    _case(0, 64, FP32, layout="packed"),
    _case(1, 1, FP32),
    _case(1, 1, FP16, layout="packed"),
    _case(3, 4097, FP32),
    _case(3, 1365, FP32, layout="packed"),
    *(_case(31, 127, FP32, activation) for activation in ("relu", "sigmoid", "identity")),
    *(_case(31, 127, FP32, activation, spread=8.0) for activation in ("silu", "gelu", "gelu_tanh")),
    *(_case(17, 64, FP16, activation, layout="packed") for activation in ("silu", "gelu", "gelu_tanh")),
    *(_case(33, 257, BF16, activation, layout="packed") for activation in ACTIVATIONS[:5]),
    _case(23, 129, FP32, layout="halves"),
    _case(23, 1040, FP16, layout="halves"),
    _case(257, 1023, BF16, spread=8.0),
    # Unaligned rows with enough active lanes: CUDA C++ on Hopper.
    *(_case(37, 1365, BF16, activation, layout="packed") for activation in ACTIVATIONS),
    *(_case(29, 703, FP16, activation, layout="halves") for activation in ACTIVATIONS),
)
# The benchmarked cases with unaligned rows, which have their own kernels and configurations on Hopper.
ODD = tuple(case for case in CASES if case.bench and case.dims["dim"] % 8 and "layout" in case.params)
EVEN = tuple(case for case in CASES if case.bench and case not in ODD)


def make_inputs(case: Case, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    params = dict(case.params)
    layout, spread = params.pop("layout", "separate"), params.pop("spread", 1.0)
    rows, dim = case.dims["rows"], case.dims["dim"]

    def normal(cols: int) -> torch.Tensor:
        return torch.randn(rows, cols, dtype=case.dtype, device=device, generator=generator) * spread

    if layout == "separate":
        return {"gate": normal(dim), "up": normal(dim), **params}
    packed = normal(2 * dim)
    if layout == "halves":
        return {"gate": packed[:, :dim], "up": packed[:, dim:], **params}
    return {"gate": packed, **params}


def cost(case: Case, mode: str) -> Cost:
    elements = case.dims["rows"] * case.dims["dim"]
    # forward: gate, up and y. backward: dy, gate, up, dgate and dup.
    tensors = {"fwd": 3, "bwd": 5}[mode]
    # Operations of the formulas as written, where an exponential, erf or tanh counts as one, and the multiplications by
    # up and dy.
    forward = dict(silu=5, gelu=6, gelu_tanh=10, relu=2, sigmoid=5, identity=1)[case.params["activation"]]
    backward = dict(silu=11, gelu=15, gelu_tanh=23, relu=5, sigmoid=9, identity=2)[case.params["activation"]]
    flops = {"fwd": forward, "bwd": backward}[mode]
    return Cost(flops=flops * elements, bytes=tensors * elements * case.dtype.itemsize)


def _torch():
    """As models write it, where every operation rounds to the dtype."""

    def gated(gate, up=None, *, activation="silu"):
        if up is None:
            gate, up = gate.chunk(2, dim=-1)
        if activation.startswith("gelu"):
            return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
        return {"silu": F.silu, "relu": F.relu, "sigmoid": torch.sigmoid, "identity": torch.clone}[activation](
            gate
        ) * up

    return gated


def _liger():
    from liger_kernel.ops.geglu import LigerGELUMulFunction
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction, LigerSiLUMulFunction

    def gated(gate, up=None, *, activation="silu"):
        if up is None:
            return LigerFusedGateUpSiLUMulFunction.apply(gate)
        return {"silu": LigerSiLUMulFunction, "gelu_tanh": LigerGELUMulFunction}[activation].apply(gate, up)

    return gated


def _liger_supports(case: Case, mode: str) -> str | None:
    activation, packed = case.params["activation"], case.params.get("layout") == "packed"
    if activation != "silu" and (packed or activation != "gelu_tanh"):
        return f"does not support {activation} with {'a packed tensor' if packed else 'separate tensors'}"
    if mode != "fwd" and not packed:
        return "overwrites gate and up with their gradients, so that the backward cannot run repeatedly"
    return None


def _candidates(case: Case) -> list[configs.Config]:
    """Tiles with 4 to 32 elements per thread: of a single row or, for a packed tensor, of rows of its half."""
    sizes = [(n, w) for n in (1024, 2048, 4096, 8192) for w in (4, 8, 16) if 4 <= n // (32 * w) <= 32]
    if case.params.get("layout") != "packed":
        tiles = [(1, n, w) for n, w in sizes]
    else:
        tiles = [(size // n, n, w) for size, w in sizes for n in (256, 512, 1024, 2048) if n <= size]
    return [configs.Config(*tile, eviction) for tile in tiles for eviction in ("", "evict_last")]


def _unaligned_candidates(case: Case) -> list[configs.UnalignedConfig]:
    """As many CTAs as registers allow without spills: in the forward about 32 per thread, 24 more per further slot."""
    sizes = [(n, 1, r * 256 // n) for n in (128, 256, 512) for r in (4, 5, 6, 8)]
    sizes += [(n, 2, r * 256 // n) for n in (128, 256) for r in (2, 3, 4)]
    return [configs.UnalignedConfig(*size, eviction) for size in sizes for eviction in ("", "evict_last")]


def _taken(case: Case) -> bool:
    """Whether unaligned.cu can run a case on Hopper."""
    return case.dtype != FP32 and case.dims["rows"] > 1 and case.dims["dim"] % 16 != 0 and "layout" in case.params


def _unsupported_reason(implementation: str, case: Case, mode: str) -> str | None:
    return (
        "requires a 16-bit dtype, and rows that are not aligned"
        if implementation == "cuda" and not _taken(case)
        else None
    )


def _alias_reason(implementation: str, case: Case, mode: str) -> str | None:
    """Always a reason for "cuda", because the generic checks try layouts that it does not support. test_unaligned.py
    checks it."""
    faster = _taken(case) and configs.fills_warps(case.dims["dim"], 2 * (mode == "bwd"))
    if implementation == "triton":
        return None if faster else "same version as auto"
    if implementation == "cuda":
        return "same version as auto" if faster else "auto selects triton at this width; its own tests check it"
    return None


SPEC = KernelSpec(
    name="swiglu",
    implementations={
        "auto": swiglu,
        "triton": partial(swiglu, backend="triton"),
        "cuda": partial(swiglu, backend="cuda"),
    },
    min_capability={"cuda": (9, 0)},
    unsupported_reason=_unsupported_reason,
    alias_reason=_alias_reason,
    baselines=(
        EAGER,
        COMPILED,
        COMPILED_MAX,
        Peer("torch", load=_torch),
        Peer("liger", load=_liger, supports=_liger_supports),
    ),
    pytorch=("torch",),
    reference=swiglu_reference,
    make_inputs=make_inputs,
    cost=cost,
    cases=CASES,
    grads=("gate", "up"),
    unit="elements",
    items=lambda case: case.dims["rows"] * case.dims["dim"],
    fuzz={"rows": (0, 40), "dim": (1, 700)},
    tunables=(
        *(Tunable(configs, "pick_config", mode, _candidates, EVEN) for mode in ("fwd", "bwd")),
        *(Tunable(configs, "pick_unaligned_config", mode, _unaligned_candidates, ODD) for mode in ("fwd", "bwd")),
    ),
    host_cases=(dataclasses.replace(_case(4, 256, BF16), name="4x256-bf16-host"),),
)

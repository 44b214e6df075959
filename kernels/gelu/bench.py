"""The declaration of gelu: cases, cost, peers. `python -m harness bench --kernel gelu`."""

from __future__ import annotations

import dataclasses

import torch

from harness.spec import COMPILED, COMPILED_MAX, EAGER, Case, Cost, Inputs, KernelSpec, Tunable

from . import configs, gelu
from .reference import gelu_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _case(rows: int, dim: int, dtype: torch.dtype, form: str, bench: bool = False, **params) -> Case:
    short = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
    suffix = "-wide" if "spread" in params else ""
    name = f"{rows}x{dim}-{short}-{'exact' if form == 'none' else form}{suffix}"
    return Case(name, dict(rows=rows, dim=dim), dtype, dict(approximate=form, **params), bench)


CASES = (
    # Widths of a small transformer, of Llama-2 7B's MLP (11008), of TransformerNP (512, 1365); one case fits in L2.
    _case(65536, 4096, BF16, "tanh", bench=True),
    _case(65536, 4096, BF16, "none", bench=True),
    _case(2048, 4096, BF16, "tanh", bench=True),
    _case(16384, 11008, BF16, "tanh", bench=True),
    _case(205000, 512, BF16, "none", bench=True),
    _case(205000, 1365, BF16, "none", bench=True),
    _case(32768, 8192, FP16, "none", bench=True),
    _case(32768, 4096, FP32, "none", bench=True),
    _case(32768, 4096, FP32, "tanh", bench=True),
    # Boundary cases: empty, one element, primes, one off a power of two, more than one tile, large values.
    _case(0, 64, FP32, "none"),
    _case(1, 1, FP32, "none"),
    _case(31, 127, FP32, "none"),
    _case(31, 127, FP32, "tanh"),
    _case(33, 257, FP16, "none"),
    _case(33, 257, FP16, "tanh"),
    _case(3, 4097, FP32, "tanh"),
    _case(64, 256, FP32, "none", spread=8.0),
    _case(64, 256, FP16, "tanh", spread=8.0),
    _case(257, 1023, BF16, "none", spread=8.0),
    _case(257, 1023, BF16, "tanh", spread=8.0),
)
SUITE_CASES = tuple(_case(rows, 4096, BF16, form, bench=True) for rows in (4096, 16384) for form in ("none", "tanh"))


def make_inputs(case: Case, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    params = dict(case.params)
    shape = (case.dims["rows"], case.dims["dim"])
    x = torch.randn(shape, dtype=case.dtype, device=device, generator=generator)
    return {"x": x * params.pop("spread", 1.0), **params}


def cost(case: Case, mode: str) -> Cost:
    elements = case.dims["rows"] * case.dims["dim"]
    # forward: x and y. backward: dy, x and dx.
    tensors = {"fwd": 2, "bwd": 3}[mode]
    # Operations of the formulas as written; an exponential, erf or tanh counts as one.
    flops = {"none": {"fwd": 5, "bwd": 11}, "tanh": {"fwd": 9, "bwd": 19}}[case.params["approximate"]][mode]
    return Cost(flops=flops * elements, bytes=tensors * elements * case.dtype.itemsize)


def _candidates(case: Case) -> list[configs.Config]:
    """Tiles with 8 to 32 elements per thread."""
    tiles = [(n, w) for n in (1024, 2048, 4096, 8192) for w in (4, 8, 16) if 8 <= n // (32 * w) <= 32]
    return [configs.Config(1, n, w, eviction) for n, w in tiles for eviction in ("", "evict_last")]


SPEC = KernelSpec(
    name="gelu",
    implementations={"triton": gelu},
    baselines=(EAGER, COMPILED, COMPILED_MAX),
    pytorch=("eager",),  # F.gelu itself
    reference=gelu_reference,
    make_inputs=make_inputs,
    cost=cost,
    cases=CASES,
    grads=("x",),
    unit="elements",
    items=lambda case: case.dims["rows"] * case.dims["dim"],
    fuzz={"rows": (0, 40), "dim": (1, 700)},
    tunables=tuple(Tunable(configs, "pick_config", mode, _candidates) for mode in ("fwd", "bwd")),
    suite_cases=SUITE_CASES,
    host_cases=(dataclasses.replace(_case(4, 256, BF16, "tanh"), name="4x256-bf16-tanh-host"),),
)

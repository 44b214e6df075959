"""The declaration of mxfp: cases, cost, baselines."""

from __future__ import annotations

import dataclasses

import torch

from harness.spec import Case, Cost, Inputs, KernelSpec, Tunable

from . import configs
from .op import mxfp
from .reference import mxfp_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _case(rows: int, dim: int, dtype: torch.dtype, bench: bool = False, **params) -> Case:
    short = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
    return Case(f"{rows}x{dim}-{short}", {"rows": rows, "dim": dim}, dtype, {"alpha": 0.5, **params}, bench)


CASES = (
    # What is timed: one size that lives in L2, one that does not.
    _case(2048, 4096, BF16, bench=True),
    _case(32768, 8192, BF16, bench=True),
    # What goes wrong: nothing, one element, primes, one off a power of two, more than one tile.
    _case(0, 64, FP32),
    _case(1, 1, FP32),
    _case(31, 127, FP32),
    _case(13, 513, FP16, alpha=-3.0),
    _case(3, 4097, FP32),
    _case(17, 257, BF16),
)


def make_inputs(case: Case, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    shape = (case.dims["rows"], case.dims["dim"])
    return {"x": torch.randn(shape, dtype=case.dtype, device=device, generator=generator), **case.params}


def cost(case: Case, mode: str) -> Cost:
    # x and y forward, dy and dx backward: two tensors either way, one multiplication an element.
    elements = case.dims["rows"] * case.dims["dim"]
    return Cost(flops=elements, bytes=2 * elements * case.dtype.itemsize)


def _candidates(case: Case) -> list[configs.Config]:
    return [configs.Config(m, n, w) for m in (1, 2, 4) for n in (512, 1024, 2048) for w in (2, 4, 8)]


SPEC = KernelSpec(
    name="mxfp",
    implementations={"triton": mxfp},
    reference=mxfp_reference,
    make_inputs=make_inputs,
    cost=cost,
    cases=CASES,
    grads=("x",),
    unit="rows",
    items=lambda case: case.dims["rows"],
    fuzz={"rows": (0, 40), "dim": (1, 700)},
    host_cases=(dataclasses.replace(_case(4, 256, BF16), name="4x256-bf16-host"),),
    tunables=tuple(
        Tunable(configs, "pick_config", mode, _candidates, implementation="triton") for mode in ("fwd", "bwd")
    ),
)

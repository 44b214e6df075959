"""Kernels for the tests of the ahead-of-time build: right ones, and each way in which one can be wrong.

`python -m tests.ahead_samples FILE` compiles them all and writes what the build says of them. It is a program because
the compiler is not there in a process that runs Triton's interpreter, as the tests do without a GPU.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from harness.spec import Case, Cost, KernelSpec


@triton.jit
def _scale_kernel(x_ptr, y_ptr, n, by, SMS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) * by, mask=at < n)


def _scale(x: torch.Tensor, by: float) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.is_cuda or x.device.type != "cuda":
        raise RuntimeError("x must be on a GPU")
    with torch.cuda.device_of(x):
        sms = torch.cuda.get_device_properties(x.device).multi_processor_count
        _scale_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), by, SMS=sms, BLOCK=1024)
    return y


@torch.library.custom_op("ahead_samples::scale", mutates_args=())
def scale_op(x: torch.Tensor, by: float) -> torch.Tensor:
    return _scale(x, by)


@torch.library.custom_op("ahead_samples::scale_bwd", mutates_args=())
def scale_bwd_op(dy: torch.Tensor, by: float) -> torch.Tensor:
    return scale_op(dy, -by)  # an op that calls an op


for _op in (scale_op, scale_bwd_op):
    _op.register_fake(lambda x, by: x.new_empty(x.shape))


def _save(ctx, inputs, output) -> None:
    ctx.by = inputs[1]


scale_op.register_autograd(lambda ctx, dy: (scale_bwd_op(dy * 1, ctx.by), None), setup_context=_save)


@triton.jit
def _square_kernel(x_ptr, y_ptr, side, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    row, k = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, side, BLOCK_K):
        a = tl.load(x_ptr + row[:, None] * side + (start + k)[None, :])
        b = tl.load(x_ptr + (start + k)[:, None] * side + row[None, :])
        total = tl.dot(a, b, total)
    tl.store(y_ptr + row[:, None] * side + row[None, :], total.to(y_ptr.dtype.element_ty))


@triton_op("ahead_samples::square", mutates_args={})
def square(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    wrap_triton(_square_kernel)[(1,)](x, y, x.shape[0], BLOCK=64, BLOCK_K=32, num_warps=4)
    return y


def greedy(x: torch.Tensor) -> torch.Tensor:
    """Nine stages of two tiles of 64 x 128 halves: 288 KiB of shared memory, more than any GPU has."""
    y = torch.empty_like(x)
    _square_kernel[(1,)](x, y, x.shape[0], BLOCK=64, BLOCK_K=128, num_warps=4, num_stages=10)
    return y


@gluon.jit
def _copy_kernel(x_ptr, y_ptr, n, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    at = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    gl.store(y_ptr + at, gl.load(x_ptr + at, mask=at < n), mask=at < n)


def copy(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    _copy_kernel[(triton.cdiv(x.numel(), 512),)](x, y, x.numel(), BLOCK=512, num_warps=4)
    return y


@triton.jit
def _spilling_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, x * tl.sum(x * x))


def spilling(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    _spilling_kernel[(1,)](x, y, BLOCK=x.numel(), num_warps=1, maxnreg=32)
    return y


@triton.jit
def _broken_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK < 128, "the block is too large")
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at))


def broken(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    _broken_kernel[(1,)](x, y, BLOCK=x.numel())
    return y


def _inputs(case: Case, device, generator) -> dict:
    start = case.params.get("start", 0)
    x = torch.randn(start + case.dims["n"], dtype=case.dtype, device=device, generator=generator)[start:]
    return {"x": x if case.dims.get("rank", 1) == 1 else x.view(-1, case.dims["side"])}


def _spec(name: str, op, *cases: Case, **fields) -> KernelSpec:
    return KernelSpec(
        name=name,
        implementations={"triton": op},
        reference=lambda x: x,
        make_inputs=_inputs,
        cost=lambda case, mode: Cost(case.dims["n"], 2 * case.dims["n"]),
        cases=cases,
        grads=fields.pop("grads", ()),
        unit="elements",
        items=lambda case: case.dims["n"],
        fuzz={},
        **{"modes": ("fwd",), **fields},
    )


def _line(name: str, n: int, dtype: torch.dtype = torch.float32, bench: bool = True, **rest) -> Case:
    return Case(name, {"n": n}, dtype, bench=bench, **rest)


def _tile(name: str, side: int, dtype: torch.dtype) -> Case:
    return Case(name, {"n": side * side, "side": side, "rank": 2}, dtype, bench=True)


SPILLING = _spec("spilling", spilling, _line("2048", 2048))

SPECS = (
    _spec(
        "scale",
        lambda x: scale_op(x, 2.0),
        _line("4096", 4096),
        _line("again", 8192, bench=False),
        _line("offset", 4096, bench=False, params={"start": 1}),
        _line("half", 4096, torch.bfloat16, bench=False, min_capability=(9, 0)),
        grads=("x",),
        modes=("fwd", "bwd", "fwd+bwd"),
    ),
    _spec("square", square, _tile("64", 64, torch.bfloat16)),
    _spec("copy", copy, _line("4096", 4096)),
    SPILLING,
    replace(SPILLING, name="granted", spills={"_spilling_kernel": 1 << 20}),
    _spec("greedy", greedy, _tile("64", 64, torch.bfloat16)),
    _spec("broken", broken, _line("fits", 64), _line("large", 128)),
    replace(
        _spec("two", lambda x: scale_op(x, 2.0), _line("4096", 4096)),
        implementations={"triton": lambda x: scale_op(x, 2.0), "cuda": broken},
        min_capability={"cuda": (10, 0)},
    ),
    _spec("silent", lambda x: x + 1, _line("4096", 4096)),
)


def compile_all() -> list[dict]:
    """Every SPEC for every target, as `harness.compiling.ahead.compile_spec` reports it."""
    from harness.compiling.ahead import compile_spec

    pairs = ((spec, capability) for spec in SPECS for capability in spec.compile_targets)
    return [asdict(compile_spec(spec, capability, spec.cases, spec.modes)) for spec, capability in pairs]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(compile_all()), encoding="utf-8")

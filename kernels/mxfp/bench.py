"""The declaration of mxfp: cases, cost, peers. `python -m harness bench --kernel mxfp`."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch

from harness.spec import COMPILED, COMPILED_MAX, EAGER, Case, Cost, Inputs, KernelSpec, Peer, Tunable, Yardstick

from . import configs, mxfp, mxfp_dequantize
from .formats import FORMATS
from .reference import mxfp_dequantize_reference, mxfp_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _case(rows: int, dim: int, dtype: torch.dtype, format: str, /, bench: bool = False, **params: Any) -> Case:
    """The name contains every option that is not the default: 8192x8192-bf16-nvfp4-tensor_scale."""
    short = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
    words = [k if v is True else f"{k}{v}" for k, v in params.items()]
    name = "-".join([f"{rows}x{dim}", short, format, *words])
    return Case(name, {"rows": rows, "dim": dim}, dtype, {"format": format, **params}, bench)


# Parameters that are not arguments: `dequantize`: dequantises random bytes; `tensor_scale`: one is given.
CASES = (
    # A weight and activations, blocks along either dimension for training, stochastic rounding for training.
    *(_case(8192, 8192, BF16, format, bench=True) for format in FORMATS),
    *(_case(8192, 8192, BF16, format, bench=True, dim=0) for format in ("mxfp8_e4m3", "mxfp4")),
    _case(8192, 8192, BF16, "nvfp4", bench=True, tensor_scale=True),
    _case(8192, 8192, BF16, "mxfp4", bench=True, stochastic=True),
    *(_case(65536, 4096, BF16, format, bench=True) for format in ("mxfp8_e4m3", "mxfp6_e2m3", "mxfp4", "nvfp4")),
    _case(65536, 4096, BF16, "nvfp4", bench=True, tensor_scale=True),
    *(_case(8192, 8192, BF16, format, bench=True, dequantize=True) for format in FORMATS),
    *(
        _case(65536, 4096, BF16, format, bench=True, dequantize=True)
        for format in ("mxfp8_e4m3", "mxfp6_e2m3", "mxfp4", "nvfp4")
    ),
    # Boundary cases: empty, one element, primes, one off a block, whole tiles, the other dimension, every option.
    _case(31, 127, FP32, "mxfp8_e4m3"),
    _case(0, 64, FP32, "mxfp8_e4m3"),
    _case(3, 0, FP32, "mxfp8_e4m3"),
    _case(1, 1, FP32, "mxfp8_e4m3"),
    _case(16, 512, FP32, "mxfp8_e4m3"),
    _case(37, 130, FP16, "mxfp8_e5m2", dim=0),
    _case(13, 96, FP32, "mxfp6_e3m2"),
    _case(7, 513, FP16, "mxfp6_e2m3"),
    _case(8, 512, FP16, "mxfp6_e2m3"),
    _case(33, 257, FP32, "mxfp4"),
    _case(64, 64, FP16, "mxfp4", dim=0),
    _case(9, 70, FP32, "mxfp4", stochastic=True, seed=7),
    _case(17, 129, FP32, "nvfp4"),
    _case(8, 1024, FP16, "nvfp4", tensor_scale=True),
    _case(5, 33, FP32, "nvfp4", dim=0, stochastic=True, seed=2**40 + 1),
    *(_case(11, 70, FP32, format, dequantize=True) for format in FORMATS),
    _case(4, 512, FP16, "mxfp6_e3m2", dequantize=True),
    _case(8, 256, FP16, "nvfp4", dequantize=True),
    _case(257, 1023, BF16, "mxfp8_e4m3"),
    _case(257, 1024, BF16, "mxfp4"),
    _case(257, 1000, BF16, "mxfp6_e2m3", dim=0),
    _case(129, 1000, BF16, "nvfp4", dequantize=True),
    _case(100, 190, BF16, "mxfp8_e5m2", dim=0),
    _case(1000, 258, BF16, "mxfp4", dim=0),
    _case(129, 131, BF16, "mxfp4", dim=0),
    _case(96, 70, BF16, "nvfp4", dim=0),
    _case(500, 64, BF16, "nvfp4", dim=0, tensor_scale=True),
)


def make_inputs(case: Case, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    params = dict(case.params)
    rows, dim = case.dims["rows"], case.dims["dim"]
    layout = FORMATS[params["format"]]
    one = torch.rand((), dtype=FP32, device=device, generator=generator) / 1024 + 1 / 1024
    if params.pop("dequantize", False):
        blocks = layout.blocks(dim)

        def random(columns: int, low: int, high: int) -> torch.Tensor:
            shape = (rows, columns)
            return torch.randint(low, high, shape, dtype=torch.uint8, device=device, generator=generator)

        nvfp4 = params["format"] == "nvfp4"
        scales = random(blocks, 1, 127) if nvfp4 else random(blocks, 119, 128)
        data = random(blocks * layout.block_bytes, 0, 256)
        if layout.width == 8:  # neither NaN nor infinity, which opcheck reports as a difference
            data = torch.where(data & 0x7F < 0x78, data, 0)
        inputs: Inputs = {"data": data, "scales": scales, "dtype": case.dtype}
        return {**inputs, **({"tensor_scale": one} if nvfp4 else {}), "size": dim, **params}
    inputs = {"x": torch.randn((rows, dim), dtype=case.dtype, device=device, generator=generator)}
    if params.pop("tensor_scale", False):
        inputs["tensor_scale"] = one
    return {**inputs, **params}


@functools.wraps(mxfp)
def quantize_or_dequantize(backend: str = "auto", **inputs: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Calls the public function that a case tests."""
    return mxfp_dequantize(**inputs) if "data" in inputs else mxfp(**inputs, backend=backend)


def reference(**inputs: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
    return mxfp_dequantize_reference(**inputs) if "data" in inputs else mxfp_reference(**inputs)


def cost(case: Case, mode: str) -> Cost:
    rows, dim = case.dims["rows"], case.dims["dim"]
    layout = FORMATS[case.params["format"]]
    lead, size = (dim, rows) if case.params.get("dim") == 0 else (rows, dim)
    packed = lead * layout.blocks(size) * (layout.block_bytes + 1)
    # NVFP4's tensor scale is written or read. Computing it needs another read of x, which is not counted here, so that
    # the fraction of the roofline shows it.
    scale = 4 if case.params["format"] == "nvfp4" else 0
    # A comparison and a multiplication per element; dequantisation has one multiplication.
    flops = rows * dim * (1 if case.params.get("dequantize") else 2)
    return Cost(flops=flops, bytes=rows * dim * case.dtype.itemsize + packed + scale)


def _copy_cost(case: Case, mode: str) -> Cost:
    return Cost(flops=0, bytes=2 * math.prod(case.dims.values()) * case.dtype.itemsize)


# Quantisation is compared with a copy of its input.
COPY = Yardstick(
    "copy",
    load=lambda: lambda x, **_: x.clone(),
    cost=_copy_cost,
    supports=lambda case, mode: "copies x, which only quantisation reads" if case.params.get("dequantize") else None,
)


def _torchao():
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

    elements = {
        "mxfp8_e4m3": torch.float8_e4m3fn,
        "mxfp8_e5m2": torch.float8_e5m2,
        "mxfp4": torch.float4_e2m1fn_x2,
    }

    def quantize(x, format):
        scales, data = to_mx(x, elements[format], 32)
        return data.view(torch.uint8), scales.view(torch.uint8)

    def dequantize(data, scales, format, dtype, size):
        data = data if format == "mxfp4" else data.view(elements[format])
        return to_dtype(data, scales.view(torch.float8_e8m0fnu), elements[format], 32, dtype)

    # torchao's functions are meant to be compiled: in eager mode each operation writes to memory.
    quantize, dequantize = (torch.compile(fn, dynamic=False) for fn in (quantize, dequantize))
    return lambda **inputs: dequantize(**inputs) if "data" in inputs else quantize(**inputs)


def _torchao_supports(case: Case, mode: str) -> str | None:
    params = case.params
    if params["format"] not in ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp4"):
        return "its data layout or its rounding of scales differs"
    if params.get("stochastic") or params.get("dim") == 0:
        return "supports only round-to-nearest along the last dimension"
    return "requires sizes that are multiples of the block" if case.dims["dim"] % 32 else None


def _candidates(case: Case) -> list[configs.Config]:
    widths = (32, 64, 128) if case.params.get("dim") == 0 else (128, 256, 512, 1024, 2048)
    return [configs.Config(max(1, tile // n), n, w) for n in widths for tile in (2048, 4096, 8192) for w in (4, 8, 16)]


def _pairs_candidates(case: Case) -> list[configs.Config]:
    return [configs.Config(1, 512 * w * each, w) for w in (1, 2, 4, 8, 16) for each in (1, 2, 4)]


def _amax_candidates(case: Case) -> list[configs.Config]:
    return [configs.Config(tile // 512, 512, w) for tile in (4096, 8192, 16384, 32768) for w in (4, 8, 16)]


def _units_candidates(case: Case) -> list[configs.UnitsConfig]:
    return [configs.UnitsConfig(32 * w * each, w) for w in (1, 2, 4, 8, 16) for each in (1, 2, 4, 8)]


def _by_pairs(case: Case) -> bool:
    return not case.params.get("dequantize") and case.params.get("dim") != 0


def _cuda_candidates(case: Case) -> list[configs.CudaConfig]:
    return [configs.CudaConfig(steps, warps) for steps in (1, 2, 4, 8) for warps in (1, 2, 4, 8)]


def _by_cuda(case: Case) -> bool:
    """Whether CUDA C++ can run a case."""
    if case.dtype != BF16 or case.params.get("dim") != 0 or case.params.get("stochastic"):
        return False
    columns, blocks = case.dims["dim"], FORMATS[case.params["format"]].blocks(case.dims["rows"])
    return columns % 2 == 0 and (case.params["format"] != "nvfp4" or blocks % 2 == 0)


def _unsupported_reason(implementation: str, case: Case, mode: str) -> str | None:
    if implementation == "cuda" and not _by_cuda(case):
        return "requires bfloat16, round-to-nearest, and a dim other than the last, of even size"
    return None


def _alias_reason(implementation: str, case: Case, mode: str) -> str | None:
    return "same version as auto" if implementation == configs.pick_backend("auto", possible=_by_cuda(case)) else None


_BENCHED = tuple(case for case in CASES if case.bench)

SPEC = KernelSpec(
    name="mxfp",
    implementations={
        "auto": quantize_or_dequantize,
        "triton": functools.partial(quantize_or_dequantize, backend="triton"),
        "cuda": functools.partial(quantize_or_dequantize, backend="cuda"),
    },
    # On other GPUs "auto" is "triton".
    min_capability={"triton": (9, 0), "cuda": (9, 0)},
    unsupported_reason=_unsupported_reason,
    alias_reason=_alias_reason,
    baselines=(EAGER, COMPILED, COMPILED_MAX, Peer("torchao", load=_torchao, supports=_torchao_supports), COPY),
    pytorch=("torchao",),
    reference=reference,
    make_inputs=make_inputs,
    cost=cost,
    cases=CASES,
    grads=(),
    modes=("fwd",),
    determinism={"fwd": "run-to-run"},
    unit="rows",
    items=lambda case: case.dims["rows"],
    fuzz={"rows": (0, 140), "dim": (1, 300)},
    tunables=(
        # Those for Hopper. Other problems use pick_config and pick_dequantize_config, as on other GPUs.
        Tunable(configs, "pick_pairs", "fwd", _pairs_candidates, cases=tuple(filter(_by_pairs, _BENCHED))),
        Tunable(
            configs,
            "pick_amax",
            "fwd",
            _amax_candidates,
            cases=tuple(c for c in _BENCHED if c.params == {"format": "nvfp4"}),
        ),
        Tunable(
            configs,
            "pick_config",
            "fwd",
            _candidates,
            cases=tuple(c for c in _BENCHED if c.params.get("dim") == 0),
            implementation="triton",
        ),
        Tunable(
            configs,
            "pick_cuda_config",
            "fwd",
            _cuda_candidates,
            cases=tuple(dataclasses.replace(c, min_capability=(9, 0)) for c in _BENCHED if _by_cuda(c)),
            implementation="cuda",
        ),
        Tunable(
            configs,
            "pick_dequantize_pairs",
            "fwd",
            _units_candidates,
            cases=tuple(case for case in _BENCHED if case.params.get("dequantize")),
        ),
        Tunable(
            configs,
            "pick_dequantize_config",
            "fwd",
            _candidates,
            cases=tuple(case for case in CASES if case.name == "129x1000-bf16-nvfp4-dequantize"),
        ),
    ),
    host_cases=(dataclasses.replace(_case(128, 256, BF16, "mxfp8_e4m3"), name="128x256-bf16-mxfp8_e4m3-host"),),
)

"""The declaration of mxfp_matmul: cases, cost, peers. `python -m harness bench --kernel mxfp_matmul`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from harness.spec import COMPILED, COMPILED_MAX, EAGER, Case, Cost, Inputs, KernelSpec, Peer, Tunable, Yardstick

from . import configs, mxfp_matmul
from .formats import BLOCK, CHUNK, TILE, TILE_BYTES, chunks, tiles
from .reference import E2M1, codes, mxfp_matmul_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _case(rows: int, columns: int, depth: int, dtype: torch.dtype, format: str, bench: bool = False) -> Case:
    short = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
    dims = {"rows": rows, "columns": columns, "depth": depth}
    return Case(f"{rows}x{columns}x{depth}-{short}-{format}", dims, dtype, {"format": format}, bench)


CASES = (
    # Decoding, a small batch, and prompts: bound by the reads of w, by both, and by the tensor cores.
    *(_case(rows, 8192, 8192, BF16, format, bench=True) for rows in (1, 16, 64, 1024) for format in BLOCK),
    _case(1, 28672, 8192, BF16, "mxfp4", bench=True),
    _case(4096, 8192, 8192, BF16, "mxfp4", bench=True),
    # Boundary cases: empty, one element, primes, one off a tile and a chunk, split-K, every format.
    _case(3, 17, 150, FP32, "mxfp4"),
    _case(0, 32, 128, FP32, "mxfp4"),
    _case(3, 0, 128, FP32, "mxfp4"),
    _case(2, 8, 0, FP32, "mxfp4"),
    _case(1, 1, 1, FP32, "mxfp4"),
    _case(16, 64, 1024, FP16, "mxfp4"),
    _case(17, 65, 1111, FP16, "mxfp4"),
    _case(65, 129, 256, FP32, "nvfp4"),
    _case(5, 31, 1031, FP16, "nvfp4"),
    _case(257, 130, 384, FP16, "nvfp4"),
    _case(5, 127, 1031, BF16, "mxfp4"),
    _case(9, 144, 1096, BF16, "mxfp4"),
    _case(33, 272, 1031, FP16, "nvfp4"),
    _case(70, 528, 384, BF16, "nvfp4"),
    _case(300, 257, 1024, BF16, "nvfp4"),
    # Many rows on Hopper, with partial tiles.
    dataclasses.replace(_case(600, 3632, 264, BF16, "mxfp4"), min_capability=(9, 0)),
    dataclasses.replace(_case(600, 3632, 264, FP16, "nvfp4"), min_capability=(9, 0)),
)


def make_inputs(case: Case, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    rows, columns, depth = (case.dims[n] for n in ("rows", "columns", "depth"))
    format = case.params["format"]
    count, nvfp4 = chunks(depth), format == "nvfp4"  # scales of nvfp4: 2^-6 to 2^0

    def random(shape: tuple[int, ...], low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=device, generator=generator)

    scales = random((count, columns, CHUNK // BLOCK[format]), *((128, 184) if nvfp4 else (119, 124)))
    inputs: Inputs = {
        "x": torch.randn((rows, depth), dtype=case.dtype, device=device, generator=generator),
        "w": random((count, tiles(columns), TILE_BYTES), 0, 256),
        "scales": scales,
    }
    if nvfp4:
        inputs["tensor_scale"] = torch.rand((), dtype=FP32, device=device, generator=generator) / 256 + 1 / 256
    return {**inputs, **case.params}


def _dense_cost(case: Case, weights: int) -> Cost:
    rows, columns, depth = (case.dims[n] for n in ("rows", "columns", "depth"))
    pipe = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[case.dtype]
    size = rows * (depth + columns) * case.dtype.itemsize + weights
    return Cost(flops=2 * rows * columns * depth, bytes=size, pipe=pipe)


def cost(case: Case, mode: str) -> Cost:
    format = case.params["format"]
    columns = case.dims["columns"]
    chunk = tiles(columns) * TILE_BYTES + columns * (CHUNK // BLOCK[format])
    weights = chunks(case.dims["depth"]) * chunk + (4 if format == "nvfp4" else 0)
    return _dense_cost(case, weights)


def _once_a_weight(make: Callable[..., Any]) -> Callable[..., Any]:
    """Caches the result of `make` for each weight, as long as that tensor exists unchanged."""
    kept = WeakTensorKeyDictionary()

    def get(w: torch.Tensor, *rest: Any) -> Any:
        version, made = kept.get(w, (None, None))
        if version != w._version:
            made = make(w, *rest)
            kept[w] = (w._version, made)
        return made

    return get


def unpacked(w: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [N, K / 2] and scales [N, K / block] in the order of their elements: for MXFP4 the inverse of
    `mxfp_pack`. Scales of NVFP4 remain as stored."""
    natural = codes(w)[: scales.shape[1]].to(torch.uint8)
    return natural[:, 0::2] | (natural[:, 1::2] << 4), scales.transpose(0, 1).flatten(1)


def _torch():
    """Dequantises the weights by table look-up in x's dtype, then calls a dense GEMM. The weights are unpacked to the
    order of their elements once."""
    tables: dict[tuple, torch.Tensor] = {}
    natural = _once_a_weight(unpacked)

    def function(x, w, scales, format, tensor_scale=None):
        key = (x.dtype, x.device)
        if key not in tables:
            tables[key] = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=x.dtype, device=x.device)
        data, scales = natural(w, scales)
        numbers = torch.stack([data & 15, data >> 4], -1).flatten(1).int()
        if format == "nvfp4":
            scale = ((scales.short() << 7).view(torch.float16) / 128).to(x.dtype)
        else:
            scale = scales.view(torch.float8_e8m0fnu).to(x.dtype)
        blocks = tables[key][numbers].unflatten(-1, (scale.shape[-1], BLOCK[format]))
        weights = (blocks * scale.unsqueeze(-1)).flatten(1)
        y = F.linear(F.pad(x, (0, weights.shape[1] - x.shape[-1])), weights)
        return y if tensor_scale is None else (y * tensor_scale).to(x.dtype)

    return function


def _humming():
    from humming.layer import HummingLayer

    def layer(w, scales, dtype):
        data, scales = unpacked(w, scales)
        made = HummingLayer(
            shape_n=data.shape[0],
            shape_k=2 * data.shape[1],
            weight_config={"quant_method": "mxfp4"},
            torch_dtype=dtype,
        ).to(w.device)
        made.load_from_tensors({"weight": data.contiguous(), "weight_scale": scales.contiguous()})
        made.transform()
        return made

    layers = _once_a_weight(layer)
    return lambda x, w, scales, format: layers(w, scales, x.dtype)(x)


def _humming_supports(case: Case, mode: str) -> str | None:
    if case.params["format"] != "mxfp4":
        return "its NVFP4 layer requires another layout of scales"
    return (
        None
        if case.dims["depth"] % CHUNK == 0 and case.dims["columns"] % 64 == 0
        else "requires K and N in whole tiles"
    )


def _dense():
    """A dense GEMM of the same shape and dtype, with random weights that are generated once."""
    made: dict[tuple, torch.Tensor] = {}

    def dense(x, scales, **_):
        key = (scales.shape[1], x.shape[-1], x.dtype, x.device)
        if key not in made:
            made[key] = torch.randn(key[:2], dtype=x.dtype, device=x.device)
        return x @ made[key].t()

    return dense


# Compute-bound problems are compared with a GEMM with weights in x's dtype.
DENSE = Yardstick(
    "dense",
    load=_dense,
    cost=lambda case, mode: _dense_cost(case, case.dims["columns"] * case.dims["depth"] * case.dtype.itemsize),
)


def _candidates(case: Case) -> list[configs.Config]:
    rows, found = case.dims["rows"], []
    tiles = [(16, 32), (16, 64), (16, 128)] if rows <= 16 else [(64, 64), (64, 128), (128, 64), (128, 128), (128, 256)]
    for block_m, block_n in tiles:
        for splits in (1, 2, 4, 8) if rows <= 64 else (1,):
            found += [
                configs.Config(block_m, block_n, block_k, splits, 8, warps, stages)
                for block_k in (32, 64)
                for warps in (4, 8)
                for stages in (2, 3, 4)
            ]
    return found


def _cuda_candidates(case: Case) -> list[configs.CudaConfig]:
    rows, bytes_each = case.dims["rows"], CHUNK // 2 + CHUNK // BLOCK[case.params["format"]]
    tile_m = next(size for size in (8, 16, 32, 64) if rows <= size or size == 64)
    return [
        configs.CudaConfig(tile_m, groups, splits, stages)
        for groups in (1, 2, 4)
        for splits in (1, 2, 4, 8)
        for stages in (3, 4, 6, 8)
        if stages * (2 * tile_m * CHUNK + 64 * groups * bytes_each + 16) <= (224 << 10) * groups // 4
    ]


def _takes_cuda(case: Case) -> bool:
    return case.dtype != FP32 and case.dims["columns"] % TILE == 0


def _unsupported_reason(implementation: str, case: Case, mode: str) -> str | None:
    if implementation == "cuda" and not _takes_cuda(case):
        return f"requires float16 or bfloat16, and N a multiple of {TILE}"
    return None


def _alias_reason(implementation: str, case: Case, mode: str) -> str | None:
    chosen = configs.pick_backend("auto", case.dims["rows"], possible=_takes_cuda(case))
    return "same version as auto" if implementation == chosen else None


CUDA_CASES = tuple(
    dataclasses.replace(case, min_capability=(9, 0))
    for case in CASES
    if case.bench and not configs.pick_many(case.dims["rows"], case.dims["columns"])
)

SPEC = KernelSpec(
    name="mxfp_matmul",
    implementations={
        "auto": mxfp_matmul,
        "triton": partial(mxfp_matmul, backend="triton"),
        "cuda": partial(mxfp_matmul, backend="cuda"),
    },
    # On other GPUs "auto" is "triton".
    min_capability={"triton": (9, 0), "cuda": (9, 0)},
    unsupported_reason=_unsupported_reason,
    alias_reason=_alias_reason,
    baselines=(
        EAGER,
        COMPILED,
        COMPILED_MAX,
        Peer("torch", load=_torch),
        Peer("humming", load=_humming, supports=_humming_supports),
        DENSE,
    ),
    pytorch=("torch",),
    reference=mxfp_matmul_reference,
    make_inputs=make_inputs,
    cost=cost,
    cases=CASES,
    grads=(),
    modes=("fwd",),
    determinism={"fwd": "run-to-run"},
    unit="rows",
    items=lambda case: case.dims["rows"],
    fuzz={"rows": (0, 70), "columns": (0, 140), "depth": (1, 300)},
    # Words of the next pipeline stage are read while the previous one is released (README).
    early_arrivals={"mxfp_matmul_many_rows": 1},
    tunables=(
        Tunable(configs, "pick_config", "fwd", _candidates, implementation="triton"),
        Tunable(configs, "pick_cuda_config", "fwd", _cuda_candidates, CUDA_CASES, implementation="cuda"),
    ),
    host_cases=(dataclasses.replace(_case(1, 256, 256, BF16, "mxfp4"), name="1x256x256-bf16-mxfp4-host"),),
)

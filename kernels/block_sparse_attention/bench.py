"""The declaration of block_sparse_attention: cases, cost, peers.
`python -m harness bench --kernel block_sparse_attention`."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness import registry
from harness.spec import (
    COMPILED,
    COMPILED_MAX,
    EAGER,
    MAX_AUTOTUNE,
    Case,
    Cost,
    Inputs,
    KernelSpec,
    Op,
    Peer,
    Tunable,
    Yardstick,
)

from . import BlockIndex, block_index, block_sparse_attention, configs
from .masks import sliding_window_blocks
from .reference import MOST_SCORES, block_sparse_attention_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _case(
    batch: int,
    heads: int | tuple[int, int],
    queries: int,
    keys: int,
    dim: int,
    kept: int,
    dtype: torch.dtype = BF16,
    suffix: str = "",
    masks: tuple[int, int] | None = None,
    window: tuple[int, int] | None = None,
    empty: int = 0,
    **params,
) -> Case:
    """Returns a case. `heads`: query heads, or (query heads, KV heads). `kept`: per cent of the visible blocks that
    each row of the mask keeps. `window`: instead, the number of blocks before the diagonal and at the beginning.
    `empty`: the first of every `empty` rows keeps nothing. `masks`: (batches, heads) of the mask, by default all. A
    bf16 case without suffix is a bench case."""
    query_heads, kv_heads = heads if isinstance(heads, tuple) else (heads, heads)
    short = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
    shared = f"-{kv_heads}" if kv_heads != query_heads else ""
    pattern = f"window{window[0]}" if window else f"kept{kept}"
    block = f"block{params['block_size']}" if params.get("block_size", 128) != 128 else ""
    words = ("causal" if params.get("causal") else "", pattern, block, "bias" if params.get("bias") else "", short)
    name = "-".join((f"b{batch}-h{query_heads}{shared}-q{queries}-k{keys}-d{dim}", *filter(None, (*words, suffix))))
    dims = dict(batch=batch, kv_heads=kv_heads, group=query_heads // kv_heads, queries=queries, keys=keys, dim=dim)
    dims["mask_batch"], dims["mask_heads"] = masks or (batch, query_heads)
    dims |= dict(zip(("window", "first"), window, strict=True)) if window else dict(kept=kept, empty=empty)
    return Case(name, dims, dtype, params, bench=dtype == BF16 and not suffix)


SMALL: dict[str, Any] = dict(block_size=64)

CASES = (
    # Random blocks in each head, as in dynamic masks; the heads of Llama-2 and of TransformerNP.
    *(_case(1, 32, 8192, 8192, 128, kept) for kept in (50, 25, 10)),
    *(_case(1, 8, 16384, 16384, 64, kept) for kept in (50, 25, 10)),
    _case(1, 32, 4096, 4096, 128, 25),
    _case(1, (64, 8), 8192, 8192, 128, 25),
    _case(1, 32, 8192, 8192, 128, 25, block_size=64),
    _case(1, 32, 8192, 8192, 128, 25, causal=True),
    _case(1, 8, 8192, 8192, 128, 25, bias=True),
    # A window of 4096 tokens before each block, and the first block of the sequence; one mask for all heads.
    _case(1, (32, 8), 16384, 16384, 128, 0, masks=(1, 1), window=(32, 1), causal=True),
    # Boundary cases: no option, then every option, size 0, size 1, every head dimension, partial blocks.
    _case(1, 1, 100, 120, 24, 50, FP32, **SMALL),
    _case(1, 1, 100, 70, 16, 50, FP16, causal=True, **SMALL),
    _case(1, 1, 100, 120, 16, 50, FP32, "options", bias=True, causal=True, scale=0.3, return_lse=True, **SMALL),
    _case(2, (4, 2), 130, 150, 16, 50, FP32, bias=True, causal=True, scale=0.3, return_lse=True, **SMALL),
    _case(2, 1, 200, 130, 16, 50, FP32, empty=2, **SMALL),
    _case(1, 2, 150, 200, 16, 50, FP32, "shared", masks=(1, 1), empty=3, **SMALL),
    _case(2, (2, 1), 70, 200, 16, 34, FP32, "heads", masks=(1, 2), **SMALL),
    _case(2, 2, 130, 70, 16, 50, FP16, "batches", masks=(2, 1), causal=True, **SMALL),
    _case(1, 2, 0, 5, 16, 50, FP32, **SMALL),
    _case(1, 2, 5, 0, 16, 50, FP32, **SMALL),
    _case(1, 1, 1, 1, 1, 100, FP32, **SMALL),
    *(_case(1, 1, 70, 130, dim, 50, FP16, causal=True, **SMALL) for dim in (64, 80, 96, 128, 256)),
    # Many checks use the first case of a kind: here one that the version for Hopper supports.
    *(_case(2, (4, 2), 1000, 1300, dim, 40, BF16, "small") for dim in (64, 32, 80, 96, 128, 256)),
    *(_case(2, (4, 2), 1000, 1300, dim, 40, BF16, "small", causal=True, **SMALL) for dim in (64, 32, 128, 256)),
    *(_case(2, (4, 2), 1300, 1000, d, 40, BF16, "small", causal=True, bias=True, return_lse=True) for d in (64, 128)),
    _case(1, 2, 1300, 1300, 64, 0, BF16, "small", masks=(1, 1), window=(2, 1), causal=True),
    # More rows of blocks than a GPU processes at a time, with static and dynamic schedule; some rows keep nothing.
    *(_case(2, (8, 4), 1500, 1000, dim, 40, BF16, "many", empty=3) for dim in (64, 128)),
    *(_case(2, (8, 4), 3000, 3100, dim, 30, BF16, "many", causal=True, return_lse=True) for dim in (64, 128)),
    *(_case(2, (8, 4), 1600, 1500, dim, 30, BF16, "many", bias=True, empty=5, **SMALL) for dim in (64, 128)),
    *(_case(1, 1, 130, 100, dim, 50, FP32, **SMALL) for dim in (64, 128)),
)


def kept_of_rows(case: Case) -> list[tuple[int, int]]:
    """Returns for each row of the mask how many blocks it keeps, and how many are visible."""
    d, block = case.dims, case.params.get("block_size", 128)
    rows, columns = -(-d["queries"] // block), -(-d["keys"] // block)
    result = []
    for row in range(rows):
        last = min((row + 1) * block, d["queries"]) - 1 + d["keys"] - d["queries"]
        visible = min(columns, max(last // block + 1, 0)) if case.params.get("causal") else columns
        if "window" in d:
            here = row + columns - rows
            seen = range(visible)
            kept = sum(here - d["window"] <= j <= here or j < d["first"] or row < d["first"] for j in seen)
        elif d["empty"] and row % d["empty"] == 0:
            kept = 0
        else:
            kept = min(visible, max(1, round(visible * d["kept"] / 100)))
        result.append((kept, visible))
    return result


def make_mask(case: Case, device: torch.device | str, generator: torch.Generator | None) -> torch.Tensor:
    """Returns the mask of a case. With `causal` each row keeps the last block that it sees, the one on the diagonal."""
    d, block = case.dims, case.params.get("block_size", 128)
    rows, columns = -(-d["queries"] // block), -(-d["keys"] // block)
    if "window" in d:
        return sliding_window_blocks(rows, columns, d["window"], 0, d["first"], device=device)
    counts = _moved(torch.tensor(kept_of_rows(case), dtype=torch.int64).reshape(rows, 2), device)
    shape = (d["mask_batch"], d["mask_heads"], rows, columns)
    scores = torch.rand(shape, device=device, generator=generator)
    column = torch.arange(columns, device=device)
    scores = scores.masked_fill(column >= counts[:, 1:], -1.0)
    if case.params.get("causal"):
        scores = scores.masked_fill(column == counts[:, 1:] - 1, 2.0)
    return scores.argsort(-1, descending=True).argsort(-1) < counts[:, :1]


def _moved(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Returns a copy on the device, by a call that the ahead-of-time build supports, which has no real GPU."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor)


def make_inputs(case: Case, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    """Returns inputs. A bench case has the same mask at every call, so that peers can prepare theirs once, as in a
    model."""
    d, params = case.dims, dict(case.params)

    def normal(heads: int, rows: int) -> torch.Tensor:
        shape = (d["batch"], heads, rows, d["dim"])
        return torch.randn(shape, dtype=case.dtype, device=device, generator=generator)

    query_heads = d["kv_heads"] * d["group"]
    inputs: Inputs = {"q": normal(query_heads, d["queries"])}
    inputs |= {"k": normal(d["kv_heads"], d["keys"]), "v": normal(d["kv_heads"], d["keys"])}
    if case.bench:
        inputs["block_mask"] = _moved(make_mask(case, "cpu", torch.Generator().manual_seed(0)), device)
    else:
        inputs["block_mask"] = make_mask(case, device, generator)
    if params.pop("bias", False):
        shape = (d["mask_batch"], query_heads, *inputs["block_mask"].shape[-2:])
        inputs["block_bias"] = torch.randn(shape, device=device, generator=generator)
    return {**inputs, **params}


def kept_pairs(case: Case) -> int:
    """Returns the pairs of query and key in kept blocks, per head; exact if no block is partial."""
    d, block = case.dims, case.params.get("block_size", 128)
    shift, pairs = d["keys"] - d["queries"], 0
    for row, (kept, visible) in enumerate(kept_of_rows(case)):
        queries = range(row * block, min((row + 1) * block, d["queries"]))
        seen = len(queries) * d["keys"]
        if case.params.get("causal"):
            seen = sum(min(max(query + shift + 1, 0), d["keys"]) for query in queries)
        pairs += max(0, seen - (visible - kept) * block * len(queries)) if kept else 0
    return pairs


def _cost(case: Case, mode: str, pairs: int) -> Cost:
    d, size = case.dims, case.dtype.itemsize
    heads = d["batch"] * d["kv_heads"]
    # Rows of q, out, k and v; lse; the mask, and the bias with its gradient.
    rows = heads * (d["group"] * d["queries"] * 2 + d["keys"] * 2)
    lse = 4 * heads * d["group"] * d["queries"]
    block = case.params.get("block_size", 128)
    blocks = -(-d["queries"] // block) * -(-d["keys"] // block)
    mask = d["mask_batch"] * d["mask_heads"] * blocks
    products, tensors = {"fwd": (2, 1), "bwd": (5, 2)}[mode]
    bias = 4 * d["mask_batch"] * d["kv_heads"] * d["group"] * blocks * tensors if case.params.get("bias") else 0
    pipe = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[case.dtype]
    flops = products * 2 * d["dim"] * pairs * heads * d["group"]
    return Cost(flops=flops, bytes=tensors * rows * d["dim"] * size + lse + mask + bias, pipe=pipe)


def cost(case: Case, mode: str) -> Cost:
    """Forward: two GEMMs of 2·D FLOPs per kept pair. Backward: five, one of which is recomputed from the forward."""
    return _cost(case, mode, kept_pairs(case))


def extra_bytes(case: Case, mode: str) -> dict[str, int]:
    d = case.dims
    rows = d["batch"] * d["kv_heads"] * d["group"] * d["queries"]
    out = {} if mode == "fwd" else {"out": rows * d["dim"] * case.dtype.itemsize}
    return {"lse": 4 * rows, **out}


def _dense_cost(case: Case, mode: str) -> Cost:
    d = case.dims
    shift = d["keys"] - d["queries"]
    seen = [min(max(i + shift + 1, 0), d["keys"]) for i in range(d["queries"])] if case.params.get("causal") else None
    return _cost(case, mode, d["queries"] * d["keys"] if seen is None else sum(seen))


def _fits(case: Case, mode: str) -> str | None:
    """Returns why the reference is no baseline, or None: too large a problem is computed in chunks, and recomputed in
    the backward."""
    scores = case.dims["batch"] * case.dims["kv_heads"] * case.dims["group"] * case.dims["queries"] * case.dims["keys"]
    return f"needs {4 * scores / 1e9:.0f} GB for the score matrix" if scores > MOST_SCORES else None


def _prepared(case: Case, mode: str) -> str | None:
    return None if case.bench else "prepares the first mask only, but here each call has another"


def _unbiased(case: Case, mode: str) -> str | None:
    return "does not support the gradient of block_bias" if case.params.get("bias") and mode == "bwd" else None


def _dense_takes(case: Case, mode: str) -> str | None:
    if case.params.get("causal") and case.dims["queries"] != case.dims["keys"]:
        return "aligns a causal mask to the top left, not the bottom right"
    return _unbiased(case, mode)


def _flex(autotune: bool = False, **options: Any) -> Op:
    """Returns FlexAttention with these kernel options and the same blocks. Its BlockMask is made at the first call."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False
    compiled = torch.compile(flex_attention, dynamic=False, options=MAX_AUTOTUNE if autotune else None)
    own_tiles = autotune or "BACKEND" in options
    made: list[Any] = []

    def attend(q, k, v, block_mask, *, block_size=128, scale=None, causal=False, block_bias=None):
        (batch, heads, queries), keys = q.shape[:3], k.shape[2]
        masks = block_mask[(None,) * (4 - block_mask.dim())].expand(batch, heads, -1, -1)

        def kept(b, h, i, j):
            here = masks[b, h, i // block_size, j // block_size]
            return here & (j <= i + (keys - queries)) if causal else here

        def biased(score, b, h, i, j):
            return score + biases[b, h, i // block_size, j // block_size]

        if not made:
            own = [n if whole > 1 else None for n, whole in zip((batch, heads), _leading(block_mask), strict=True)]
            made.append(create_block_mask(kept, *own, queries, keys, device=q.device, BLOCK_SIZE=block_size))
        biases = None if block_bias is None else block_bias.expand(batch, heads, -1, -1)
        return compiled(
            q,
            k,
            v,
            score_mod=None if biases is None else biased,
            block_mask=made[0],
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
            # Its default tiles, without autotuning, are larger than blocks of 64.
            kernel_options=(FLEX_64 if block_size == 64 and not own_tiles else {}) | options or None,
        )

    return attend


FLEX_64: dict[str, Any] = dict(BLOCK_M=64, BLOCK_N=64, BLOCK_M1=32, BLOCK_N1=64, BLOCK_M2=64, BLOCK_N2=32)
#: The gradient of a bias leaves no shared memory for FlexAttention's default stages. Tiles for blocks of 64 are then
#: found by autotuning only, which drops configurations that do not fit.
SMALLER = {
    "two stages": partial(_flex, num_stages=2),
    "autotuned tiles": partial(_flex, autotune=True),
    "one stage and tiles of 64": partial(_flex, num_stages=1, **FLEX_64),
}


def _flex_flash() -> Op:
    """Returns FlexAttention with the backend FlashAttention-4. ImportError if PyTorch or the package is too old."""
    import flash_attn.cute  # noqa: F401
    from torch.nn.attention.flex_attention import FlexKernelOptions

    if "BACKEND" not in FlexKernelOptions.__annotations__:
        raise ImportError("this PyTorch's FlexAttention has one backend")
    return _flex(BACKEND="FLASH")


def _flex_flash_takes(case: Case, mode: str) -> str | None:
    if reason := _prepared(case, mode):
        return reason
    if mode == "bwd" and case.params.get("bias"):
        return "does not support the gradient of block_bias"
    small = case.params.get("block_size", 128) != 128
    return "its backward requires blocks of 128" if mode == "bwd" and small else None


def _masked_sdpa() -> Op:
    """Returns PyTorch's SDPA with an elementwise mask, which is made at the first call."""
    made: list[torch.Tensor] = []

    def attend(q, k, v, block_mask, *, block_size=128, scale=None, causal=False, block_bias=None):
        queries, keys = q.shape[2], k.shape[2]
        if not made:
            pairs = block_mask.repeat_interleave(block_size, -2).repeat_interleave(block_size, -1)
            pairs = pairs[(None,) * (4 - pairs.dim())][..., :queries, :keys]
            seen = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
            made.append(pairs & seen if causal else pairs)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=made[0], scale=scale)

    return attend


def _masked_sdpa_takes(case: Case, mode: str) -> str | None:
    return "not implemented with block_bias" if case.params.get("bias") else _prepared(case, mode)


def _leading(mask: torch.Tensor) -> tuple[int, int]:
    return tuple(mask[(None,) * (4 - mask.dim())].shape[:2])  # type: ignore[return-value]


def _dense() -> Op:
    """Returns dense attention by this package's `attention`."""
    attention = registry.load("attention").implementations["auto"]

    def attend(q, k, v, block_mask, *, block_size=128, scale=None, causal=False, block_bias=None):
        return attention(q, k, v, causal=causal, scale=scale)

    return attend


def _dense_sdpa() -> Op:
    """Returns dense attention by PyTorch's FlashAttention."""

    def attend(q, k, v, block_mask, *, block_size=128, scale=None, causal=False, block_bias=None):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            shared = q.shape[1] != k.shape[1]
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=shared)

    return attend


def _indexed() -> Op:
    """Returns our op with the mask compressed once, to show the cost of the two small launches."""
    made: list[BlockIndex] = []

    def attend(q, k, v, block_mask, *, block_size=128, causal=False, **options):
        if not made:
            made.append(block_index(block_mask, q.shape[2], k.shape[2], block_size=block_size, causal=causal))
        return block_sparse_attention(q, k, v, made[0], block_size=block_size, causal=causal, **options)

    return attend


CUDA_CASES = tuple(
    dataclasses.replace(case, min_capability=(9, 0))
    for case in (
        *(_case(1, 32, 8192, 8192, 128, kept) for kept in (50, 25, 10)),
        *(_case(1, 8, 16384, 16384, 64, kept) for kept in (50, 25, 10)),
        _case(1, 32, 8192, 8192, 128, 25, block_size=64),
        _case(1, 8, 16384, 16384, 64, 25, block_size=64),
    )
)


def _has_two_backwards(case: Case) -> bool:
    return case.params.get("block_size", 128) == 128 and not case.params.get("bias")


CUDA_BWD_CASES = tuple(
    dataclasses.replace(case, min_capability=(9, 0)) for case in CASES if case.bench and _has_two_backwards(case)
)


def _backward_versions(case: Case) -> tuple[str, ...]:
    return ("cuda", "portable") if _has_two_backwards(case) else ("portable",)


def _alias_reason(implementation: str, case: Case, mode: str) -> str | None:
    one = (implementation, mode) == ("triton", "bwd") and not _has_two_backwards(case)
    return "same backward as auto" if one else None


def _tiles(case: Case, stages: tuple[int, ...]) -> list[configs.Config]:
    return configs.tile_candidates(case.dims["dim"], case.params.get("block_size", 128), (4, 8), stages)


def _sections(case: Case) -> list[int]:
    d = case.dims
    return configs.section_candidates(d["group"], d["batch"] * d["kv_heads"] * d["group"])


def _cuda_candidates(case: Case) -> tuple[configs.CudaConfig, ...]:
    return configs.CUDA_CANDIDATES[case.dims["dim"], case.params.get("block_size", 128)]


# Why racecheck's reports are false alarms. tests/test_false_alarms.py reproduces one with a kernel of a few lines.
HANDED_OVER = "a bulk copy or a warp hands it over through an mbarrier, and racecheck does not know who waits for those"

SPEC = KernelSpec(
    name="block_sparse_attention",
    implementations={
        "auto": block_sparse_attention,
        "triton": partial(block_sparse_attention, forward="portable", backward="portable"),
    },
    # On other GPUs "triton" is the same as "auto".
    min_capability={"triton": (9, 0)},
    alias_reason=_alias_reason,
    baselines=(
        dataclasses.replace(EAGER, supports=_fits),
        dataclasses.replace(COMPILED, supports=_fits),
        dataclasses.replace(COMPILED_MAX, supports=_fits),
        Peer("torch", load=_masked_sdpa, supports=_masked_sdpa_takes),
        Peer("flex", load=_flex, configurations=SMALLER, supports=_prepared),
        Peer("flex-flash", load=_flex_flash, supports=_flex_flash_takes),
        Yardstick("dense", load=_dense, cost=_dense_cost, supports=_unbiased),
        Yardstick("dense-sdpa", load=_dense_sdpa, cost=_dense_cost, supports=_dense_takes),
        Yardstick("indexed", load=_indexed, cost=cost, supports=_prepared),
    ),
    pytorch=("torch",),
    reference=block_sparse_attention_reference,
    make_inputs=make_inputs,
    cost=cost,
    extra_bytes=extra_bytes,
    cases=CASES,
    grads=("q", "k", "v", "block_bias"),
    determinism={"fwd": "run-to-run", "bwd": "on request"},
    unit="queries",
    items=lambda case: case.dims["batch"] * case.dims["queries"],
    # Dropped blocks are not read; the reference multiplies them by 0, and 0 · NaN is NaN.
    finite_only=lambda case: True,
    # Under a causal mask and Triton 3.6 (EXPERIMENTS.md).
    spills={"_block_sparse_attention_dkdv_kernel": 32},
    false_alarms={
        ("racecheck", function): HANDED_OVER
        for function in ("load_row", "load_one", "load_shared", "load_shared4", "store_pair", "store_shared")
    },
    fuzz={"queries": (65, 128), "keys": (65, 128), "dim": (1, 24)},
    tunables=(
        Tunable(configs, "pick_forward", "fwd", lambda case: ("cuda", "portable")),
        Tunable(configs, "pick_cuda_config", "fwd", _cuda_candidates, CUDA_CASES),
        Tunable(configs, "pick_cuda_section", "fwd", _sections, CUDA_CASES),
        Tunable(
            configs,
            "pick_fwd_config",
            "fwd",
            lambda case: _tiles(case, (2, 3, 4)),
            implementation="triton",
        ),
        Tunable(configs, "pick_backward", "bwd", _backward_versions),
        Tunable(configs, "pick_cuda_bwd_config", "bwd", lambda case: configs.CUDA_BWD_CANDIDATES, CUDA_BWD_CASES),
        *(
            Tunable(
                configs,
                name,
                "bwd",
                lambda case: _tiles(case, (1, 2, 3)),
                implementation="triton",
            )
            for name in ("pick_dkdv_config", "pick_dq_config")
        ),
    ),
    host_cases=(_case(1, 2, 512, 512, 64, 50, suffix="host"),),
)

"""The declaration of ring attention: cases, cost, peers. Sizes are those of the whole sequence.

A case of one rank is checked like any kernel. In a case of several ranks each gets its own rows (`make_shard`), and
`check_shard` compares a small problem of the same kind with the oracle on all ranks.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import torch

from harness.spec import COMPILED, COMPILED_MAX, EAGER, Case, Cost, Inputs, KernelSpec, Op, Peer, Sharding

from ..attention import attention
from . import Rates, configs, peers, release, ring_attention, simulate
from .flash_attn_shim import installed
from .layout import cut, even_lengths, place
from .reference import ring_attention_reference
from .schedule import Call, Problem, schedule

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MOST_ALONE = 2e16  # FLOPs of a call (backward: with its forward) on one GPU, for the efficiency: half a minute
MOST_OF_PEERS = 1e15  # FLOPs of a forward beyond which peers would take minutes
CHECKED_ROWS = 768


def _case(
    world: int,
    heads: int | tuple[int, int],
    queries: int,
    keys: int,
    dim: int,
    dtype: torch.dtype = BF16,
    batch: int = 1,
    suffix: str = "",
    modes: tuple[str, ...] = (),
    **params,
) -> Case:
    """Returns a case. `heads`: query heads, or (query heads, KV heads). A bf16 case without suffix is a bench case."""
    query_heads, kv_heads = heads if isinstance(heads, tuple) else (heads, heads)
    shared = f"-{kv_heads}" if kv_heads != query_heads else ""
    short = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
    words = ("causal" if params.get("causal") else "", short, suffix)
    name = "-".join((f"x{world}-b{batch}-h{query_heads}{shared}-q{queries}-k{keys}-d{dim}", *filter(None, words)))
    dims = dict(batch=batch, kv_heads=kv_heads, group=query_heads // kv_heads, queries=queries, keys=keys, dim=dim)
    return Case(name, dims, dtype, params, bench=dtype == BF16 and not suffix, modes=modes, world_size=world)


def _of_many(world: int) -> tuple[Case, ...]:
    """Returns the bench cases of more than two GPUs. The longest is last: on four GPUs a call takes a minute."""
    return (
        *(_case(world, (32, 8), length, length, 128, causal=True) for length in (65536, 262_144, 1_048_576)),
        _case(world, 8, 1_050_000, 1_000_000, 64),
        _case(world, (32, 8), 4_194_304, 4_194_304, 128, modes=("fwd",), causal=True),
    )


CASES = (
    _case(2, 32, 16384, 16384, 128, causal=True),
    *(_case(2, (32, 8), length, length, 128, causal=True) for length in (65536, 262_144, 1_048_576)),
    *(_case(2, 8, length, length, 64) for length in (262_144, 524_288)),
    # TransformerNP, M context points and N targets: (200k, 5k), (1M, 50k), and only the targets as queries of 1M.
    _case(2, 8, 205_000, 200_000, 64),
    _case(2, 8, 1_050_000, 1_000_000, 64),
    _case(2, 8, 5000, 1_000_000, 64),
    *_of_many(4),
    *_of_many(8),
    # One rank: plain attention.
    _case(1, (2, 1), 37, 41, 24, FP32),
    _case(1, 2, 37, 29, 16, FP32, causal=True, return_lse=True),
    _case(1, (2, 1), 41, 37, 24, FP16, causal=True, layout="striped", rotate="queries"),
    _case(1, 2, 0, 5, 16, FP32),
    _case(1, 2, 300, 260, 64, BF16, suffix="small", causal=True),
    # Several ranks: every layout and rotation, lengths not divisible by ranks, more keys than queries and the reverse.
    *(_case(world, (4, 2), 1000, 1000, 64, BF16, suffix="small", causal=True) for world in (2, 3, 4)),
    *(
        _case(2, (4, 2), 700, 1001, 128, BF16, suffix=f"small-{rotate}", causal=True, rotate=rotate)
        for rotate in ("keys", "queries", "gather")
    ),
    _case(2, 4, 1001, 700, 64, FP16, suffix="small", causal=True, layout="striped"),
    _case(4, 4, 1003, 701, 64, BF16, suffix="small-contiguous", layout="contiguous"),
)

HOST_CASES = (_case(1, 2, 128, 128, 64, suffix="host", causal=True),)


def make_inputs(case: Case, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    """Returns inputs of the whole problem, on one rank."""
    d = case.dims
    rows = (d["queries"], d["keys"], d["keys"])
    return _inputs(case, rows, device, generator) | dict(case.params)


def make_shard(case: Case, rank: int, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    """Returns one rank's rows, as `shard` would select them. Lengths are passed if they differ between ranks."""
    lengths = _lengths(case)
    rows = (lengths[0][rank], lengths[1][rank], lengths[1][rank])
    told = zip(("q_lengths", "k_lengths"), lengths, strict=True)
    uneven = {name: numbers for name, numbers in told if len(set(numbers)) > 1}
    return _inputs(case, rows, device, generator) | dict(case.params) | uneven


def _inputs(case: Case, rows: tuple[int, int, int], device, generator: torch.Generator | None) -> Inputs:
    d = case.dims
    heads = (d["kv_heads"] * d["group"], d["kv_heads"], d["kv_heads"])
    return {
        name: torch.randn(d["batch"], h, n, d["dim"], dtype=case.dtype, device=device, generator=generator)
        for name, h, n in zip("qkv", heads, rows, strict=True)
    }


def _layout(case: Case) -> str:
    return case.params.get("layout", "zigzag")


def _lengths(case: Case) -> tuple[tuple[int, ...], tuple[int, ...]]:
    d = case.dims
    queries, keys = (even_lengths(n, case.world_size, _layout(case)) for n in (d["queries"], d["keys"]))
    return queries, keys


def check_shard(fn: Op, case: Case, mode: str, device: torch.device | str) -> str | None:
    """Returns why `fn` is wrong on a small problem of the case's kind, or None; all ranks call it together. A rank's
    rows, and with a backward their gradients, are compared with the oracle in fp64 by the rule for one GPU: at most
    twice the error of PyTorch in the case's dtype, plus a floor."""
    rank, world = place(None)
    shrink = max(1, max(case.dims["queries"], case.dims["keys"]) // CHECKED_ROWS)
    # Multiples of 4 · ranks, because some peers support equal lengths only.
    sizes = {name: max(1, case.dims[name] // shrink // (4 * world)) * 4 * world for name in ("queries", "keys")}
    dims = dict(case.dims) | sizes | dict(kv_heads=max(1, min(case.dims["kv_heads"], 2 * world)))
    small = dataclasses.replace(case, dims=dims)
    inputs = make_inputs(small, device, torch.Generator(device).manual_seed(11))
    dout = torch.randn(inputs["q"].shape, generator=torch.Generator(device).manual_seed(12), device=device)
    layout = getattr(fn, "layout", _layout(case))  # a peer may support one layout only
    rows = partial(cut, dim=2, rank=rank, world=world, layout=layout)
    whole = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    given = {name: value for name, value in inputs.items() if name not in whole}
    found = _results(fn, {n: rows(t) for n, t in whole.items()}, given, rows(dout), mode)
    wide = {name: tensor.double() for name, tensor in whole.items()}
    exact, eager = (_results(ring_attention_reference, x, given, dout, mode) for x in (wide, whole))
    for name, tensor in found.items():
        error = _rms(tensor.double() - rows(exact[name]))
        allowed = _rms(rows(eager[name]).double() - rows(exact[name]))
        floor = 4 * torch.finfo(case.dtype).eps * _rms(rows(exact[name]))
        if not error <= 2 * allowed + floor:
            return f"rank {rank}: {name} is off by {error:.3g} (RMS); allowed is {2 * allowed + floor:.3g}"
    return None


def _results(fn: Op, tensors: Inputs, given: Inputs, dout: torch.Tensor, mode: str) -> dict[str, torch.Tensor]:
    """Returns out and, with a backward, the gradients."""
    leaves = {name: tensor.detach().requires_grad_(mode != "fwd") for name, tensor in tensors.items()}
    out = fn(**leaves, **given)
    out = out if isinstance(out, torch.Tensor) else out[0]
    if mode == "fwd":
        return {"out": out}
    grads = torch.autograd.grad(out, list(leaves.values()), dout.to(out.dtype))
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def _rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def cost(case: Case, mode: str) -> Cost:
    """Returns the cost of one GPU: its share of the GEMMs and of inputs and outputs, and the bytes that it fetches and
    sends by the schedule, in the cheaper rotation. GEMMs of 2·D FLOPs per pair and head: forward two, backward five."""
    d, size, world = case.dims, case.dtype.itemsize, case.world_size
    heads = d["batch"] * d["kv_heads"] * d["group"]
    pairs = Call((0, d["queries"]), (0, d["keys"]), d["keys"] - d["queries"], 0, bool(case.params.get("causal"))).pairs
    products, tensors = {"fwd": (2, 1), "bwd": (5, 2)}[mode]
    rows = 2 * heads * d["queries"] + 2 * d["batch"] * d["kv_heads"] * d["keys"]
    moved = tensors * rows * d["dim"] * size + 4 * heads * d["queries"]
    pipe = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[case.dtype]
    flops = products * 2 * d["dim"] * pairs * heads / world
    return Cost(flops, moved // world, pipe, link_bytes=_link_bytes(case, mode))


def extra_bytes(case: Case, mode: str) -> dict[str, int]:
    d = case.dims
    rows = d["batch"] * d["kv_heads"] * d["group"] * d["queries"] // case.world_size
    out = {} if mode == "fwd" else {"out": rows * d["dim"] * case.dtype.itemsize}
    return {"lse": 4 * rows, **out}


def _link_bytes(case: Case, mode: str) -> int:
    """Returns the bytes of the rank that moves the most."""
    d, size, dim = case.dims, case.dtype.itemsize, case.dims["dim"]
    lengths = _lengths(case)
    problem = Problem(_layout(case), bool(case.params.get("causal")), *lengths)
    heads = d["kv_heads"] * d["group"]
    rotate = case.params.get("rotate", configs.pick_rotation(*lengths, heads, d["kv_heads"], dim, size))
    if rotate == "queries":
        there = heads * (dim * size if mode == "fwd" else 2 * dim * size + 8)
        back = heads * (4 * (dim + 1) if mode == "fwd" else 4 * dim)
    else:
        there, back = 2 * d["kv_heads"] * dim * size, 0 if mode == "fwd" else 2 * d["kv_heads"] * dim * 4
    most = 0
    for rank in range(case.world_size):
        steps = schedule(problem, rank, "queries" if rotate == "queries" else "keys")[1:]
        fetched = sum(step.rows[1] - step.rows[0] for step in steps)
        sent = sum(step.to_rows[1] - step.to_rows[0] for step in steps)
        most = max(most, fetched * there + sent * back, sent * there + fetched * back)
    return d["batch"] * most


def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, **_) -> torch.Tensor:
    """Returns the whole problem on one GPU, the baseline of the efficiency."""
    out = attention(q, k, v, causal=causal)
    assert isinstance(out, torch.Tensor)
    return out


def alone_reason(case: Case, mode: str) -> str | None:
    """Returns why one GPU does not compute the whole problem, or None."""
    modes = ("fwd",) if mode == "fwd" else ("fwd", "bwd")
    flops = sum(cost(case, each).total_flops for each in modes) * case.world_size
    return "one GPU would take too long" if flops > MOST_ALONE else None


def model(
    case: Case, mode: str, gpus: int, length: int | None, flops: float, link: float
) -> tuple[float, float, float]:
    """Runs `simulate` with the case's heads and mask. `length` replaces the number of keys; queries scale with it."""
    d, keys = case.dims, length or case.dims["keys"]
    found = simulate(
        gpus,
        round(d["queries"] * keys / d["keys"]),
        keys,
        Rates(flops, link),
        heads=d["kv_heads"] * d["group"],
        kv_heads=d["kv_heads"],
        dim=d["dim"],
        size=case.dtype.itemsize,
        batch=d["batch"],
        causal=bool(case.params.get("causal")),
        layout=_layout(case),
        backward=mode == "bwd",
    )
    return found.seconds, found.exposed, found.efficiency


def _series(case: Case) -> str:
    """Returns the line of the chart to which a case belongs."""
    d, kv_heads = case.dims, case.dims["kv_heads"]
    heads = f"{d['group'] * kv_heads}" + (f" and {kv_heads}" if d["group"] > 1 else "")
    mask = "causal, " if case.params.get("causal") else ""
    queries = "" if d["queries"] == d["keys"] else ", few queries" if 8 * d["queries"] < d["keys"] else ", rectangular"
    return f"{mask}{heads} heads, D {d['dim']}{queries}"


def _one_gpu(case: Case, mode: str) -> str | None:
    return "computes the whole problem on one GPU" if case.world_size > 1 else None


def _too_long(case: Case) -> str | None:
    flops = cost(case, "fwd").total_flops * case.world_size
    return "not compared in so long a case, which would take minutes" if flops > MOST_OF_PEERS else None


def _equal(case: Case, mode: str) -> str | None:
    """Returns why peers over several GPUs do not support a case, or None."""
    if case.world_size == 1:
        return "requires several GPUs"
    if case.params.get("return_lse"):
        return "does not return the log-sum-exp"
    if reason := _too_long(case):
        return reason
    return "requires equal lengths on all ranks" if any(len(set(n)) > 1 for n in _lengths(case)) else None


def _square_zigzag(case: Case, mode: str) -> str | None:
    if reason := _equal(case, mode):
        return reason
    causal, square = case.params.get("causal"), case.dims["queries"] == case.dims["keys"]
    if not square:
        return "requires as many queries as keys"
    return "supports a causal mask only in the zigzag layout" if causal and _layout(case) != "zigzag" else None


def _causal_square(case: Case, mode: str) -> str | None:
    return _square_zigzag(case, mode) or (None if case.params.get("causal") else "supports only a causal mask")


def _heads_divide(case: Case, mode: str) -> str | None:
    if reason := _equal(case, mode):
        return reason
    return "requires the heads of k to be a multiple of the ranks" if case.dims["kv_heads"] % case.world_size else None


def _flash_attention_4():
    from flash_attn.cute import interface

    return interface


def _ring_flash_attn() -> Op:
    """Imports ring-flash-attn. Its module for transformers imports functions that transformers 5 removed."""
    names = ("substitute_hf_flash_attn", "update_ring_flash_attn_params")
    with installed(_flash_attention_4(), {"ring_flash_attn.adapters": names}):
        from ring_flash_attn import zigzag_ring_flash_attn_func
    return peers.zigzag(zigzag_ring_flash_attn_func)


def _yunchang() -> Op:
    with installed(_flash_attention_4()):
        from yunchang import UlyssesAttention
        from yunchang.kernels import AttnType
    return peers.ulysses(UlyssesAttention(attn_type=AttnType.FA))


def _gathering() -> Op:
    return partial(ring_attention, rotate="gather")


def _several(case: Case, mode: str) -> str | None:
    if case.world_size == 1:
        return "requires several GPUs"
    return "same version as the case itself" if case.params.get("rotate") else _too_long(case)


def _context_parallel(backend: str, rotate: str) -> Op:
    return peers.context_parallel(backend, rotate, _flash_attention_4() if backend == "fa4" else None)


TORCH = {
    f"torch-{backend}-{rotate}": partial(_context_parallel, backend, rotate)
    for backend in ("flash", "cudnn", "fa4")
    for rotate in peers.ROTATIONS
}

SPEC = KernelSpec(
    name="ring_attention",
    implementations={"auto": ring_attention},
    needs=("attention",),
    model=model,
    pytorch=tuple(TORCH),
    baselines=(
        dataclasses.replace(EAGER, supports=_one_gpu),
        dataclasses.replace(COMPILED, supports=_one_gpu),
        dataclasses.replace(COMPILED_MAX, supports=_one_gpu),
        *(Peer(name, load=load, supports=_square_zigzag) for name, load in TORCH.items()),
        Peer("torch-ridgeline", load=partial(_context_parallel, "ridgeline", "allgather"), supports=_square_zigzag),
        Peer("ring-flash-attn", load=_ring_flash_attn, supports=_causal_square),
        Peer("yunchang", load=_yunchang, supports=_heads_divide),
        Peer("all-to-all", load=peers.all_to_all, supports=_heads_divide),
        Peer("all-gather", load=_gathering, supports=_several),
    ),
    reference=ring_attention_reference,
    make_inputs=make_inputs,
    cost=cost,
    extra_bytes=extra_bytes,
    cases=CASES,
    grads=("q", "k", "v"),
    determinism={"fwd": "run-to-run", "bwd": "on request"},
    unit="queries",
    items=lambda case: case.dims["batch"] * case.dims["queries"],
    # Whether a masked element is multiplied by 0 or not read at all depends on the tiles, and 0 · NaN is NaN.
    finite_only=lambda case: bool(case.params.get("causal")),
    host_cases=HOST_CASES,
    fuzz={"queries": (0, 40), "keys": (0, 40), "dim": (1, 40)},
    sharding=Sharding(
        make_shard=make_shard,
        check_shard=check_shard,
        alone={"attention": alone},
        alone_reason=alone_reason,
        local={"auto": partial(ring_attention, transport="none")},
        release=release,
        # NVLink multicast is not used, and should not be initialised on a shared host.
        environment=lambda case: {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"},
        axis=lambda case: (_series(case), case.dims["keys"]),
    ),
)

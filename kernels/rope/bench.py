"""The declaration of rope: cases, cost, peers. `python -m harness bench --kernel rope`."""

from __future__ import annotations

import math
from typing import Any

import torch

from harness.spec import COMPILED, COMPILED_MAX, EAGER, Case, Cost, Inputs, KernelSpec, Peer, Tunable, Yardstick

from . import configs, rope
from .reference import rope_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SPARE = 5  # rows of the tables past the end of the sequence


def _case(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, suffix: str = "", bench: bool = False, **params: Any
) -> Case:
    """`shape` is batch, sequence, heads of q, heads of k, head dimension."""
    names = ("batch", "seq", "heads", "kv_heads", "dim")
    short = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
    b, s, h, kv, d = shape
    mutates = () if not params.get("inplace") else ("q",) if params.get("alone") else ("q", "k")
    name = f"{b}x{s}x{h}-{kv}x{d}-{short}{suffix}"
    return Case(name, dict(zip(names, shape, strict=True)), dtype, params, bench, mutates=mutates)


# Parameters that are not arguments of the op: `alone`: no k; `rotary`: R / D; `tables` "full": each value twice;
# `batched`: tables [B, S, W]; `table_dtype`; `positions`: the number of dimensions of position_ids; `packed`: q and k
# are slices of one packed projection.
CASES = (
    # Llama-2 7B, also in place and, as in Hugging Face, with heads before tokens; 13B; 70B and Llama-3 (grouped-query
    # attention); position_ids with fp32 tables; GPT-J's interleaved pairs; TransformerNP; one decoding step.
    _case((8, 8192, 32, 32, 128), BF16, bench=True),
    _case((8, 8192, 32, 32, 128), BF16, "-inplace", bench=True, inplace=True),
    _case((4, 4096, 32, 32, 128), BF16, "-bhsd", bench=True, layout="bhsd"),
    _case((4, 4096, 40, 40, 128), BF16, "-packed", bench=True, layout="bhsd", packed=True, tables="full"),
    _case((4, 4096, 64, 8, 128), BF16, "-inplace", bench=True, inplace=True),
    _case((4, 4096, 64, 8, 128), BF16, "-fp32-tables", bench=True, table_dtype=FP32, positions=2),
    _case((4, 4096, 32, 32, 128), BF16, "-interleaved", bench=True, interleaved=True),
    _case((4, 4096, 32, 32, 128), BF16, "-half-rotary", bench=True, rotary=0.5),
    _case((1, 205000, 8, 8, 64), BF16, bench=True),
    _case((64, 1, 32, 8, 128), BF16, "-decode-inplace", bench=True, inplace=True, positions=2),
    # Boundary cases: empty, one pair, no k, odd sizes, R / 2 that is not a power of two. All checks run once for each
    # set of parameters, so there are few sets, with several parameters each.
    _case((2, 7, 3, 1, 16), FP32),
    _case((0, 4, 2, 2, 8), FP32),
    _case((2, 0, 2, 2, 8), FP32),
    _case((1, 1, 1, 1, 2), FP32),
    _case((1, 3, 71, 1, 64), FP32),
    _case((3, 5, 4, 1, 34), FP16, "-alone", alone=True, interleaved=True),
    _case((2, 9, 5, 2, 25), FP32, "-partial-pairs", rotary=0.5, interleaved=True, tables="full", positions=2),
    _case((3, 6, 4, 2, 64), FP32, "-batched-tables", tables="full", batched=True, rotary=0.75, layout="bhsd"),
    _case((2, 7, 12, 3, 96), FP16, "-packed", packed=True, table_dtype=FP32, positions=1),
    _case((2, 7, 3, 1, 16), FP32, "-inplace", inplace=True),
    _case((2, 5, 1, 4, 24), FP16, "-inplace", inplace=True, interleaved=True, layout="bhsd", rotary=0.75, positions=1),
    _case((2, 33, 7, 3, 80), BF16),
    _case((2, 33, 8, 8, 128), BF16, "-interleaved", interleaved=True, table_dtype=FP32),
    _case((2, 17, 8, 2, 256), BF16, "-inplace", inplace=True, rotary=0.25, positions=2),
)
SUITE_CASES = (_case((4, 2048, 32, 32, 128), BF16, bench=True),)


def _rotary(case: Case) -> int:
    return max(2, int(case.dims["dim"] * case.params.get("rotary", 1.0)) // 2 * 2)


def make_inputs(case: Case, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    batch, seq, heads, kv_heads, dim = (case.dims[n] for n in ("batch", "seq", "heads", "kv_heads", "dim"))
    params, rotary = dict(case.params), _rotary(case)
    for name in ("alone", "rotary", "tables", "batched", "table_dtype", "positions", "packed"):
        params.pop(name, None)

    def rows(count: int) -> torch.Tensor:
        return torch.randn((batch, seq, count, dim), dtype=case.dtype, device=device, generator=generator)

    if case.params.get("packed"):
        q, k = rows(heads + 2 * kv_heads)[:, :, : heads + kv_heads].split((heads, kv_heads), dim=2)
    else:
        q, k = rows(heads), rows(kv_heads)
    if params.get("layout") == "bhsd":
        # A packed projection has tokens before heads in memory; the transposed view has heads before tokens.
        q, k = (x.transpose(1, 2) if case.params.get("packed") else x.transpose(1, 2).contiguous() for x in (q, k))

    positions = case.params.get("positions", 0)
    shape = (batch, seq) if case.params.get("batched") else (seq + SPARE,)
    angles = torch.rand((*shape, rotary // 2), device=device, generator=generator) * (2 * math.pi)
    if case.params.get("tables") == "full":
        angles = angles.repeat_interleave(2, -1) if params.get("interleaved") else torch.cat((angles, angles), -1)
    table_dtype = case.params.get("table_dtype", case.dtype)
    inputs: Inputs = {"q": q, "k": None if case.params.get("alone") else k}
    inputs |= {"cos": angles.cos().to(table_dtype), "sin": angles.sin().to(table_dtype)}
    if positions:
        shape = (seq,) if positions == 1 else (batch, seq)
        inputs["position_ids"] = torch.randint(seq + SPARE, shape, device=device, generator=generator)
    return {**inputs, **params, "rotary_dim": rotary}


def cost(case: Case, mode: str) -> Cost:
    batch, seq, heads, kv_heads, dim = (case.dims[n] for n in ("batch", "seq", "heads", "kv_heads", "dim"))
    rotary, tokens = _rotary(case), batch * seq
    heads += 0 if case.params.get("alone") else kv_heads
    # In place, columns that are not rotated are neither read nor written.
    moved = rotary if case.params.get("inplace") else dim
    table = 2 * (tokens if case.params.get("batched") else seq) * (rotary // 2)
    size = case.params.get("table_dtype", case.dtype).itemsize
    positions = 8 * seq * {0: 0, 1: 1, 2: batch}[case.params.get("positions", 0)]
    # A pair needs four multiplications and two additions.
    flops = 3 * tokens * heads * rotary
    return Cost(flops=flops, bytes=2 * tokens * heads * moved * case.dtype.itemsize + table * size + positions)


def extra_bytes(case: Case, mode: str) -> dict[str, int]:
    batch, seq, heads, kv_heads, dim = (case.dims[n] for n in ("batch", "seq", "heads", "kv_heads", "dim"))
    heads += 0 if case.params.get("alone") else kv_heads
    rotary, batched = _rotary(case), case.params.get("batched")
    size = case.params.get("table_dtype", case.dtype).itemsize
    angles = rotary if case.params.get("tables") == "full" else rotary // 2
    given = (batch * seq if batched else seq + SPARE) * angles
    read = (batch * seq if batched else seq) * (rotary // 2)
    tensors = batch * seq * heads * case.dtype.itemsize
    return {
        "spare rows and repeated halves of the tables": 2 * (read - given) * size,
        "what is not rotated, in place": -2 * tensors * (dim - rotary) if case.params.get("inplace") else 0,
        "q and k, which the backward does not need": -tensors * dim if mode == "bwd" else 0,
    }


def _copy(q, k=None, *tables, **options):
    return q.clone() if k is None else (q.clone(), k.clone())


def _copy_cost(case: Case, mode: str) -> Cost:
    batch, seq, heads, kv_heads, dim = (case.dims[n] for n in ("batch", "seq", "heads", "kv_heads", "dim"))
    heads += 0 if case.params.get("alone") else kv_heads
    return Cost(flops=0, bytes=2 * batch * seq * heads * dim * case.dtype.itemsize)


# The lower bound is the time of a copy: PyTorch's clone of q and of k.
COPY = Yardstick(
    "copy",
    load=lambda: _copy,
    cost=_copy_cost,
    supports=lambda case, mode: (
        None if mode == "fwd" and not case.params.get("inplace") else "copies inputs to outputs"
    ),
)


def _torch():
    """As models write it: one multiplication by cos and one by sin for both halves, in the dtype of q and k."""

    def rotated(x, cos, sin, interleaved):
        if interleaved:
            other = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
        else:
            a, b = x.chunk(2, -1)
            other = torch.cat((-b, a), -1)
        return x * cos + other * sin

    def function(q, k, cos, sin, *, rotary_dim, position_ids=None, interleaved=False, layout="bshd", inplace=False):
        heads, seq = (-2, q.shape[1]) if layout == "bshd" else (-3, q.shape[2])
        tables = []
        for table in (cos, sin):
            if position_ids is not None:
                table = table[position_ids]
            elif table.dim() == 2:
                table = table[:seq]
            if table.shape[-1] != rotary_dim:
                table = table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)
            tables.append(table.to(q.dtype).unsqueeze(heads))

        def turn(x):
            if rotary_dim == x.shape[-1]:
                return rotated(x, *tables, interleaved)
            return torch.cat((rotated(x[..., :rotary_dim], *tables, interleaved), x[..., rotary_dim:]), -1)

        return turn(q) if k is None else (turn(q), turn(k))

    return function


def _liger():
    from liger_kernel.ops.rope import LigerRopeFunction

    def liger_rope(q, k, cos, sin, *, rotary_dim, layout="bshd", inplace=False):
        # Liger's function expects [B, heads, S, D], works on the transpose, and returns the tensors that it overwrote.
        q, k = LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin, None, 1, rotary_dim)
        return q.transpose(1, 2), k.transpose(1, 2)

    return liger_rope


def _liger_supports(case: Case, mode: str) -> str | None:
    params = case.params
    if not params.get("inplace"):
        return "supports only inplace=True"
    if params.get("positions") or params.get("interleaved") or params.get("alone"):
        return "does not support position_ids or interleaved pairs, and requires k"
    return "copies q and k in the bhsd layout" if params.get("layout") == "bhsd" else None


def _quack():
    from quack.rotary import apply_rotary_emb

    def quack_rope(q, k, cos, sin, *, rotary_dim, interleaved=False, layout="bshd", inplace=False):
        # Each call rotates one tensor [B, S, heads, D].
        q, k = (x if layout == "bshd" or x is None else x.transpose(1, 2) for x in (q, k))
        cos, sin = (t[..., : rotary_dim // 2] for t in (cos, sin))
        q, k = (None if x is None else apply_rotary_emb(x, cos, sin, interleaved, inplace) for x in (q, k))
        q, k = (x if layout == "bshd" or x is None else x.transpose(1, 2) for x in (q, k))
        return q if k is None else (q, k)

    return quack_rope


def _quack_supports(case: Case, mode: str) -> str | None:
    if case.params.get("positions") or case.params.get("batched"):
        return "does not support position_ids or tables per sequence"
    if case.params.get("interleaved") and case.params.get("tables") == "full":
        return "does not support tables that repeat each value"
    return "requires dimensions that are multiples of 8" if _rotary(case) % 8 or case.dims["dim"] % 8 else None


def _candidates(case: Case) -> list[configs.Config]:
    heads, kv_heads = case.dims["heads"], case.dims["kv_heads"]
    found = []
    for rows in (16, 32, 64, 128):
        for most in (1, 4, 8, 32, 64):
            q_tile, k_tile = (min(configs.tile_heads(h, rows), most) for h in (heads, kv_heads))
            found += [configs.Config(rows, q_tile, k_tile, w, e) for w in (4, 8) for e in ("", "evict_last")]
    return list(dict.fromkeys(found))


SPEC = KernelSpec(
    name="rope",
    implementations={"triton": rope},
    baselines=(
        EAGER,
        COMPILED,
        COMPILED_MAX,
        Peer("torch", load=_torch),
        Peer("liger", load=_liger, supports=_liger_supports),
        Peer("quack", load=_quack, supports=_quack_supports),
        COPY,
    ),
    pytorch=("torch",),
    reference=rope_reference,
    make_inputs=make_inputs,
    cost=cost,
    extra_bytes=extra_bytes,
    cases=CASES,
    grads=("q", "k"),
    unit="tokens",
    items=lambda case: case.dims["batch"] * case.dims["seq"],
    # Results have the input's memory order, which an expanded input lacks; test_rope.py checks the other strides.
    own_strides=lambda case: (0, 1),
    # Few head dimensions, because each compiles a kernel. 31 to 36 include odd ones, and halves below and above 16.
    fuzz={"batch": (0, 3), "seq": (0, 40), "heads": (1, 5), "kv_heads": (0, 2), "dim": (31, 36)},
    tunables=tuple(Tunable(configs, "pick_config", mode, _candidates) for mode in ("fwd", "bwd")),
    suite_cases=SUITE_CASES,
    host_cases=(_case((1, 4, 2, 2, 64), BF16, "-host"),),
)

"""The declaration of attention: cases, cost, peers. `python -m harness bench --kernel attention`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.spec import (
    COMPILED,
    COMPILED_MAX,
    EAGER,
    Case,
    Cost,
    Inputs,
    KernelSpec,
    Op,
    Peer,
    Rows,
    Tunable,
    Yardstick,
)

from . import attention
from .configs import backward as backward_configs
from .configs import candidates
from .configs import forward as forward_configs
from .configs import portable as portable_configs
from .op_blocks import attention_in_blocks
from .reference import MOST_SCORES, attention_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _case(
    batch: int,
    heads: int | tuple[int, int],
    queries: int,
    keys: int,
    dim: int,
    dtype: torch.dtype = BF16,
    suffix: str = "",
    **params,
) -> Case:
    """Returns a case. `heads`: query heads, or (query heads, KV heads). A bf16 case without suffix is a bench case."""
    query_heads, kv_heads = heads if isinstance(heads, tuple) else (heads, heads)
    short = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
    shared = f"-{kv_heads}" if kv_heads != query_heads else ""
    fp8 = params.get("fp8", False)
    words = ("causal" if params.get("causal") else "", short, "fp8" if fp8 else "", suffix)
    name = "-".join((f"b{batch}-h{query_heads}{shared}-q{queries}-k{keys}-d{dim}", *filter(None, words)))
    dims = dict(batch=batch, kv_heads=kv_heads, group=query_heads // kv_heads, queries=queries, keys=keys, dim=dim)
    bench = dtype == BF16 and not suffix
    forward_alone = fp8 or (bench and queries == 1)  # decoding
    needed = (9, 0) if fp8 else (0, 0)
    return Case(name, dims, dtype, params, bench, needed, modes=("fwd",) if forward_alone else ())


def _context(batch: int, queries: int, keys: int) -> Case:
    """Returns a case of TransformerNP: context and target points are queries, and the context points are the keys."""
    return _case(batch, 8, queries, keys, 64, context=True)


CASES = (
    # TransformerNP, M context points and N targets: (10k, 1k), (200k, 5k), (64, 500).
    _context(4, 11000, 10000),
    _context(1, 205000, 200000),
    _context(64, 564, 64),
    # Llama-2 7B's heads, and 70B's.
    _case(4, 32, 512, 512, 128, causal=True),
    _case(4, 32, 2048, 2048, 128, causal=True),
    _case(4, 32, 4096, 4096, 128, causal=True),
    _case(1, 32, 16384, 16384, 128, causal=True),
    _case(1, 32, 8192, 8192, 128),
    _case(1, (64, 8), 8192, 8192, 128, causal=True),
    # Few queries: decoding, targets with a long context, cross-attention of a decoder.
    _case(1, 8, 1, 200000, 64),
    _case(8, (64, 8), 1, 32768, 128),
    _case(1, 8, 564, 64000, 64),
    _case(4, 32, 512, 4096, 128),
    # In e4m3, compared with the same peers in bf16.
    *(_case(1, 16, 16384, 16384, dim, causal=causal, fp8=True) for dim in (64, 128) for causal in (False, True)),
    _case(4, 8, 11000, 10000, 64, context=True, fp8=True),
    *(_case(2, (4, 2), 333, 517, dim, BF16, "small", fp8=True, return_lse=True) for dim in (64, 80, 128)),
    *(_case(2, (4, 2), 517, 333, dim, FP16, "small", fp8=True, causal=True) for dim in (64, 128)),
    _case(1, 3, 130, 900, 64, BF16, "small", fp8=True, context=True),
    # Boundary cases: no option, then every option, size 0, size 1, every head dimension, partial tiles.
    _case(1, (2, 1), 37, 41, 24, FP32),
    _case(1, (2, 1), 41, 37, 24, FP16),
    _case(2, (4, 2), 17, 9, 16, FP32),
    _case(1, 2, 37, 29, 16, FP32, causal=True, return_lse=True),
    _case(2, 1, 37, 45, 24, FP16, causal=True),
    _case(1, 2, 40, 33, 24, FP32, "window", window=(7, 3)),
    _case(1, (2, 1), 33, 40, 24, FP16, "options", window=(5, -1), causal=True, scale=0.3, return_lse=True),
    _case(2, 1, 41, 29, 24, FP32, "context", context=True, return_lse=True),
    _case(1, 2, 5, 0, 16, FP32, "context", context=True),
    _case(1, 2, 17, 19, 16, FP32, "window", window=(0, 0)),
    _case(1, 2, 0, 5, 16, FP32),
    _case(1, 2, 5, 0, 16, FP32),
    _case(1, 1, 1, 1, 1, FP32),
    _case(1, 1, 150, 70, 32, FP16, causal=True),
    _case(1, (2, 1), 40, 70, 32, FP32, "window", window=(7, 3)),
    _case(1, 2, 3, 600, 32, FP16),
    _case(1, (6, 1), 4, 600, 16, FP16, causal=True),
    *(_case(1, 1, 20, 66, dim, FP16) for dim in (64, 80, 96, 128, 256)),
    *(_case(1, 1, 20, 35, dim, FP32) for dim in (64, 80, 128)),
    *(_case(2, (4, 2), 333, 517, dim, BF16, "small") for dim in (32, 64, 80, 96, 128, 256)),
    *(_case(2, (4, 2), 333, 517, dim, BF16, "small", causal=True, return_lse=True) for dim in (64, 128, 256)),
    # One block of keys, and tiles of queries that see none of them.
    *(_case(2, (4, 2), 700, 100, dim, BF16, "small", causal=True) for dim in (64, 128)),
    _case(1, (8, 2), 3, 3000, 128, BF16, "small"),
    # More tiles than SMs; queries that see no key; keys beyond num_context.
    _case(2, (8, 4), 3000, 3100, 64, BF16, "small", causal=True, return_lse=True),
    _case(1, (16, 4), 3000, 2777, 128, FP16, "small"),
    _case(1, 2, 300, 130, 128, BF16, "small", causal=True),
    _case(1, 3, 130, 900, 64, BF16, "small", context=True, return_lse=True),
    _case(1, 2, 517, 333, 64, BF16, "window", window=(100, 20)),
)


def make_inputs(case: Case, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    """Returns random inputs. `context`: k and v have as many rows as q, of which the first `keys` are valid."""
    d, params = case.dims, dict(case.params)

    def normal(heads: int, rows: int) -> torch.Tensor:
        shape = (d["batch"], heads, rows, d["dim"])
        return torch.randn(shape, dtype=case.dtype, device=device, generator=generator)

    rows = d["keys"]
    if params.pop("context", False):
        params["num_context"], rows = d["keys"], max(d["queries"], d["keys"])
    q = normal(d["kv_heads"] * d["group"], d["queries"])
    return {"q": q, "k": normal(d["kv_heads"], rows), "v": normal(d["kv_heads"], rows), **params}


def visible(queries: int, keys: int, left: int, right: int) -> int:
    """Returns the number of visible pairs of query and key in the band."""

    def below(shift: int) -> int:
        """Returns the sum over queries i of min(max(i + shift, 0), keys)."""

        def upto(n: int) -> int:
            n = max(n, 0)
            return n * (n - 1) // 2 if n <= keys else keys * (keys - 1) // 2 + (n - keys) * keys

        return upto(shift + queries) - upto(shift)

    first = below(keys - queries - left) if left >= 0 else 0
    return (below(keys - queries + right + 1) if right >= 0 else queries * keys) - first


def cost(case: Case, mode: str) -> Cost:
    d, params, size = case.dims, case.params, case.dtype.itemsize
    left, right = params.get("window", (-1, -1))
    keys = params.get("num_context", d["keys"])
    pairs = visible(d["queries"], keys, left, 0 if params.get("causal") else right)
    heads = d["batch"] * d["kv_heads"]
    # Rows of q, out, k and v; lse. Gradients of keys beyond num_context are zeros, and are not counted.
    rows = heads * (d["group"] * d["queries"] * 2 + keys * 2)
    lse = 4 * heads * d["group"] * d["queries"]
    # Forward: two GEMMs of 2·D FLOPs per pair and head. Backward: five, one of which is recomputed from the forward.
    products, tensors = {"fwd": (2, 1), "bwd": (5, 2)}[mode]
    pipe = "fp8" if params.get("fp8") else {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[case.dtype]
    flops = products * 2 * d["dim"] * pairs * heads * d["group"]
    return Cost(flops=flops, bytes=tensors * rows * d["dim"] * size + lse, pipe=pipe)


def extra_bytes(case: Case, mode: str) -> dict[str, int]:
    d, size = case.dims, case.dtype.itemsize
    rows = d["batch"] * d["kv_heads"] * d["group"] * d["queries"]
    spare = max(d["queries"] - d["keys"], 0) if case.params.get("context") else 0
    unread = 2 * d["batch"] * d["kv_heads"] * spare * d["dim"] * size
    extra = {"lse": 4 * rows, "keys, values and gradients beyond the context": -unread * (2 if mode == "bwd" else 1)}
    return extra if mode == "fwd" else {**extra, "out": rows * d["dim"] * size}


def _square_if_causal(case: Case) -> str | None:
    if case.params.get("window"):
        return "does not support a window"
    if case.params.get("causal") and case.dims["queries"] != case.dims["keys"]:
        return "aligns a causal mask to the top left, not the bottom right"
    return None


def _sampled(case: Case) -> Rows | None:
    """Returns which rows are compared in large cases. Queries are independent rows, unless a mask depends on their
    position."""
    d, masked = case.dims, case.params.get("causal") or case.params.get("window")
    large = d["batch"] * d["kv_heads"] * d["group"] * d["queries"] * d["keys"] > 32 * MOST_SCORES
    return Rows(128, {"q": 2}, 2) if large and not masked else None


def _fits(case: Case, mode: str) -> str | None:
    """Returns why the reference is no baseline, or None: too large a problem is computed in chunks, and recomputed in
    the backward."""
    scores = case.dims["batch"] * case.dims["kv_heads"] * case.dims["group"] * case.dims["queries"] * case.dims["keys"]
    return f"needs {4 * scores / 1e9:.0f} GB for the score matrix" if scores > MOST_SCORES else None


def _sdpa(backend: SDPBackend) -> Callable[[], Op]:
    """Returns PyTorch's SDPA with this backend only: PyTorch raises where the backend does not support a problem."""

    def attend(q, k, v, *, causal=False, scale=None, num_context=None, window=None, fp8=False):
        k, v = (k, v) if num_context is None else (k[:, :, :num_context], v[:, :, :num_context])
        with sdpa_kernel(backend):
            shared = q.shape[1] != k.shape[1]
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=shared)

    return lambda: attend


@functools.cache
def _block_mask(queries: int, keys: int, device: str):
    from torch.nn.attention.flex_attention import create_block_mask

    def below(batch, head, query, key):
        return key <= query + (keys - queries)

    return create_block_mask(below, None, None, queries, keys, device=device)


def _flex(**options) -> Op:
    """Returns FlexAttention with these kernel options."""
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q, k, v, *, causal=False, scale=None, num_context=None, window=None, fp8=False):
        k, v = (k, v) if num_context is None else (k[:, :, :num_context], v[:, :, :num_context])
        mask = _block_mask(q.shape[2], k.shape[2], str(q.device)) if causal else None
        shared = q.shape[1] != k.shape[1]
        return compiled(q, k, v, block_mask=mask, scale=scale, enable_gqa=shared, kernel_options=options or None)

    return attend


#: Kernel options of FlexAttention for cases where its default tiles do not fit shared memory.
SMALLER = {
    "two stages": partial(_flex, num_stages=2),
    "one stage and tiles of 64": partial(
        _flex, num_stages=1, BLOCK_M=64, BLOCK_N=64, BLOCK_M1=32, BLOCK_N1=64, BLOCK_M2=64, BLOCK_N2=32
    ),
}


def _flex_flash() -> Op:
    """Returns FlexAttention with the backend FlashAttention-4. ImportError if PyTorch or the package is too old."""
    import flash_attn.cute  # noqa: F401
    from torch.nn.attention.flex_attention import FlexKernelOptions

    if "BACKEND" not in FlexKernelOptions.__annotations__:
        raise ImportError("this PyTorch's FlexAttention has one backend")
    return _flex(BACKEND="FLASH")


def rounded(x: torch.Tensor, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns x [B, H, S, D] in e4m3 as [B, S, H, D], and its descale factors [B, kv_heads]."""
    grouped = x.unflatten(1, (kv_heads, -1))
    descale = (grouped.abs().amax((2, 3, 4)).float() / torch.finfo(torch.float8_e4m3fn).max).clamp(min=2.0**-126)
    data = (grouped / descale[:, :, None, None, None]).to(torch.float8_e4m3fn)
    return data.flatten(1, 2).transpose(1, 2).contiguous(), descale


def _fa3() -> Op:
    """Returns FlashAttention-3. In fp8 cases each call quantises q, k and v by a function under torch.compile."""
    from flash_attn_interface import flash_attn_func

    round_compiled = torch.compile(rounded, dynamic=False)

    def attend(q, k, v, *, causal=False, scale=None, num_context=None, window=None, fp8=False):
        k, v = (k, v) if num_context is None else (k[:, :, :num_context], v[:, :, :num_context])
        # num_splits = 0: its heuristic chooses split-K for few queries.
        options: dict[str, Any] = dict(softmax_scale=scale, causal=causal, window_size=window or (-1, -1), num_splits=0)
        tensors = [t.transpose(1, 2) for t in (q, k, v)]  # its layout is [B, S, H, D]
        if fp8:
            tensors, descales = zip(*(round_compiled(t, k.shape[1]) for t in (q, k, v)), strict=True)
            options |= zip(("q_descale", "k_descale", "v_descale"), descales, strict=True)
        out = flash_attn_func(*tensors, **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attend


def _fa4() -> Op:
    from flash_attn.cute import flash_attn_func

    def attend(q, k, v, *, causal=False, scale=None, num_context=None, window=None, fp8=False):
        k, v = (k, v) if num_context is None else (k[:, :, :num_context], v[:, :, :num_context])
        window = (None, None) if window is None else tuple(None if bound < 0 else bound for bound in window)
        # Its layout is [B, S, H, D].
        out = flash_attn_func(
            *(t.transpose(1, 2) for t in (q, k, v)), softmax_scale=scale, causal=causal, window_size=window
        )
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attend


# Cases that compare the versions of the forward, from few queries and keys to many.
LENGTHS = (32, 128, 512, 2048, 8192, 32768, 200_000)
GRID = tuple(
    _case(1, 8, queries, keys, dim)
    for dim, lengths in ((64, LENGTHS), (128, LENGTHS[:-1]))
    for queries in lengths
    for keys in lengths
    if queries * keys <= 32768 * 200_000
)


H200_SMS = 132
FP8 = tuple(case for case in CASES if case.bench and case.params.get("fp8"))
PLAIN = tuple(case for case in CASES if case.bench and not case.params.get("fp8"))


def _picks_cuda(case: Case) -> bool:
    """Returns whether the forward in CUDA C++ runs on an H200."""
    d = case.dims
    sizes = (d["queries"], d["keys"], d["batch"] * d["kv_heads"], d["group"])
    return forward_configs.pick_forward("auto", case.dtype, *sizes, H200_SMS, "cuda", d["dim"])[0] == "cuda"


def _fwd_candidates(case: Case) -> list[portable_configs.Config]:
    shapes = [(64, 64), (64, 128), (128, 32), (128, 64), (128, 128), (192, 64), (256, 64)]
    return candidates.tiles(case.dims["dim"], shapes, (4, 8, 16), (2, 3, 4))


def _dkdv_candidates(case: Case) -> list[portable_configs.Config]:
    shapes = [(32, 64), (32, 128), (64, 64), (64, 128), (128, 64)]
    return candidates.tiles(case.dims["dim"], shapes, (4, 8), (1, 2, 3))


def _dq_candidates(case: Case) -> list[portable_configs.Config]:
    shapes = [(64, 32), (64, 64), (128, 32), (128, 64), (128, 128)]
    return candidates.tiles(case.dims["dim"], shapes, (4, 8), (1, 2, 3))


def _cuda_bwd_candidates(case: Case) -> list[backward_configs.CudaBackwardConfig]:
    d = case.dims
    heads = d["batch"] * d["kv_heads"]
    return candidates.cuda_bwd(d["keys"], d["dim"], heads, d["group"], bool(case.params.get("causal")))


TUNABLES = (
    Tunable(forward_configs, "pick_forward", "fwd", lambda case: candidates.versions(case.dims["keys"]), GRID),
    Tunable(
        forward_configs,
        "pick_cuda_config",
        "fwd",
        lambda case: candidates.cuda(case.dims["dim"]),
        tuple(filter(_picks_cuda, PLAIN)),
    ),
    Tunable(forward_configs, "pick_fp8_config", "fwd", lambda case: candidates.fp8(case.dims["dim"]), FP8),
    Tunable(portable_configs, "pick_fwd_config", "fwd", _fwd_candidates, PLAIN, "triton"),
    Tunable(portable_configs, "pick_dkdv_config", "bwd", _dkdv_candidates, PLAIN, "triton"),
    Tunable(portable_configs, "pick_dq_config", "bwd", _dq_candidates, PLAIN, "triton"),
    Tunable(backward_configs, "pick_cuda_bwd_config", "bwd", _cuda_bwd_candidates, PLAIN),
)


def _alias_reason(implementation: str, case: Case, mode: str) -> str | None:
    if implementation != "auto" and case.params.get("fp8"):
        return "same version as auto: fp8 has only one"
    if implementation == "triton-fused" and mode == "fwd":
        return "same forward as auto"
    return None


# Why racecheck's reports are false alarms. tests/test_false_alarms.py reproduces one with a kernel of a few lines.
HANDED_OVER = (
    "a bulk copy or a warp hands it over through an mbarrier, and racecheck does not know which threads wait for those"
)

HOST_CASES = (_case(1, 2, 128, 128, 64, suffix="host", causal=True),)
# Few tokens, where a user would call PyTorch without naming a backend.
SMALL = tuple(
    _case(batch, heads, tokens, tokens, 64, dtype)
    for dtype in (FP16, BF16)
    for batch, heads, tokens in (*((1, 1, n) for n in (32, 64, 128, 256, 512)), (2, 4, 128))
)


def _sdpa_as_called() -> Op:
    """Returns SDPA with the backend that PyTorch chooses. Naming one needs a context manager, which costs host time."""

    def attend(q, k, v, *, causal=False, scale=None, num_context=None, **_):
        k, v = (k, v) if num_context is None else (k[:, :, :num_context], v[:, :, :num_context])
        shared = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=shared)

    return attend


def _as_called(case: Case, mode: str) -> str | None:
    return "does not return the log-sum-exp" if case.params.get("return_lse") else _square_if_causal(case)


CARRY_QUERIES = 4096  # least queries for which the carry is timed: blocks of ring attention are not shorter


def _carry(case: Case, mode: str) -> str | None:
    """Returns why attention in blocks of keys does not support a case, or is not timed on it, or None."""
    if set(case.params) - {"causal", "scale"}:
        return "does not support a window, num_context, fp8 or return_lse"
    return (
        f"timed only with at least {CARRY_QUERIES} queries, as in ring attention"
        if case.bench and case.dims["queries"] < CARRY_QUERIES
        else None
    )


def _carry_cost(case: Case, mode: str) -> Cost:
    """Returns the cost of attention plus that of two blocks: the forward writes and reads fp32 out and lse once more.
    The backward zeros fp32 dq, dk and dv, adds to dq twice and to dk and dv once, and rounds all three."""
    plain, d = cost(case, mode), case.dims
    rows = d["batch"] * d["kv_heads"] * d["group"] * d["queries"]
    keys = 2 * d["batch"] * d["kv_heads"] * d["keys"]
    added = 2 * rows * (d["dim"] + 1) if mode == "fwd" else (6 * rows + 4 * keys) * d["dim"]
    return dataclasses.replace(plain, bytes=plain.bytes + 4 * added)


SPEC = KernelSpec(
    name="attention",
    implementations={
        "auto": attention,
        "triton": partial(attention, forward="portable", backward="separate"),
        "triton-fused": partial(attention, backward="fused"),
    },
    # On the CPU "triton" is the same as "auto". The interpreter would take minutes for all checks of "triton-fused":
    # there test_attention.py compares them.
    min_capability={"triton": (9, 0), "triton-fused": (8, 0)},
    alias_reason=_alias_reason,
    baselines=(
        dataclasses.replace(EAGER, supports=_fits),
        dataclasses.replace(COMPILED, supports=_fits),
        dataclasses.replace(COMPILED_MAX, supports=_fits),
        Peer("sdpa-flash", load=_sdpa(SDPBackend.FLASH_ATTENTION), supports=lambda case, mode: _square_if_causal(case)),
        Peer("cudnn", load=_sdpa(SDPBackend.CUDNN_ATTENTION), supports=lambda case, mode: _square_if_causal(case)),
        Peer("torch", load=_sdpa_as_called, supports=_as_called),
        Peer("flex", load=_flex, configurations=SMALLER),
        Peer("flex-flash", load=_flex_flash),
        Peer("fa3", load=_fa3),
        Peer("fa4", load=_fa4),
        Yardstick("carry", load=lambda: attention_in_blocks, supports=_carry, cost=_carry_cost, ours=True),
    ),
    pytorch=("torch",),
    reference=attention_reference,
    make_inputs=make_inputs,
    cost=cost,
    extra_bytes=extra_bytes,
    cases=CASES,
    grads=("q", "k", "v"),
    determinism={"fwd": "run-to-run", "bwd": "on request"},
    unit="queries",
    items=lambda case: case.dims["batch"] * case.dims["queries"],
    # Whether a masked element is multiplied by 0 or not read at all depends on the tiles, and 0 · NaN is NaN.
    # In e4m3 an infinity is NaN.
    finite_only=lambda case: any(case.params.get(name) for name in ("causal", "window", "fp8")),
    sampled=_sampled,
    fuzz={"queries": (0, 40), "keys": (0, 40), "dim": (1, 40)},
    false_alarms={
        ("initcheck", "_attention_delta_kernel"): (
            "it reads out, all of which the forward in Gluon has stored by TMA; initcheck does not see these stores"
        ),
        **{
            ("racecheck", where): HANDED_OVER
            for where in (
                *("load_row", "store_one", "store_pair", "store_shared"),
                *("shared_chunk", "load_shared", "_attention_gluon_fwd_kernel"),
            )
        },
    },
    spills={"attention_fp8_fwd": 52},  # with NVRTC 13.5; with 13.0, which was measured, 48
    tunables=TUNABLES,
    suite_cases=SMALL,
    host_cases=HOST_CASES,
)

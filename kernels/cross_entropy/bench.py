"""The declaration of cross_entropy: cases, cost, peers. `python -m harness bench --kernel cross_entropy`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from harness.spec import COMPILED, COMPILED_MAX, EAGER, Case, Cost, Inputs, KernelSpec, Peer, Tunable

from . import cluster, configs, cross_entropy, cross_entropy_and_grad
from .reference import cross_entropy_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _case(rows: int, vocab: int, dtype: torch.dtype, suffix: str = "", bench: bool = False, **params) -> Case:
    short = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
    mutates = ("logits",) if params.get("with_grad") else ()
    return Case(f"{rows}x{vocab}-{short}{suffix}", dict(rows=rows, vocab=vocab), dtype, params, bench, mutates=mutates)


EVERYTHING: dict[str, Any] = dict(
    weight=True, ignored=True, label_smoothing=0.1, z_loss=1e-2, softcap=5.0, return_z_loss=True, return_lse=True
)

CASES = (
    # Vocabularies of Llama 2 and 3, GPT-2 (odd: no row but the first starts on a 16-byte boundary), Gemma 2 with its
    # softcap, and a small one.
    _case(4096, 32000, BF16, bench=True),
    _case(16384, 32000, BF16, bench=True),
    _case(8192, 128256, BF16, bench=True),
    _case(8192, 50257, BF16, bench=True),
    _case(4096, 256000, BF16, "-softcap", bench=True, softcap=30.0),
    _case(205000, 512, BF16, bench=True),
    # The loss and its gradient in one pass, in place.
    _case(4096, 32000, BF16, "-inplace", bench=True, with_grad=True),
    _case(16384, 32000, BF16, "-inplace", bench=True, with_grad=True),
    _case(8192, 128256, BF16, "-inplace", bench=True, with_grad=True),
    # Boundary cases: no row, one row, one class, primes, one off a power of two, rows in chunks, unaligned rows.
    _case(0, 64, FP32),
    _case(1, 1, FP32),
    _case(7, 1, FP16),
    _case(31, 127, FP32),
    _case(24, 24, FP32, "-none", reduction="none", ignored=True),
    _case(13, 257, FP32, "-sum", reduction="sum", z_loss=1e-2, return_lse=True),
    _case(13, 96, FP16, "-smooth", label_smoothing=0.1, ignored=True),
    _case(19, 65, FP32, "-weight", weight=True, ignored=True, z_loss=1e-3),
    _case(19, 64, FP32, "-softcap", softcap=5.0),
    _case(11, 131, FP32, "-everything", **EVERYTHING),
    _case(11, 131, FP16, "-everything-none", reduction="none", **EVERYTHING),
    _case(11, 130, FP32, "-fused", grad_in_forward=True, ignored=True),
    _case(11, 131, FP32, "-fused-everything-sum", grad_in_forward=True, reduction="sum", **EVERYTHING),
    _case(9, 72, FP16, "-inplace", with_grad=True, ignored=True),
    _case(9, 71, FP32, "-inplace-everything", with_grad=True, **EVERYTHING),
    # Options at the ends of their ranges.
    _case(5, 33, FP32, "-int32-smooth1", index=torch.int32, label_smoothing=1.0),
    _case(5, 33, FP32, "-all-ignored-everything-sum", all_ignored=True, reduction="sum", **EVERYTHING),
    _case(5, 33, FP32, "-all-ignored-int32-inplace", all_ignored=True, index=torch.int32, with_grad=True),
    _case(5, 8192, FP32, ignored=True),
    _case(5, 8201, FP16, "-everything", **EVERYTHING),
    _case(4, 20003, FP32, "-smooth-none", reduction="none", label_smoothing=0.2),
    _case(3, 32000, FP16, "-inplace", with_grad=True),
    _case(3, 5003, FP32, "-inplace-everything", with_grad=True, **EVERYTHING),
    _case(2, 262144, FP16),
    _case(257, 1023, BF16, ignored=True),
    # More tiles of entire rows than resident programs, in the interpreter and on a GPU.
    _case(41, 2500, FP32, "-everything", **EVERYTHING),
    _case(17001, 504, BF16, "-everything", **EVERYTHING),
    _case(17001, 504, BF16, "-inplace-everything", with_grad=True, **EVERYTHING),
    _case(19, 9001, BF16, "-everything", **EVERYTHING),
    _case(19, 8200, BF16, "-inplace-everything", with_grad=True, **EVERYTHING),
    # A cluster of CTAs on Hopper: two, of which the second has fewer or as many columns, and sixteen.
    _case(7, 16392, FP16, "-inplace-sum", with_grad=True, ignored=True, reduction="sum", return_lse=True),
    _case(5, 16384, FP32, "-inplace-smooth", with_grad=True, ignored=True, label_smoothing=0.1),
    _case(2, 131080, BF16, "-inplace-z-none", with_grad=True, reduction="none", z_loss=1e-2, return_z_loss=True),
)


def make_inputs(case: Case, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    rows, vocab = case.dims["rows"], case.dims["vocab"]
    params = dict(case.params)
    inputs: Inputs = {"logits": 2 * torch.randn(rows, vocab, dtype=case.dtype, device=device, generator=generator)}
    target = torch.randint(0, max(vocab, 1), (rows,), device=device, generator=generator)
    if params.pop("ignored", False):
        # Not the middle row: there the checks put NaN and inf, and in PyTorch these pass through an ignored row.
        row = torch.arange(rows, device=device)
        target = torch.where((row % 5 == 1) & (row != rows // 2), -100, target)
    if params.pop("all_ignored", False):
        target.fill_(-100)
    inputs["target"] = target.to(params.pop("index", torch.int64))
    if params.pop("weight", False):
        inputs["weight"] = 0.5 + torch.rand(vocab, dtype=torch.float32, device=device, generator=generator).to(
            case.dtype
        )
    return {**inputs, **params}


def cost(case: Case, mode: str) -> Cost:
    rows, vocab, size = case.dims["rows"], case.dims["vocab"], case.dtype.itemsize
    with_grad = case.params.get("with_grad", False)
    # The logits are read. The backward, or the forward that also writes the gradient, writes as many bytes.
    matrices = 2 if with_grad or mode == "bwd" else 1
    vectors = 8 * rows + (vocab * size if case.params.get("weight", False) else 0)
    if case.params.get("reduction") == "none":
        vectors += size * rows
    # forward: maximum, difference, exponential, sum. backward: difference, exponential, scale, subtraction at target.
    flops = {"fwd": 8 if with_grad else 4, "bwd": 4}[mode]
    return Cost(flops=flops * rows * vocab, bytes=matrices * size * rows * vocab + vectors)


def _op(logits, target, with_grad=False, backend="auto", **options):
    """Calls `cross_entropy`, or with_grad `cross_entropy_and_grad` in place, without autograd."""
    if with_grad:
        return cross_entropy_and_grad(logits, target, inplace=True, backend=backend, **options)
    return cross_entropy(logits, target, backend=backend, **options)


def _torch():
    def loss(logits, target, with_grad=False, **options):
        target = target.long()
        if not with_grad:
            return F.cross_entropy(logits, target, **options)
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            value = F.cross_entropy(leaf, target, **options)
            return value.detach(), *torch.autograd.grad(value, leaf)

    return loss


def _torch_supports(case: Case, mode: str) -> str | None:
    unknown = {"grad_in_forward", "softcap", "z_loss", "return_lse", "return_z_loss"} & set(case.params)
    return f"does not support {', '.join(sorted(unknown))}" if unknown else None


def _liger():
    from liger_kernel.ops.cross_entropy import cross_entropy_forward

    def loss(logits, target, *, reduction="mean", softcap=None, with_grad=False):
        # The function that LigerCrossEntropyFunction calls. It writes the gradient if the logits require one.
        logits = logits.detach().requires_grad_(with_grad)
        with torch.no_grad():
            value, *_, gradient = cross_entropy_forward(logits, target, None, -100, 0.0, 0.0, reduction, softcap, False)
        return (value, gradient.detach()) if with_grad else value

    return loss


def _liger_supports(case: Case, mode: str) -> str | None:
    if mode == "bwd":
        return "computes the gradient in the forward, in place: see the inplace cases"
    unknown = set(case.params) - {"with_grad", "softcap", "reduction"}
    return f"not compared with {', '.join(sorted(unknown))}" if unknown else None


def _quack():
    import quack

    def loss(logits, target):
        return quack.cross_entropy(logits, target, reduction="mean").to(logits.dtype)

    return loss


def _quack_with_grad():
    """Loss and gradient in two passes: QuACK's backward overwrites the logits."""
    import quack

    def loss(logits, target, with_grad):
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            value = quack.cross_entropy(leaf, target, reduction="mean", inplace_backward=True)
            (gradient,) = torch.autograd.grad(value, leaf)
        return value.detach().to(logits.dtype), gradient

    return loss


def _quack_one_pass():
    """Loss and gradient in one pass over the logits. QuACK computes the gradient of the sum; that of the mean, without
    another pass, follows if every class has the weight 1 / rows."""
    from quack.cross_entropy import cross_entropy_fwd

    def loss(logits, target, with_grad):
        share = (target != -100).sum().clamp(min=1).float().reciprocal()
        weight = share.expand(logits.shape[1]).contiguous()
        losses, gradient = cross_entropy_fwd(logits, target, weight=weight, return_dx=True, inplace_backward=True)
        return losses.sum().to(logits.dtype), gradient

    return loss


def _quack_supports(with_grad: bool) -> Callable[[Case, str], str | None]:
    def supports(case: Case, mode: str) -> str | None:
        if unknown := case.params.keys() - {"with_grad"}:
            return f"does not support {', '.join(sorted(unknown))}"
        if with_grad:
            return (
                None
                if case.params.get("with_grad")
                else "computes the gradient too: compared only in the inplace cases"
            )
        return "see quack-one-pass and quack-two-pass" if case.params.get("with_grad") else None

    return supports


def _narrow_candidates(case: Case) -> list[configs.NarrowConfig]:
    vocab, size = case.dims["vocab"], case.dtype.itemsize
    block_n = 1 << (vocab - 1).bit_length()
    vector = 1 if vocab * size % 16 else min(block_n, 16 // size)
    return [
        configs.NarrowConfig(lanes, vector, 32 * warps // lanes * rows_a_thread, warps)
        for lanes in (8, 16, 32, 64)
        for warps in (2, 4, 8)
        for rows_a_thread in (1, 2)
        if lanes * vector <= block_n and lanes <= 32 * warps
    ]


def _fwd_candidates(case: Case) -> list[configs.NarrowFwdConfig | configs.WideFwdConfig]:
    if case.dims["vocab"] <= configs.NARROW:
        return [
            configs.NarrowFwdConfig(t.lanes, t.vector, t.block_m, t.num_warps, registers)
            for t in _narrow_candidates(case)
            for registers in (40, 64, 96, 128)
        ]
    return [
        configs.WideFwdConfig(unroll, 0, warps, eviction)
        for unroll in (1, 2, 4, 8)
        for warps in (4, 8, 16)
        for eviction in ("", "evict_last")
    ]


def _bwd_candidates(case: Case) -> list[configs.NarrowConfig | configs.WideBwdConfig]:
    if case.dims["vocab"] <= configs.NARROW:
        return [*_narrow_candidates(case)]
    return [
        configs.WideBwdConfig(block_n, warps, eviction)
        for block_n in (2048, 4096, 8192)
        for warps in (4, 8, 16)
        for eviction in ("", "evict_first", "evict_last")
    ]


def _cluster_candidates(case: Case) -> list[configs.ClusterConfig]:
    vocab, dtype = case.dims["vocab"], case.dtype
    terms = bool(case.params.get("label_smoothing") or case.params.get("z_loss"))
    vectors = vocab * dtype.itemsize // 16
    splits = {(-(-vectors // (threads * most)), threads) for threads in (128, 256, 512) for most in range(4, 9)}
    return [
        configs.cluster_config(ctas, threads, vocab, dtype, terms)
        for ctas, threads in sorted(splits)
        if 2 <= ctas <= 16
    ]


def _unsupported_reason(implementation: str, case: Case, mode: str) -> str | None:
    vectors = case.dims["vocab"] * case.dtype.itemsize / configs.VECTOR
    if implementation != "cuda":
        return None
    if not case.params.get("with_grad"):
        return "supports only the loss together with its gradient"
    if case.params.get("weight") or case.params.get("softcap"):
        return "does not support class weights or softcap"
    whole = vectors.is_integer() and cluster.NARROWEST <= vectors <= cluster.WIDEST
    return None if whole else "requires rows of more than 32 and up to 512 KiB on 16-byte boundaries"


def _alias_reason(implementation: str, case: Case, mode: str) -> str | None:
    """For "cuda" always a reason: the generic checks try layouts that it does not support."""
    if implementation == "cuda":
        return "same version as auto"
    if implementation == "triton" and _unsupported_reason("cuda", case, mode):
        return "same version as auto"
    return None


ALONE = tuple(case for case in CASES if case.bench and not case.params.get("with_grad"))
IN_PLACE = tuple(case for case in CASES if case.bench and case.params.get("with_grad"))

SPEC = KernelSpec(
    name="cross_entropy",
    implementations={"auto": _op, "triton": partial(_op, backend="triton"), "cuda": partial(_op, backend="cuda")},
    min_capability={"cuda": (9, 0)},
    unsupported_reason=_unsupported_reason,
    alias_reason=_alias_reason,
    baselines=(
        EAGER,
        COMPILED,
        COMPILED_MAX,
        Peer("torch", load=_torch, supports=_torch_supports),
        Peer("liger", load=_liger, supports=_liger_supports),
        Peer("quack", load=_quack, supports=_quack_supports(with_grad=False)),
        Peer("quack-one-pass", load=_quack_one_pass, supports=_quack_supports(with_grad=True)),
        Peer("quack-two-pass", load=_quack_with_grad, supports=_quack_supports(with_grad=True)),
    ),
    pytorch=("torch",),
    reference=cross_entropy_reference,
    make_inputs=make_inputs,
    cost=cost,
    cases=CASES,
    grads=("logits",),
    unit="rows",
    items=lambda case: case.dims["rows"],
    fuzz={"rows": (0, 40), "vocab": (1, 700)},
    spills={"_cross_entropy_narrow_kernel": 8},  # one small fp16 case with smoothing, under Triton 3.7; no bench case
    limits={"weight": 1e4},  # an infinite weight gives NaN under label smoothing, where PyTorch may give inf
    tunables=(
        # With the gradient, wide rows never reach this function on Hopper, where a cluster processes them.
        Tunable(configs, "pick_fwd_config", "fwd", _fwd_candidates, ALONE),
        Tunable(configs, "pick_cluster_config", "fwd", _cluster_candidates, IN_PLACE),
        Tunable(configs, "pick_bwd_config", "bwd", _bwd_candidates),
    ),
    host_cases=(_case(4, 512, BF16, "-host"),),
)

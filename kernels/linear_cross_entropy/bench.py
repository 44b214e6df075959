"""The declaration of linear_cross_entropy: cases, cost, peers."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from harness.spec import COMPILED, COMPILED_MAX, EAGER, Case, Cost, Inputs, KernelSpec, Peer, Tunable

from . import configs, linear_cross_entropy
from .reference import linear_cross_entropy_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _case(rows: int, dim: int, vocab: int, dtype: torch.dtype, suffix: str = "", bench: bool = False, **params) -> Case:
    short = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
    dims = dict(rows=rows, dim=dim, vocab=vocab)
    return Case(f"{rows}x{dim}x{vocab}-{short}{suffix}", dims, dtype, params, bench)


ALL: dict[str, Any] = dict(bias=True, label_smoothing=0.1, softcap=5.0, z_loss=1e-3)

CASES = (
    # The output layers of Llama 3 8B and Llama 2 7B, 8192 tokens; a small one. "roomy": all logits fit in memory.
    _case(8192, 4096, 128256, BF16, bench=True),
    _case(8192, 4096, 128256, BF16, "-roomy", bench=True, scratch_bytes=1 << 32),
    _case(8192, 4096, 32000, BF16, bench=True),
    _case(2048, 2048, 32000, BF16, bench=True),
    # Boundary cases: sizes of 1, size 0, primes, slices and chunks with remainders, every option.
    _case(23, 14, 130, FP32),
    _case(23, 14, 130, FP32, "-tight", scratch_bytes=0),
    _case(23, 14, 130, FP32, "-tight-all", scratch_bytes=0, reduction="sum", **ALL),
    _case(23, 14, 130, FP16, "-all", **ALL),
    _case(23, 14, 130, FP32, "-tight-none", scratch_bytes=0, reduction="none"),
    _case(0, 16, 9, FP32),
    _case(1, 1, 1, FP32),
    _case(5, 31, 1, FP32, "-tight", scratch_bytes=0),
    _case(67, 3, 57, FP32, "-tight", scratch_bytes=0),
    _case(131, 67, 300, FP16, "-all", **ALL),
    # Options at the ends of their ranges.
    _case(9, 6, 35, FP32, "-int32-smooth1", index=torch.int32, label_smoothing=1.0),
    _case(9, 6, 35, FP32, "-all-ignored-sum", all_ignored=True, scratch_bytes=0, reduction="sum", **ALL),
    _case(9, 6, 35, FP32, "-all-ignored-int32", all_ignored=True, index=torch.int32),
    _case(257, 129, 1031, FP32),
    _case(72, 128, 2050, BF16),
    _case(300, 128, 522, BF16, "-tight", scratch_bytes=100_000),
    _case(300, 128, 522, BF16, "-tight-all", scratch_bytes=100_000, **ALL),
    _case(300, 128, 264, BF16, "-tight-none", scratch_bytes=0, reduction="none"),
)


def make_inputs(case: Case, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    """Inputs with logits of variance 1. About every tenth row is ignored."""
    rows, dim, vocab = (case.dims[n] for n in ("rows", "dim", "vocab"))
    params = dict(case.params)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=case.dtype, device=device, generator=generator)

    target = torch.randint(0, vocab, (rows,), device=device, generator=generator)
    ignored = torch.rand(rows, device=device, generator=generator) < 0.1
    if params.pop("all_ignored", False):
        ignored.fill_(True)
    inputs: Inputs = {
        "hidden": normal(rows, dim),
        "weight": normal(vocab, dim).mul_(dim**-0.5),
        "target": target.masked_fill_(ignored, -100).to(params.pop("index", torch.int64)),
    }
    if params.pop("bias", False):
        inputs["bias"] = normal(vocab)
    return {**inputs, **params}


def cost(case: Case, mode: str) -> Cost:
    rows, dim, vocab = (case.dims[n] for n in ("rows", "dim", "vocab"))
    size, bias = case.dtype.itemsize, case.params.get("bias", False)
    tensors = size * (rows * dim + vocab * dim + vocab * bias)
    # forward: the GEMM of the logits. backward: the GEMMs of hidden's gradient and weight's. Recomputation not counted.
    products, passes = {"fwd": (1, 1), "bwd": (2, 2), "fwd+bwd": (3, 2)}[mode]
    pipe = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[case.dtype]
    return Cost(flops=2 * products * rows * dim * vocab, bytes=passes * tensors + 8 * rows, pipe=pipe)


def _torch():
    def function(hidden, weight, target, bias=None, scratch_bytes=None, **options):
        return F.cross_entropy(F.linear(hidden, weight, bias).float(), target.long(), **options)

    return function


def _liger():
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    def function(
        hidden,
        weight,
        target,
        bias=None,
        ignore_index=-100,
        label_smoothing=0.0,
        softcap=None,
        z_loss=0.0,
        reduction="mean",
        scratch_bytes=None,
    ):
        arguments = (ignore_index, z_loss, label_smoothing, reduction, softcap)
        return LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, target, bias, None, *arguments)[0]

    return function


def _liger_sm90():
    """Liger's CuTe kernels for Hopper, instead of its Triton kernels."""
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import liger_fused_linear_cross_entropy_sm90

    def function(hidden, weight, target, ignore_index=-100, reduction="mean", scratch_bytes=None):
        return liger_fused_linear_cross_entropy_sm90(hidden, weight, target, ignore_index, reduction)

    return function


def _liger_sm90_supports(case: Case, mode: str) -> str | None:
    if reason := _only("reduction", "ignore_index")(case, mode):
        return reason
    if case.dtype != BF16 or case.params.get("reduction") == "none":
        return "supports only bfloat16, and reduction mean or sum"
    whole = case.dims["rows"] and case.dims["rows"] % 128 == 0 and case.dims["vocab"] % 256 == 0
    return None if whole else "requires rows a multiple of 128 and classes a multiple of 256"


def _quack(scaled_exp: bool | None):
    """`scaled_exp`: None is QuACK's default, which is faster and needs a package in a folder called site-packages."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    def function(hidden, weight, target, ignore_index=-100, reduction="mean", scratch_bytes=None):
        options: dict[str, Any] = dict(ignore_index=ignore_index, reduction=reduction, use_scaled_exp=scaled_exp)
        return chunked_linear_cross_entropy(hidden, weight, target, **options)

    return function


def _only(*known: str):
    """The reason why a peer cannot run a case with other options than these."""

    def supports(case: Case, mode: str) -> str | None:
        unknown = set(case.params) - {"scratch_bytes", *known}
        return f"does not support {', '.join(sorted(unknown))}" if unknown else None

    return supports


def _stats_candidates(case: Case) -> list[configs.StatsConfig]:
    return [
        configs.StatsConfig(r, elements // r, unroll, span, warps)
        for r in (64, 128, 256)
        for elements, warps in ((1024, 4), (2048, 8))
        for unroll in (2, 4, 8)
        for span in (512, 1024, 2048)
    ]


def _tile_candidates(case: Case) -> list[configs.TileConfig]:
    return [
        configs.TileConfig(r, elements // r, w) for r in (64, 128, 256) for elements in (2048, 4096) for w in (4, 8)
    ]


def _logits_candidates(case: Case) -> list[configs.LogitsConfig]:
    return [
        configs.LogitsConfig(block_n, stages, height // cluster, cluster)
        for block_n, stages in ((192, 5), (192, 4), (176, 5), (160, 6))
        for height in (8, 16, 32, 64)  # of a group in the grouped tile order, in tiles
        for cluster in (1, 2)
    ]


def _in_cuda(case: Case) -> bool:
    return case.dtype != FP32 and case.dims["dim"] % 8 == 0


def _unsupported_reason(implementation: str, case: Case, mode: str) -> str | None:
    if implementation == "cuda" and not _in_cuda(case):
        return "requires float16 or bfloat16, and H a multiple of 8"
    return None


def _alias_reason(implementation: str, case: Case, mode: str) -> str | None:
    """For "cuda" always a reason: the generic checks try layouts that it does not support. test_sm90.py checks it."""
    if implementation == "triton":
        return None if _in_cuda(case) else "same version as auto"
    return "checked by its own tests, and timed as auto where auto selects it" if implementation == "cuda" else None


CUDA_CASES = tuple(dataclasses.replace(case, min_capability=(9, 0)) for case in CASES if case.bench)
PADDING = "behind the last row it reads padding, for whole vectors, which it does not use"

SPEC = KernelSpec(
    name="linear_cross_entropy",
    implementations={
        "auto": linear_cross_entropy,
        "triton": partial(linear_cross_entropy, backend="triton"),
        "cuda": partial(linear_cross_entropy, backend="cuda"),
    },
    # On other GPUs "auto" is the same as "triton".
    min_capability={"triton": (9, 0), "cuda": (9, 0)},
    unsupported_reason=_unsupported_reason,
    alias_reason=_alias_reason,
    baselines=(
        EAGER,
        COMPILED,
        COMPILED_MAX,
        Peer("torch", load=_torch, supports=_only("bias", "label_smoothing", "reduction", "ignore_index")),
        Peer("liger", load=_liger),
        Peer("liger-sm90", load=_liger_sm90, supports=_liger_sm90_supports),
        Peer(
            "quack",
            load=partial(_quack, None),
            configurations={"its pipeline without scaled exponentials": partial(_quack, False)},
            supports=_only("reduction", "ignore_index"),
        ),
    ),
    pytorch=("torch",),
    reference=linear_cross_entropy_reference,
    make_inputs=make_inputs,
    cost=cost,
    cases=CASES,
    grads=("hidden", "weight", "bias"),
    modes=("fwd", "fwd+bwd"),
    determinism={"fwd": "run-to-run", "bwd": "run-to-run", "fwd+bwd": "run-to-run"},
    unit="tokens",
    items=lambda case: case.dims["rows"],
    fuzz={"rows": (0, 30), "dim": (1, 70), "vocab": (1, 80)},
    false_alarms={("initcheck", f"_linear_cross_entropy_{part}_kernel"): PADDING for part in ("stats", "grad", "move")},
    tunables=(
        Tunable(configs, "pick_stats_config", "fwd", _stats_candidates, implementation="triton"),
        Tunable(configs, "pick_tile_config", "fwd+bwd", _tile_candidates, implementation="triton"),
        Tunable(configs, "pick_logits_config", "fwd", _logits_candidates, CUDA_CASES, implementation="cuda"),
    ),
    host_cases=(_case(16, 64, 512, BF16, "-host"),),
)

"""The declaration of rmsnorm: cases, cost, peers. `python -m harness bench --kernel rmsnorm`."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from harness.spec import COMPILED, COMPILED_MAX, EAGER, Case, Cost, Inputs, KernelSpec, Peer, Tunable

from . import cluster, configs, rmsnorm
from .reference import rmsnorm_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _case(rows: int, dim: int, dtype: torch.dtype, suffix: str = "", bench: bool = False, **params) -> Case:
    short = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
    return Case(f"{rows}x{dim}-{short}{suffix}", dict(rows=rows, dim=dim), dtype, params, bench)


CASES = (
    # Llama-2 7B, 13B and 70B widths, and TransformerNP's 512.
    _case(8192, 4096, BF16, bench=True),
    _case(32768, 8192, BF16, bench=True),
    _case(131072, 8192, BF16, bench=True),
    _case(205000, 512, BF16, bench=True),
    _case(16384, 5120, BF16, bench=True),
    _case(32768, 4096, FP16, bench=True),
    _case(32768, 4096, FP32, bench=True),
    _case(16384, 8192, BF16, "-residual", bench=True, residual=True),
    # Wide rows: one cluster of CTAs per row on Hopper.
    _case(2048, 65536, BF16, bench=True),
    _case(2048, 49152, BF16, bench=True),
    _case(8192, 20480, BF16, bench=True),
    # Boundary cases: empty, one row, one column, primes, one off a power of two, rows in chunks, no weight.
    _case(0, 64, FP32),
    _case(1, 1, FP32),
    _case(7, 1, FP16),
    _case(1, 128, FP32, "-offset", weight_offset=1.0),
    _case(31, 127, FP32),
    _case(33, 257, FP16, "-residual", residual=True),
    _case(13, 512, FP32, "-noweight", weight=False),
    _case(13, 513, FP32, "-noweight-residual", weight=False, residual=True),
    _case(5, 4096, FP32, "-eps", eps=0.1),
    _case(3, 5119, FP16),
    _case(3, 16385, FP32, "-residual", residual=True, weight_offset=1.0),
    _case(3, 65536, FP16),
    _case(257, 1023, BF16),
    _case(19, 2048, BF16, "-residual", residual=True),
    _case(5, 20480, BF16, "-residual", residual=True),
    # Wide rows, with parameters that no case above has, so that the checks made once per set of parameters also run on
    # these. In the last case one CTA of the cluster has fewer vectors than the others.
    _case(5, 20480, BF16, "-eps", eps=1e-5),
    _case(3, 49152, FP32, "-eps-residual", eps=1e-5, residual=True),
    _case(2, 20488, FP16, "-eps-noweight", eps=1e-5, weight=False),
)
# Together with those above: batch 4 and 32, sequence 2048 and 4096, width 4096 and 8192.
SUITE_CASES = tuple(
    _case(rows, dim, BF16, bench=True)
    for rows, dim in ((16384, 4096), (65536, 4096), (131072, 4096), (8192, 8192), (16384, 8192), (65536, 8192))
)


def make_inputs(case: Case, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    shape = (case.dims["rows"], case.dims["dim"])
    params = dict(case.params)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=case.dtype, device=device, generator=generator)

    inputs: Inputs = {"x": normal(*shape)}
    if params.pop("weight", True):
        inputs["weight"] = normal(shape[1])
    if params.pop("residual", False):
        inputs["residual"] = normal(*shape)
    return {**inputs, **params}


def cost(case: Case, mode: str) -> Cost:
    rows, dim, size = case.dims["rows"], case.dims["dim"], case.dtype.itemsize
    residual, weight = case.params.get("residual", False), case.params.get("weight", True)
    # forward: x, y and, with a residual, residual and h. backward: h, dy, dx and, with a residual, dh.
    tensors = {"fwd": 4 if residual else 2, "bwd": 4 if residual else 3}[mode]
    vectors = {"fwd": 1, "bwd": 2}[mode] * weight
    # forward: square, add, scale, weight. backward: x̂, dy·w, two for the mean, three for dx, two for dw.
    flops = {"fwd": 4, "bwd": 9}[mode] + residual
    return Cost(flops=flops * rows * dim, bytes=size * dim * (tensors * rows + vectors))


def extra_bytes(case: Case, mode: str) -> dict[str, int]:
    if mode == "fwd" or not case.params.get("residual"):
        return {}
    tensor = case.dims["rows"] * case.dims["dim"] * case.dtype.itemsize
    return {"h in place of x and residual": -tensor, "their gradients, which are one": -tensor}


def _torch():
    def rms_norm(x, weight=None, eps=1e-6, residual=None, weight_offset=0.0):
        h = x if residual is None else x + residual
        y = F.rms_norm(h, h.shape[-1:], weight, eps)
        return y if residual is None else (y, h)

    return rms_norm


def _torch_supports(case: Case, mode: str) -> str | None:
    return "does not support weight_offset" if case.params.get("weight_offset") else None


def _liger():
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    def rms_norm(x, weight=None, eps=1e-6, residual=None, weight_offset=0.0):
        # in_place=False: by default Liger overwrites dY with dX, which is wrong if the graph is retained.
        if residual is None:
            return LigerRMSNormFunction.apply(x, weight, eps, weight_offset, "llama", False)
        return LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, weight_offset, "llama", False)

    return rms_norm


def _quack():
    import quack

    def rms_norm(x, weight=None, eps=1e-6, residual=None, weight_offset=0.0):
        return quack.rmsnorm(
            x, weight, residual=residual, eps=eps, prenorm=residual is not None, weight_offset=weight_offset
        )

    return rms_norm


def _tiles(case: Case) -> list[tuple[int, int, int]]:
    """Candidates of (block_m, block_n, num_warps) for entire rows: 8 to 64 elements per thread."""
    block_n = 1 << (case.dims["dim"] - 1).bit_length()
    shapes = [(m, block_n) for m in (1, 2, 4, 8) if max(block_n, 2048) <= m * block_n <= max(block_n, 4096)]
    return [(m, n, w) for m, n in shapes for w in (2, 4, 8, 16) if 8 <= m * n // (32 * w) <= 64]


def _fwd_candidates(case: Case) -> list[configs.FwdConfig]:
    config, dim = configs.FwdConfig, case.dims["dim"]
    block_n = 1 << (dim - 1).bit_length()
    policies = ("", "evict_last")
    if block_n > configs.MAX_BLOCK:
        shapes = [(n, w) for n in (8192, 16384, 32768) for w in (8, 16, 32) if n // (32 * w) <= 64]
        return [config(1, n, w, eviction) for n, w in shapes for eviction in policies]
    whole = [config(*t, eviction, 0, first) for t in _tiles(case) for eviction in policies for first in (False, True)]
    tail = 1 << (dim - block_n // 2 - 1).bit_length()
    if not 16 <= tail <= block_n // 4:
        return whole
    return whole + [config(1, block_n // 2, w, eviction, tail) for w in (4, 8) for eviction in policies]


def _bwd_candidates(case: Case) -> list[configs.BwdConfig]:
    loops = ((1, 1), (1, 3), (1, 4), (2, 1), (2, 3), (4, 3))
    tiles = _tiles(case)
    if case.dims["dim"] > configs.MAX_BLOCK:
        tiles = [(m, n, w) for m, n in ((1, 2048), (2, 1024), (2, 2048), (4, 1024)) for w in (2, 4, 8)]
    return [configs.BwdConfig(m, n, w, p, s) for m, n, w in tiles for p, s in loops if p * w <= 32]


def _cluster_candidates(case: Case) -> list[configs.ClusterConfig]:
    """Candidates: 2 to 16 CTAs of 128 to 512 threads, with 2 to 8 vectors per thread, no more than the row has."""
    vectors, line = case.dims["dim"] * case.dtype.itemsize // configs.VECTOR, 128 // configs.VECTOR
    found = []
    for ctas in (2, 4, 8, 16):
        part = -(-vectors // ctas // line) * line if vectors % (ctas * line) else vectors // ctas
        for threads in (128, 256, 512):
            each = -(-part // threads)
            if 2 <= each <= 8 and part * (ctas - 1) < vectors:
                residents = sorted({max(1, 65536 // (threads * r)) for r in (32, 40, 48, 56, 64, 80)})
                found += [configs.ClusterConfig(ctas, threads, each, part, r) for r in residents if r * threads <= 2048]
    return found


WIDE = tuple(case for case in CASES if case.bench and case.dims["dim"] > configs.MAX_BLOCK)


def _unsupported_reason(implementation: str, case: Case, mode: str) -> str | None:
    dim, vector = case.dims["dim"], cluster.VECTOR // case.dtype.itemsize
    if implementation != "cuda" or (dim in cluster.WIDTHS and dim % vector == 0):
        return None
    return "requires rows of 16 385 to 65 536 elements on 16-byte boundaries"


def _alias_reason(implementation: str, case: Case, mode: str) -> str | None:
    """For "cuda" always a reason: the generic checks try layouts that it does not support."""
    if implementation != "auto" and mode == "bwd":
        return "same backward as auto"
    if implementation == "cuda":
        return "same version as auto"
    if implementation == "triton" and _unsupported_reason("cuda", case, mode):
        return "same version as auto"
    return None


SPEC = KernelSpec(
    name="rmsnorm",
    implementations={
        "auto": rmsnorm,
        "triton": partial(rmsnorm, backend="triton"),
        "cuda": partial(rmsnorm, backend="cuda"),
    },
    min_capability={"cuda": (9, 0)},
    unsupported_reason=_unsupported_reason,
    alias_reason=_alias_reason,
    baselines=(
        EAGER,
        COMPILED,
        COMPILED_MAX,
        Peer("torch", load=_torch, supports=_torch_supports),
        Peer("liger", load=_liger),
        Peer("quack", load=_quack),
    ),
    pytorch=("torch",),
    reference=rmsnorm_reference,
    make_inputs=make_inputs,
    cost=cost,
    extra_bytes=extra_bytes,
    cases=CASES,
    grads=("x", "weight", "residual"),
    unit="rows",
    items=lambda case: case.dims["rows"],
    fuzz={"rows": (0, 40), "dim": (1, 700)},
    tunables=(
        Tunable(configs, "pick_fwd_config", "fwd", _fwd_candidates, implementation="triton"),
        Tunable(configs, "pick_cluster_config", "fwd", _cluster_candidates, WIDE, implementation="cuda"),
        Tunable(configs, "pick_bwd_config", "bwd", _bwd_candidates),
    ),
    suite_cases=SUITE_CASES,
    host_cases=(_case(4, 256, BF16, "-host"),),
)

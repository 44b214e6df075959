"""The declaration of gmm_logprob: cases, cost, what to tune. `python -m harness bench --kernel gmm_logprob`."""

from __future__ import annotations

import torch
import triton
from torch.distributions import Categorical, MixtureSameFamily, Normal

from harness.spec import COMPILED, COMPILED_MAX, EAGER, Case, Cost, Inputs, KernelSpec, Peer, Tunable

from . import configs, gmm_logprob
from .reference import gmm_logprob_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _case(rows: int, k: int, dtype: torch.dtype, suffix: str = "", bench: bool = False, **params) -> Case:
    short = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
    return Case(f"{rows}x{k}-{short}{suffix}", {"rows": rows, "k": k}, dtype, {"reduction": "mean", **params}, bench)


CASES = (
    # 41 time steps of 205 000 agents, one time step, and a small batch; then the same in bf16, and from one network
    # output [rows, 3K] without a copy; then K = 32, where rows are entire sectors.
    _case(8_400_000, 10, FP32, bench=True),
    _case(205_000, 10, FP32, bench=True),
    _case(5_000, 10, FP32, bench=True),
    _case(8_400_000, 10, BF16, bench=True),
    _case(8_400_000, 10, FP32, "-packed", bench=True, packed=True),
    _case(2_600_000, 32, FP32, bench=True),
    # Boundary cases: empty, one row, primes, one component, one off a power of two, the widest.
    _case(0, 10, FP32, "-sum", reduction="sum"),  # a mean of no rows is NaN, which torch.library.opcheck cannot compare
    _case(0, 3, FP16, "-none", reduction="none"),
    _case(1, 1, FP32),
    _case(1, 128, FP32, "-none", reduction="none"),
    _case(31, 1, FP32, "-sum", reduction="sum"),
    _case(61, 2, FP16, "-none", reduction="none"),
    _case(61, 3, FP32, "-none", reduction="none"),
    _case(67, 10, FP32, "-none", reduction="none"),
    _case(257, 10, FP32),
    _case(67, 10, FP16, "-sum", reduction="sum"),
    _case(67, 10, FP32, "-packed", packed=True),
    _case(67, 10, BF16, "-none", reduction="none"),
    _case(37, 16, FP32, "-sum", reduction="sum"),
    _case(37, 16, BF16),
    _case(37, 17, FP32, "-none", reduction="none"),
    _case(37, 17, FP16, "-packed", packed=True),
    _case(29, 64, FP32),
    _case(29, 64, BF16, "-sum", reduction="sum"),
    _case(19, 127, FP32, "-none", reduction="none"),
    _case(19, 128, FP16, "-none", reduction="none"),
    _case(211, 10, FP32, "-extreme", reduction="none", extreme=True),
)


def make_inputs(case: Case, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    """Inputs with standard normal logits, mu and y; log_sigma has half that deviation. `packed`: logits, mu and
    log_sigma are chunks of one tensor. `extreme`: log_sigma up to ±30, inclusive, and mu and y a few times 1e4."""
    rows, k = case.dims["rows"], case.dims["k"]
    params = dict(case.params)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=case.dtype, device=device, generator=generator)

    if params.pop("packed", False):
        logits, mu, log_sigma = normal(rows, 3 * k).chunk(3, dim=-1)
    else:
        logits, mu, log_sigma = normal(rows, k), normal(rows, k), normal(rows, k)
    y = normal(rows)
    if params.pop("extreme", False):
        logits, mu, log_sigma, y = 10 * logits, 1e4 * mu, (20 * log_sigma).clamp(-30, 30), 1e4 * y
    else:
        log_sigma.mul_(0.5)
    return {"logits": logits, "mu": mu, "log_sigma": log_sigma, "y": y, **params}


def cost(case: Case, mode: str) -> Cost:
    rows, k, size = case.dims["rows"], case.dims["k"], case.dtype.itemsize
    inputs = size * rows * (3 * k + 1)
    output = size * (rows if case.params["reduction"] == "none" else 1)
    # Each tensor is counted once, although fwd+bwd reads inputs that do not fit in L2 twice: the backward cannot begin
    # before the incoming gradient exists.
    nbytes = {"fwd": inputs + output, "bwd": 2 * inputs + output, "fwd+bwd": 2 * inputs + 2 * output}[mode]
    # FLOPs per component, an exponential counted as one and maxima not counted: weight 3 (subtract, exp, add), 1/sigma
    # 2 (negate, exp), z 2, joint 4 (½ z², two subtractions, one of them from the weight), density 3. Its gradients:
    # posterior 1, d_logits 2, z/sigma 2, d_log_sigma 2, d_y 1. Per row: log, divide, two additions, the sum.
    forward, gradients, per_row = 14, 8, 5
    flops = {
        "fwd": rows * (forward * k + per_row),
        "bwd": rows * ((forward + gradients) * k + per_row),
        "fwd+bwd": rows * ((2 * forward + gradients) * k + 2 * per_row),
    }[mode]
    return Cost(flops=flops, bytes=nbytes)


def _torch():
    """torch.distributions, without validation of arguments, which would synchronise with the device."""

    def log_density(logits, mu, log_sigma, y, reduction="mean"):
        weights = Categorical(logits=logits, validate_args=False)
        components = Normal(mu, log_sigma.exp(), validate_args=False)
        log_p = MixtureSameFamily(weights, components, validate_args=False).log_prob(y)
        return {"mean": torch.mean, "sum": torch.sum, "none": torch.clone}[reduction](log_p)

    return log_density


def _widths(k: int, itemsize: int) -> list[tuple[int, int]]:
    """Candidates of (load_n, hold_n): one or more threads per row, loaded as held; then entire rows, split through
    shared memory."""
    vector, whole = configs.vector(k, itemsize), triton.next_power_of_2(k)
    widths = [(w, w) for w in (vector, 2 * vector, 4 * vector) if w <= whole and -(-k // w) <= 16]
    if vector < whole <= 16 * vector:
        widths.append((whole, vector))
    return widths or [(whole, whole)]


def _candidates(case: Case, backward: bool) -> list[configs.Config]:
    k, vector = case.dims["k"], configs.vector(case.dims["k"], case.dtype.itemsize)
    whole = triton.next_power_of_2(k)
    if case.dims["rows"] <= 1 << 18:
        shapes = [(1, w, 0) for w in (1, 2, 4, 8)]  # rows per thread, warps, programs per SM
    elif backward:
        shapes = [(1, 1, 0), (1, 2, 0), (1, 4, 0), (1, 4, 5), (1, 8, 0), (2, 4, 0)]
    else:
        shapes = [(1, 1, 32), (1, 4, 8), (1, 4, 10), (1, 4, 40), (1, 8, 5), (2, 4, 8), (2, 4, 32)]
    found: dict[configs.Config, None] = {}
    for load, hold in _widths(k, case.dtype.itemsize):
        for store in sorted({hold, max(hold, whole)}) if backward else (hold,):
            for per_thread, warps, programs in shapes:
                block = max(1, per_thread * 32 * warps * vector // hold)
                found[configs.Config(block, load, hold, store, warps, programs)] = None
    return list(found)


SPEC = KernelSpec(
    name="gmm_logprob",
    implementations={"triton": gmm_logprob},
    baselines=(EAGER, COMPILED, COMPILED_MAX, Peer("torch", load=_torch)),
    pytorch=("torch",),
    reference=gmm_logprob_reference,
    make_inputs=make_inputs,
    cost=cost,
    cases=CASES,
    grads=("logits", "mu", "log_sigma", "y"),
    modes=("fwd", "bwd", "fwd+bwd"),
    determinism={"fwd": "run-to-run", "bwd": "run-to-run", "fwd+bwd": "run-to-run"},
    unit="rows",
    items=lambda case: case.dims["rows"],
    fuzz={"rows": (0, 33), "k": (1, 128)},
    tunables=(
        Tunable(configs, "pick_fwd_config", "fwd", lambda case: _candidates(case, backward=False)),
        Tunable(configs, "pick_bwd_config", "bwd", lambda case: _candidates(case, backward=True)),
    ),
    host_cases=(_case(8, 10, FP32, "-host"),),
)

"""The declaration of patched_model: cases, cost, peers. `python -m harness bench --kernel patched_model`.

A row is one training step: forward, loss, backward, AdamW. With `--timer graph` there is a column with the step in one
CUDA graph.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from functools import partial
from math import prod

import torch

from harness.spec import Case, Cost, Inputs, KernelSpec, Op, Peer, StandIn

from .peers import compiled, liger, plain
from .reference import loss_and_norms, norms, of_norms, patched_model_reference
from .step import SIZES, Sizes, patched_and_compiled, patched_model, places, views

BF16, FP32 = torch.bfloat16, torch.float32
MUTATED = ("weights", "exp_avg", "exp_avg_sq", "step")
#: Layers of the model that replaces a timed one in the checks. Its other sizes are the same. Two layers suffice for one
#: layer to pass its result to another.
STAND_IN_LAYERS = 2
#: Relative error of the loss of a bf16 model: logits are rounded to 8 bits independently, and thousands are averaged.
LOSS_ERROR = 1e-3
TINY = {
    "tiny-llama": Sizes("llama", 24, 2, 4, 2, 8, 20, 37, 1e-5, 10_000.0),
    "tiny-qwen3": Sizes("qwen3", 16, 1, 2, 1, 12, 24, 33, 1e-6, 10_000.0),
}
SMALL = {
    "small-llama": Sizes("llama", 256, 2, 4, 2, 64, 512, 1000, 1e-5, 10_000.0),
    "small-qwen3": Sizes("qwen3", 256, 2, 4, 2, 128, 512, 1000, 1e-6, 10_000.0),
}
HOST = Sizes("llama", 128, 2, 4, 2, 32, 256, 512, 1e-5, 10_000.0)


def _case(name: str, sizes: Sizes, batch: int, length: int, dtype: torch.dtype = BF16) -> Case:
    short = {BF16: "bf16", FP32: "fp32"}[dtype]
    own = {field: value for field, value in dataclasses.asdict(sizes).items() if isinstance(value, int)}
    dims = {"batch": batch, "length": length, **own}
    params = {"family": sizes.family, "rms_norm_eps": sizes.rms_norm_eps, "rope_theta": sizes.rope_theta}
    bench = name in SIZES
    return Case(f"{name}-b{batch}-s{length}-{short}", dims, dtype, params, bench=bench, mutates=MUTATED)


CASES = (
    *(_case(name, sizes, b, s) for name, sizes in SIZES.items() for b, s in ((4, 2048), (1, 4096))),
    # For the checks: grouped heads, widths that are not powers of two; in bf16 on a GPU.
    *(_case(name, sizes, 2, 5, FP32) for name, sizes in TINY.items()),
    *(_case(name, sizes, 2, 130) for name, sizes in SMALL.items()),
)


def sizes_of(case: Case) -> Sizes:
    known = {field.name for field in dataclasses.fields(Sizes)}
    return Sizes(**{name: value for name, value in {**case.dims, **case.params}.items() if name in known})


def make_inputs(case: Case, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    """Inputs as of a new model: matrices with standard deviation 0.02, norms about 1, and moments as of gradients of
    norm 1."""
    sizes, d = sizes_of(case), case.dims
    _, length = places(sizes)

    def normal(size: int) -> torch.Tensor:
        return torch.randn(size, dtype=case.dtype, device=device, generator=generator)

    weights = normal(length).mul_(0.02)
    parameters = views(weights, sizes)
    for name in norms(sizes):
        parameters[name].mul_(5).add_(1)
    shape = (d["batch"], d["length"])
    return {
        "tokens": torch.randint(0, sizes.vocab_size, shape, device=device, generator=generator),
        "weights": weights,
        "exp_avg": normal(length).div_(length**0.5),
        "exp_avg_sq": normal(length).abs_().add_(0.1).div_(length),
        "step": torch.full((), 10.0, device=device),
        "sizes": sizes,
    }


def cost(case: Case, mode: str) -> Cost:
    """Counts the forward's GEMMs three times, those of attention, which is causal, three and a half times, and logits
    only of tokens that have a successor. Weights and moments are read and written."""
    s, d = sizes_of(case), case.dims
    found, length = places(s)
    tokens, predicted = d["batch"] * d["length"], d["batch"] * (d["length"] - 1)
    matrices = sum(prod(shape) for name, _, shape in found if len(shape) == 2 and "embed" not in name)
    pairs = d["batch"] * s.num_attention_heads * d["length"] * (d["length"] + 1) // 2
    forward = 2 * (tokens * matrices + predicted * s.vocab_size * s.hidden_size)
    attended = 4 * s.num_hidden_layers * pairs * s.head_dim
    pipe = {BF16: "bf16", FP32: "fp32"}[case.dtype]
    return Cost(flops=3 * forward + 3.5 * attended, bytes=6 * length * case.dtype.itemsize + 8 * tokens, pipe=pipe)


def stand_in(case: Case) -> StandIn | None:
    """The stand-in of a timed case, whose model leaves too little memory for an oracle of the same size."""
    if not case.bench:
        return None
    smaller = dataclasses.replace(
        case,
        name=f"{case.name}-{STAND_IN_LAYERS}-layers",
        dims={**case.dims, "num_hidden_layers": STAND_IN_LAYERS},
        bench=False,
    )

    def inputs(timed: Inputs) -> Inputs:
        sizes = timed["sizes"]
        kept = {"tokens": timed["tokens"], "weights": timed["weights"].clone(), "sizes": sizes}
        return {**kept, "norms_avg": of_norms(timed["exp_avg"], sizes)}

    def results(found: tuple[torch.Tensor, ...], timed: Inputs) -> tuple[torch.Tensor, ...]:
        return found[0], of_norms(found[2], timed["sizes"])

    return StandIn(smaller, inputs, loss_and_norms, results, LOSS_ERROR)


def _unsupported(implementation: str, case: Case, mode: str) -> str | None:
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    return _half(case, mode) if implementation == "patched-compile" else None


def _by(loss_fn: Callable) -> Callable[[], Op]:
    def load() -> Op:
        import transformers  # noqa: F401  (its ImportError is the reason in the table)

        return partial(patched_model, loss_fn=loss_fn)

    return load


def _half(case: Case, mode: str) -> str | None:
    return None if case.dtype == BF16 else "compiled models are compared in bf16"


def _liger() -> Op:
    from liger_kernel.transformers import apply_liger_kernel_to_llama, apply_liger_kernel_to_qwen3

    return partial(
        patched_model, loss_fn=liger({"llama": apply_liger_kernel_to_llama, "qwen3": apply_liger_kernel_to_qwen3})
    )


SPEC = KernelSpec(
    name="patched_model",
    implementations={
        "patched": patched_model,
        "patched-compile": partial(patched_model, loss_fn=patched_and_compiled),
    },
    baselines=(
        Peer("torch", load=_by(plain)),
        Peer("torch-compile", load=_by(compiled), supports=_half),
        Peer("liger", load=_liger),
    ),
    pytorch=("torch", "torch-compile"),
    reference=patched_model_reference,
    make_inputs=make_inputs,
    cost=cost,
    cases=CASES,
    grads=(),
    modes=("train",),
    determinism={"train": "on request"},
    # Weights and intermediate results are rounded to the dtype of the model.
    product_error=lambda inputs: 0.0 if inputs["weights"].dtype != BF16 else torch.finfo(BF16).eps / 2,
    stand_in=stand_in,
    unit="tokens",
    items=lambda case: case.dims["batch"] * case.dims["length"],
    fuzz={"batch": (1, 2), "length": (2, 8)},
    unsupported_reason=_unsupported,
    host_cases=(_case("host", HOST, 1, 16),),
    needs=("attention", "linear_cross_entropy", "rmsnorm", "rope", "swiglu"),
)

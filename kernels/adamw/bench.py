"""The declaration of adamw: cases, cost, peers. `python -m harness bench --kernel adamw`.

The op takes lists and the harness single tensors, so the inputs are called p0, p1 … (params), g (grads), m (exp_avgs),
v (exp_avg_sqs) and w (master_params), and a wrapper collects them. A step returns the updated tensors, in that order.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.adamw import adamw as pytorch_adamw
from torch.utils.weak import WeakTensorKeyDictionary

from harness.spec import COMPILED, COMPILED_MAX, EAGER, Case, Cost, Inputs, KernelSpec, Peer, Tunable

from . import AdamW, PointerTables, adamw, clip_scale, configs
from .arguments import check_tensors
from .reference import adamw_reference, clip_scale_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LISTS = {"params": "p", "grads": "g", "exp_avgs": "m", "exp_avg_sqs": "v", "master_params": "w"}
BETAS = (0.9, 0.999)
HYPER = dict(step=10, lr=1e-3, betas=BETAS, eps=1e-8, weight_decay=0.1)


def make_case(name: str, dims: dict[str, int], dtype: torch.dtype, bench: bool = False, **params: Any) -> Case:
    short = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
    case = Case(f"{name}-{short}", dims, dtype, params, bench)
    count = len(_shapes(case))
    written = [f"{x}{i}" for x in "pmv" for i in range(count)]
    written += [f"w{i}" for i in range(count) if _has_master(case, i)]
    return Case(case.name, dims, dtype, params, bench, mutates=tuple(written))


def pieces(matrices: int, vectors: int, rows: int, cols: int) -> dict[str, int]:
    return dict(matrices=matrices, vectors=vectors, rows=rows, cols=cols)


def _shapes(case: Case) -> list[tuple[int, ...]]:
    """The shapes of a case's parameters: a number of matrices and vectors, or layers of a Llama."""
    dims = case.dims
    if "layers" in dims:
        hidden, inner = dims["hidden"], dims["inner"]
        layer = [(hidden, hidden)] * 4 + [(inner, hidden)] * 2 + [(hidden, inner), (hidden,), (hidden,)]
        return layer * dims["layers"]
    return [(dims["rows"], dims["cols"])] * dims["matrices"] + [(dims["cols"],)] * dims["vectors"]


def _dtype(case: Case, index: int) -> torch.dtype:
    """The dtype of a parameter and its gradient. In a mixed case the vectors are fp32, as norms often are."""
    vector = len(_shapes(case)[index]) == 1
    return FP32 if case.params.get("mixed") and vector else case.dtype


def _has_master(case: Case, index: int) -> bool:
    return bool(case.params.get("master")) and _dtype(case, index) != FP32


LLAMA = dict(layers=2, hidden=4096, inner=11008)
CASES = (
    # 268 M elements in one parameter; two layers of Llama-2 7B, 405 M in 18; 200 parameters of TransformerNP's size.
    make_case("268m", pieces(1, 0, 16384, 16384), FP32, bench=True),
    make_case("llama", LLAMA, FP32, bench=True),
    make_case("llama-master", LLAMA, BF16, bench=True, master=True),
    make_case("llama-master-clip", LLAMA, BF16, bench=True, master=True, max_norm=1.0),
    make_case("llama-stochastic", LLAMA, BF16, bench=True, stochastic_rounding=True),
    make_case("200-small", pieces(100, 100, 512, 512), FP32, bench=True),
    # Boundary cases: odd sizes, no element, one element, a block and a remainder, aligned and unaligned addresses.
    make_case("odd", pieces(2, 1, 5, 37), FP32),
    make_case("empty", pieces(2, 1, 0, 3), FP32),
    make_case("one", pieces(2, 1, 1, 1), FP32),
    make_case("blocks", pieces(2, 1, 3, 1025), FP32),
    make_case("even", pieces(2, 1, 8, 512), FP32),
    make_case("first-step", pieces(2, 1, 9, 33), FP32, step=1, maximize=True, eps=1e-3, weight_decay=0.0),
    make_case("on-device", pieces(2, 1, 9, 40), FP32, on_device=True, step=100_000, betas=(0.5, 0.99)),
    make_case("scaled", pieces(2, 1, 9, 33), FP32, grad_scale=1000.0),
    make_case("clip", pieces(2, 1, 9, 33), FP32, max_norm=0.5),
    make_case("clip-mixed", pieces(2, 1, 7, 200), FP16, master=True, mixed=True, max_norm=3.0),
    make_case("plain", pieces(2, 1, 7, 65), FP16),
    make_case("mixed", pieces(2, 1, 7, 200), FP16, master=True, mixed=True),
    make_case("plain", pieces(2, 1, 7, 65), BF16),
    make_case("mixed", pieces(2, 1, 7, 200), BF16, master=True, mixed=True),
    make_case("stochastic", pieces(2, 1, 9, 640), BF16, stochastic_rounding=True, mixed=True),
)


def make_inputs(case: Case, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    params = {k: v for k, v in case.params.items() if k not in ("master", "mixed", "on_device")}
    inputs: Inputs = {}

    def fresh(draw: Callable[..., torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype = FP32) -> torch.Tensor:
        return draw(shape, dtype=dtype, device=device, generator=generator)

    for index, shape in enumerate(_shapes(case)):
        dtype = _dtype(case, index)
        if _has_master(case, index):
            inputs[f"w{index}"] = fresh(torch.randn, shape)
            inputs[f"p{index}"] = inputs[f"w{index}"].to(dtype)
        else:
            inputs[f"p{index}"] = fresh(torch.randn, shape, dtype)
        inputs[f"g{index}"] = fresh(torch.randn, shape, dtype)
        inputs[f"m{index}"] = fresh(torch.randn, shape)
        inputs[f"v{index}"] = fresh(torch.rand, shape)
    if "grad_scale" in params:
        for index in range(len(_shapes(case))):
            inputs[f"g{index}"].mul_(params["grad_scale"])
    inputs |= {**HYPER, **params}
    if case.params.get("on_device"):
        # An integer tensor, so that the checks with huge and tiny values do not change the step.
        inputs["step"] = torch.tensor(inputs["step"], device=device)
        inputs["lr"] = torch.tensor(inputs["lr"], device=device)
    return inputs


def cost(case: Case, mode: str) -> Cost:
    """A step reads p (or w), g, m and v, and writes p, m, v and w. A norm reads g once more."""
    total = flops = 0
    for index, shape in enumerate(_shapes(case)):
        size, elements = _dtype(case, index).itemsize, torch.Size(shape).numel()
        params = 4 + 4 + size if _has_master(case, index) else 2 * size
        clip = "max_norm" in case.params
        total += elements * (params + size + 16 + size * clip)
        # FLOPs: m 3, v 4, decay 2, denominator 3, update 3.
        flops += (15 + 2 * clip) * elements
    return Cost(flops=flops, bytes=total)


def extra_bytes(case: Case, mode: str) -> dict[str, int]:
    sizes = [_dtype(case, i).itemsize * torch.Size(shape).numel() for i, shape in enumerate(_shapes(case))]
    written = sum(size for i, size in enumerate(sizes) if _has_master(case, i))
    twice = sum(sizes) if "max_norm" in case.params else 0
    return {"params with a master copy, which are not read": -written, "gradients, which a norm reads too": twice}


def _collected(inputs: Inputs) -> tuple[dict[str, Any], Inputs]:
    """(lists of tensors by name, the op's other arguments)."""
    count = sum(re.fullmatch(r"p\d+", name) is not None for name in inputs)
    lists: dict[str, Any] = {name: [inputs.get(f"{x}{i}") for i in range(count)] for name, x in LISTS.items()}
    tensors = {f"{x}{i}" for x in LISTS.values() for i in range(count)}
    options = {k: v for k, v in inputs.items() if k not in tensors}
    first = lists["params"][0]
    if isinstance(options["step"], torch.Tensor):
        options["step"] = options["step"].to(FP32)
    if "grad_scale" in options:
        options["grad_scale"] = torch.full((), options["grad_scale"], dtype=FP32, device=first.device)
    return lists, options


def _updated(lists: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    return tuple(
        t for name in ("params", "exp_avgs", "exp_avg_sqs", "master_params") for t in lists[name] if t is not None
    )


def flat(op: Callable[..., None]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Wraps an op with the arguments of `adamw` for the harness, which passes tensors and expects the updated ones."""

    def step(**inputs: Any) -> tuple[torch.Tensor, ...]:
        lists, options = _collected(inputs)
        if torch.compiler.is_compiling():
            op(**lists, **options)
            return _updated(lists)
        try:
            op(**lists, **options)
        except (TypeError, ValueError, RuntimeError) as error:
            if type(error) not in (TypeError, ValueError, RuntimeError):
                raise
            # The error must name the inputs as the harness knows them.
            words = re.sub(r"(\w+)\[(\d+)\]", lambda found: LISTS.get(found[1], found[1]) + found[2], str(error))
            raise type(error)(words) from None
        return _updated(lists)

    return step


def _with_tables(params: list[torch.Tensor], max_norm: float | None = None, **options: Any) -> None:
    """`adamw` with gradients clipped to max_norm. Its tables of addresses live as long as the parameters, as those of
    an optimizer."""
    tables = None if torch.compiler.is_compiling() else _TABLES.setdefault(params[0], PointerTables())
    if max_norm is not None:
        grads, exp_avgs, exp_avg_sqs = (options[name] for name in ("grads", "exp_avgs", "exp_avg_sqs"))
        # Errors must be raised before the norm is launched.
        check_tensors(params, grads, exp_avgs, exp_avg_sqs, options["master_params"], False)
        options["grad_scale"] = clip_scale(grads, max_norm, tables=tables)[1]
    adamw(params, tables=tables, **options)


_TABLES = WeakTensorKeyDictionary()


def _reference(**inputs: Any) -> tuple[torch.Tensor, ...]:
    lists, options = _collected(inputs)
    max_norm = options.pop("max_norm", None)
    if max_norm is not None:
        options["grad_scale"] = clip_scale_reference(lists["grads"], max_norm, lists["exp_avgs"][0].dtype)[1]
    return tuple(t for column in adamw_reference(**lists, **options) for t in column)


def _one_graph(case: Case, mode: str) -> str | None:
    return "a graph of 200 parameters takes minutes to compile" if len(_shapes(case)) > 100 else None


def _torch(fused: bool) -> Callable[[], Any]:
    """torch.optim.AdamW's implementations on the same tensors. Master weights are updated in the usual way: cast the
    gradients, step, copy back."""

    def load() -> Any:
        steps: dict[
            Any, list[torch.Tensor]
        ] = {}  # steps on the device; the fused implementation reads them and does not advance them

        def step(**inputs: Any) -> tuple[torch.Tensor, ...]:
            lists, options = _collected(inputs)
            params, grads, exp_avgs, exp_avg_sqs, masters = lists.values()
            weights = params
            if masters[0] is not None:
                weights, grads = masters, [g.float() for g in grads]
            if "max_norm" in options:  # like clip_grad_norm_, which overwrites the gradients
                norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
                grads = torch._foreach_mul(grads, (options["max_norm"] / (norm + 1e-6)).clamp(max=1.0))
            beta1, beta2 = options["betas"]
            rest = dict(lr=options["lr"], weight_decay=options["weight_decay"], eps=options["eps"])
            rest |= dict(beta1=beta1, beta2=beta2, amsgrad=False, maximize=options.get("maximize", False))
            number, count, device = options["step"], len(params), params[0].device
            if fused:
                key = (number, count, device)
                if key not in steps:
                    steps[key] = [torch.tensor(float(number), device=device) for _ in range(count)]
                torch._fused_adamw_(weights, grads, exp_avgs, exp_avg_sqs, [], steps[key], **rest)
            else:
                own = [torch.tensor(number - 1.0) for _ in range(count)]
                pytorch_adamw(weights, grads, exp_avgs, exp_avg_sqs, [], own, foreach=True, **rest)
            if weights is masters:
                torch._foreach_copy_(params, masters)
            return _updated(lists)

        return step

    return load


def _optimizer(made: Any, **options: Any) -> Any:
    """The step of an optimizer over the parameters. The optimizer owns its states."""
    optimizers: dict[int, Any] = {}

    def step(**inputs: Any) -> None:
        first = inputs["p0"]
        optimizer = optimizers.get(id(first))
        if optimizer is None:
            lists, _ = _collected(inputs)
            for param, grad in zip(lists["params"], lists["grads"], strict=True):
                param.grad = grad
            optimizer = optimizers[id(first)] = made(lists["params"], lr=HYPER["lr"], **options)
        optimizer.step()

    return step


def _torch_can(case: Case, mode: str) -> str | None:
    params = case.params
    if params.get("stochastic_rounding"):
        return "does not support stochastic rounding"
    if params.get("mixed") or (case.dtype != FP32 and not params.get("master")):
        return "stores the states in the parameter's dtype"
    return "not implemented for this case" if params.get("on_device") or "grad_scale" in params else None


def _candidates(case: Case) -> list[configs.Config]:
    tiles = ((512, 4), (1024, 4), (1024, 8), (2048, 8), (2048, 16), (4096, 16))
    return [configs.Config(b, w, e) for b, w in tiles for e in ("", "evict_first", "evict_last")]


SPEC = KernelSpec(
    name="adamw",
    implementations={"triton": flat(_with_tables)},
    baselines=(
        EAGER,
        dataclasses.replace(COMPILED, supports=_one_graph),
        dataclasses.replace(COMPILED_MAX, supports=_one_graph),
        Peer("fused", load=_torch(fused=True), supports=_torch_can),
        Peer("foreach", load=_torch(fused=False), supports=_torch_can),
    ),
    pytorch=("fused",),
    reference=_reference,
    make_inputs=make_inputs,
    cost=cost,
    extra_bytes=extra_bytes,
    cases=CASES,
    grads=(),
    modes=("step",),
    determinism={"step": "run-to-run"},
    unit="parameters",
    items=lambda case: sum(torch.Size(shape).numel() for shape in _shapes(case)),
    fuzz={"rows": (0, 20), "cols": (1, 130)},
    tunables=(Tunable(configs, "pick_config", "step", _candidates),),
    host_cases=(make_case("100-small-host", pieces(100, 0, 4, 64), FP32),),
    host_ops={"triton": _optimizer(AdamW), "fused": _optimizer(torch.optim.AdamW, fused=True)},
)

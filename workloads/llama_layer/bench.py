"""The declaration of llama_layer: cases, cost, peers. `python -m harness bench --kernel llama_layer`.

In fp8 cases the matrices are quantised beforehand, as for inference. The inputs are codes and scales; codes are bytes,
because float8 lacks most operations that the checks need. The oracle quantises the operands of GEMMs as the layer does;
a separate test bounds the difference from the layer in x's dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from harness.spec import EAGER, MAX_AUTOTUNE, Case, Cost, Inputs, KernelSpec, Op, Peer, Yardstick
from harness.suites import Part, Suite

from .architectures import own_architectures
from .fp8_weights import FP8Weight
from .layer import LLAMA2, MATRICES, LayerConfig, llama_layer, rope_tables
from .reference import llama_layer_reference, llama_train_reference
from .training import STATES, WEIGHTS, Update, fused_adamw, our_adamw, state, train_step

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WEIGHTS_OF = {"attention": ("norm_attention", "w_qkv", "w_o"), "ffn": ("norm_ffn", "w_up", "w_down"), "layer": WEIGHTS}
PER_PART = {"layer": ("attention", "ffn"), "attention": ("attention",), "ffn": ("ffn",)}


def _case(
    model: str,
    batch: int,
    length: int,
    part: str = "layer",
    ffn: str = "swiglu",
    dtype: torch.dtype = BF16,
    fp8: str = "",
    adamw: bool = False,
    **dims,
) -> Case:
    """A case with one of Llama 2's layers, or with `dims` a small layer under the name `model`. `fp8`: "weights" for
    matrices that are quantised beforehand, or "train" for those that each call quantises, forward and backward.
    `adamw`: a training step, in which 16-bit weights have fp32 masters."""
    short = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
    words = (
        [part] * (part != "layer")
        + [ffn] * (ffn == "gelu")
        + {"": [], "weights": ["fp8"], "train": ["fp8", "train"]}[fp8]
        + ["adamw"] * adamw
    )
    name = "-".join((model, f"b{batch}", f"s{length}", *words, short))
    sizes = LLAMA2[model] if model in LLAMA2 else LayerConfig(**dims)
    own = dict(hidden=sizes.hidden, heads=sizes.heads, kv_heads=sizes.kv_heads, intermediate=sizes.intermediate)
    params = {k: v for k, v in (("part", part), ("ffn", ffn)) if v not in ("layer", "swiglu")}
    modes = {"": ("fwd", "fwd+bwd"), "weights": ("fwd",), "train": ("fwd+bwd",)}[fp8]
    params |= {"fp8": fp8} if fp8 else {}
    mutates: tuple[str, ...] = ()
    if adamw:
        params, modes, mutates = {**params, "adamw": True}, ("train",), _updated(part, dtype)
    # Small fp32 cases also run in Triton's interpreter, where fp8_matmul decodes bytes.
    least = (8, 9) if fp8 and dtype != FP32 else (0, 0)
    sizes_of = dict(batch=batch, length=length, **own)
    return Case(name, sizes_of, dtype, params, model in LLAMA2, least, mutates, modes)


def _updated(part: str, dtype: torch.dtype) -> tuple[str, ...]:
    """The names of the tensors that a training step updates, in the order of its results."""
    names = [name for name in WEIGHTS if name in WEIGHTS_OF[part]]
    kinds = [kind for kind in STATES if kind != "master" or dtype != FP32]
    return *names, *(state(name, kind) for kind in kinds for name in names)


CASES = (
    *(_case(model, b, s) for model in LLAMA2 for b in (1, 4) for s in (512, 1024, 2048, 4096)),
    *(_case("7b", 1, s, ffn="gelu") for s in (512, 4096)),
    *(_case("7b", 1, s, part) for part in ("attention", "ffn") for s in (512, 1024, 2048, 4096)),
    *(_case(model, 1, 4096, part) for model in ("13b", "70b") for part in ("attention", "ffn")),
    *(_case("7b", 1, s, fp8="weights") for s in (512, 1024, 2048, 4096)),
    *(_case(model, 1, 4096, fp8="weights") for model in ("13b", "70b")),
    *(_case("7b", 1, 4096, part, fp8="weights") for part in ("attention", "ffn")),
    _case("7b", 1, 4096, ffn="gelu", fp8="weights"),
    *(_case("7b", 1, s, fp8="train") for s in (512, 4096)),
    *(_case(model, 1, 4096, fp8="train") for model in ("13b", "70b")),
    *(_case("7b", 1, s, adamw=True) for s in (512, 1024, 2048, 4096)),
    *(_case(model, 1, 4096, adamw=True) for model in ("13b", "70b")),
    _case("7b", 4, 4096, adamw=True),
    # For the checks: grouped heads, widths that are not powers of two.
    _case("tiny", 1, 4, dtype=FP32, hidden=12, heads=2, kv_heads=1, intermediate=10),
    _case("tiny", 2, 3, "ffn", "gelu", FP32, hidden=10, heads=1, kv_heads=1, intermediate=14),
    _case("tiny", 2, 4, dtype=FP32, fp8="weights", hidden=32, heads=2, kv_heads=1, intermediate=48),
    _case("tiny", 2, 4, dtype=FP32, fp8="train", hidden=32, heads=2, kv_heads=1, intermediate=48),
    _case("tiny", 1, 3, "ffn", "gelu", FP32, fp8="train", hidden=32, heads=1, kv_heads=1, intermediate=16),
    _case("tiny", 1, 3, "ffn", "gelu", FP32, fp8="weights", hidden=32, heads=1, kv_heads=1, intermediate=16),
    _case("tiny", 1, 4, dtype=FP32, adamw=True, hidden=12, heads=2, kv_heads=1, intermediate=10),
    _case("tiny", 2, 3, "ffn", "gelu", FP32, adamw=True, hidden=10, heads=1, kv_heads=1, intermediate=14),
    _case("tiny", 2, 100, dtype=BF16, adamw=True, hidden=256, heads=4, kv_heads=2, intermediate=352),
)
#: Cases that run only in a suite or by --case: parts of the larger models at fewer tokens, and with four sequences.
SUITE_CASES = (
    *(_case(m, 1, s, part) for m in ("13b", "70b") for part in ("attention", "ffn") for s in (512, 1024, 2048)),
    *(_case(m, 4, s, part) for m in LLAMA2 for part in ("attention", "ffn") for s in (512, 1024, 2048, 4096)),
)

HOST_CASES = (_case("host", 1, 16, dtype=BF16, hidden=256, heads=4, kv_heads=2, intermediate=512),)


def make_inputs(case: Case, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    """Inputs with weights of variance 1 / columns, so that every GEMM's output has about the variance of its input."""
    d, part = case.dims, case.params.get("part", "layer")
    hidden, heads, kv_heads, inner = d["hidden"], d["heads"], d["kv_heads"], d["intermediate"]
    head_dim = hidden // heads

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, dtype=case.dtype, device=device, generator=generator).mul_(scale)

    inputs: Inputs = {"x": normal(d["batch"], d["length"], hidden)}
    if "attention" in PER_PART[part]:
        inputs["norm_attention"] = normal(hidden)
        inputs["w_qkv"] = normal((heads + 2 * kv_heads) * head_dim, hidden, scale=hidden**-0.5)
        inputs["w_o"] = normal(hidden, heads * head_dim, scale=hidden**-0.5)
        inputs["cos"], inputs["sin"] = rope_tables(d["length"], head_dim, 10000.0, device)
    if "ffn" in PER_PART[part]:
        rows = inner if case.params.get("ffn") == "gelu" else 2 * inner
        inputs["norm_ffn"] = normal(hidden)
        inputs["w_up"] = normal(rows, hidden, scale=hidden**-0.5)
        inputs["w_down"] = normal(hidden, inner, scale=inner**-0.5)
    if case.params.get("fp8") == "train":
        inputs["fp8"] = True
    elif case.params.get("fp8"):
        inputs = {name: made for given in inputs.items() for name, made in _quantised(*given)}
    if case.params.get("adamw"):
        inputs |= _states(inputs, normal, device)
    return {**inputs, "heads": heads, "kv_heads": kv_heads, "part": part}


def _states(inputs: Inputs, normal: Callable[..., torch.Tensor], device: torch.device | str) -> Inputs:
    """The incoming gradient, and the AdamW states of each weight: moments of gradients of about 1. The second moment is
    far from 0, as its root is a divisor."""
    own: Inputs = {"dout": normal(*inputs["x"].shape)}
    for name in WEIGHTS:
        if name in inputs:
            shape, half = tuple(inputs[name].shape), inputs[name].dtype != FP32
            if half:
                own[state(name, "master")] = inputs[name].float()
            own[state(name, "exp_avg")] = normal(*shape).float()
            own[state(name, "exp_avg_sq")] = normal(*shape).float().abs_().add_(0.1)
    return own


def _with_steps(layer: Op, update: Update) -> Op:
    """Wraps the layer: given the gradient of its result, it performs a training step instead."""
    step = train_step(layer, update)
    return lambda **inputs: step(**inputs) if "dout" in inputs else layer(**inputs)


def _stock(load: Callable[[], Op]) -> Callable[[], Op]:
    """Loads a peer's layer, which is trained with PyTorch's fused AdamW."""
    return lambda: _with_steps(load(), fused_adamw())


def _reference(**inputs) -> torch.Tensor | tuple[torch.Tensor, ...]:
    return llama_train_reference(**inputs) if "dout" in inputs else _of_bytes(llama_layer_reference)(**inputs)


def _quantised(name: str, tensor: torch.Tensor) -> tuple[tuple[str, torch.Tensor], ...]:
    """A matrix as codes and one scale per row; other inputs unchanged."""
    if name not in MATRICES:
        return ((name, tensor),)
    scale = tensor.float().abs().amax(1, keepdim=True).clamp_(min=2.0**-126) / 448
    codes = (tensor / scale).clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return (name, codes), (f"{name}_scale", scale)


def _of_bytes(op: Op) -> Op:
    """Wraps the op: matrices are passed unchanged or, if there are scales, as codes and scales."""

    def layer(**inputs):
        scales = {name: inputs.pop(f"{name}_scale") for name in MATRICES if f"{name}_scale" in inputs}
        codes = {name: inputs[name].view(torch.float8_e4m3fn) for name in scales}
        try:
            return op(**inputs | {name: FP8Weight(codes[name], scales[name]) for name in scales})
        except (TypeError, ValueError) as error:  # the error must use the harness's names of the arguments
            raise type(error)(str(error).replace(".scale", "_scale")) from error

    return layer


def cost(case: Case, mode: str) -> Cost:
    """Counts the FLOPs of GEMMs and of the unmasked pairs of attention, and the bytes of x, the weights, the result
    and, in the backward, of all gradients. The backward has two GEMMs per GEMM, and five for attention's two. A
    training step reads and writes weights and AdamW's states; AdamW's few operations per element are not counted."""
    d, part = case.dims, case.params.get("part", "layer")
    tokens, hidden, inner = d["batch"] * d["length"], d["hidden"], d["intermediate"]
    head_dim = hidden // d["heads"]
    weights, vectors, pairs = 0, 0, 0
    if "attention" in PER_PART[part]:
        weights += ((d["heads"] + 2 * d["kv_heads"]) + d["heads"]) * head_dim * hidden
        vectors += hidden
        pairs = d["batch"] * d["heads"] * d["length"] * (d["length"] + 1) // 2
    if "ffn" in PER_PART[part]:
        weights += (2 if case.params.get("ffn") == "gelu" else 3) * inner * hidden
        vectors += hidden
    tables = 2 * d["length"] * (head_dim // 2) * 4 if pairs else 0
    # A training step moves x, the gradient of the result and dx; the result itself need not be written.
    products, attended, activations, written = {"fwd": (1, 2, 2, 0), "fwd+bwd": (3, 7, 4, 1), "train": (3, 7, 3, 1)}[
        mode
    ]
    of_products, of_pairs = 2 * products * tokens * weights, 2 * attended * pairs * head_dim
    pipe = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[case.dtype]
    elements = activations * tokens * hidden + (1 + written) * vectors
    of_weights = (1 + written) * weights * case.dtype.itemsize
    flops = {pipe: of_products + of_pairs}
    if in_fp8 := case.params.get("fp8"):
        flops = {"fp8": of_products, **({pipe: of_pairs} if pairs else {})}
    if in_fp8 == "weights":
        of_weights = weights + 4 * _rows(case)
    # Moments, and masters of 16-bit weights, are read and written in fp32.
    of_states = 8 * (2 if case.dtype == FP32 else 3) * (weights + vectors) if mode == "train" else 0
    return Cost(flops=flops, bytes=elements * case.dtype.itemsize + of_weights + of_states + tables)


def _rows(case: Case) -> int:
    """The number of rows of all matrices; in fp8 each row has a scale."""
    d, part = case.dims, case.params.get("part", "layer")
    of_attention = (d["heads"] + 2 * d["kv_heads"]) * (d["hidden"] // d["heads"]) + d["hidden"]
    of_ffn = (1 if case.params.get("ffn") == "gelu" else 2) * d["intermediate"] + d["hidden"]
    return sum(rows for name, rows in (("attention", of_attention), ("ffn", of_ffn)) if name in PER_PART[part])


def _torch(
    x,
    norm_attention=None,
    w_qkv=None,
    w_o=None,
    cos=None,
    sin=None,
    norm_ffn=None,
    w_up=None,
    w_down=None,
    *,
    heads,
    kv_heads,
    part,
    eps=1e-5,
):
    """The layer as a PyTorch user would write it; GEMMs with fp8 matrices use `scaled_mm`."""
    if part != "ffn":
        qkv = _linear(F.rms_norm(x, x.shape[-1:], norm_attention, eps), w_qkv)
        qkv = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).transpose(1, 2)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        angles = cos.to(x.dtype), sin.to(x.dtype)
        q, k = _rotated(q, *angles), _rotated(k, *angles)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        x = x + _linear(out.transpose(1, 2).flatten(2), w_o)
    if part != "attention":
        up = _linear(F.rms_norm(x, x.shape[-1:], norm_ffn, eps), w_up)
        if up.shape[-1] == (w_down.data if isinstance(w_down, FP8Weight) else w_down).shape[1]:
            return x + _linear(F.gelu(up), w_down)
        gate, up = up.chunk(2, -1)
        x = x + _linear(F.silu(gate) * up, w_down)
    return x


def _linear(x: torch.Tensor, weight: torch.Tensor | FP8Weight) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        return F.linear(x, weight)
    rows = x.flatten(0, -2)
    scale = rows.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / 448
    codes = (rows.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    of = F.ScalingType.RowWise
    y = F.scaled_mm(codes, weight.data.t(), scale, of, weight.scale.t(), of, output_dtype=x.dtype, use_fast_accum=True)
    return y.view(*x.shape[:-1], -1)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _cudnn() -> Op:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def layer(**inputs):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return _of_bytes(_torch)(**inputs)

    return layer


def _hugging_face(patch: Callable[[], None] | None = None, attention: str = "sdpa") -> Callable[[], Op]:
    """transformers' LlamaDecoderLayer with these weights, called as a model calls it."""

    def load() -> Op:
        from transformers import LlamaConfig
        from transformers.models.llama import modeling_llama

        if patch is not None:
            with own_architectures("llama") as modeling_llama:
                patch()
        layers: dict[tuple, torch.nn.Module] = {}

        def layer(x, norm_attention, w_qkv, w_o, cos, sin, norm_ffn, w_up, w_down, *, heads, kv_heads, part, eps=1e-5):
            key = (x.shape[-1], heads, kv_heads, w_down.shape[1])
            if key not in layers:
                config = LlamaConfig(
                    hidden_size=x.shape[-1],
                    num_attention_heads=heads,
                    num_key_value_heads=kv_heads,
                    intermediate_size=w_down.shape[1],
                    rms_norm_eps=eps,
                    attn_implementation=attention,
                )
                with torch.device("meta"):
                    layers[key] = modeling_llama.LlamaDecoderLayer(config, 0)
            weights = _named(norm_attention, w_qkv, w_o, norm_ffn, w_up, w_down, heads, kv_heads)
            angles = tuple(torch.cat((t, t), -1)[None].to(x.dtype) for t in (cos, sin))
            return torch.func.functional_call(layers[key], weights, (x,), {"position_embeddings": angles})

        return layer

    return load


def _named(norm_attention, w_qkv, w_o, norm_ffn, w_up, w_down, heads: int, kv_heads: int) -> dict[str, torch.Tensor]:
    head_dim = w_qkv.shape[0] // (heads + 2 * kv_heads)
    q, k, v = w_qkv.split((heads * head_dim, kv_heads * head_dim, kv_heads * head_dim))
    gate, up = w_up.chunk(2)
    return {
        "input_layernorm.weight": norm_attention,
        "self_attn.q_proj.weight": q,
        "self_attn.k_proj.weight": k,
        "self_attn.v_proj.weight": v,
        "self_attn.o_proj.weight": w_o,
        "post_attention_layernorm.weight": norm_ffn,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": w_down,
    }


def _liger() -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(cross_entropy=False, fused_linear_cross_entropy=False)


def _takes(case: Case, mode: str) -> str | None:
    """The reason why `_torch` cannot run a case, or None."""
    if case.params.get("fp8") == "train":
        return "scaled_mm has no backward"
    if case.params.get("fp8") and case.dtype != BF16:
        return "scaled_mm with per-row scales returns only bfloat16"
    return None


def _whole_llama(case: Case, mode: str) -> str | None:
    if case.params.get("fp8"):
        return "has no GEMMs in fp8"
    whole = case.params.get("part", "layer") == "layer" and case.params.get("ffn") != "gelu"
    return None if whole else "has only whole layers with SwiGLU"


def _halves(case: Case, mode: str) -> str | None:
    if case.params.get("part") == "ffn":
        return "this case has no attention"
    if reason := _takes(case, mode):
        return reason
    return None if case.dtype in (BF16, FP16) else "cuDNN's attention supports only float16 and bfloat16"


def _dense() -> Op:
    """This layer in bf16. fp8 matrices are replaced by bf16 matrices of the same sizes, allocated once."""
    made: dict[tuple, torch.Tensor] = {}

    def matrix(like: torch.Tensor) -> torch.Tensor:
        if like.dtype != torch.uint8:
            return like
        key = (tuple(like.shape), like.device)
        if key not in made:
            made[key] = torch.randn(like.shape, dtype=BF16, device=like.device).mul_(like.shape[1] ** -0.5)
        return made[key]

    def layer(**inputs):
        kept = {name: value for name, value in inputs.items() if not name.endswith("_scale") and name != "fp8"}
        return llama_layer(**kept | {name: matrix(kept[name]) for name in MATRICES if name in kept})

    return layer


def _dense_cost(case: Case, mode: str) -> Cost:
    params = {name: value for name, value in case.params.items() if name != "fp8"}
    return cost(dataclasses.replace(case, params=params), mode)


def _dense_takes(case: Case, mode: str) -> str | None:
    return None if case.params.get("fp8") and case.dtype == BF16 else "compared only with fp8 cases"


def _unsupported_reason(implementation: str, case: Case, mode: str) -> str | None:
    if implementation == "fp8_matmul" and not case.params.get("fp8"):
        return "requires fp8 weights"
    return None


def _alias_reason(implementation: str, case: Case, mode: str) -> str | None:
    if implementation == "fp8_matmul" and case.dtype != BF16:
        return "same version as auto, since results are not bfloat16"
    return None


def _product_error(inputs: Inputs) -> float:
    """The error allowed for GEMMs. Hopper's tensor cores truncate accumulators of fp8 GEMMs to 13 fractional bits, and
    an intermediate value that is rounded to another code differs by a sixteenth. Both implementations and eager have
    such errors."""
    return 2**-12 if "fp8" in inputs or any(name.endswith("_scale") for name in inputs) else 0.0


def _items(case: Case) -> int:
    return case.dims["batch"] * case.dims["length"]


SPEC = KernelSpec(
    name="llama_layer",
    implementations={
        "auto": _with_steps(_of_bytes(llama_layer), our_adamw()),
        "fp8_matmul": _of_bytes(partial(llama_layer, backend="fp8_matmul")),
    },
    # On other GPUs "auto" is the same as "fp8_matmul".
    min_capability={"fp8_matmul": (9, 0)},
    unsupported_reason=_unsupported_reason,
    alias_reason=_alias_reason,
    baselines=(
        EAGER,
        Peer("torch-sdpa", load=_stock(lambda: _of_bytes(_torch)), supports=_takes),
        Peer(
            "torch-sdpa-compile",
            load=_stock(lambda: torch.compile(_of_bytes(_torch), dynamic=False)),
            supports=_takes,
        ),
        Peer(
            "torch-sdpa-compile-max",
            load=_stock(lambda: torch.compile(_of_bytes(_torch), dynamic=False, options=dict(MAX_AUTOTUNE))),
            supports=_takes,
        ),
        Peer("torch-cudnn", load=_stock(_cudnn), supports=_halves),
        Peer(
            "torch-cudnn-compile-max",
            load=_stock(lambda: torch.compile(_cudnn(), dynamic=False, options=dict(MAX_AUTOTUNE))),
            supports=_halves,
        ),
        Peer("hugging-face", load=_stock(_hugging_face()), supports=_whole_llama),
        Peer("liger", load=_stock(_hugging_face(_liger)), supports=_whole_llama),
        Yardstick("bf16", load=_dense, cost=_dense_cost, supports=_dense_takes),
    ),
    pytorch=("torch-sdpa",),
    reference=_reference,
    make_inputs=make_inputs,
    cost=cost,
    cases=CASES,
    grads=("x", "norm_attention", "w_qkv", "w_o", "norm_ffn", "w_up", "w_down"),
    modes=("fwd", "fwd+bwd", "train"),
    unit="tokens",
    items=_items,
    fuzz={"length": (1, 9)},
    product_error=_product_error,
    limits={"cos": 1.0, "sin": 1.0},  # they are a cosine and a sine
    determinism={"fwd": "run-to-run", "bwd": "on request", "fwd+bwd": "on request", "train": "on request"},
    needs=("adamw", "attention", "fp8", "fp8_matmul", "gelu", "rmsnorm", "rope", "swiglu"),
    host_cases=HOST_CASES,
    suite_cases=SUITE_CASES,
)


def _part(model: str, part: str, *baselines: str) -> Part:
    """A table of a suite: one part of a model's layer at all lengths of its cases."""
    named = [case for case in (*SUITE_CASES, *CASES) if case.name.startswith(f"{model}-b1-")]
    named = [case for case in named if not {"ffn", "fp8", "adamw"} & case.params.keys()]
    chosen = tuple(case.name for case in named if case.params.get("part", "layer") == part)
    return Part("llama_layer", chosen, baselines)


def _suite(name: str, model: str) -> Suite:
    return Suite(
        name,
        f"a decoder layer of Llama 2 {model.upper()}: attention, feed-forward, and the whole",
        (
            _part(model, "attention", "eager", "torch-sdpa", "torch-cudnn-compile-max"),
            _part(model, "ffn", "eager", "torch-sdpa", "torch-sdpa-compile-max"),
            _part(model, "layer", "eager", "torch-sdpa", "torch-cudnn-compile-max", "hugging-face", "liger"),
        ),
    )


SUITES = (_suite("llm", "7b"), _suite("llm-13b", "13b"), _suite("llm-70b", "70b"))

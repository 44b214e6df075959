"""The declaration of llama_layer: cases, cost, peers. `python -m harness bench --kernel llama_layer`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from harness.spec import EAGER, MAX_AUTOTUNE, Case, Cost, Inputs, KernelSpec, Op, Peer
from harness.suites import Part, Suite

from .architectures import own_architectures
from .layer import LLAMA2, LayerConfig, llama_layer, rope_tables
from .reference import llama_layer_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PER_PART = {"layer": ("attention", "ffn"), "attention": ("attention",), "ffn": ("ffn",)}


def _case(
    model: str, batch: int, length: int, part: str = "layer", ffn: str = "swiglu", dtype: torch.dtype = BF16, **dims
) -> Case:
    """One of Llama 2's layers, or with `dims` a small one under the name `model`."""
    short = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
    name = "-".join(
        (model, f"b{batch}", f"s{length}", *([part] if part != "layer" else []), *([ffn] * (ffn == "gelu")), short)
    )
    sizes = LLAMA2[model] if model in LLAMA2 else LayerConfig(**dims)
    own = dict(hidden=sizes.hidden, heads=sizes.heads, kv_heads=sizes.kv_heads, intermediate=sizes.intermediate)
    params = {k: v for k, v in (("part", part), ("ffn", ffn)) if v not in ("layer", "swiglu")}
    return Case(name, dict(batch=batch, length=length, **own), dtype, params, bench=model in LLAMA2)


CASES = (
    *(_case(model, b, s) for model in LLAMA2 for b in (1, 4) for s in (512, 1024, 2048, 4096)),
    *(_case("7b", 1, s, ffn="gelu") for s in (512, 4096)),
    *(_case("7b", 1, s, part) for part in ("attention", "ffn") for s in (512, 1024, 2048, 4096)),
    *(_case(model, 1, 4096, part) for model in ("13b", "70b") for part in ("attention", "ffn")),
    # For the checks: grouped heads, widths that are no powers of two.
    _case("tiny", 1, 4, dtype=FP32, hidden=12, heads=2, kv_heads=1, intermediate=10),
    _case("tiny", 2, 3, "ffn", "gelu", FP32, hidden=10, heads=1, kv_heads=1, intermediate=14),
)

HOST_CASES = (_case("host", 1, 16, dtype=BF16, hidden=256, heads=4, kv_heads=2, intermediate=512),)


def make_inputs(case: Case, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    """Weights of variance 1 / columns, so that every product has about the variance of what goes in."""
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
    return {**inputs, "heads": heads, "kv_heads": kv_heads, "part": part}


def cost(case: Case, mode: str) -> Cost:
    """Matrix products and the pairs of the causal mask; bytes of x, the weights, the result and, backward, of all
    gradients. The backward has two products for each, attention's five for its two."""
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
    products, attended, activations, written = {"fwd": (1, 2, 2, 0), "fwd+bwd": (3, 7, 4, 1)}[mode]
    flops = 2 * products * tokens * weights + 2 * attended * pairs * head_dim
    elements = activations * tokens * hidden + (1 + written) * (weights + vectors)
    pipe = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[case.dtype]
    return Cost(flops=flops, bytes=elements * case.dtype.itemsize + tables, pipe=pipe)


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
    """What a PyTorch user would write."""
    if part != "ffn":
        qkv = F.linear(F.rms_norm(x, x.shape[-1:], norm_attention, eps), w_qkv)
        qkv = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).transpose(1, 2)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        angles = cos.to(x.dtype), sin.to(x.dtype)
        q, k = _rotated(q, *angles), _rotated(k, *angles)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        x = x + F.linear(out.transpose(1, 2).flatten(2), w_o)
    if part != "attention":
        up = F.linear(F.rms_norm(x, x.shape[-1:], norm_ffn, eps), w_up)
        if w_up.shape[0] == w_down.shape[1]:
            return x + F.linear(F.gelu(up), w_down)
        gate, up = up.chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, w_down)
    return x


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _cudnn() -> Op:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def layer(**inputs):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return _torch(**inputs)

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


def _whole_llama(case: Case, mode: str) -> str | None:
    whole = case.params.get("part", "layer") == "layer" and case.params.get("ffn") != "gelu"
    return None if whole else "it has whole layers with SwiGLU"


def _halves(case: Case, mode: str) -> str | None:
    if case.params.get("part") == "ffn":
        return "there is no attention in this case"
    return None if case.dtype in (BF16, FP16) else "cuDNN's attention takes fp16 and bf16"


def _items(case: Case) -> int:
    return case.dims["batch"] * case.dims["length"]


SPEC = KernelSpec(
    name="llama_layer",
    implementations={"auto": llama_layer},
    baselines=(
        EAGER,
        Peer("torch-sdpa", load=lambda: _torch),
        Peer("torch-sdpa-compile", load=lambda: torch.compile(_torch)),
        Peer("torch-sdpa-compile-max", load=lambda: torch.compile(_torch, options=dict(MAX_AUTOTUNE))),
        Peer("torch-cudnn", load=_cudnn, supports=_halves),
        Peer(
            "torch-cudnn-compile-max",
            load=lambda: torch.compile(_cudnn(), options=dict(MAX_AUTOTUNE)),
            supports=_halves,
        ),
        Peer("hugging-face", load=_hugging_face(), supports=_whole_llama),
        Peer("liger", load=_hugging_face(_liger), supports=_whole_llama),
    ),
    pytorch=("torch-sdpa",),
    reference=llama_layer_reference,
    make_inputs=make_inputs,
    cost=cost,
    cases=CASES,
    grads=("x", "norm_attention", "w_qkv", "w_o", "norm_ffn", "w_up", "w_down"),
    modes=("fwd", "fwd+bwd"),
    unit="tokens",
    items=_items,
    fuzz={"length": (1, 9)},
    limits={"cos": 1.0, "sin": 1.0},  # they are a cosine and a sine
    determinism={"fwd": "run-to-run", "bwd": "on request", "fwd+bwd": "on request"},
    needs=("attention", "gelu", "rmsnorm", "rope", "swiglu"),
    host_cases=HOST_CASES,
)


def _part(model: str, part: str, *baselines: str) -> Part:
    """A table of the suite: one part of a model's layer at all lengths that it has."""
    named = (case for case in CASES if case.name.startswith(f"{model}-b1-") and case.params.get("ffn") != "gelu")
    chosen = tuple(case.name for case in named if case.params.get("part", "layer") == part)
    return Part("llama_layer", chosen, baselines)


SUITES = (
    Suite(
        "llm",
        "a decoder layer of Llama 2 7B: attention, feed-forward, and the whole",
        (
            _part("7b", "attention", "eager", "torch-sdpa", "torch-cudnn-compile-max"),
            _part("7b", "ffn", "eager", "torch-sdpa", "torch-sdpa-compile-max"),
            _part("7b", "layer", "eager", "torch-sdpa", "torch-cudnn-compile-max", "hugging-face", "liger"),
        ),
    ),
)

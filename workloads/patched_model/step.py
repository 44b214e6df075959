"""`patched_model`: one training step of a Hugging Face model as a function of tensors, for checks and timing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch

ALIGNMENT = 64  # parameters begin at multiples of this many elements, so that all are aligned
#: PyTorch's fused AdamW computes 1 − β₂ in fp32, which for 0.999 has a relative error of 1.3e-5; here it is exact.
BETAS, EPS, WEIGHT_DECAY = (0.9, 1 - 2**-10), 1e-8, 1e-2
STATES = ("weights", "exp_avg", "exp_avg_sq")
FAMILIES = {"llama": "Llama", "qwen3": "Qwen3"}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

#: (tokens, parameters by name) -> loss
Loss = Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model with tied embeddings, under the names of transformers' configurations."""

    family: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float


#: The published configurations of meta-llama/Llama-3.2-1B and Qwen/Qwen3-0.6B. Llama's scaling of the rotary
#: frequencies is omitted: it changes only the values of a table.
SIZES = {
    "llama-1b": Sizes("llama", 2048, 16, 32, 8, 64, 8192, 128_256, 1e-5, 500_000.0),
    "qwen3-0.6b": Sizes("qwen3", 1024, 28, 16, 8, 128, 3072, 151_936, 1e-6, 1_000_000.0),
}


@lru_cache(maxsize=64)
def places(sizes: Sizes) -> tuple[tuple[tuple[str, int, tuple[int, ...]], ...], int]:
    """((name, offset, shape) of each parameter in one vector, length of the vector)."""
    found, offset = [], 0
    for name, shape in _shapes(sizes).items():
        found.append((name, offset, shape))
        offset += -(-prod(shape) // ALIGNMENT) * ALIGNMENT
    return tuple(found), offset


def _shapes(s: Sizes) -> dict[str, tuple[int, ...]]:
    hidden, width, kv = s.hidden_size, s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (width, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, width),
        **({"self_attn.q_norm": (s.head_dim,), "self_attn.k_norm": (s.head_dim,)} if s.family == "qwen3" else {}),
        "mlp.gate_proj": (s.intermediate_size, hidden),
        "mlp.up_proj": (s.intermediate_size, hidden),
        "mlp.down_proj": (hidden, s.intermediate_size),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    layers = [f"model.layers.{i}." for i in range(s.num_hidden_layers)]
    return {
        "model.embed_tokens.weight": (s.vocab_size, hidden),
        **{f"{prefix}{name}.weight": shape for prefix in layers for name, shape in layer.items()},
        "model.norm.weight": (hidden,),
    }


def views(vector: torch.Tensor, sizes: Sizes) -> dict[str, torch.Tensor]:
    """The parameters as views of a vector, by name."""
    return {name: vector[at : at + prod(shape)].view(shape) for name, at, shape in places(sizes)[0]}


def made(sizes: Sizes, device: torch.device, architectures: Any = None, attention: str = "sdpa") -> Any:
    """transformers' causal language model of these sizes, in training mode, with SDPA. It has no weights: each call
    passes them. `architectures` is the module with the model's class, by default transformers; `attention` is the
    name of the attention among transformers'."""
    import transformers

    family = FAMILIES[sizes.family]
    config = getattr(transformers, f"{family}Config")(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.num_hidden_layers,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_key_value_heads,
        head_dim=sizes.head_dim,
        rms_norm_eps=sizes.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_theta},
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation=attention,
    )
    with torch.random.fork_rng(devices=[]), torch.device("meta"):  # random numbers are drawn even for meta tensors
        model = getattr(architectures or transformers, f"{family}ForCausalLM")(config)
    rotary = model.model.rotary_emb
    with torch.device(device):  # the rotary frequencies are not parameters, so they need real memory
        model.model.rotary_emb = type(rotary)(config)
    return model.train()


def loss_of(model: Any) -> Loss:
    """The loss of a model as a function of tokens and parameters."""

    def loss(tokens: torch.Tensor, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (), {"input_ids": tokens, "labels": tokens}).loss

    return loss


@lru_cache(maxsize=8)
def patched(sizes: Sizes, device: torch.device) -> Loss:
    """The loss of a model with `ridgeline.patch` applied."""
    from kernels.patch import patch

    return loss_of(patch(made(sizes, device)))


@lru_cache(maxsize=8)
def patched_and_compiled(sizes: Sizes, device: torch.device) -> Loss:
    """The same under torch.compile as one graph, which specialises on its shapes."""
    return torch.compile(patched(sizes, device), dynamic=False, fullgraph=True)


def patched_model(
    tokens: torch.Tensor,
    weights: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    step: torch.Tensor,
    *,
    sizes: Sizes,
    lr: float = 1e-4,
    loss_fn: Callable[[Sizes, torch.device], Loss] = patched,
) -> tuple[torch.Tensor, ...]:
    """Computes one training step in place: loss, gradients and AdamW.

        loss = mean over all but the last token of each row of −log p(next token),   p of the model's softmax
        weights, exp_avg, exp_avg_sq ← AdamW

    tokens      int64 [B, S], S > 1, which are also the labels
    weights, exp_avg, exp_avg_sq  vectors of one dtype, fp32, fp16 or bf16, which is also the model's: all parameters,
                concatenated as `places` defines
    step        fp32 scalar, the number of steps before this one
    loss_fn     (sizes, device) -> the loss as a function of tokens and parameters; by default that of the model with
                `ridgeline.patch` applied

    The optimizer is PyTorch's fused AdamW for every loss_fn, so that differences are due to the model.

    Returns (loss, weights, exp_avg, exp_avg_sq, step). The loss is fp32.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device, ImportError without transformers.

    AdamW: Loshchilov and Hutter 2019, arXiv:1711.05101.
    """
    _check(tokens, {"weights": weights, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}, step, sizes)
    with torch.enable_grad():
        leaves = {name: view.detach().requires_grad_() for name, view in views(weights, sizes).items()}
        loss = loss_fn(sizes, tokens.device)(tokens, leaves)
        grads = torch.autograd.grad(loss, list(leaves.values()))
    step.add_(1)
    torch._fused_adamw_(
        [leaf.detach() for leaf in leaves.values()],
        [grad.contiguous() for grad in grads],
        *(list(views(moments, sizes).values()) for moments in (exp_avg, exp_avg_sq)),
        [],
        [step] * len(leaves),
        lr=lr,
        beta1=BETAS[0],
        beta2=BETAS[1],
        weight_decay=WEIGHT_DECAY,
        eps=EPS,
        amsgrad=False,
        maximize=False,
    )
    return loss.detach().to(torch.float32), weights, exp_avg, exp_avg_sq, step


def _check(tokens: torch.Tensor, state: dict[str, torch.Tensor], step: torch.Tensor, sizes: Sizes) -> None:
    dtype, length = state["weights"].dtype, places(sizes)[1]
    if tokens.dtype != torch.int64:
        raise TypeError(f"patched_model: tokens must be int64, got {tokens.dtype}")
    if dtype not in FLOATS:
        raise TypeError(f"patched_model: weights must be float32, float16 or bfloat16, got {dtype}")
    for name, tensor in state.items():
        if tensor.dtype != dtype:
            raise TypeError(f"patched_model: {name} must be of weights' dtype {dtype}, got {tensor.dtype}")
    if step.dtype != torch.float32:
        raise TypeError(f"patched_model: step must be float32, got {step.dtype}")
    for name, tensor in {**state, "step": step}.items():
        if tensor.device != tokens.device:
            raise ValueError(f"patched_model: {name} must be on {tokens.device}, tokens' device, got {tensor.device}")
    if tokens.dim() != 2 or tokens.shape[0] < 1 or tokens.shape[1] < 2:
        raise ValueError(f"patched_model: tokens must be [B, S] with S > 1, got {tuple(tokens.shape)}")
    for name, tensor in state.items():
        if tensor.shape != (length,) or not tensor.is_contiguous():
            raise ValueError(f"patched_model: {name} must be [{length}] and contiguous, got {tuple(tensor.shape)}")
    if step.dim():
        raise ValueError(f"patched_model: step must be a scalar, got shape {tuple(step.shape)}")

"""A Llama decoder block built from this project's modules, with the weights of Hugging Face's block.

    python -m examples.llama_block                      # from the checkout's root

Its parameters have the names of LlamaDecoderLayer's, so each can load the other's state dict. The first residual is
added by the second norm, in one launch. The block is compared with Hugging Face's or, if transformers is not installed,
with PyTorch's own functions; on a GPU both are then timed, eager and compiled.
"""

import argparse
import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported

from kernels.nn import Attention, RMSNorm, RotaryEmbedding, SwiGLU  # noqa: E402


@dataclass(frozen=True)
class Sizes:
    """Of a block, under the names of LlamaConfig."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0


SIZES = {"tiny": Sizes(32, 48, 4, 2), "llama-3-8b": Sizes(4096, 14336, 32, 8)}


class LlamaBlock(nn.Module):
    """x + attention(norm(x)), then that + mlp(norm(that)). x [B, S, hidden_size], causal."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, heads = sizes.hidden_size, sizes.num_attention_heads
        rotary = RotaryEmbedding(width // heads, sizes.rope_theta)
        self.input_layernorm = RMSNorm(width, sizes.rms_norm_eps)
        self.self_attn = Attention(width, heads, sizes.num_key_value_heads, causal=True, rotary=rotary)
        self.post_attention_layernorm = RMSNorm(width, sizes.rms_norm_eps)
        self.mlp = SwiGLU(width, sizes.intermediate_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed, x = self.post_attention_layernorm(self.self_attn(self.input_layernorm(x)), x)
        return x + self.mlp(normed)


class PlainBlock(nn.Module):
    """The same of PyTorch's functions."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, width = sizes, sizes.hidden_size
        keys = width // sizes.num_attention_heads * sizes.num_key_value_heads
        linear = {"q_proj": (width, width), "k_proj": (width, keys), "v_proj": (width, keys), "o_proj": (width, width)}
        self.self_attn = nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in linear.items()})
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(width, sizes.rms_norm_eps) for _ in range(2))
        hidden = sizes.intermediate_size
        linear = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
        self.mlp = nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in linear.items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.sizes.hidden_size // self.sizes.num_attention_heads
        normed = self.input_layernorm(x)
        q, k, v = (
            self.self_attn[n](normed).unflatten(-1, (-1, heads)).transpose(1, 2) for n in ("q_proj", "k_proj", "v_proj")
        )
        q, k = (self._rotated(t) for t in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.self_attn["o_proj"](out.transpose(1, 2).flatten(2))
        normed = self.post_attention_layernorm(x)
        return x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed))

    def _rotated(self, t: torch.Tensor) -> torch.Tensor:
        half = t.shape[-1] // 2
        pair = torch.arange(half, device=t.device, dtype=torch.float32) / half
        position = torch.arange(t.shape[-2], device=t.device, dtype=torch.float32)
        angles = torch.outer(position, self.sizes.rope_theta**-pair)
        first, second, cos, sin = t[..., :half].float(), t[..., half:].float(), angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(t.dtype)


def hugging_face(sizes: Sizes) -> nn.Module | None:
    """LlamaDecoderLayer with the angles of its model, None where transformers is not installed."""
    try:
        from transformers.models.llama import modeling_llama as llama
    except ImportError:
        return None

    config = llama.LlamaConfig(
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_key_value_heads,
        rms_norm_eps=sizes.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_theta},
        attn_implementation="sdpa",
    )

    class HuggingFaceLayer(llama.LlamaDecoderLayer):
        def __init__(self) -> None:
            super().__init__(config, layer_idx=0)
            self.angles = llama.LlamaRotaryEmbedding(config)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            positions = torch.arange(x.shape[1], device=x.device)[None]
            return super().forward(x, position_ids=positions, position_embeddings=self.angles(x, positions))

    return HuggingFaceLayer()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="llama-3-8b" if ON_GPU else "tiny")
    parser.add_argument("--tokens", type=int, default=4096 if ON_GPU else 24)
    arguments = parser.parse_args()
    sizes, device = SIZES[arguments.size], "cuda" if ON_GPU else "cpu"
    torch.manual_seed(0)
    theirs = hugging_face(sizes) or PlainBlock(sizes)
    block = LlamaBlock(sizes)
    block.load_state_dict(theirs.state_dict())
    x = torch.randn(1, arguments.tokens, sizes.hidden_size)
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    block, theirs, x = block.to(device, dtype), theirs.to(device, dtype), x.to(device, dtype)
    with torch.no_grad():
        found, expected = block(x).float(), theirs(x).float()
    error = ((found - expected).norm() / expected.norm()).item()
    print(f"{type(theirs).__name__} and LlamaBlock differ by {error:.1e} of the result's norm")
    if ON_GPU:
        import harness

        harness.bench({"ridgeline": block}, x, reference=theirs, baselines=("eager", "compile"), name="llama-block")


if __name__ == "__main__":
    main()

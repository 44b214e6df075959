"""Your own module under this project's bench: checked in fp64, timed against baselines, with its memory use.

    PYTHONPATH=. python examples/benchmark.py
    python -m harness bench --kernel examples/benchmark.py:BENCHMARK --samples 50 --warmup 10

The candidates are self-attention with the scores written out and, on a GPU, with this project's attention. On a GPU
device time is measured, elsewhere wall-clock time on the CPU.
"""

import torch
import torch.nn.functional as F
from torch import nn

import harness
from harness.candidates import hugging_face
from harness.roofline import Cost

ON_GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
BATCH, TOKENS, WIDTH, HEADS = (4, 2048, 1024, 8) if ON_GPU else (2, 64, 64, 4)


class SelfAttention(nn.Module):
    """With Hugging Face's names of the parameters, so that its weights can be the same."""

    def __init__(self, attend) -> None:
        super().__init__()
        self.attend = attend
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(WIDTH, WIDTH, dtype=DTYPE) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(self.attend(*heads).transpose(1, 2).flatten(2))


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q·kᵀ / √d)·v"""
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    return scores.softmax(-1) @ v


def clip(transformers) -> nn.Module:
    config = transformers.CLIPVisionConfig(hidden_size=WIDTH, num_attention_heads=HEADS, attn_implementation="sdpa")
    return transformers.models.clip.modeling_clip.CLIPAttention(config).to(DTYPE)


def cost(inputs: dict, mode: str) -> Cost:
    """Four projections and two products of the attention; the backward has each twice."""
    times = 3 if mode == "training" else 1
    flops = BATCH * TOKENS * WIDTH * (8 * WIDTH + 4 * TOKENS)
    moved = DTYPE.itemsize * (2 * BATCH * TOKENS * WIDTH + 4 * WIDTH * (WIDTH + 1))
    return Cost(times * flops, times * moved, pipe="bf16" if ON_GPU else "fp32")


CANDIDATES = {"written-out": SelfAttention(written_out)}
if ON_GPU:
    from kernels.attention import attention

    CANDIDATES["ridgeline"] = SelfAttention(attention)

BENCHMARK = harness.Benchmark(
    name="self-attention",
    candidates=CANDIDATES,
    reference=SelfAttention(F.scaled_dot_product_attention),
    baselines=("eager", "compile", "flash", hugging_face(clip)),
    inputs=lambda device, generator: torch.randn(BATCH, TOKENS, WIDTH, dtype=DTYPE, device=device, generator=generator),
    cost=cost,
    items=lambda inputs: BATCH * TOKENS,
    unit="tokens",
)

if __name__ == "__main__":
    BENCHMARK.run()

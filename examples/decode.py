"""Greedy decoding with a cache of keys and values, on these kernels.

    python -m examples.decode                           # from the checkout's root

The whole prompt is computed in one pass. Then each new token is one row: it is rotated in place at its position, and
attends to the rows of the cache, which are read without a copy. The tokens are compared with those of a decoder without
a cache, which computes the whole sequence again for each token.
"""

import argparse
import os
import time

import torch
from torch import nn

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported

from examples.llama_block import SIZES, LlamaBlock, Sizes  # noqa: E402
from kernels.attention import attention  # noqa: E402
from kernels.nn import RMSNorm  # noqa: E402
from kernels.rope import rope  # noqa: E402

VOCABULARY = {"tiny": 64, "llama-3-8b": 32000}


class Cache:
    """Keys and values of one block, [B, heads, tokens, D], of which the first `length` rows are there."""

    def __init__(self, block: LlamaBlock, batch: int, tokens: int) -> None:
        attn, weight = block.self_attn, block.self_attn.k_proj.weight
        self.k, self.v = weight.new_empty(2, batch, attn.num_kv_heads, tokens, attn.head_dim).unbind()
        self.length = 0

    def extended(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """With these rows behind its own. Returns all that are there, without a copy."""
        end = self.length + k.shape[2]
        self.k[:, :, self.length : end], self.v[:, :, self.length : end] = k, v
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]


class Decoder(nn.Module):
    """Embedding, blocks, norm, and a projection to the vocabulary."""

    def __init__(self, sizes: Sizes, vocabulary: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, sizes.hidden_size)
        self.blocks = nn.ModuleList(LlamaBlock(sizes) for _ in range(layers))
        self.norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.head = nn.Linear(sizes.hidden_size, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of all tokens, without a cache."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def next_token(self, ids: torch.Tensor, caches: list[Cache]) -> torch.Tensor:
        """[B, 1]: the most likely token after `ids` [B, S], which come after those in the caches."""
        x = self.embedding(ids)
        for block, cache in zip(self.blocks, caches, strict=True):
            normed, x = block.post_attention_layernorm(attended(block, block.input_layernorm(x), cache), x)
            x = x + block.mlp(normed)
        return self.head(self.norm(x[:, -1:])).argmax(-1)


def attended(block: LlamaBlock, x: torch.Tensor, cache: Cache) -> torch.Tensor:
    """The block's attention over the cache, to which it adds the rows of x."""
    attn, start = block.self_attn, cache.length
    q, k, v = (p(x).unflatten(-1, (-1, attn.head_dim)) for p in (attn.q_proj, attn.k_proj, attn.v_proj))
    positions = torch.arange(start, start + x.shape[1], device=x.device)
    cos, sin = attn.rotary.tables(x.device, start + x.shape[1])
    q, k = rope(q, k, cos, sin, position_ids=positions, inplace=True)
    keys, values = cache.extended(k.transpose(1, 2), v.transpose(1, 2))
    out = attention(q.transpose(1, 2), keys, values, causal=True)  # the last query sees all keys
    return attn.o_proj(out.transpose(1, 2).flatten(2))


@torch.no_grad()
def generate(model: Decoder, prompt: torch.Tensor, count: int) -> torch.Tensor:
    """[B, count]: the most likely continuation of prompt [B, S]."""
    batch, length = prompt.shape
    caches = [Cache(block, batch, length + count) for block in model.blocks]
    found = [model.next_token(prompt, caches)]
    while len(found) < count:
        found.append(model.next_token(found[-1], caches))
    return torch.cat(found, 1)


@torch.no_grad()
def generate_anew(model: Decoder, prompt: torch.Tensor, count: int) -> torch.Tensor:
    """The same without a cache."""
    ids = prompt
    for _ in range(count):
        ids = torch.cat((ids, model(ids)[:, -1:].argmax(-1)), 1)
    return ids[:, prompt.shape[1] :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="llama-3-8b" if ON_GPU else "tiny")
    parser.add_argument("--layers", type=int, default=8 if ON_GPU else 1)
    parser.add_argument("--prompt", type=int, default=1000 if ON_GPU else 5, help="tokens")
    parser.add_argument("--tokens", type=int, default=64 if ON_GPU else 4)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    vocabulary = VOCABULARY[arguments.size]
    model = Decoder(SIZES[arguments.size], vocabulary, arguments.layers)
    model = model.to("cuda" if ON_GPU else "cpu", torch.bfloat16 if ON_GPU else torch.float32)
    prompt = torch.randint(vocabulary, (1, arguments.prompt), device=model.head.weight.device)
    found = generate(model, prompt, arguments.tokens)
    same = (found == generate_anew(model, prompt, arguments.tokens)).float().mean().item()
    print(f"{100 * same:.0f} % of {arguments.tokens} tokens are the same as without a cache")
    if ON_GPU:
        torch.cuda.synchronize()
        began = time.perf_counter()
        generate(model, prompt, arguments.tokens)
        torch.cuda.synchronize()
        print(f"{arguments.tokens / (time.perf_counter() - began):.0f} tokens/s with a prompt of {arguments.prompt}")


if __name__ == "__main__":
    main()

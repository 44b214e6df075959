"""Makes a Hugging Face model use these kernels, with one line.

    python -m examples.patch_a_model                    # from the checkout's root; needs transformers

A small Llama with random weights is trained for some steps unpatched, and again from the same weights after
`ridgeline.patch`: the losses must agree. --model trains a pretrained model instead.
"""

import argparse
import copy
import os
import time

import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported

from kernels.patch import patch, patched, unpatch  # noqa: E402

SIZES = {
    "tiny": dict(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    ),
    "llama-1b": dict(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=4096,
    ),
}


def model_of(name: str | None, size: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name)
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES[size], attn_implementation="sdpa"))


def trained(model: torch.nn.Module, steps: int, batch: int, tokens: int) -> tuple[list[float], float]:
    """The loss of each step on the same random tokens, and tokens a second without the first step."""
    device = next(model.parameters()).device
    source = torch.Generator().manual_seed(1)
    ids = torch.randint(model.config.vocab_size, (batch, tokens), generator=source).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses, began = [], 0.0
    for step in range(steps):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the GPU
        began = time.perf_counter() if step == 0 else began
    return losses, (steps - 1) * batch * tokens / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or folder of a pretrained model")
    parser.add_argument("--size", choices=tuple(SIZES), default="llama-1b" if ON_GPU else "tiny")
    parser.add_argument("--steps", type=int, default=20 if ON_GPU else 4)
    parser.add_argument("--batch", type=int, default=4 if ON_GPU else 2)
    parser.add_argument("--tokens", type=int, default=2048 if ON_GPU else 9)
    arguments = parser.parse_args()
    sizes = arguments.steps, arguments.batch, arguments.tokens
    plain = model_of(arguments.model, arguments.size).to(
        "cuda" if ON_GPU else "cpu", torch.bfloat16 if ON_GPU else torch.float32
    )
    ours = patch(copy.deepcopy(plain))
    print("patched:", ", ".join(f"{count} × {op}" for op, count in patched(ours).items()))
    expected, plain_rate = trained(plain, *sizes)
    del plain
    losses, rate = trained(ours, *sizes)
    apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    print(f"losses {losses[0]:.4f} to {losses[-1]:.4f}, at most {apart:.1e} from those of the unpatched model")
    if ON_GPU:
        print(f"{rate:.0f} tokens/s, plain {plain_rate:.0f}: {rate / plain_rate:.2f}×")
    unpatch(ours)
    print("patched after unpatch:", sum(patched(ours).values()))


if __name__ == "__main__":
    main()

"""A small GPT trained with compressed gradients, beside the same without: what does compression cost in loss?

    torchrun --nproc-per-node 2 examples/gradient_compression.py --steps 2000 --seeds 0 1 2 --out losses.json

The text is drawn from a random Markov chain over two characters, so that its entropy bounds the loss from below. Every
kind starts from the same weights and sees the same batches. Without GPUs the processes are the CPU's, over gloo, the
model is tiny, and the kernels run in Triton's interpreter.
"""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported

try:
    from ridgeline.gradient_compression import CompressState, compress_hook, release
except ImportError:  # in a checkout
    from kernels.gradient_compression import CompressState, compress_hook, release

KINDS = ("none", "int8", "fp8", "int4", "topk", "powersgd")
CHARACTERS = 64
LAYERS, WIDTH, HEADS, CONTEXT, BATCH = (4, 256, 4, 256, 32) if ON_GPU else (1, 48, 2, 16, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHARACTERS, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.characters(text[:, :-1]) + self.positions
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


class Text:
    """Batches of a language in which each character depends on the two before it."""

    def __init__(self, seed: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(seed)
        logits = 3 * torch.randn(CHARACTERS, CHARACTERS, CHARACTERS, generator=generator)
        self._table = logits.softmax(-1).to(device)
        self._seed, self._device = seed, device

    def batch(self, number: int, rows: int) -> torch.Tensor:
        """[rows, CONTEXT + 1], another for each number."""
        generator = torch.Generator(self._device).manual_seed(1_000_003 * self._seed + number)
        text = torch.randint(CHARACTERS, (rows, CONTEXT + 1), generator=generator, device=self._device)
        draws = torch.rand(rows, CONTEXT + 1, generator=generator, device=self._device)
        cumulative = self._table.cumsum(-1)
        for place in range(2, CONTEXT + 1):
            share = cumulative[text[:, place - 2], text[:, place - 1]]
            following = torch.searchsorted(share, draws[:, place : place + 1]).clamp_(max=CHARACTERS - 1)
            text[:, place] = following[:, 0]
        return text


def train(kind: str, steps: int, texts: list[torch.Tensor], held_out: torch.Tensor, seed: int) -> dict[str, float]:
    """Trains one model; its loss at the end on text that it has not seen, and the time of a step."""
    torch.manual_seed(seed)
    model = GPT().to(held_out.device)
    ddp = nn.parallel.DistributedDataParallel(model)
    if kind != "none":
        warmup = steps // 10 if kind in ("topk", "powersgd") else 0  # as sparse or low-rank gradients want it
        state = CompressState(kind=kind, error_feedback=True, warmup_steps=warmup)
        ddp.register_comm_hook(state, compress_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=max(steps, 2))
    begin = time.perf_counter()
    for step in range(steps):
        optimizer.zero_grad()
        ddp(texts[step % len(texts)]).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        loss = float(model(held_out))
    return {"loss": loss, "ms_a_step": 1e3 * (time.perf_counter() - begin) / max(steps, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS), help="beside none, which always runs")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", help="a file for the losses, as JSON")
    options = parser.parse_args()
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo")
    device = torch.device("cuda", torch.cuda.current_device()) if ON_GPU else torch.device("cpu")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    kinds = ["none", *(kind for kind in KINDS if kind in options.kind and kind != "none")]
    results: dict[str, dict[int, dict[str, float]]] = {kind: {} for kind in kinds}
    for seed in options.seeds:
        text = Text(seed, device)
        texts = [text.batch(1 + rank + ranks * number, BATCH) for number in range(min(options.steps, 500))]
        held_out = text.batch(0, 4 * BATCH)
        for kind in kinds:
            results[kind][seed] = train(kind, options.steps, texts, held_out, seed)
            if rank == 0:
                loss, plain = results[kind][seed]["loss"], results["none"][seed]["loss"]
                step = results[kind][seed]["ms_a_step"]
                print(f"seed {seed}  {kind:9}  loss {loss:.4f}  {loss - plain:+.4f}  {step:.1f} ms a step", flush=True)
    if rank == 0 and options.out:
        with open(options.out, "w") as file:
            json.dump({"ranks": ranks, "steps": options.steps, "results": results}, file, indent=1)
    release()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

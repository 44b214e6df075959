"""Trains a small GPT with and without compressed gradients, and compares the losses.

    torchrun --nproc-per-node 2 -m examples.gradient_compression --steps 2000 --seeds 0 1 2 --out losses.json

The text is drawn from a random Markov chain over two characters, so that its entropy bounds the loss from below. Every
kind of compression starts from the same weights and sees the same batches; no batch is repeated. If the file of --out
exists, the run continues it: seeds and kinds that it contains are not trained again, so that seeds may be spread over
several calls. `python -m harness report` makes a page of reports/<gpus>/training/gradient_compression.json. Without a
GPU the ranks are CPU processes over gloo, the model is tiny, and the kernels run in Triton's interpreter.
"""

import argparse
import json
import os
import time
from typing import Any

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
LAYERS, WIDTH, HEADS, CONTEXT, BATCH = (2, 256, 4, 128, 16) if ON_GPU else (1, 48, 2, 16, 4)
HELD_OUT = 16 * BATCH  # rows
POINTS = 40  # of a curve
WARM_UP = 20  # steps that are not timed, of those that compress: the first ones compile kernels and make connections


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

    def rows(self, number: int, rows: int) -> torch.Tensor:
        """[rows, CONTEXT + 1], others for each number."""
        generator = torch.Generator(self._device).manual_seed(1_000_003 * self._seed + number)
        text = torch.randint(CHARACTERS, (rows, CONTEXT + 1), generator=generator, device=self._device)
        draws = torch.rand(rows, CONTEXT + 1, generator=generator, device=self._device)
        cumulative = self._table.cumsum(-1)
        for place in range(2, CONTEXT + 1):
            share = cumulative[text[:, place - 2], text[:, place - 1]]
            following = torch.searchsorted(share, draws[:, place : place + 1].contiguous()).clamp_(max=CHARACTERS - 1)
            text[:, place] = following[:, 0]
        return text


def train(kind: str, texts: tuple[torch.Tensor, ...], held_out: torch.Tensor, seed: int) -> dict[str, Any]:
    """Trains one model: its loss at the end on text that it has not seen, that in training, the time of a step. A step
    is timed once compression has begun and is warm; if there are too few steps for that, all are."""
    steps, warmup = len(texts), 0
    torch.manual_seed(seed)
    model = GPT().to(held_out.device)
    ddp = nn.parallel.DistributedDataParallel(model)
    if kind != "none":
        warmup = steps // 10 if kind in ("topk", "powersgd") else 0  # as sparse or low-rank gradients want it
        state = CompressState(kind=kind, error_feedback=True, warmup_steps=warmup)
        ddp.register_comm_hook(state, compress_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=ON_GPU)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=max(steps, 2))
    losses = torch.zeros(steps, device=held_out.device)  # read at the end: the host never waits for a step
    begin, timed = time.perf_counter(), steps
    for step, text in enumerate(texts):
        if step == warmup + WARM_UP:
            synchronize()
            begin, timed = time.perf_counter(), steps - step
        optimizer.zero_grad()
        loss = ddp(text)
        loss.backward()
        losses[step] = loss.detach()
        optimizer.step()
        schedule.step()
    synchronize()
    seconds = time.perf_counter() - begin
    dist.all_reduce(losses)
    curve = curve_of((losses / dist.get_world_size()).tolist())
    with torch.no_grad():
        loss = float(model(held_out))
    return {"loss": loss, "ms_a_step": 1e3 * seconds / timed, "curve": curve}


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def curve_of(losses: list[float]) -> list[tuple[int, float]]:
    """Up to POINTS means over steps in a row, each with its last step."""
    width = -(-len(losses) // POINTS)
    parts = [losses[at : at + width] for at in range(0, len(losses), width)]
    return [(min((n + 1) * width, len(losses)), sum(part) / len(part)) for n, part in enumerate(parts)]


def opened(path: str | None, head: dict[str, Any]) -> dict[str, Any]:
    """The record of `path`, of these settings; a new one where there is none. ValueError for other settings."""
    if path is None or not os.path.exists(path):
        return {**head, "results": {}}
    with open(path) as file:
        record = json.load(file)
    if other := {name: record.get(name) for name, value in head.items() if record.get(name) != value}:
        raise ValueError(f"{path} is of other settings: {other}, and not {head}")
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS), help="besides none, which always runs")
    parser.add_argument("--steps", type=int, default=2000 if ON_GPU else 10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", help="file for the losses, as JSON; continued if it exists")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be 1 or more")
    if "RANK" not in os.environ:
        parser.error("start this with torchrun --nproc-per-node 2 -m examples.gradient_compression")
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_float32_matmul_precision("high")
    dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo")
    device = torch.device("cuda", torch.cuda.current_device()) if ON_GPU else torch.device("cpu")
    kinds = ["none", *(kind for kind in KINDS if kind in options.kind and kind != "none")]
    record = opened(options.out, head_of(options.steps, device))
    dist.barrier()  # every rank has read the file before the first one writes it
    for seed in options.seeds:
        run_seed(seed, kinds, record, options, device)
    release()
    dist.destroy_process_group()


def head_of(steps: int, device: torch.device) -> dict[str, Any]:
    """What the losses of one file have in common."""
    return {
        "schema": 1,
        "device": torch.cuda.get_device_name(device) if ON_GPU else "CPU",
        "torch": torch.__version__,
        "ranks": dist.get_world_size(),
        "steps": steps,
        "model": {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "context": CONTEXT, "batch": BATCH},
    }


def run_seed(
    seed: int, kinds: list[str], record: dict[str, Any], options: argparse.Namespace, device: torch.device
) -> None:
    """Trains with what the record lacks of a seed, and writes it down after each."""
    results, rank = record["results"], dist.get_rank()
    if not (missing := [kind for kind in kinds if str(seed) not in results.get(kind, {})]):
        return
    text = Text(seed, device)
    texts, held_out = text.rows(1 + rank, options.steps * BATCH).split(BATCH), text.rows(0, HELD_OUT)
    for kind in missing:
        found = results.setdefault(kind, {})[str(seed)] = train(kind, texts, held_out, seed)
        if rank == 0:
            over = found["loss"] - results["none"][str(seed)]["loss"]
            words = f"seed {seed}  {kind:9}  loss {found['loss']:.4f}  {over:+.4f}  {found['ms_a_step']:.1f} ms a step"
            print(words, flush=True)
            if options.out:
                with open(options.out, "w") as file:
                    json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()

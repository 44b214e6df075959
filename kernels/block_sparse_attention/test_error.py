"""The error of block-sparse attention compared with dense attention on structured scores: a report and its test.

`python -m kernels.block_sparse_attention.test_error` prints the table as Markdown: in bf16 by the kernel on a GPU,
without one in fp32 by the reference, on shorter sequences.

The scores imitate a text with topics. Each span of consecutive tokens has a topic, and its queries and keys point in
the direction of that topic. Topics recur, so a query gives most of its attention to a few spans anywhere in the text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from . import block_sparse_attention
from .masks import best_blocks, block_shares, sliding_window_blocks, threshold_blocks, visible_blocks
from .reference import block_sparse_attention_reference

if torch.cuda.is_available():
    DEVICE, ATTENTION, DTYPE = "cuda", block_sparse_attention, torch.bfloat16
    LENGTH, HEADS, DIM, BLOCK = 8192, 8, 128, 128
else:
    DEVICE, ATTENTION, DTYPE = "cpu", block_sparse_attention_reference, torch.float32
    LENGTH, HEADS, DIM, BLOCK = 2048, 2, 64, 64
SPARSITIES = (0.5, 0.75, 0.9)
MASKS = ("best", "threshold", "window", "random")


def topics(seed: int = 0, count: int = 16, score: float = 6.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns q, k, v. Spans of 1/2 to 2 blocks are not aligned with blocks. The mean score is `score` for a query and
    a key of the same topic, else 0, with noise of standard deviation 1 or more."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    lengths = torch.randint(BLOCK // 2, 2 * BLOCK, (2 * LENGTH // BLOCK,), generator=generator)
    topic = torch.randint(count, lengths.shape, generator=generator).repeat_interleave(lengths)[:LENGTH]
    direction = torch.nn.functional.normalize(normal(1, HEADS, count, DIM), dim=-1) * math.sqrt(score * math.sqrt(DIM))
    content = normal(1, HEADS, count, DIM)
    q, k, v = (centre[:, :, topic] + normal(1, HEADS, LENGTH, DIM) for centre in (direction, direction, content))
    return q.to(DEVICE, DTYPE), k.to(DEVICE, DTYPE), v.to(DEVICE, DTYPE)


def make(name: str, q: torch.Tensor, k: torch.Tensor, sparsity: float, shares: torch.Tensor) -> torch.Tensor:
    """Returns a mask that drops the fraction `sparsity` of the blocks. "best" uses the exact attention, `shares`."""
    blocks = LENGTH // BLOCK
    if name == "threshold":
        return threshold_blocks(q, k, sparsity=sparsity, block_size=BLOCK)
    if name == "window":
        side = round((1 - sparsity) * blocks / 2)
        return sliding_window_blocks(blocks, blocks, side, side, device=q.device).expand(shares.shape)
    visible = visible_blocks(LENGTH, LENGTH, BLOCK, False, device=q.device)
    scores = shares if name == "best" else torch.rand(shares.shape, device=q.device)
    return best_blocks(scores, sparsity=sparsity, visible=visible, diagonal=False)


def errors() -> Iterator[tuple[float, str, float, float, float]]:
    """Yields (requested sparsity, mask, fraction of the blocks dropped, fraction of the attention kept, relative RMS
    error of the output compared with dense attention in fp32)."""
    q, k, v = topics()
    shares = block_shares(q, k, block_size=BLOCK)
    dense = torch.softmax(q.float() @ k.float().transpose(-1, -2) / math.sqrt(DIM), dim=-1) @ v.float()
    for sparsity in SPARSITIES:
        for name in MASKS:
            mask = make(name, q, k, sparsity, shares)
            out = ATTENTION(q, k, v, mask, block_size=BLOCK)
            error = (out.float() - dense).norm() / dense.norm()
            kept = (shares * mask).sum() / shares.sum()
            yield sparsity, name, 1 - mask.float().mean().item(), kept.item(), error.item()


def report(rows: Iterable[tuple[float, str, float, float, float]]) -> str:
    """Returns the rows of `errors` as a Markdown table."""
    short = str(DTYPE).removeprefix("torch.")
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else "the reference on the CPU"
    lines = [
        f"{LENGTH} tokens, {HEADS} heads of {DIM}, blocks of {BLOCK}, {short}, {where}.",
        "",
        "| sparsity | mask | blocks dropped | attention kept | error of the output |",
        "|---|---|--:|--:|--:|",
    ]
    for sparsity, name, dropped, kept, error in rows:
        lines.append(f"| {sparsity:.0%} | {name} | {dropped:.1%} | {kept:.1%} | {error:.3g} |")
    return "\n".join(lines)


def test_the_threshold_is_near_the_best_choice():
    """It is also far better than random blocks at every sparsity, and more blocks are never worse."""
    rows = list(errors())
    print(f"\n{report(rows)}")
    found = {(sparsity, name): (kept, error) for sparsity, name, _, kept, error in rows}
    for sparsity in SPARSITIES:
        kept, error = found[sparsity, "threshold"]
        assert kept >= 0.9 * found[sparsity, "best"][0]
        assert error <= 0.5 * found[sparsity, "random"][1]
    for name in ("best", "threshold"):
        series = [found[sparsity, name][1] for sparsity in SPARSITIES]
        assert series == sorted(series)


if __name__ == "__main__":
    print(report(errors()))

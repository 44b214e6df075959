"""The masks of `masks` and `gate`: plain PyTorch, except the training of a gate through the kernel."""

from __future__ import annotations

import math

import pytest
import torch

from . import block_sparse_attention
from .gate import BlockGate
from .masks import (
    best_blocks,
    big_bird_blocks,
    block_shares,
    pooled,
    sliding_window_blocks,
    strided_blocks,
    threshold_blocks,
    visible_blocks,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE)


def drawn(mask: torch.Tensor) -> list[str]:
    return ["".join(".x"[int(kept)] for kept in row) for row in mask.tolist()]


def test_a_sliding_window():
    assert drawn(sliding_window_blocks(4, 4, 1, 0)) == ["x...", "xx..", ".xx.", "..xx"]
    assert drawn(sliding_window_blocks(4, 4, 0, 1, 1)) == ["xxxx", "xxx.", "x.xx", "x..x"]
    assert drawn(sliding_window_blocks(2, 4, 1, 0)) == [".xx.", "..xx"]  # the last row is aligned with the last column


def test_strided_blocks():
    assert drawn(strided_blocks(5, 5, 2, 3)) == ["x.x..", "xxx..", ".xx..", "..xx.", "..xxx"]


def test_big_bird_blocks():
    mask = big_bird_blocks(12, 12, 1, 1, 2, seed=3, device=DEVICE)
    assert torch.equal(mask, big_bird_blocks(12, 12, 1, 1, 2, seed=3, device=DEVICE))
    assert not torch.equal(mask, big_bird_blocks(12, 12, 1, 1, 2, seed=4, device=DEVICE))
    fixed = sliding_window_blocks(12, 12, 1, 1, 1, device=DEVICE)
    assert (mask | ~fixed).all()
    assert ((mask & ~fixed).sum(-1) <= 2).all()
    assert mask.sum() > fixed.sum()


@pytest.mark.parametrize(("queries", "keys"), [(130, 130), (70, 200), (200, 70)])
def test_visible_blocks(queries, keys):
    seen = torch.arange(keys) <= torch.arange(queries)[:, None] + keys - queries
    visible = visible_blocks(queries, keys, 64, True)
    for i, j in torch.cartesian_prod(torch.arange(visible.shape[0]), torch.arange(visible.shape[1])).tolist():
        assert visible[i, j] == seen[i * 64 : (i + 1) * 64, j * 64 : (j + 1) * 64].any()
    assert visible_blocks(queries, keys, 64, False).all()


def test_means_of_ragged_blocks():
    x = normal(2, 3, 150, 5)
    expected = torch.stack([x[:, :, i : i + 64].mean(2) for i in (0, 64, 128)], dim=2)
    torch.testing.assert_close(pooled(x, 64), expected)
    assert pooled(x.half(), 64).dtype == torch.float32
    assert pooled(x[:, :, :0], 64).shape == (2, 3, 0, 5)


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("causal", [False, True])
def test_the_number_of_blocks_is_exact(sparsity, causal):
    """In each head, for any scores, also equal ones."""
    visible = visible_blocks(600, 700, 64, causal, device=DEVICE)
    rows = visible.shape[0]
    for scores in (normal(2, 3, *visible.shape), torch.zeros(2, 3, *visible.shape, device=DEVICE)):
        kept = best_blocks(scores, sparsity=sparsity, visible=visible, diagonal=causal)
        assert not (kept & ~visible).any()
        assert kept.any(-1).all()
        wanted = round((1 - sparsity) * int(visible.sum()))
        least = int(kept.sum((-1, -2)).min())
        assert least == int(kept.sum((-1, -2)).max()) == wanted or rows <= least <= 2 * rows
        if causal:
            last = visible.sum(-1) - 1
            assert kept[:, :, torch.arange(rows), last].all()
        best = scores.masked_fill(~visible, -math.inf).argmax(-1, keepdim=True)
        assert kept.gather(-1, best).all()


def test_the_best_are_kept():
    scores = torch.tensor([[[[5.0, 4.0, 3.0], [1.0, 2.0, 0.0]]]])
    visible = torch.ones(2, 3, dtype=torch.bool)
    assert drawn(best_blocks(scores, sparsity=0.5, visible=visible, diagonal=False)[0, 0]) == ["xx.", ".x."]
    assert drawn(best_blocks(scores, sparsity=0.5, visible=visible, diagonal=True)[0, 0]) == ["x.x", ".xx"]
    with pytest.raises(ValueError, match="sparsity must be from 0 to 1, got 90"):
        best_blocks(scores, sparsity=90, visible=visible, diagonal=False)


def test_rows_that_see_nothing_keep_nothing():
    q, k = normal(1, 2, 200, 8), normal(1, 1, 70, 8)
    kept = threshold_blocks(q, k, sparsity=0.5, block_size=64, causal=True)
    assert kept.shape == (1, 2, 4, 2)
    assert not kept[:, :, :2].any()  # queries 0 to 129 are aligned with positions before the first key
    assert kept[:, :, 2:].any(-1).all()


def test_the_threshold_finds_where_the_attention_is():
    """Queries and keys of a block point in one of eight directions. Each row of blocks should keep those of its own."""
    directions = 12 * torch.eye(8, 16, device=DEVICE)
    q, k = (directions.repeat_interleave(64, 0)[None, None] + 0.1 * normal(1, 2, 512, 16) for _ in range(2))
    shuffled = torch.randperm(8, device=DEVICE)
    k = k.unflatten(2, (8, 64))[:, :, shuffled].flatten(2, 3)
    kept = threshold_blocks(q, k, sparsity=7 / 8, block_size=64)
    assert torch.equal(kept, (shuffled == torch.arange(8, device=DEVICE)[:, None]).expand(1, 2, 8, 8))
    shares = block_shares(q, k, block_size=64)
    assert shares[kept].min() > 0.9
    torch.testing.assert_close(shares.sum(-1), torch.ones(1, 2, 8, device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_shares_of_ragged_causal_attention(dtype):
    q, k = normal(1, 2, 100, 8).to(dtype), normal(1, 1, 150, 8).to(dtype)
    shares = block_shares(q, k, block_size=64, causal=True)
    assert shares.shape == (1, 2, 2, 3)
    torch.testing.assert_close(shares.sum(-1), torch.ones(1, 2, 2, device=DEVICE))
    assert not (shares * ~visible_blocks(100, 150, 64, True, device=DEVICE)).any()


def test_shares_are_of_the_scaled_scores():
    q, k = normal(1, 2, 64, 8), normal(1, 2, 128, 8)
    p = (0.3 * q @ k.transpose(-1, -2)).softmax(-1)
    want = p.unflatten(-1, (2, 64)).sum(-1).mean(-2, keepdim=True)
    torch.testing.assert_close(block_shares(q, k, block_size=64, scale=0.3), want)


def test_masks_are_of_the_blocks_that_the_attention_has_by_default():
    q, k = normal(1, 2, 258, 8), normal(1, 1, 255, 8)
    gated = BlockGate(2, 1, 8, sparsity=0.5, device=DEVICE)(q, k)
    for made in (threshold_blocks(q, k, sparsity=0.5), block_shares(q, k), gated.mask):
        assert made.shape == (1, 2, 3, 2)
    assert block_sparse_attention(q, k, k, gated.mask).shape == q.shape


def gate(**options) -> BlockGate:
    torch.manual_seed(0)
    return BlockGate(2, 1, 8, gate_dim=4, block_size=64, device=DEVICE, **{"sparsity": 0.5, **options})


def test_a_gate_learns_through_the_bias_of_what_it_keeps():
    """The gradient of its parameters is that of the biased attention with the choice held fixed."""
    # 4 of 6 blocks are kept, in 3 rows: if each row kept only one, its bias would have no effect.
    module, wanted = gate(causal=True, sparsity=0.25), normal(1, 2, 130, 8)
    q, k, v = normal(1, 2, 130, 8), normal(1, 1, 130, 8), normal(1, 1, 130, 8)
    blocks = module(q, k)
    assert blocks.mask.shape == blocks.bias.shape == (1, 2, 3, 3)
    assert not blocks.mask.all()
    parameters = list(module.parameters())

    def loss(op) -> torch.Tensor:
        out = op(q, k, v, blocks.mask, block_size=64, causal=True, block_bias=blocks.bias)
        return (out - wanted).square().sum()

    from .reference import block_sparse_attention_reference

    mine = torch.autograd.grad(loss(block_sparse_attention), parameters, retain_graph=True)
    other = torch.autograd.grad(loss(block_sparse_attention_reference), parameters)
    for a, b in zip(mine, other, strict=True):
        assert b.abs().max() > 1e-4
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_a_gate_explores_in_training_alone():
    module, (q, k) = gate(explore=5.0), (normal(1, 2, 600, 8), normal(1, 1, 600, 8))
    assert not torch.equal(module(q, k).mask, module(q, k).mask)
    module.eval()
    assert torch.equal(module(q, k).mask, module(q, k).mask)


def test_a_gate_can_be_distilled():
    """A randomly initialised gate learns which blocks receive the attention in dense attention."""
    directions = 3 * torch.eye(8, device=DEVICE).repeat_interleave(64, 0)
    q, k = (directions[None, None] + 0.1 * normal(1, heads, 512, 8) for heads in (2, 1))
    module, shares = gate(sparsity=7 / 8), block_shares(q, k, block_size=64)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        loss = module.distillation(module(q, k).score, shares, 512, 512)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    kept = (module(q, k).mask * shares).sum() / shares.sum()
    assert kept > 0.9 * shares.topk(1, dim=-1).values.sum() / shares.sum()


def test_says_what_is_wrong_with_a_gate():
    with pytest.raises(ValueError, match="heads must be a multiple of kv_heads, got 3 and 2"):
        BlockGate(3, 2, 8, sparsity=0.5)
    with pytest.raises(ValueError, match="sparsity must be from 0 to 1, got -1"):
        BlockGate(2, 2, 8, sparsity=-1)

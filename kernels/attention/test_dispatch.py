"""What the dispatcher picks: versions, tiles, sections, splits and shares. Pure functions of sizes."""

from __future__ import annotations

import heapq
import itertools

import pytest
import torch

from . import band, cuda_backward, cuda_forward, delta, dispatch

CAPABILITIES = ((8, 0), (8, 6), (9, 0), (10, 0))
QUERY_TILES = [(64, 128), (128, 64), (128, 80)]  # of the backward in CUDA C++, with the width of the head


@pytest.mark.parametrize(
    ("queries", "keys", "kv_heads", "group", "version"),
    [
        (11000, 10000, 32, 1, "portable"),
        (205000, 200000, 8, 1, "portable"),
        (564, 64, 512, 1, "portable"),
        (512, 512, 128, 1, "portable"),
        (8192, 8192, 8, 8, "portable"),
        (1, 200000, 8, 1, "split"),
        (1, 32768, 64, 8, "split"),
        (564, 64000, 8, 1, "split"),
        (1, 64, 8, 1, "portable"),
        (1, 64, 8, 8, "split"),  # a group in one tile, though nothing is shared out
    ],
)
def test_version_by_shape(queries, keys, kv_heads, group, version):
    chosen, splits = dispatch.pick_forward("auto", torch.bfloat16, queries, keys, kv_heads, group, multiprocessors=132)
    assert chosen == version
    assert dispatch.pick_forward("auto", torch.float32, queries, keys, kv_heads, group, 132) == ("portable", 1)
    assert splits == 1 or (version == "split" and keys // splits >= 256)
    on_hopper = dispatch.pick_forward("auto", torch.bfloat16, queries, keys, kv_heads, group, 132, "cuda", dim=128)
    assert on_hopper == ({"portable": "cuda", "split": "split"}[version], splits)
    for forced in ("portable", "split"):
        assert dispatch.pick_forward(forced, torch.float32, queries, keys, kv_heads, group, 132)[0] == forced


def forward_config(dim, queries, keys, causal=False, heads=8):
    return dispatch.pick_cuda_config(dim, queries, keys, causal, heads, 132)


def test_blocks_of_keys_at_64():
    """112 are the fastest, but where they leave too much of the last block empty."""
    for block, several in ((64, (1, 64, 128, 192, 256, 512)), (112, (65, 112, 224, 448, 3000, 10_000, 200_000))):
        for keys in several:
            assert forward_config(64, 8192, keys).block_n == block
    assert forward_config(64, 8192, 128, causal=True).block_n == 112


@pytest.mark.parametrize(
    ("queries", "heads", "full", "causal_64", "causal_128"),
    [
        (2048, 8, 2, 2, 2),  # 88 tiles of 192 queries, 128 of 128
        (3000, 8, 3, 3, 2),  # 128 and 192
        (1024, 32, 2, 3, 2),  # 192 and 256: two rounds of either
        (4096, 8, 2, 3, 2),
        (8192, 8, 3, 3, 3),  # three rounds and four
        (200_000, 8, 3, 3, 3),
    ],
)
def test_two_consumers_where_tiles_are_few(queries, heads, full, causal_64, causal_128):
    for dim in (64, 128):
        assert forward_config(dim, queries, 2048, False, heads).consumers == full
    assert forward_config(64, queries, 2048, True, heads).consumers == causal_64
    assert forward_config(128, queries, 2048, True, heads).consumers == causal_128


def test_splits_fill_the_gpu():
    sizes = itertools.product((1, 8, 100, 564), (4096, 65536, 200_000), (1, 2, 8, 40), (64, 128))
    for rows, keys, heads, dim in sizes:
        splits = dispatch.pick_splits(rows, keys, heads, 132, dim)
        ctas = heads * -(-rows // dispatch.block_of_rows(rows)) * splits
        most = min(128, keys // 256) * heads
        assert 1 <= splits <= max(1, min(128, keys // 256))
        assert ctas >= min(0.75 * 264 if dim == 64 else 0.75 * 132, 0.8 * most)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_width_has_a_tile(dtype, capability):
    picks = (
        dispatch.pick_fwd_config,
        dispatch.pick_dkdv_config,
        dispatch.pick_dq_config,
        dispatch.pick_fused_config,
        lambda *kind: dispatch.pick_split_config(5, *kind),
    )
    for dim, banded, pick in itertools.product((1, 16, 24, 32, 64, 80, 96, 128, 256), (False, True), picks):
        config = pick(dim, banded, dtype, capability)
        assert dim <= config.block_d <= max(16, 2 * dim)
        assert delta.ROWS.value % config.block_m == 0
        # Scores, in fp32, over the threads: what is in registers beside the accumulators.
        assert config.block_m * config.block_n <= 64 * 32 * config.num_warps


def test_sections_keep_keys_in_l2():
    assert band.section(32, 1 << 20, banded=False) == 1
    assert band.section(32, 1 << 20, banded=True) == int(band.SECTION_BYTES) >> 20
    assert band.section(4, 1, banded=True) == 4
    assert band.section(4, 1 << 40, banded=True) == 1


def test_a_repeatable_backward_is_picked_where_it_is_wanted():
    assert dispatch.pick_backward("auto", "cuda") == "cuda"
    assert dispatch.pick_backward("auto", "cuda", repeatable=True) == "separate"
    assert dispatch.pick_backward("auto") == "separate"
    assert dispatch.pick_backward("fused", "cuda", repeatable=True) == "fused"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_the_forward_in_cuda_fits(dim, causal):
    for queries, keys, heads in itertools.product((1, 512, 8192), (1, 64, 512, 513, 200_000), (1, 32)):
        config = forward_config(dim, queries, keys, causal, heads)
        assert cuda_forward.shared_bytes(dim, config) <= 232_448
        assert config.block_n % 8 == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_shares_of_the_backward_in_cuda(dim, causal):
    for queries, keys, heads, group in itertools.product((1, 200, 8192), (1, 128, 4096, 200_000), (1, 8, 32), (1, 8)):
        config = dispatch.pick_cuda_bwd_config(queries, keys, dim, heads, group, causal, 132)
        blocks, tiles = heads * -(-keys // 128), group * -(-queries // config.queries)
        assert 1 <= config.section <= heads
        assert 0 <= config.shared <= blocks and 1 <= config.splits <= min(16, tiles)
        assert config.shared == 0 or (config.splits > 1 and not causal)
        assert config.alternate == (causal and group > 1)
        assert (dim, config.queries) in QUERY_TILES
        # Tiles of 80 have no rows of dQ that a single block could store.
        assert config.queries != 80 or (dim == 128 and keys > 128)
        assert config.queries % cuda_backward.helper_rows(config.queries) == 0
        rounds = blocks + config.shared * (config.splits - 1) > 132
        few, chains = tiles <= dispatch.CHAIN_TILES[dim], config.queries == (128 if dim == 64 else 64)
        assert config.chained == (chains and keys >= dispatch.CHAIN_KEYS[dim] and rounds and few)
        assert not config.chained or config.span == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dim", "queries", "keys", "heads", "chained"),
    [
        (64, 564, 64_000, 8, True),
        (64, 11_000, 10_000, 32, True),
        (64, 564, 1000, 512, True),
        (64, 2048, 2048, 8, False),  # fewer blocks than multiprocessors
        (64, 205_000, 200_000, 8, False),
        (64, 564, 128, 512, False),  # a single block of keys
        (128, 564, 64_000, 8, True),
        (128, 512, 4096, 128, True),  # rather than whole heads
        (128, 1024, 2048, 128, True),
        (128, 1025, 2048, 128, False),
        (128, 512, 2047, 128, False),
        (128, 564, 2048, 8, False),
    ],
)
def test_where_the_backward_in_cuda_is_chained(dim, queries, keys, heads, chained, causal):
    """Where there are more blocks and shares than multiprocessors, and few tiles of queries."""
    config = dispatch.pick_cuda_bwd_config(queries, keys, dim, heads, 1, causal, 132)
    assert config.chained == chained
    assert not chained or (config.queries == (128 if dim == 64 else 64) and not config.whole_heads and not config.span)


@pytest.mark.parametrize(
    ("dim", "queries", "keys", "group", "causal", "rounds", "tile"),
    [
        (64, 8192, 200_000, 1, False, 9, 128),
        (128, 8192, 8192, 1, False, 9, 80),
        (128, 8192, 129, 8, False, 9, 80),
        (128, 8192, 128, 1, False, 1, 64),
        (128, 2048, 2048, 1, True, 9, 64),
        (128, 2048, 2048, 1, True, 2, 80),
        (128, 512, 512, 1, True, 1, 64),
        (128, 4096, 4096, 1, True, 9, 80),
        (128, 8192, 8192, 8, True, 2, 64),
        (128, 8192, 8192, 8, True, 1, 80),
        (128, 16_384, 16_384, 8, True, 9, 80),
        (128, 1000, 1500, 1, False, 9, 80),
        (128, 512, 4096, 4, False, 9, 64),  # 8 tiles of 64, 560 rows in tiles of 80
        (128, 1, 4096, 1, True, 1, 64),
    ],
)
def test_queries_of_a_tile_of_the_backward_in_cuda(dim, queries, keys, group, causal, rounds, tile):
    assert dispatch.cuda_query_tile(dim, queries, keys, group, causal, rounds) == tile


def schedule(keys: int, heads: int, section: int, tile: int, multiprocessors: int) -> int:
    """Tiles until the last CTA of a causal backward is done, which start in their order as multiprocessors become free.
    3 for the start of each."""
    tiles, free = -(-keys // tile), [0] * multiprocessors
    for first in range(0, heads, section):
        for block in range(-(-keys // 128)):
            for _ in range(min(section, heads - first)):
                heapq.heapreplace(free, free[0] + tiles - block * 128 // tile + 3)
    return max(free)


@pytest.mark.parametrize("multiprocessors", [78, 114, 132])
@pytest.mark.parametrize("keys", [2048, 3000, 4096, 8192, 16_384])
def test_sections_of_the_backward_are_balanced(keys, multiprocessors):
    """Up to eight rounds of CTAs: what is picked ends with the best of equal shares or up to 16 % later, in the mean 3.
    Sections by L2 alone would end up to 50 % later."""
    behind = []
    for heads in range(1, 8 * multiprocessors * 128 // keys):
        config = dispatch.pick_cuda_bwd_config(keys, keys, 128, heads, 1, True, multiprocessors)
        if config.whole_heads:
            continue
        ends = {
            section: schedule(keys, heads, section, config.queries, multiprocessors)
            for section in {config.section, *(-(-heads // n) for n in range(1, 5))}
        }
        behind.append(ends[config.section] / min(ends.values()) - 1)
    assert max(behind) < 0.16 and sum(behind) < 0.03 * len(behind)


@pytest.mark.parametrize(("keys", "section"), [(2048, 8), (4096, 4), (8192, 2), (16_384, 1), (100_000, 1)])
def test_a_section_of_shared_heads_has_a_block_for_each_multiprocessor(keys, section):
    config = dispatch.pick_cuda_bwd_config(keys, keys, 128, 8, 8, True, 132)
    assert (config.section, config.alternate) == (section, True)

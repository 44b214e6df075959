"""The `pick_*` functions: versions, tiles, sections and splits. Pure functions of sizes."""

from __future__ import annotations

import itertools

import pytest
import torch

from .configs import candidates
from .configs import forward as configs
from .configs import portable as tiles
from .portable import band, delta
from .sm90 import forward, fp8

CAPABILITIES = ((8, 0), (8, 6), (9, 0), (10, 0))


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
        (1, 64, 8, 8, "split"),  # the query heads of a group in one tile, though there is one split
    ],
)
def test_version_by_shape(queries, keys, kv_heads, group, version):
    chosen, splits = configs.pick_forward("auto", torch.bfloat16, queries, keys, kv_heads, group, sms=132)
    assert chosen == version
    assert configs.pick_forward("auto", torch.float32, queries, keys, kv_heads, group, 132) == ("portable", 1)
    assert splits == 1 or (version == "split" and keys // splits >= 256)
    on_hopper = configs.pick_forward("auto", torch.bfloat16, queries, keys, kv_heads, group, 132, "cuda", dim=128)
    assert on_hopper == ({"portable": "cuda", "split": "split"}[version], splits)
    for forced in ("portable", "split"):
        assert configs.pick_forward(forced, torch.float32, queries, keys, kv_heads, group, 132)[0] == forced


def forward_config(dim, queries, keys, causal=False, heads=8):
    return configs.pick_cuda_config(dim, queries, keys, causal, heads, 132)


def test_blocks_of_keys_at_64():
    """Blocks of 112 keys are the fastest, unless they pad the last block too much."""
    for block, several in ((64, (1, 64, 128, 192, 256, 512)), (112, (65, 112, 224, 448, 3000, 10_000, 200_000))):
        for keys in several:
            assert forward_config(64, 8192, keys).block_n == block
    assert forward_config(64, 8192, 128, causal=True).block_n == 112


@pytest.mark.parametrize(
    ("queries", "heads", "full", "causal_64", "causal_128"),
    [
        (2048, 8, 2, 2, 2),  # 88 tiles of 192 queries, 128 of 128
        (3000, 8, 3, 3, 2),  # 128 and 192
        (1024, 32, 2, 3, 2),  # 192 and 256: two waves of either
        (4096, 8, 2, 3, 2),
        (8192, 8, 3, 3, 3),  # three waves and four
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
        splits = configs.pick_splits(rows, keys, heads, 132, dim)
        ctas = heads * -(-rows // tiles.block_of_rows(rows)) * splits
        most = min(128, keys // 256) * heads
        assert 1 <= splits <= max(1, min(128, keys // 256))
        assert ctas >= min(0.75 * 264 if dim == 64 else 0.75 * 132, 0.8 * most)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_width_has_a_tile(dtype, capability):
    picks = (
        tiles.pick_fwd_config,
        tiles.pick_dkdv_config,
        tiles.pick_dq_config,
        tiles.pick_fused_config,
        lambda *kind: tiles.pick_split_config(5, *kind),
    )
    for dim, banded, pick in itertools.product((1, 16, 24, 32, 64, 80, 96, 128, 256), (False, True), picks):
        config = pick(dim, banded, dtype, capability)
        assert dim <= config.block_d <= max(16, 2 * dim)
        assert delta.ROWS.value % config.block_m == 0
        # fp32 scores per thread, which are in registers in addition to the accumulators.
        assert config.block_m * config.block_n <= 64 * 32 * config.num_warps


def test_sections_keep_keys_in_l2():
    assert band.section(32, 1 << 20, banded=False) == 1
    assert band.section(32, 1 << 20, banded=True) == int(band.SECTION_BYTES) >> 20
    assert band.section(4, 1, banded=True) == 4
    assert band.section(4, 1 << 40, banded=True) == 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_the_forward_in_cuda_fits(dim, causal):
    for queries, keys, heads in itertools.product((1, 512, 8192), (1, 64, 512, 513, 200_000), (1, 32)):
        config = forward_config(dim, queries, keys, causal, heads)
        assert forward.shared_bytes(dim, config) <= 232_448
        assert config.block_n % 8 == 0


def test_candidates_fit():
    for dim in (64, 128):
        assert all(forward.shared_bytes(dim, config) <= 232_448 for config in candidates.cuda(dim))
        assert all(fp8.shared_bytes(dim, config) <= 232_448 for config in candidates.fp8(dim))

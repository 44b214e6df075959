"""How the backward in CUDA C++ distributes its work over CTAs. Pure functions of sizes."""

from __future__ import annotations

import heapq
import itertools
import re
from pathlib import Path

import pytest

from .configs import backward as backward_configs
from .configs import candidates
from .configs.backward import Schedule
from .sm90 import backward

QUERY_TILES = [(64, 128), (128, 64), (128, 80)]  # (head dimension, queries of a tile)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_shares_of_the_backward_in_cuda(dim, causal):
    for queries, keys, heads, group in itertools.product((1, 200, 8192), (1, 128, 4096, 200_000), (1, 8, 32), (1, 8)):
        config = backward_configs.pick_cuda_bwd_config(queries, keys, dim, heads, group, causal, 132)
        blocks, tiles = heads * -(-keys // 128), group * -(-queries // config.queries)
        assert 1 <= config.section <= heads
        assert 0 <= config.shared <= blocks and 1 <= config.splits <= min(16, tiles)
        assert config.shared == 0 or (config.splits > 1 and not causal)
        assert config.alternate == (causal and group > 1)
        assert (dim, config.queries) in QUERY_TILES
        # With tiles of 80, dQ is transposed: SINGLE_BLOCK could not store rows of it.
        assert config.queries != 80 or (dim == 128 and keys > 128)
        assert config.queries % backward.helper_rows(config.queries) == 0
        waves = blocks + config.shared * (config.splits - 1) > 132
        few = tiles <= backward_configs.PERSISTENT_TILES[dim]
        tile = config.queries == backward_configs.PERSISTENT_QUERIES[dim]
        enough = keys >= backward_configs.PERSISTENT_KEYS[dim]
        assert (config.schedule is Schedule.PERSISTENT) == (tile and enough and waves and few)
        assert (config.schedule is Schedule.SINGLE_BLOCK) == (keys <= 128)
        assert (config.schedule is Schedule.ROLES) == (config.span > 0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dim", "queries", "keys", "heads", "persistent"),
    [
        (64, 564, 64_000, 8, True),
        (64, 11_000, 10_000, 32, True),
        (64, 564, 1000, 512, True),
        (64, 2048, 2048, 8, False),  # fewer blocks than SMs
        (64, 205_000, 200_000, 8, False),
        (64, 564, 128, 512, False),  # a single block of keys
        (128, 564, 64_000, 8, True),
        (128, 512, 4096, 128, True),  # rather than CTA_PER_KV_HEAD
        (128, 1024, 2048, 128, True),
        (128, 1025, 2048, 128, False),
        (128, 512, 2047, 128, False),
        (128, 564, 2048, 8, False),
    ],
)
def test_where_the_backward_in_cuda_is_persistent(dim, queries, keys, heads, persistent, causal):
    """PERSISTENT is picked where there are more blocks and splits than SMs, and few tiles of queries."""
    config = backward_configs.pick_cuda_bwd_config(queries, keys, dim, heads, 1, causal, 132)
    assert (config.schedule is Schedule.PERSISTENT) == persistent
    assert not persistent or config.queries == (128 if dim == 64 else 64)


@pytest.mark.parametrize(
    ("dim", "queries", "keys", "group", "causal", "waves", "tile"),
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
def test_queries_of_a_tile_of_the_backward_in_cuda(dim, queries, keys, group, causal, waves, tile):
    assert backward_configs.pick_query_tile(dim, queries, keys, group, causal, waves) == tile


def schedule(keys: int, heads: int, section: int, tile: int, sms: int) -> int:
    """Returns the makespan of a causal backward, in tiles. CTAs start in order as SMs become free; prologue and
    epilogue of each count as 3 tiles."""
    tiles, free = -(-keys // tile), [0] * sms
    for first in range(0, heads, section):
        for block in range(-(-keys // 128)):
            for _ in range(min(section, heads - first)):
                heapq.heapreplace(free, free[0] + tiles - block * 128 // tile + 3)
    return max(free)


@pytest.mark.parametrize("sms", [78, 114, 132])
@pytest.mark.parametrize("keys", [2048, 3000, 4096, 8192, 16_384])
def test_sections_of_the_backward_are_balanced(keys, sms):
    """Up to eight waves of CTAs, the picked section takes at most 16 % longer than the best number of equal sections,
    and 3 % on average. Sections chosen by L2 alone would take up to 50 % longer."""
    behind = []
    for heads in range(1, 8 * sms * 128 // keys):
        config = backward_configs.pick_cuda_bwd_config(keys, keys, 128, heads, 1, True, sms)
        if config.schedule is Schedule.CTA_PER_KV_HEAD:
            continue
        ends = {
            section: schedule(keys, heads, section, config.queries, sms)
            for section in {config.section, *(-(-heads // n) for n in range(1, 5))}
        }
        behind.append(ends[config.section] / min(ends.values()) - 1)
    assert max(behind) < 0.16 and sum(behind) < 0.03 * len(behind)


@pytest.mark.parametrize(("keys", "section"), [(2048, 8), (4096, 4), (8192, 2), (16_384, 1), (100_000, 1)])
def test_a_section_of_shared_heads_has_a_block_for_each_sm(keys, section):
    config = backward_configs.pick_cuda_bwd_config(keys, keys, 128, 8, 8, True, 132)
    assert (config.section, config.alternate) == (section, True)


def test_a_deterministic_backward_is_picked_where_it_is_wanted():
    assert backward_configs.pick_backward("auto", "cuda") == "cuda"
    assert backward_configs.pick_backward("auto", "cuda", deterministic=True) == "separate"
    assert backward_configs.pick_backward("auto") == "separate"
    assert backward_configs.pick_backward("fused", "cuda", deterministic=True) == "fused"


def test_schedules_have_the_same_numbers_in_the_source():
    header = Path(backward.__file__).with_name("backward_schedule.cuh").read_text(encoding="utf-8")
    numbers = dict(re.findall(r"^#define (\w+) (\d+)", header, flags=re.MULTILINE))
    assert numbers == {schedule.name: str(schedule.value) for schedule in Schedule}


@pytest.mark.parametrize("dim", [64, 128])
def test_candidates_of_the_backward_are_what_the_source_takes(dim):
    for keys, kv_heads, group, causal in itertools.product((100, 4096), (1, 8, 1000), (1, 8), (False, True)):
        for config in candidates.cuda_bwd(keys, dim, kv_heads, group, causal):
            assert (dim, config.queries) in QUERY_TILES and 1 <= config.section <= kv_heads
            assert (config.schedule is Schedule.SINGLE_BLOCK) == (keys <= 128)
            assert (config.schedule is Schedule.ROLES) == (config.span > 0)
            assert config.span == 0 or -(-kv_heads // config.span) <= backward_configs.CUDA_BWD_SPANS
            if config.schedule is Schedule.PERSISTENT:
                assert config.queries == backward_configs.PERSISTENT_QUERIES[dim]

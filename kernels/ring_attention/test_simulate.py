"""The model of many GPUs: properties that hold for any rates."""

from __future__ import annotations

import pytest

from . import simulate
from .simulate import Rates

FAST = Rates(flops=7e14, link=1e15, latency=0.0)


@pytest.mark.parametrize("world", [1, 8, 64, 1024])
@pytest.mark.parametrize("backward", [False, True])
def test_links_without_end_leave_the_work_shared_out(world: int, backward: bool) -> None:
    found = simulate(world, 1 << 20, 1 << 20, FAST, backward=backward)
    assert found.world == world and 0.98 < found.efficiency <= 1 + 1e-9 and found.exposed < 1e-3


def test_one_gpu_is_its_products() -> None:
    found = simulate(1, 4096, 4096, FAST, heads=32, dim=128, causal=False)
    assert found.seconds == pytest.approx(4 * 32 * 128 * 4096**2 / 7e14) and found.exposed == 0


def test_slow_links_and_short_sequences_cost_more() -> None:
    def efficiency(length: int, link: float, world: int = 8) -> float:
        return simulate(world, length, length, Rates(7e14, link)).efficiency

    assert efficiency(1 << 17, 1e10) < efficiency(1 << 17, 1e11) <= efficiency(1 << 17, 1e12)
    assert efficiency(1 << 14, 1e11) < efficiency(1 << 20, 1e11)
    assert efficiency(1 << 17, 1e10, 64) < efficiency(1 << 17, 1e10, 2)


def test_what_does_not_overlap_is_the_transfer_beyond_the_products() -> None:
    found = simulate(2, 1024, 1024, Rates(1e30, 1e9, latency=0.0), heads=1, kv_heads=1, dim=64, causal=False)
    assert found.exposed == found.seconds == pytest.approx(512 * 64 * 2 * 2 / 1e9)


def test_gradients_leave_a_step_later_than_their_block_came() -> None:
    """Rank 2, the slowest, moves 1 row for step 1 and 2 rows for step 2. The fp32 gradients of step 1 are sent during
    step 2, those of step 2 after it."""
    options = dict(heads=1, kv_heads=1, dim=64, layout="zigzag", backward=True)
    found = simulate(3, 5, 5, Rates(1e30, 1e9, latency=0.0), **options)
    row = 64 * 2
    assert found.seconds == pytest.approx(row * (2 * (1 + 2) + 4 * (1 + 2)) / 1e9)


def test_a_layout_that_is_not_balanced_is_slower() -> None:
    even, uneven = (
        simulate(8, 1 << 18, 1 << 18, FAST, layout=layout).efficiency for layout in ("zigzag", "contiguous")
    )
    assert uneven < 0.6 * even


def test_nothing_to_do_is_refused() -> None:
    with pytest.raises(ValueError, match="world, queries and keys must be at least 1, got 0, 4, 4"):
        simulate(0, 4, 4, FAST)

"""The statistics against known distributions and against numpy."""

from __future__ import annotations

import random

import numpy as np
import pytest

from harness.measure import stats


@pytest.mark.parametrize("n", [6, 7, 20, 101, 300])
def test_the_interval_of_the_median_covers_it_in_95_of_100_cases(n):
    """Exponential samples: skewed, as times are. 1500 trials, so that 93 % is four standard errors away."""
    rng = random.Random(n)
    hits = 0
    for _ in range(1500):
        low, high = stats.median_ci(sorted(rng.expovariate(1.0) for _ in range(n)))
        hits += low <= np.log(2) <= high
    assert hits / 1500 > 0.93


def test_the_interval_narrows_with_samples_and_is_the_range_of_few():
    rng = random.Random(1)
    widths = []
    for n in (10, 100, 1000):
        low, high = stats.median_ci(sorted(rng.gauss(0, 1) for _ in range(n)))
        widths.append(high - low)
    assert widths[0] > widths[1] > widths[2]
    assert stats.median_ci([1.0, 2.0, 9.0]) == (1.0, 9.0)


@pytest.mark.parametrize("q", [0.0, 0.25, 0.5, 0.95, 0.99, 1.0])
def test_quantiles_are_numpys(q):
    samples = sorted(random.Random(3).random() for _ in range(37))
    assert stats.quantile(samples, q) == pytest.approx(np.quantile(samples, q))


def test_outliers_are_counted_and_kept():
    column = stats.column([10.0, 10.1, 10.2, 9.9, 10.0, 10.1, 50.0], "rounds")
    assert (column["outliers"], column["max_us"], column["n"]) == (1, 50.0, 7)
    assert column["ci95_us"][0] <= column["median_us"] <= column["ci95_us"][1]


def test_ratios_are_paired_so_that_drift_cancels():
    """Both slow down by half on the way; one is always twice the other."""
    fast = [1.0 + i / 40 for i in range(20)]
    slow = [2 * sample for sample in fast]
    ratio = stats.ratio(slow, fast)
    assert ratio["median"] == pytest.approx(2.0)
    assert ratio["ci95"] == pytest.approx([2.0, 2.0])
    with pytest.raises(ValueError):
        stats.ratio(slow, fast[:-1])


def test_convergence_needs_a_narrow_interval():
    rng = random.Random(5)
    assert stats.converged([100 + rng.gauss(0, 0.1) for _ in range(30)], width=0.01)
    assert not stats.converged([100 + rng.gauss(0, 20) for _ in range(30)], width=0.01)

"""Statistics of repeated timings. Distributions of kernel times are skewed and have outliers, so everything that a
decision depends on is computed from order statistics; mean and standard deviation are only reported.

Intervals have a coverage of 95 % although sampling stops as soon as they are narrow enough. With K interim looks, each
of which may stop the sampling, each look uses an interval of level 1 − 0.05 / K (Bonferroni), so that all K together
hold with a probability of at least 95 %. K is the planned number of looks, `looks`, however many were used.

Imports no torch, so that `report` and `compare` can use it anywhere.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

RESAMPLES = 2000
FEWEST = 6  # with fewer samples not even their range contains the median with a probability of 95 %
Array = np.ndarray[Any, np.dtype[Any]]


def quantile(ordered: Sequence[float], q: float) -> float:
    """Linear interpolation between the order statistics at q in [0, 1] (Hyndman and Fan 1996, type 7)."""
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def looks_at(fewest: int, most: int) -> tuple[int, ...]:
    """The sample sizes at which to check for convergence: `fewest`, then doubling, and finally `most`."""
    found = [fewest]
    while found[-1] < most:
        found.append(min(2 * found[-1], most))
    return tuple(found)


def median_ci(ordered: Sequence[float], looks: int = 1) -> tuple[float, float]:
    """A distribution-free confidence interval of the median with coverage of at least 95 % at the last of so many
    looks.

    The number of samples below the median is Binomial(n, 1/2), so the k-th smallest and k-th largest bracket it with
    probability 1 − 2·P(B < k) (David and Nagaraja, Order Statistics, 7.1). Where no k reaches the level, as with fewer
    than FEWEST samples at one look, the whole range is returned.
    """
    n = len(ordered)
    k, tail, log_term = 0, 0.0, -n * math.log(2)  # P(B = k); its logarithm does not underflow
    while tail + math.exp(log_term) <= 0.025 / looks:
        tail += math.exp(log_term)
        log_term += math.log((n - k) / (k + 1))
        k += 1
    return ordered[max(k - 1, 0)], ordered[min(n - k, n - 1)]


@lru_cache(maxsize=64)
def _blocks(n: int, seed: int) -> Array:
    """Indices of RESAMPLES circular block resamples of n samples in time order (Künsch 1989; block length n^(1/3))."""
    block = max(1, round(n ** (1 / 3)))
    starts = np.random.default_rng(seed).integers(0, n, size=(RESAMPLES, -(-n // block)))
    indices = (starts[:, :, None] + np.arange(block)) % n
    return indices.reshape(RESAMPLES, -1)[:, :n]


def resampled_medians(samples: Sequence[float], seed: int = 0) -> Array:
    """Medians of RESAMPLES bootstrap resamples. Blocks of neighbours are drawn instead of single samples, since clocks
    and temperature correlate neighbours.

    The resamples consist of 16-bit ranks instead of samples: NumPy partitions these several times as fast as fp64."""
    ordered, ranks = np.unique(np.asarray(samples, dtype=np.float64), return_inverse=True)
    drawn = ranks.astype(np.uint16 if len(ordered) <= 1 << 16 else np.int64)[_blocks(len(ranks), seed)]
    half = len(ranks) // 2
    drawn.partition(half, axis=1)
    upper = drawn[:, half]
    lower = drawn[:, :half].max(axis=1) if len(ranks) % 2 == 0 else upper
    return (ordered[lower] + ordered[upper]) / 2


def outliers(ordered: Sequence[float]) -> int:
    """The number of samples outside Tukey's fences, 1.5 interquartile ranges beyond the quartiles. None is dropped."""
    q1, q3 = quantile(ordered, 0.25), quantile(ordered, 0.75)
    reach = 1.5 * (q3 - q1)
    return sum(not q1 - reach <= sample <= q3 + reach for sample in ordered)


def column(samples_us: Sequence[float], stop: str, looks: int = 1) -> dict[str, Any]:
    """A COLUMN of the record (see `record.py`) from samples in µs and the reason why sampling stopped."""
    ordered = sorted(samples_us)
    return {
        "samples_us": [round(sample, 3) for sample in samples_us],
        "n": len(ordered),
        "median_us": quantile(ordered, 0.5),
        "mean_us": statistics.fmean(ordered),
        "std_us": statistics.stdev(ordered) if len(ordered) > 1 else 0.0,
        "min_us": ordered[0],
        "max_us": ordered[-1],
        "p95_us": quantile(ordered, 0.95),
        "p99_us": quantile(ordered, 0.99),
        "ci95_us": list(median_ci(ordered, looks)),
        "outliers": outliers(ordered),
        "stop": stop,
        "looks": looks,
    }


def converged(samples: Sequence[float], width: float, looks: int = 1) -> bool:
    """Whether the confidence interval of the median is narrower than `width` times the median."""
    ordered = sorted(samples)
    low, high = median_ci(ordered, looks)
    return high - low <= width * quantile(ordered, 0.5)


def ratio(numerator: Sequence[float], denominator: Sequence[float], looks: int = 1) -> dict[str, Any]:
    """Median and 95 % interval of the ratios of samples taken in the same round, so that slow drift cancels."""
    return paired([a / b for a, b in zip(numerator, denominator, strict=True)], looks)


def paired(figures: Sequence[float], looks: int = 1) -> dict[str, Any]:
    """Median and 95 % interval of one figure per round. The interval is the wider of a block bootstrap's, which
    accounts for correlated neighbours, and `median_ci`, which is correct for few rounds."""
    ordered, tail = sorted(figures), 0.025 / looks
    low, high = median_ci(ordered, looks)
    drawn = np.quantile(resampled_medians(figures), (tail, 1 - tail))
    return {"median": quantile(ordered, 0.5), "ci95": [min(low, float(drawn[0])), max(high, float(drawn[1]))]}


FEWEST_UNTHROTTLED = 6  # rounds: fewer give no interval of a median


def ratio_of_columns(
    numerator: Mapping[str, Any], denominator: Mapping[str, Any], throttled: Collection[int] = ()
) -> dict[str, Any]:
    """`ratio` of two COLUMNs. If the GPU throttled in the rounds numbered `throttled`, "unthrottled" is the ratio over
    the other rounds and their number, or null if they are too few."""
    looks = denominator.get("looks", 1)
    above, below = numerator["samples_us"], denominator["samples_us"]
    found = ratio(above, below, looks)
    if throttled:
        kept = [index for index in range(len(below)) if index not in throttled]
        found["unthrottled"] = None
        if len(kept) >= FEWEST_UNTHROTTLED:
            calm = ratio([above[i] for i in kept], [below[i] for i in kept], looks)
            found["unthrottled"] = {**calm, "n": len(kept)}
    return found

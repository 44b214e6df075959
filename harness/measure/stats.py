"""Statistics of repeated timings. Distributions of kernel times are skewed and have outliers, so everything that a
decision hangs on is built from order statistics; mean and standard deviation are there for those who ask.

Imports no torch, so that `report` and `compare` can use it anywhere.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any


def quantile(ordered: Sequence[float], q: float) -> float:
    """Linear interpolation between the order statistics at q in [0, 1] (Hyndman and Fan 1996, type 7)."""
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def median_ci(ordered: Sequence[float]) -> tuple[float, float]:
    """A confidence interval of the median with coverage of at least 95 %, free of any assumption on the distribution.

    The number of samples under the median is Binomial(n, 1/2), so the k-th smallest and k-th largest bracket it with
    probability 1 − 2·P(B < k) (David and Nagaraja, Order Statistics, 7.1). Under 6 samples no k reaches 95 %: then the
    whole range is returned.
    """
    n = len(ordered)
    k, tail, term = 0, 0.0, 0.5**n  # term = P(B = k); underflows past 1074 samples, long after sampling has stopped
    while tail + term <= 0.025:
        tail += term
        term *= (n - k) / (k + 1)
        k += 1
    return ordered[max(k - 1, 0)], ordered[min(n - k, n - 1)]


def outliers(ordered: Sequence[float]) -> int:
    """Samples outside Tukey's fences, 1.5 interquartile ranges beyond the quartiles. Counted, never dropped."""
    q1, q3 = quantile(ordered, 0.25), quantile(ordered, 0.75)
    reach = 1.5 * (q3 - q1)
    return sum(not q1 - reach <= sample <= q3 + reach for sample in ordered)


def column(samples_us: Sequence[float], stop: str) -> dict[str, Any]:
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
        "ci95_us": list(median_ci(ordered)),
        "outliers": outliers(ordered),
        "stop": stop,
    }


def converged(samples: Sequence[float], width: float) -> bool:
    """Whether the interval of the median is narrower than `width` times the median."""
    ordered = sorted(samples)
    low, high = median_ci(ordered)
    return high - low <= width * quantile(ordered, 0.5)


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> dict[str, Any]:
    """Median and 95 % interval of the ratios of samples taken in the same round, so that slow drift cancels."""
    ratios = sorted(a / b for a, b in zip(numerator, denominator, strict=True))
    return {"median": quantile(ratios, 0.5), "ci95": list(median_ci(ratios))}

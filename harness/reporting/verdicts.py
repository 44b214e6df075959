"""FASTER, SAME, SLOWER or UNSURE: the rule that compares two measurements of the same thing.

Let r be the median time of the current samples over that of the baseline's, t the practical threshold (0.03 is 3 %),
and [low, high] the 95 % interval of r:

SLOWER  low > 1 + t                            even the lower end of the interval is above the threshold
FASTER  high < 1 / (1 + t)                     the same in the other direction
SAME    1 / (1 + t) <= low and high <= 1 + t   even the upper end of the interval is below the threshold (an equivalence
                                               test)
UNSURE  everything else: measure longer, or with less noise

So a small change that is certain is SAME, and a large one that is noisy is UNSURE, never the other way round.

The interval is a percentile bootstrap of the ratio of medians with fixed seeds, over blocks of neighbouring samples
(`stats.resampled_medians`), but no narrower than what the order statistics of both sides give, added in quadrature:
with fewer than some twenty samples the bootstrap alone contains the truth less often than 95 times in 100. It is then
widened to the A/A intervals of the two runs, which compare an implementation with itself: a difference that the harness
measures where there is none cannot be distinguished from a real one. With fewer than six samples on a side no interval
of a median reaches 95 %, so the verdict is UNSURE.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..measure import stats
from ..measure.stats import FEWEST

FASTER, SAME, SLOWER, UNSURE = "FASTER", "SAME", "SLOWER", "UNSURE"
THRESHOLD = 0.03
HOST_THRESHOLD = 0.10  # for host time, which depends on what else the processor does


@dataclass(frozen=True)
class Ratio:
    """Current over baseline time, with its 95 % interval. More than 1 is slower."""

    value: float
    low: float
    high: float


def classify(ratio: Ratio, threshold: float = THRESHOLD) -> str:
    """The rule above."""
    if ratio.low > 1 + threshold:
        return SLOWER
    if ratio.high < 1 / (1 + threshold):
        return FASTER
    return SAME if ratio.low >= 1 / (1 + threshold) and ratio.high <= 1 + threshold else UNSURE


def ratio_of_medians(baseline: Sequence[float], current: Sequence[float], noise: float = 0.0) -> Ratio | None:
    """None with fewer than six samples on a side. `noise` is the minimum distance of each end from the ratio, in
    |ln r|."""
    if min(len(baseline), len(current)) < FEWEST:
        return None
    value = float(np.median(current) / np.median(baseline))
    ratios = stats.resampled_medians(current, 0) / stats.resampled_medians(baseline, 1)
    low, high = (float(end) for end in np.quantile(ratios, (0.025, 0.975)))
    (below, above), (baseline_below, baseline_above) = _distances(current), _distances(baseline)
    low = min(low, value * math.exp(-max(noise, math.hypot(below, baseline_above))))
    high = max(high, value * math.exp(max(noise, math.hypot(above, baseline_below))))
    return Ratio(value, low, high)


def _distances(samples: Sequence[float]) -> tuple[float, float]:
    """The distances of the median from the ends of its interval, in ln."""
    low, high = stats.median_ci(sorted(samples))
    median = float(np.median(samples))
    return math.log(median / low), math.log(high / median)


def noise_floor(*pairs: Mapping[str, Any] | None) -> float:
    """The largest distance of the A/A intervals from 1, as |ln r|; 0 if no pair was recorded."""
    ends = [end for pair in pairs if pair for end in pair.get("ci95") or () if end]
    return max((abs(math.log(end)) for end in ends), default=0.0)


def against(baseline: Mapping[str, Any], current: Mapping[str, Any]) -> Ratio | None:
    """The change of the time *relative to a third implementation*: r with machine drift divided out.

    Both arguments are entries of a row's `ratios` (time of that implementation over ours, paired by round). The ends
    combine the unfavourable ends of both intervals, so that the interval is conservative.
    """
    (a_low, a_high), (b_low, b_high) = baseline["ci95"], current["ci95"]
    if not all((a_low, a_high, b_low, b_high, baseline["median"], current["median"])):
        return None
    return Ratio(baseline["median"] / current["median"], a_low / b_high, a_high / b_low)

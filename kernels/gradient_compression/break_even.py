"""The link speed below which compression pays: arithmetic on measured times, without tensors."""

from __future__ import annotations

import math


def break_even_bandwidth(
    baseline_bytes: float, compressed_bytes: float, extra_seconds: float, overlapped_fraction: float = 0.0
) -> float:
    """Computes the link speed, in bytes per second and direction, below which the compressed exchange is faster.

        baseline    baseline_bytes / B
        compressed  compressed_bytes / B + extra

    The two times are equal at B = (baseline_bytes − compressed_bytes) / extra, where
    extra = extra_seconds · (1 − overlapped_fraction).

    baseline_bytes       bytes that a GPU sends over the link without compression: 2·n·s·(N−1)/N for n elements of s
                         bytes
    compressed_bytes     bytes that it sends with compression, codes and scales
    extra_seconds        time of compression in addition to the link: measured with the transfers replaced by local
                         copies, or a measured total less compressed_bytes / (measured link speed); less the same for
                         the baseline. 0 or less if the kernels cost nothing.
    overlapped_fraction  the share of extra_seconds that is overlapped with other work, 0 to 1

    Returns the speed B: 0.0 if no bytes are saved, so that compression never pays, and math.inf if it always pays.

    Raises ValueError for negative bytes or a fraction outside 0 to 1.
    """
    if baseline_bytes < 0 or compressed_bytes < 0:
        raise ValueError(f"baseline_bytes and compressed_bytes must be >= 0, got {baseline_bytes}, {compressed_bytes}")
    if not 0 <= overlapped_fraction <= 1:
        raise ValueError(f"overlapped_fraction must be from 0 to 1, got {overlapped_fraction}")
    extra = extra_seconds * (1 - overlapped_fraction)
    saved = baseline_bytes - compressed_bytes
    if saved <= 0:
        return 0.0
    return saved / extra if extra > 0 else math.inf

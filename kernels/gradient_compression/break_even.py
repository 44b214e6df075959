"""Below which speed of a link compression pays: arithmetic on measured times, without tensors."""

from __future__ import annotations

import math


def break_even_bandwidth(
    baseline_bytes: float, compressed_bytes: float, extra_seconds: float, overlapped_fraction: float = 0.0
) -> float:
    """The link speed, in bytes per second and direction, below which the compressed exchange is the faster one.

        baseline    baseline_bytes / B
        compressed  compressed_bytes / B + extra

    are equal at B = (baseline_bytes − compressed_bytes) / extra, where extra = extra_seconds · (1 − overlapped).

    baseline_bytes       that a GPU sends over the link without compression: 2·n·s·(N−1)/N of n elements of s bytes
    compressed_bytes     that it sends with compression, codes and scales
    extra_seconds        what compression takes beside the link: measured with the transfers replaced by local copies,
                         or a measured total less compressed_bytes / (measured link speed); less the same of the
                         baseline. 0 or less where the kernels cost nothing.
    overlapped_fraction  the share of extra_seconds that other work hides, 0 to 1

    Returns 0.0 where no bytes are saved, so that it never pays, and math.inf where it always does.

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

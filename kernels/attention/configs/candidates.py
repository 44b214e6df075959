"""The configurations that `tune` compares with what each `pick_*` picks. Pure functions of sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import triton

from .backward import CUDA_BWD_KEYS, CUDA_BWD_SPANS, PERSISTENT_QUERIES, CudaBackwardConfig, Schedule
from .forward import CudaConfig, Fp8Config
from .portable import Config, padded

Shapes = Iterable[tuple[int, int]]


def versions(keys: int) -> list[tuple[str, int]]:
    """For `pick_forward`: (version, splits), with 256 keys a split at least."""
    splits = (2, 4, 8, 16, 32, 64, 128)
    return [("cuda", 1), ("gluon", 1), ("portable", 1), *(("split", n) for n in splits if 256 * n <= keys)]


def tiles(dim: int, shapes: Shapes, warps: Iterable[int], stages: Iterable[int]) -> list[Config]:
    """For the Triton kernels. `shapes`: queries by keys."""
    powers = [(m, n) for m, n in shapes if m & (m - 1) == 0]
    return [Config(m, n, padded(dim), w, s) for (m, n), w, s in itertools.product(powers, warps, stages)]


def cuda(dim: int) -> list[CudaConfig]:
    """For `pick_cuda_config`: the configurations that fit shared memory and registers."""
    if dim == 64:
        sizes = [(64, 2), (128, 2), (64, 3), (112, 3)]
        return [CudaConfig(block_n, 4, consumers, False, True) for block_n, consumers in sizes]
    two = [CudaConfig(64, 4, 2, ping_pong, False) for ping_pong in (False, True)]
    two += [CudaConfig(128, 2, 2, ping_pong, False) for ping_pong in (False, True)]
    three = [CudaConfig(80, 4, 3, ping_pong, False) for ping_pong in (False, True)]
    return [*two, *three, CudaConfig(64, 4, 3, True, False, q_buffers=2)]


def fp8(dim: int) -> list[Fp8Config]:
    """For `pick_fp8_config`, where lse is not returned."""
    sizes = [(128, 6, 3, False), (128, 6, 2, False)] if dim <= 64 else [(96, 4, 3, False), (128, 4, 2, True)]
    sizes += [] if dim <= 64 else [(192, 2, 2, True)]
    return [Fp8Config(n, stages, groups, ping_pong, False, exact_lse=False) for n, stages, groups, ping_pong in sizes]


def cuda_bwd(keys: int, dim: int, kv_heads: int, group: int, causal: bool) -> list[CudaBackwardConfig]:
    """For `pick_cuda_bwd_config`: every schedule that supports the problem, with sections of 1 to all heads. `kv_heads`
    of all batches. None splits the queries of its last blocks (`shared`): how many do depends on the GPU, and `tune`
    measures the configuration that is picked in any case."""
    if keys <= CUDA_BWD_KEYS:
        return [CudaBackwardConfig(128 if dim == 64 else 64, 1, schedule=Schedule.SINGLE_BLOCK)]
    halves = {triton.cdiv(kv_heads, n) for n in (1, 2, 4)}
    sections = sorted({n for n in (1, 2, 4, 8, *halves) if n <= kv_heads}) if causal else [1]
    found = [
        CudaBackwardConfig(tile, section, alternate=alternate, schedule=schedule, span=span)
        for section in sections
        for alternate in ((False, True) if causal and group > 1 else (False,))
        for schedule, tile, span in _scheduled(dim, kv_heads, section)
    ]
    return [*found, CudaBackwardConfig(64, 1, schedule=Schedule.CTA_PER_KV_HEAD)] if dim == 128 else found


def _scheduled(dim: int, kv_heads: int, section: int) -> Iterator[tuple[Schedule, int, int]]:
    """(schedule, queries of a tile, span). A span is one section or two."""
    yield Schedule.PERSISTENT, PERSISTENT_QUERIES[dim], 0
    for tile in (128,) if dim == 64 else (64, 80):
        yield Schedule.CTA_PER_BLOCK, tile, 0
        for span in {section, 2 * section} if dim == 128 else ():
            if span <= kv_heads and triton.cdiv(kv_heads, span) <= CUDA_BWD_SPANS:
                yield Schedule.ROLES, tile, span

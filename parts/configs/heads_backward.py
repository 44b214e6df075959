"""Launch configurations of the backward of heads that share their input. Every choice is a pure function of the problem
and the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

MIN_BLOCK = 16  # minimum of tl.dot
PITCH = 16  # elements: rows of the hidden's gradient are whole vectors
CHUNK_ROWS = 8448
BLOCK = 128  # rows of a tile, and columns of the hidden of a CTA, in CUDA C++
BLOCK_N, STEP = 256, 64  # columns of x of a tile, and K of a K-block, of the GEMMs in CUDA C++ (heads_products.cu)
MIN_ROWS = 128


@dataclass(frozen=True)
class DhiddenConfig:
    """A CTA processes `block_h` columns of a head and `tiles` consecutive tiles of `block_m` rows."""

    block_m: int
    block_h: int
    block_k: int
    tiles: int
    stages: int
    num_warps: int


@dataclass(frozen=True)
class CudaConfig:
    """A unit of work is a block of columns of the hidden and `tiles` tiles of rows. `cluster` CTAs have consecutive
    blocks and share their loads of x, in a circular buffer of `stages` pipeline stages of 64 columns."""

    tiles: int
    cluster: int
    stages: int


@dataclass(frozen=True)
class ProductsConfig:
    """x's gradient is the sum of split-K partitions of `dx_heads` heads each, 0 if it is not needed. `dw1`: whether
    w1's is needed. `cluster` CTAs have vertically adjacent tiles or, with `beside`, horizontally adjacent ones of x's
    gradient. Each has `stages` pipeline stages of 64 of K. Clusters with one unit of x's gradient fewer get `ahead`
    units of w1's before the others get any."""

    dx_heads: int
    dw1: bool
    cluster: int
    beside: bool
    ahead: int
    stages: int


@dataclass(frozen=True)
class TileConfig:
    """A CTA computes a tile of `block_m` by `block_n` of a gradient, in K-blocks of `block_k`."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    num_warps: int


def pick_chunk_rows(rows: int, heads: int, hidden: int) -> int:
    """Rows of a chunk: the hidden's gradient is in memory for one chunk at a time. Pure. 8448 rows of 512 columns are
    132 tiles of 128 x 256, one for each SM. Each chunk also reads and writes the fp32 sums of w1's gradient: 56 MB for
    ten heads of 1365. Twice the rows would halve that (estimated, 2 % of the time), but need 465 MB instead of 232."""
    return min(max(1, rows), CHUNK_ROWS)


def pick_cuda(rows: int, possible: bool) -> bool:
    """Whether CUDA C++ computes the gradient of the hidden; `possible`: it can. Pure. In an exploration on one H200,
    ten heads of 512 -> 1365 -> 3, the backward of 564 rows took 112 us with CUDA C++ and 164 with Triton. Down to one
    tile of rows a unit of work is the same, so that fewer rows should not take longer; not measured."""
    return possible and rows > MIN_ROWS


def pick_cuda_config(rows: int, heads: int, hidden: int, sms: int) -> CudaConfig:
    """Configuration of the hidden's gradient in CUDA C++. Pure.

    The number of row tiles a unit minimises the time of all waves: a unit costs its tiles, and about half a tile more
    to load w1. Ten heads of 1365 are 55 pairs of blocks, for 66 pairs of SMs. So 8448 rows are six parts of eleven
    tiles: five waves in which no SM is idle. 5000 rows are six parts of seven tiles. Among equal times the one with the
    most tiles is chosen, which has the fewest parts. Shared memory holds 11 stages in addition to dpre and dy.
    Estimated, not measured.
    """
    blocks, bands = heads * triton.cdiv(hidden, BLOCK), triton.cdiv(rows, BLOCK)
    cluster = 2 if blocks > 1 else 1

    def time(tiles: int) -> tuple[int, int]:
        units = triton.cdiv(blocks, cluster) * triton.cdiv(bands, tiles)
        return triton.cdiv(units, max(1, sms // cluster)) * (2 * tiles + 1), -tiles

    return CudaConfig(min(range(1, bands + 1), key=time), cluster, stages=11)


def pick_products(rows: int, dim: int, possible: bool) -> bool:
    """Whether CUDA C++ also computes the GEMMs that use the hidden's gradient; `possible`: it computes that gradient.
    Pure. Only for a single chunk, where w1's gradient is rounded as it is stored; several chunks use cuBLAS. Estimated
    for ten heads of 512 -> 1365 -> 3 on one H200: 30 us for 564 rows, 230 for 5000. Rows of w1's gradient are stored in
    vectors of 16 bytes."""
    return possible and rows <= CHUNK_ROWS and dim % 8 == 0


def pick_products_config(
    rows: int, dim: int, heads: int, hidden: int, sms: int, need_x: bool, need_w1: bool
) -> ProductsConfig:
    """Configuration of the GEMMs in CUDA C++ (heads_products.cu). Pure.

    Minimises the time of the slowest cluster, in units of one K-block of 64. Storing a tile costs one more, or two in
    fp32. Partial sums of x's gradient are read again: that launch costs 5, and each part 4. For ten heads of 512 ->
    1365, 564 rows are five parts, 51 K-blocks and 25 to add the parts up; 5000 rows are one part, 301 K-blocks. Among
    equal times the one with the fewest parts is chosen. Shared memory holds 4 stages. CTAs are not in clusters: on one
    H200 the backward of 564 rows took 67 us with five parts (76 in clusters of two) and 77 with ten, in clusters of two
    that divide x's columns; that of 5000 rows 384 and 387 (EXPERIMENTS.md).
    """
    sizes = (1, *(n for n in range(2, heads) if triton.cdiv(heads, n) < triton.cdiv(heads, n - 1)), heads)
    candidates = [
        ProductsConfig(dx_heads, need_w1, cluster=1, beside=False, ahead=ahead, stages=4)
        for dx_heads in (sorted(set(sizes), reverse=True) if need_x else (0,))
        for ahead in (_rounds_ahead(rows, hidden, dx_heads) if need_x and need_w1 else (0,))
    ]
    return min(candidates, key=lambda config: _products_time(rows, dim, heads, hidden, sms, config))


def products_units(rows: int, dim: int, heads: int, hidden: int, config: ProductsConfig) -> tuple[int, int]:
    """Units of work of x's gradient and of w1's. A unit is one tile for each CTA of a cluster. Pure."""
    tiles, bands, cluster = triton.cdiv(dim, BLOCK_N), triton.cdiv(rows, BLOCK), config.cluster
    of_part = tiles // cluster * bands if config.beside else tiles * triton.cdiv(bands, cluster)
    of_x = of_part * triton.cdiv(heads, config.dx_heads) if config.dx_heads else 0
    return of_x, tiles * triton.cdiv(heads * triton.cdiv(hidden, BLOCK), cluster) if config.dw1 else 0


def _rounds_ahead(rows: int, hidden: int, dx_heads: int) -> tuple[int, ...]:
    """Candidates for `ahead`: 0, and the numbers of tiles of w1's gradient that take about as long as one of x's."""
    equal = dx_heads * triton.cdiv(hidden, STEP) // (triton.cdiv(rows, STEP) + 1)
    return (0, *range(max(1, equal - 1), equal + 2))


def _products_time(rows: int, dim: int, heads: int, hidden: int, sms: int, config: ProductsConfig) -> float:
    """Estimated time of the GEMMs and of the sum of parts, in K-blocks, by the model in pick_products_config."""
    of_x, of_w1 = products_units(rows, dim, heads, hidden, config)
    clusters = max(1, min(sms // config.cluster, of_x + of_w1))
    parts = triton.cdiv(heads, config.dx_heads) if config.dx_heads else 1
    long = config.dx_heads * triton.cdiv(hidden, STEP) * (1.05 if config.beside else 1.0) + (2 if parts > 1 else 1)
    short = triton.cdiv(rows, STEP) + 1
    count, more = divmod(of_x, clusters)
    fewer = clusters - more
    rounds, rest = divmod(max(0, of_w1 - config.ahead * fewer), clusters)
    first = count * long + (min(config.ahead, triton.cdiv(of_w1, fewer)) + rounds + (rest > 0)) * short
    others = (count + 1) * long + (rounds + (rest > fewer)) * short if more else 0
    return max(first, others) + (5 + 4 * parts if parts > 1 else 0)


def pick_library(rows: int, dtype: torch.dtype, on_gpu: bool) -> bool:
    """Whether cuBLAS computes the GEMMs that use the hidden's gradient, where Triton computes that gradient. Pure.
    Triton's GEMMs reach some 290 TFLOP/s. Measured on one H200, the backward of 500 rows takes 189 us with cuBLAS, 207
    without. Not for fp32, since cuBLAS may be set to round fp32 operands to tf32."""
    return on_gpu and dtype != torch.float32 and rows >= 256


def pick_pitch(hidden: int) -> int:
    """The pitch of the hidden's gradient, in elements. Pure."""
    return triton.cdiv(hidden, PITCH) * PITCH


def pick_dhidden_config(
    rows: int,
    dim: int,
    heads: int,
    hidden: int,
    aligned: bool,
    dtype: torch.dtype,
    capability: tuple[int, int],
    sms: int,
) -> DhiddenConfig:
    """Configuration of the hidden's gradient in Triton. Pure. A CTA processes several row tiles, as long as there are
    four CTAs for each SM: so w2's gradient has few parts. 128 columns instead of 64, measured on one H200 with the
    GEMMs by cuBLAS: 205 000 rows take 22.4 ms instead of 26.5, 5000 rows 879 us instead of 726."""
    if not aligned or dtype == torch.float32 or dim <= 64:
        block_m, block_h, block_k, stages, warps = (
            fit(rows, 32),
            fit(hidden, 32),
            fit(dim, 32 if dim <= 64 else 16),
            2,
            4,
        )
    else:
        wide = capability >= (9, 0) and rows >= 8192
        block_m, block_h, stages, warps = fit(rows, 128), fit(hidden, 128 if wide else 64), 3, 8
        block_k = 32 if capability < (9, 0) else 64
    ctas = heads * triton.cdiv(hidden, block_h) * triton.cdiv(rows, block_m)
    return DhiddenConfig(block_m, block_h, block_k, max(1, min(8, ctas // (4 * sms))), stages, warps)


def pick_dx_config(
    rows: int, dim: int, aligned: bool, dtype: torch.dtype, capability: tuple[int, int], sms: int
) -> TileConfig:
    """Configuration of x's gradient in Triton, a sum over all heads. Pure. Tiles are smaller if large ones would leave
    SMs idle."""
    if not aligned or dtype == torch.float32:
        return TileConfig(fit(rows, 64), fit(dim, 64), 16, stages=2, num_warps=4)
    if capability < (9, 0):
        return TileConfig(fit(rows, 128), fit(dim, 128), 32, stages=4, num_warps=8)
    if dim >= 256 and triton.cdiv(rows, 128) * triton.cdiv(dim, 256) > sms // 2:
        return TileConfig(128, 256, 64, stages=3, num_warps=8)
    small = triton.cdiv(rows, 128) * triton.cdiv(dim, 128) <= sms // 2
    return TileConfig(fit(rows, 64 if small else 128), fit(dim, 64 if small else 128), 64, stages=4, num_warps=4)


def pick_dw1_config(
    rows: int, dim: int, hidden: int, aligned: bool, dtype: torch.dtype, capability: tuple[int, int]
) -> TileConfig:
    """Configuration of w1's gradient in Triton. `block_m` counts columns of the hidden, `block_k` rows. Pure."""
    if not aligned or dtype == torch.float32:
        return TileConfig(fit(hidden, 64), fit(dim, 64), fit(rows, 32), stages=2, num_warps=4)
    block_k, stages = (32, 4) if capability < (9, 0) else (64, 3)
    return TileConfig(fit(hidden, 128), fit(dim, 128), block_k, stages, num_warps=8)


def fit(size: int, most: int) -> int:
    """The block size of a dimension: `most`, or the next power of two if the dimension is smaller."""
    return max(MIN_BLOCK, min(most, triton.next_power_of_2(max(1, size))))

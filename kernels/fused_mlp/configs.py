"""Launch configurations of fused_mlp: every choice is a pure function of the problem and the GPU.

A choice that is not said to be measured is estimated, as EXPERIMENTS.md describes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

MIN_BLOCK = 16  # minimum of tl.dot
PITCH = 16  # elements: the divisor of a row's pitch that Triton requires to load whole vectors
MAX_FUSED_OUT = 512  # columns of y that the single kernel keeps in registers
MAX_NARROW = 512  # largest K of narrow.cu, whose consumers keep their rows of a in registers
SHARED = 227 << 10  # bytes that a CTA of sm_90 can use


@dataclass(frozen=True)
class ProductConfig:
    """Tiles of `block_m` by `block_n`, processed by `ctas` persistent CTAs per SM in grouped tile order: `raster` row
    tiles of a column, then of the next, so that they share the column of the weight in L2."""

    block_m: int
    block_n: int
    block_k: int
    raster: int
    stages: int
    num_warps: int
    ctas: int


@dataclass(frozen=True)
class CudaConfig:
    """Configuration of products.cu. Its tiles are 128 x `block_n` x 64: 256 columns or, with `turns`, 128, 160, 176 or
    192. Pipeline stages, height of a group in the grouped tile order (`raster`, in clusters), and CTAs of a cluster,
    which share their loads of b (1 or 2)."""

    block_n: int
    stages: int
    raster: int
    cluster: int

    @property
    def turns(self) -> bool:
        """Ping-pong: each of two consumer warpgroups computes its own tiles. Else they share a tile (cooperative), as
        128 x 256 accumulators do not fit into the registers of one."""
        return self.block_n < 256


@dataclass(frozen=True)
class NarrowConfig:
    """Configuration of narrow.cu: columns of a block (64, or 128 if b is one weight), pipeline stages of b and of a,
    and CTAs of a cluster, which share their loads of b (1, 2 or 4)."""

    columns: int
    stages: int
    a_stages: int
    cluster: int


@dataclass(frozen=True)
class CopyConfig:
    """A CTA copies a block of `block_n` rows and `block_k` columns of a weight."""

    block_n: int
    block_k: int


@dataclass(frozen=True)
class WeightsConfig:
    """Tiles of `block_n` by `block_k` of a weight's gradient, summed over `block_r` rows at a time, in `splits`
    split-K partitions of the rows."""

    block_n: int
    block_k: int
    block_r: int
    splits: int
    raster: int
    stages: int
    num_warps: int


@dataclass(frozen=True)
class GradientsConfig:
    """Configuration of the gradients of x and of both weights in one launch. Tiles of x's gradient are `block_m` by
    `block_c`, with K-blocks of `block_h` columns of the hidden. Tiles of a weight's gradient are `block_n` by
    `block_k`, with K-blocks of `block_r` rows."""

    block_m: int
    block_c: int
    block_h: int
    block_n: int
    block_k: int
    block_r: int
    stages: int
    num_warps: int


@dataclass(frozen=True)
class FusedConfig:
    """A CTA keeps `block_m` rows of y and processes `block_h` columns of the hidden at a time, of one of `splits`
    split-K partitions."""

    block_m: int
    block_h: int
    block_k: int
    splits: int
    stages: int
    num_warps: int


@dataclass(frozen=True)
class SumConfig:
    """Elements of a CTA: of the sum of partial results, or of a row of a weight that is copied."""

    block: int
    num_warps: int


@dataclass(frozen=True)
class BiasConfig:
    """A CTA sums `block_n` columns over one of `splits` parts of the rows, `block_r` at a time."""

    block_n: int
    block_r: int
    splits: int
    num_warps: int


@dataclass(frozen=True)
class Versions:
    """The versions that are enabled. A GEMM uses the first one that supports its operands, else Triton. With an
    activation: narrow.cu for small K (`narrow`); cuBLAS with the activation as a separate kernel (`passes`);
    products.cu (`cuda`). Without one (y, the gradients of x and of the weights): products.cu (`plain`); cuBLAS
    (`library`); products.cu (`cuda`)."""

    cuda: bool
    library: bool
    passes: bool
    narrow: bool
    plain: bool = False

    @property
    def triton(self) -> bool:
        """Whether nothing but Triton was chosen."""
        return not (self.cuda or self.library or self.passes or self.narrow or self.plain)


def pick_versions(backend: str, rows: int, dim: int, hidden: int, dtype: torch.dtype, hopper: bool) -> Versions:
    """The version of each GEMM. Pure. `hopper`: the GEMMs in CUDA C++ (products.cu) support the problem.

    Measured on one H200. Wide models: products.cu with an activation takes as long as cuBLAS without one; without one
    it takes 1 % less time than cuBLAS for y and x's gradient (0.96 to 1.13 times as fast), and 9 % less for a weight's
    gradient (1.02 to 1.19). K = 512: cuBLAS is 7 % faster for y, and 1.7 times as fast for a weight's gradient; from
    1024 rows on it is also faster with an activation, which is then an elementwise kernel over the hidden layer. Few
    rows: cuBLAS takes 2 to 4 us less than Triton, but the hidden dimension must be a multiple of 16 (PITCH):
    otherwise further launches pad it, and their host time dominates.
    """
    if backend != "auto":
        narrow = backend == "narrow"
        return Versions(cuda=narrow or backend == "cuda", library=narrow, passes=False, narrow=narrow)
    wide = dim >= 1024
    # cuBLAS may be set to round fp32 operands to tf32.
    library = hopper and dtype != torch.float32 and (wide or rows >= 4096 or hidden % PITCH == 0)
    passes, narrow = library and not wide and rows >= 1024, library and pick_narrow(rows, dim)
    return Versions(library and wide, library, passes, narrow, plain=library and wide)


def pick_narrow(rows: int, dim: int) -> bool:
    """Whether "auto" uses narrow.cu for GEMMs with an activation on Hopper whose K it can keep in registers; others are
    computed as without it. Pure.

    On one H200, D = 512 and H = 1365 in bf16, with it and without: 205 000 rows forward 848 and 1121 us, backward 1968
    and 2241; 11 000 rows forward 63 and 81 us, the GEMMs with an activation alone 42 and 57, 53 and 62
    (EXPERIMENTS.md). The limits are estimated: with K below 256 a tile's main loop takes less time than an epilogue
    with a derivative, and with fewer than 4096 rows clusters of two have at most 3 blocks each for H = 1365.
    """
    return dim >= 256 and rows >= 4096


def pick_pitch(cols: int) -> int:
    """The pitch, in elements, of the tensors that the kernels allocate themselves: whole vectors. Pure. 1365
    becomes 1376, which costs 0.8 % of memory."""
    return triton.cdiv(cols, PITCH) * PITCH


def pick_copy(rows: int, cols: int, whole_vectors: bool, dtype: torch.dtype) -> bool:
    """Whether w2 [rows, cols] is copied to rows of whole vectors before it is multiplied. Pure.

    A row that is not aligned is loaded element by element, which halves the rate of a GEMM or worse; the copy is
    one read and one write of the weight. Weights that fit one tile are read as they are.
    """
    return dtype != torch.float32 and not whole_vectors and rows > MIN_BLOCK and cols > MIN_BLOCK


def pick_hidden_config(
    rows: int,
    cols: int,
    depth: int,
    gated: bool,
    aligned: bool,
    dtype: torch.dtype,
    capability: tuple[int, int],
    sms: int,
) -> ProductConfig:
    """Configuration of the GEMM that computes the hidden. Pure. See `_product_config`."""
    return _product_config(rows, cols, depth, "gate" if gated else "act", aligned, dtype, capability, sms)


def pick_rows_config(
    rows: int, cols: int, depth: int, aligned: bool, dtype: torch.dtype, capability: tuple[int, int], sms: int
) -> ProductConfig:
    """Configuration of the GEMMs that compute y and x's gradient. Pure. See `_product_config`."""
    return _product_config(rows, cols, depth, "", aligned, dtype, capability, sms)


def pick_dhidden_config(
    rows: int,
    cols: int,
    depth: int,
    gated: bool,
    aligned: bool,
    dtype: torch.dtype,
    capability: tuple[int, int],
    sms: int,
) -> ProductConfig:
    """Configuration of the GEMM that computes the hidden's gradient. Pure. See `_product_config`."""
    return _product_config(rows, cols, depth, "dgate" if gated else "dact", aligned, dtype, capability, sms)


def _product_config(
    rows: int,
    cols: int,
    depth: int,
    epilogue: str,
    aligned: bool,
    dtype: torch.dtype,
    capability: tuple[int, int],
    sms: int,
) -> ProductConfig:
    """`epilogue` is "" for y and x's gradient, "act" for the hidden, "gate" for a gated one, "dact" and "dgate" for
    their gradients.

    Without an epilogue, on Hopper: two warpgroups with 64 x 256 accumulators each. A K-block of 128 x 256 x 64 reads 48
    KiB for 4.2 MFLOP, where two of 128 x 128 read 64 KiB. An activation requires registers besides the accumulators:
    tiles have half the columns, and a quarter where pre is read. A gated hidden has two accumulators. With too few
    tiles to fill the GPU they are 64 x 64. Rows that are not `aligned` are loaded through registers, of which larger
    tiles have not enough. Where pre and gate are read, both of these small tiles have 32 columns, since with 64 they
    spill. By this arithmetic and by the registers that the build shows; not measured yet.
    """
    hopper, narrow = capability >= (9, 0), 32 if epilogue == "dgate" else 64
    if not aligned or dtype == torch.float32:
        block_k = 32 if aligned and epilogue != "gate" else 16
        return ProductConfig(_fit(rows, 64), _fit(cols, narrow), _fit(depth, block_k), 8, stages=2, num_warps=8, ctas=1)
    if triton.cdiv(rows, 128) * triton.cdiv(cols, 128) < sms or rows <= 64:
        return ProductConfig(_fit(rows, 64), _fit(cols, narrow), _fit(depth, 64), 8, stages=3, num_warps=4, ctas=2)
    if not hopper:
        block_n = 128 if epilogue in ("", "act") else 64
        return ProductConfig(128, _fit(cols, block_n), _fit(depth, 32), 8, stages=4, num_warps=8, ctas=1)
    if epilogue == "" and triton.cdiv(cols, 256) * 2 == triton.cdiv(cols, 128):
        return ProductConfig(128, 256, _fit(depth, 64), 8, stages=3, num_warps=8, ctas=1)
    if epilogue == "gate":
        return ProductConfig(128, _fit(cols, 128), _fit(depth, 64), 8, stages=3, num_warps=8, ctas=1)
    block_n = 128 if epilogue in ("", "act") else 64
    return ProductConfig(128, _fit(cols, block_n), _fit(depth, 64), 8, stages=3, num_warps=8, ctas=1)


def pick_weights_config(
    rows: int, cols: int, depth: int, aligned: bool, dtype: torch.dtype, capability: tuple[int, int], sms: int
) -> WeightsConfig:
    """Configuration of a weight's gradient [cols, depth] over `rows`. Pure.

    The gradient of 1365 x 512 has 44 tiles of 128 x 128: split-K with as many partitions of the rows as fill the GPU
    twice, each of at least 512 rows, whose partial sums are added in order. By this arithmetic; not measured yet.
    """
    n, k, r, stages, warps = _fit(cols, 128), _fit(depth, 128), 64, 3, 8
    if not aligned or dtype == torch.float32:
        n, k, r, stages = _fit(cols, 64), _fit(depth, 64), 32, 2
    elif capability < (9, 0):
        r, stages = 32, 4
    elif triton.cdiv(cols, 128) * triton.cdiv(depth, 256) >= sms:
        k = 256
    tiles = triton.cdiv(max(1, cols), n) * triton.cdiv(max(1, depth), k)
    return WeightsConfig(n, k, _fit(rows, r), _splits(rows, tiles, sms), raster=8, stages=stages, num_warps=warps)


def pick_gradients_config(
    rows: int,
    dim: int,
    hidden: int,
    dim_out: int,
    aligned: bool,
    dtype: torch.dtype,
    capability: tuple[int, int],
    sms: int,
) -> GradientsConfig | None:
    """Configuration of the gradients of x and of both weights in one launch; None where each has enough tiles for a
    launch of its own. Pure.

    564 rows of 512 -> 1365 -> 512 are 72 tiles of x's gradient with 11 K-blocks, and 88 of each weight's with 9: two of
    them fit an SM, by their registers and 96 KiB of shared memory. Measured as a whole backward (EXPERIMENTS.md); the
    limit, tiles for every SM, is estimated.
    """

    def tiles(height: int, width: int) -> int:
        return triton.cdiv(height, 128) * triton.cdiv(width, 128)

    if max(tiles(rows, dim), tiles(hidden, dim), tiles(dim_out, hidden)) >= sms:
        return None
    n, r, h, stages, warps = 128, 64, 128, 3, 4
    if not aligned or dtype == torch.float32:
        n, r, h, stages, warps = 64, 32, 32, 2, 8
    elif capability < (9, 0):
        r, h = 32, 64
    return GradientsConfig(
        _fit(rows, 64),
        _fit(dim, 64),
        _fit(hidden, h),
        _fit(max(hidden, dim_out), n),
        _fit(max(dim, hidden), 64),
        _fit(rows, r),
        stages,
        warps,
    )


def pick_fused_config(
    rows: int, hidden: int, dim: int, dim_out: int, gated: bool, aligned: bool, dtype: torch.dtype, sms: int
) -> FusedConfig:
    """Configuration of the single kernel. Pure.

    64 rows of 512 columns of y are 128 fp32 accumulators per thread, which leaves registers for 32 columns of the
    hidden. The hidden is split until there is a CTA for each SM: 564 rows are 9 tiles, with 14 partitions 126 CTAs. By
    this arithmetic; not measured yet.
    """
    if dtype == torch.float32 or not aligned:
        block_m, block_h, block_k, stages = 16, 16, 32, 1
    else:
        block_m, block_h, block_k, stages = _fit(rows, 64), 32, 64, 2
    blocks = triton.cdiv(max(1, hidden), block_h)
    wanted = max(1, sms // max(1, triton.cdiv(rows, block_m)))
    per_split = triton.cdiv(blocks, min(blocks, wanted))
    return FusedConfig(block_m, block_h, _fit(dim, block_k), triton.cdiv(blocks, per_split), stages, num_warps=8)


def pick_cuda_config(
    rows: int, cols: int, steps: int, parts: int, epilogue: str, sms: int, erf: bool = False
) -> CudaConfig:
    """Configuration of products.cu for a result [rows, cols] with `steps` K-blocks of 64 in `parts` split-K
    partitions; `epilogue` as in `CUDA_EPILOGUES`, `erf` where it has exact GELU. Pure.

    The fastest by the estimate of `cuda_cycles`. Of 116 GEMMs of wide models on one H200 that is the fastest of the
    five widths, or within 4.4 % of it, 0.5 % on average (EXPERIMENTS.md). Groups of 4 and 16 clusters (`raster`) were
    no faster there, and clusters of two up to 13 % faster than none. There are as many pipeline stages as fit into
    shared memory. With 192 columns exact GELU's derivative of a gate spills.
    """
    cluster = 2 if rows > 128 else 1
    widths = (256, 176, 160, 128) if epilogue == "dgate" and erf else (256, 192, 176, 160, 128)
    return min(
        (CudaConfig(width, cuda_stages(width), raster=8, cluster=cluster) for width in widths),
        key=lambda config: cuda_cycles(config, rows, cols, steps, parts, epilogue, sms),
    )


# Cycles that an epilogue of products.cu takes for each column of a tile: 128 accumulators, of one warpgroup.
CUDA_EPILOGUES = {"plain": 22, "act": 28, "gate": 28, "dact": 36, "dgate": 68, "parts": 22}


def cuda_cycles(config: CudaConfig, rows: int, cols: int, steps: int, parts: int, epilogue: str, sms: int) -> float:
    """Estimated cycles of products.cu, without what all configurations have in common: launch, first loads. Pure.

    Tiles are processed in waves. A K-block takes as long as its operands in shared memory (128 bytes a cycle: both
    written once, a read once and b by two wgmmas), which is never less than the time of the tensor cores (4096 FLOP a
    cycle), or as long as its loads from L2. The epilogue of a tile of 256 columns is exposed; each of two warpgroups
    has half of it, but they store at the same time. With ping-pong it overlaps the next tile's main loop, and takes
    time only if it is longer, or the last. A quarter less of a's bytes, the rate of L2, an epilogue's cycles and the
    factor of one of 256 columns are fitted to the measurements that `pick_cuda_config` names, so that the fastest width
    has the fewest cycles; no other meaning is claimed.
    """
    width = config.block_n
    columns = width // 2 if epilogue == "gate" else width
    bands = triton.cdiv(rows, 128 * config.cluster)
    tiles = parts * bands * triton.cdiv(cols, columns)
    rounds = triton.cdiv(tiles, max(1, sms // config.cluster))
    step = max(3 * width + 192, (128 + width / config.cluster) * 128 / 54)
    product, rest = triton.cdiv(steps, parts) * step, CUDA_EPILOGUES[epilogue] * width
    if not config.turns:
        return rounds * (product + 1.2 * rest)
    return rounds * max(product, (product + rest) / 2) + rest


def cuda_stages(block_n: int) -> int:
    """Pipeline stages of products.cu, as many as fit. Pure."""
    return SHARED // cuda_step_bytes(block_n)


def cuda_step_bytes(block_n: int) -> int:
    """Shared memory of a pipeline stage of products.cu and its two barriers; b, where it is N-major, is in panels of 64
    columns."""
    return (128 + triton.cdiv(block_n, 64) * 64) * 64 * 2 + 16


def pick_narrow_config(rows: int, steps: int, weights: int, tensors: int) -> NarrowConfig:
    """Configuration of narrow.cu for `steps` K-blocks of b, which is made of `weights` weights, and `tensors` tensors
    that are loaded or stored. Pure. Measured for D = 512 against 64 columns and fewer stages of a: the fastest in six
    of seven, and 2.5 % slower than 64 columns for 205 000 rows with pre kept.

    The stages of b hold at least the K-blocks of one block, which the second consumer reads one block later than the
    first, and as many more as fit, up to two further blocks. The stages of a hold half of a consumer's next rows, which
    are loaded before it has finished with the previous ones. Two CTAs that share b read 16 bytes of it a cycle from
    L2. Three tensors leave no room for the stages of a block of 128 columns.
    """
    config = NarrowConfig(64 if weights == 2 or tensors == 3 else 128, steps, 4, 2 if rows > 128 else 1)
    for stages in range(3 * steps, steps, -1):
        if narrow_bytes(replace(config, stages=stages), weights, tensors) <= SHARED:
            return replace(config, stages=stages)
    return config


def narrow_bytes(config: NarrowConfig, weights: int, tensors: int) -> int:
    """Shared memory of a CTA of narrow.cu: the pipeline stages of b and a, a tile of each tensor and the fp32 bias for
    each of the two consumers, and barriers."""
    b_ring = config.stages * (weights * config.columns * 64 * 2 + 16)
    return b_ring + config.a_stages * (64 * 64 * 2 + 24) + 2 * config.columns * (tensors * 64 * 2 + 4) + 4 * 8


def clusters_at_once(sms: int, size: int) -> int:
    """How many clusters of `size` CTAs are resident at once, with one CTA per SM. Pure. A cluster lies within a GPC, so
    that clusters of 4 CTAs leave 12 of 132 SMs idle (the driver's count on one H200). More clusters would take two
    waves."""
    usable = sms if size <= 2 else sms * 10 // 11
    return max(1, usable // size)


def pick_cuda_parts(steps: int, tiles: int, sms: int) -> int:
    """Split-K partitions of a weight's gradient in products.cu, of `steps` K-blocks of 64 rows. Pure. As many as fill
    the GPU with tiles, each of at least 8 K-blocks; not measured yet."""
    return max(1, min(sms // max(1, tiles), steps // 8))


def pick_sum_config(elements: int) -> SumConfig:
    """Configuration of the sum of partial results, and of a weight's copy. Pure."""
    return SumConfig(_fit(elements, 1024), num_warps=4)


def pick_copy_config(pitch: int) -> CopyConfig:
    """Blocks in which w2 is copied in the launch that computes the hidden. Pure. 64 rows of 1376 elements are 16
    blocks, of 32 or 64 elements a thread, whose loads are all in flight at once. No other size was measured
    (EXPERIMENTS.md)."""
    return CopyConfig(8, _fit(pitch, 1024))


def pick_bias_config(rows: int, cols: int, dtype: torch.dtype, sms: int) -> BiasConfig:
    """Configuration of a bias's gradient, which reads its operand once: 128 bytes of a row, in 16-bit dtypes. Pure."""
    block_n = _fit(cols, 64)
    return BiasConfig(block_n, _fit(rows, 64), _splits(rows, triton.cdiv(max(1, cols), block_n), 2 * sms), num_warps=4)


def _splits(rows: int, tiles: int, sms: int) -> int:
    """Split-K partitions of the rows: as many as fill `sms` with tiles, each of at least 512 rows."""
    return max(1, min(sms // tiles, rows // 512))


def _fit(size: int, most: int) -> int:
    """The block size of a dimension: `most`, or the next power of two if the dimension is smaller."""
    return max(MIN_BLOCK, min(most, triton.next_power_of_2(max(1, size))))

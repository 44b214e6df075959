"""The logits for Hopper in CUDA C++ (logits.cu): which problems it supports, and its launches."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import configs
from ..configs import Chunk
from ..layout import Optional, Stats
from ..problem import Problem
from . import cuda_driver
from .cuda_driver import address, tensor_map

BLOCK_M, BLOCK_K, THREADS = 128, 64, 384  # as in logits.cu
STATS, LOGITS, GRADIENT = range(3)  # epilogues of logits.cu
HALVES = (torch.float16, torch.bfloat16)
VECTOR = 8  # elements of 16 bytes
FLOAT = 4  # bytes

# Tensor maps of hidden and weight, then the fields of logits.cu's Problem: z, bias, target, stats, highest, scale,
# factor, dloss; sum_at, total_at, hit_at, pitch, dloss_stride, ignore_index; first, rows, cols, steps; softcap, z_loss,
# hit, rest.
_LAYOUT = "MM(PPPPPPPPqqqqqqiiiiffff)"


def unsupported_reason(p: Problem) -> str | None:
    """Why logits.cu cannot compute these logits, or None."""
    if p.device.type != "cuda" or p.capability != (9, 0):
        return "it needs a GPU of compute capability 9.0 (Hopper)"
    if p.dtype not in HALVES:
        return f"it supports float16 and bfloat16, not {p.dtype}"
    if not p.aligned or p.dim % VECTOR or any(s[1] != 1 or s[0] % VECTOR for _, s in (p.hidden, p.weight)):
        return "it requires hidden and weight with contiguous rows on 16-byte boundaries, and H a multiple of 8"
    return cuda_driver.no_compiler()


def stats_of(p: Problem, chunk: Chunk) -> Stats:
    """The layout of the statistics that `stats_launch` writes for a chunk. A part is the result of one tile."""
    return Stats(-(-p.vocab // _config(p, chunk, STATS).block_n), chunk.count, _is_smooth(p, STATS))


def _config(p: Problem, chunk: Chunk, epilogue: int) -> configs.LogitsConfig:
    return configs.pick_logits_config(chunk.count, _is_smooth(p, epilogue) or p.loss.softcap is not None)


def _is_smooth(p: Problem, epilogue: int) -> bool:
    """The define SMOOTHING. A loss without label smoothing needs no sums of logits. If there is no z-loss either, its
    gradient is that of softmax."""
    return p.loss.label_smoothing != 0 or (epilogue == GRADIENT and p.loss.z_loss != 0)


def stats_launch(p: Problem, chunk: Chunk, stats: Stats, pitch: int = 0) -> Callable[..., None]:
    """The launch that writes the statistics of a chunk over the whole vocabulary, given (hidden, weight, bias, target,
    z, stats). It also writes zᵀ, in rows of `pitch` elements, unless pitch is 0."""
    start = _Start(p, chunk, slice(0, p.vocab), LOGITS if pitch else STATS)
    sizes = *stats.offsets, pitch, 0

    def run(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional,
        target: torch.Tensor,
        z: Optional,
        stats: torch.Tensor,
    ) -> None:
        start(hidden, weight, bias, target, address(z) if pitch else 0, (stats.data_ptr(), 0, 0, 0, 0), sizes)

    return run


def gradient_launch(
    p: Problem, chunk: Chunk, entries: slice, pitch: int, z_at: int, dloss_stride: int | None
) -> Callable[..., None]:
    """The launch that writes the transposed gradient of a chunk's logits for these vocabulary entries, in rows of
    `pitch` elements from offset `z_at` of z, given (hidden, weight, bias, target, z, held, dloss)."""
    start, stride = _Start(p, chunk, entries, GRADIENT), dloss_stride or 0
    lse_at, factor_at, dloss_at = 2 * chunk.start * FLOAT, p.held.factor_at * FLOAT, chunk.start * stride * FLOAT
    scale_at, z_at = lse_at + chunk.count * FLOAT, z_at * p.dtype.itemsize
    sizes = 0, 0, 0, pitch, stride

    def run(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional,
        target: torch.Tensor,
        z: torch.Tensor,
        held: torch.Tensor,
        dloss: Optional,
    ) -> None:
        at, incoming = held.data_ptr(), 0 if dloss is None else dloss.data_ptr() + dloss_at
        read = 0, at + lse_at, at + scale_at, at + factor_at, incoming
        start(hidden, weight, bias, target, z.data_ptr() + z_at, read, sizes)

    return run


class _Start:
    """Launches of the kernel for some rows and vocabulary entries."""

    def __init__(self, p: Problem, chunk: Chunk, entries: slice, epilogue: int) -> None:
        rows, cols, size, loss = chunk.count, entries.stop - entries.start, p.dtype.itemsize, p.loss
        config = _config(p, chunk, epilogue)
        self._at = chunk.start * p.hidden[1][0] * size, entries.start * p.weight[1][0] * size
        self._hidden = _map(p, rows, p.hidden[1], BLOCK_M)
        self._weight = _map(p, cols, p.weight[1], config.block_n // config.cluster)
        self._bias_at, self._target_at = entries.start * size, chunk.start * (8 if p.wide else 4)
        steps = -(-p.dim // BLOCK_K)
        numbers = loss.softcap or 0.0, loss.z_loss, 1 - loss.label_smoothing, loss.label_smoothing / p.vocab
        self._last = loss.ignore_index, entries.start, rows, cols, steps, *numbers
        defines = (
            f"EPILOGUE={epilogue}",
            f"FP16={int(p.dtype == torch.float16)}",
            f"WIDE={int(p.wide)}",
            f"SOFTCAP={int(loss.softcap is not None)}",
            f"SMOOTHING={int(_is_smooth(p, epilogue))}",
            f"BLOCK_N={config.block_n}",
            f"STAGES={config.stages}",
            f"RASTER={config.raster}",
            f"CLUSTER={config.cluster}",
        )
        shared, device = shared_bytes(config), p.device
        with torch.cuda.device(device):
            (kernel,) = cuda_driver.kernels(
                device.index, "logits.cu", ("linear_cross_entropy_logits",), defines, shared
            )
            sms = torch.cuda.get_device_properties(device).multi_processor_count
        clusters = -(-rows // (BLOCK_M * config.cluster)) * -(-cols // config.block_n)
        grid = config.cluster * min(sms // config.cluster, clusters)
        self._launch = cuda_driver.Launch(device.index, kernel, grid, THREADS, shared, _LAYOUT)

    def __call__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional,
        target: torch.Tensor,
        z: int,
        pointers: tuple[int, ...],
        sizes: tuple[int, ...],
    ) -> None:
        maps = self._hidden(hidden.data_ptr() + self._at[0]), self._weight(weight.data_ptr() + self._at[1])
        biases = 0 if bias is None else bias.data_ptr() + self._bias_at
        self._launch(*maps, z, biases, target.data_ptr() + self._target_at, *pointers, *sizes, *self._last)


def shared_bytes(config: configs.LogitsConfig) -> int:
    """Shared memory of a CTA in bytes: the pipeline stages of both operands, and their mbarriers."""
    return config.stages * ((BLOCK_M + config.block_n) * BLOCK_K * 2 + 16)


def _map(p: Problem, rows: int, strides: tuple[int, ...], block: int) -> cuda_driver.TensorMap:
    """The tensor map of `rows` rows of H elements, in boxes of `block` rows by 64 columns."""
    matrix = torch.empty_strided((rows, p.dim), strides, dtype=p.dtype, device="meta")
    return tensor_map(matrix[None, None], rows, block)

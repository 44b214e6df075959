"""Gaussian mixture log-density: the two kernels and their launchers.

Napkin maths, fp32, K = 10, R rows, one NVIDIA H200 that copies 4254 GB/s:
  forward   reads logits, mu, log_sigma, y             (3K + 1) · 4 = 124 bytes a row    8.4 M rows: 1.04 GB, 245 us
  backward  reads those again, writes their gradients  2 · 124 = 248 bytes a row         8.4 M rows: 2.08 GB, 490 us
In 245 us the chip issues about 860 instructions a row (132 SMs x 4 schedulers x 32 lanes at 1.755 GHz), so what counts
is not to waste lanes: K = 10 in a tile of 16 with shuffles between the lanes of a row needs over 1000. A thread that
owns its row needs 281 (README.md has the table).

The backward saves nothing but the inputs: the two maxima and sums of a row would cost 16 bytes to write and 16 to read,
an eighth of the forward's traffic, and they come out of values that the backward needs anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .arrival import MAX_PROGRAMS, arrive, fixed_point, words
from .mixture import LN_2, gradients, mixture
from .tiles import load_columns, store_columns

MAX_K = 128
REDUCTIONS = ("none", "sum", "mean")
MAX_STRIDE = 1 << 20  # a tile of at most 1024 rows stays within 32-bit offsets

# As @triton.jit below decides it, once: later changes of the knob change nothing, and torch.compile cannot trace it.
INTERPRETED: bool = triton.knobs.runtime.interpret

HALF_LOG_2PI = tl.constexpr(0.9189385332046727)


@dataclass(frozen=True)
class Config:
    """block_m rows a tile; load_n, hold_n and store_n are the widths of `tiles`, store_n for the backward alone.
    programs_per_sm = 0 gives each tile a CTA of its own; else the CTAs stay and loop over tiles."""

    block_m: int
    load_n: int
    hold_n: int
    store_n: int
    num_warps: int
    programs_per_sm: int


def vector(k: int, itemsize: int) -> int:
    """Neighbouring columns that one load may take: rows are K elements apart, a load has at most 16 bytes."""
    return min(k & -k, 16 // itemsize)


def hold_width(k: int, itemsize: int, loads: int) -> int:
    """The narrowest tile that keeps a row to that many loads.

    Each load of a warp touches nearly every 128-byte line of its rows, and the L1 cache looks up about one line a
    cycle. Narrower means more such loads, but fewer lanes to a row, so fewer shuffles and less arithmetic done twice.
    """
    width = vector(k, itemsize)
    while -(-k // width) > loads:
        width *= 2
    return width


def _loads(itemsize: int) -> int:
    """Loads per row that pay, on an H200: 16-bit rows have half the bytes and so half the time for the arithmetic."""
    return 3 if itemsize == 4 else 5


def pick_fwd_config(rows: int, k: int, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    """Configuration of the forward kernel. Pure.

    Large batches: CTAs stay and loop, which bounds the number of additions to one word. Small ones, where a
    multiprocessor has a few warps at most and their latency is all that counts: a row a thread, and from about a CTA a
    multiprocessor on, eight warps in each, so that there are few to wait for.
    """
    if rows * k <= 1 << 22:
        width = hold_width(k, dtype.itemsize, 5)
        num_warps = 8 if rows * (width // vector(k, dtype.itemsize)) > 32768 else 1
        programs_per_sm = 0
    else:
        width, num_warps, programs_per_sm = hold_width(k, dtype.itemsize, _loads(dtype.itemsize)), 4, 8
    lanes = width // vector(k, dtype.itemsize)
    return Config(max(1, 32 * num_warps // lanes), width, width, width, num_warps, programs_per_sm)


def pick_bwd_config(rows: int, k: int, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    """Configuration of the backward kernel. Pure."""
    width = hold_width(k, dtype.itemsize, _loads(dtype.itemsize))
    whole_row = triton.next_power_of_2(k)
    # L2 takes a write by the sector of 32 bytes, and a part of a sector costs as much as the whole. A small batch
    # stays in L2, and waits rather for the detour through shared memory.
    joined = width * dtype.itemsize < 32 and whole_row <= 32 and rows * k > 1 << 18
    block_m = max(1, 64 * vector(k, dtype.itemsize) // width)
    return Config(block_m, width, width, whole_row if joined else width, num_warps=2, programs_per_sm=0)


@triton.jit
def _gmm_logprob_fwd_kernel(
    logits_ptr,
    mu_ptr,
    log_sigma_ptr,
    y_ptr,
    out_ptr,
    words_ptr,
    scale,
    unit,
    rows,
    STRIDE_LOGITS: tl.constexpr,
    STRIDE_MU: tl.constexpr,
    STRIDE_LOG_SIGMA: tl.constexpr,
    STRIDE_Y: tl.constexpr,
    SKIP_LOGITS: tl.constexpr,
    SKIP_MU: tl.constexpr,
    SKIP_LOG_SIGMA: tl.constexpr,
    REDUCTION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LOAD: tl.constexpr,
    HOLD: tl.constexpr,
    LOOP: tl.constexpr,
):
    COUNT: tl.constexpr = (K + HOLD - 1) // HOLD
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    # A single turn, known to be one, leaves no loop.
    start, stop, step = (tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.num_programs(0)) if LOOP else (0, 1, 1)
    for turn in tl.range(start, stop, step):
        # 64-bit where the tile begins, 32-bit within it.
        first = tl.cast(turn if LOOP else tl.program_id(0), tl.int64) * BLOCK_M
        lanes = tl.arange(0, BLOCK_M)
        live = lanes < rows - first
        if LOOP:
            r, in_range = lanes, live
        else:
            # Lanes without a row read the last one. Masked loads have to set their registers first, and ptxas then puts
            # a third of them off until the others have come.
            r, in_range = tl.minimum(lanes, tl.minimum(rows - 1 - first, BLOCK_M - 1).to(tl.int32)), None
        y = tl.load(y_ptr + first * STRIDE_Y + r * STRIDE_Y, mask=in_range).to(tl.float32)[:, None]
        at = logits_ptr + SKIP_LOGITS + first * STRIDE_LOGITS
        logits = load_columns(at, r, in_range, STRIDE_LOGITS, float("-inf"), K, LOAD, HOLD, BLOCK_M)
        at = mu_ptr + SKIP_MU + first * STRIDE_MU
        mu = load_columns(at, r, in_range, STRIDE_MU, 0.0, K, LOAD, HOLD, BLOCK_M)
        at = log_sigma_ptr + SKIP_LOG_SIGMA + first * STRIDE_LOG_SIGMA
        log_sigma = load_columns(at, r, in_range, STRIDE_LOG_SIGMA, 0.0, K, LOAD, HOLD, BLOCK_M)
        _, _, _, _, m, weight_sum, density_sum = mixture(logits, mu, log_sigma, y, COUNT, RESIDUAL)
        log_p = (m + tl.log2(density_sum / weight_sum)) * LN_2 - HALF_LOG_2PI
        if REDUCTION == "none":
            tl.store(out_ptr + first + lanes, log_p.to(out_ptr.dtype.element_ty), mask=live)
        else:
            total += tl.where(live, log_p, 0.0)
    if REDUCTION != "none":
        result = tl.sum(total, 0)
        last = True
        if words_ptr is not None:
            last, result = arrive(words_ptr, result, scale, unit)
        if last:
            if REDUCTION == "mean":
                result = result / rows
            tl.store(out_ptr, result.to(out_ptr.dtype.element_ty))


@triton.jit
def _gmm_logprob_bwd_kernel(
    grad_ptr,
    logits_ptr,
    mu_ptr,
    log_sigma_ptr,
    y_ptr,
    d_logits_ptr,
    d_mu_ptr,
    d_log_sigma_ptr,
    d_y_ptr,
    rows,
    STRIDE_GRAD: tl.constexpr,
    STRIDE_LOGITS: tl.constexpr,
    STRIDE_MU: tl.constexpr,
    STRIDE_LOG_SIGMA: tl.constexpr,
    STRIDE_Y: tl.constexpr,
    SKIP_LOGITS: tl.constexpr,
    SKIP_MU: tl.constexpr,
    SKIP_LOG_SIGMA: tl.constexpr,
    REDUCTION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    NEED_LOGITS: tl.constexpr,
    NEED_MU: tl.constexpr,
    NEED_LOG_SIGMA: tl.constexpr,
    NEED_Y: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LOAD: tl.constexpr,
    HOLD: tl.constexpr,
    STORE: tl.constexpr,
):
    COUNT: tl.constexpr = (K + HOLD - 1) // HOLD
    r = tl.arange(0, BLOCK_M)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.num_programs(0)):
        first = tl.cast(tile, tl.int64) * BLOCK_M
        live = r < rows - first
        y = tl.load(y_ptr + first * STRIDE_Y + r * STRIDE_Y, mask=live).to(tl.float32)[:, None]
        at = logits_ptr + SKIP_LOGITS + first * STRIDE_LOGITS
        logits = load_columns(at, r, live, STRIDE_LOGITS, float("-inf"), K, LOAD, HOLD, BLOCK_M)
        at = mu_ptr + SKIP_MU + first * STRIDE_MU
        mu = load_columns(at, r, live, STRIDE_MU, 0.0, K, LOAD, HOLD, BLOCK_M)
        at = log_sigma_ptr + SKIP_LOG_SIGMA + first * STRIDE_LOG_SIGMA
        log_sigma = load_columns(at, r, live, STRIDE_LOG_SIGMA, 0.0, K, LOAD, HOLD, BLOCK_M)
        if REDUCTION == "none":
            grad = tl.load(grad_ptr + first * STRIDE_GRAD + r * STRIDE_GRAD, mask=live).to(tl.float32)
        else:
            grad = tl.load(grad_ptr).to(tl.float32)
            if REDUCTION == "mean":
                grad = grad / rows
        parts = mixture(logits, mu, log_sigma, y, COUNT, RESIDUAL)
        d_logits, d_mu, d_log_sigma, d_y = gradients(parts, grad, COUNT)
        if NEED_LOGITS:
            store_columns(d_logits_ptr + first * K, d_logits, r, live, K, STORE, HOLD, BLOCK_M)
        if NEED_MU:
            store_columns(d_mu_ptr + first * K, d_mu, r, live, K, STORE, HOLD, BLOCK_M)
        if NEED_LOG_SIGMA:
            store_columns(d_log_sigma_ptr + first * K, d_log_sigma, r, live, K, STORE, HOLD, BLOCK_M)
        if NEED_Y:
            tl.store(d_y_ptr + first + r, d_y.to(d_y_ptr.dtype.element_ty), mask=live)


def gmm_logprob_fwd(
    logits: torch.Tensor, mu: torch.Tensor, log_sigma: torch.Tensor, y: torch.Tensor, reduction: str
) -> torch.Tensor:
    """log p(y) by row, its sum or its mean, in the inputs' dtype. Inputs as `op` has checked them."""
    rows, k = y.numel(), logits.shape[-1]
    out = torch.empty(y.shape if reduction == "none" else (), dtype=y.dtype, device=y.device)
    if rows == 0:
        return out if reduction == "none" else out.fill_(float("nan") if reduction == "mean" else 0.0)
    with torch.cuda.device_of(y):
        capability, multiprocessors = _device(y)
        config = pick_fwd_config(rows, k, y.dtype, capability)
        programs, tiles = _programs(rows, config, multiprocessors), triton.cdiv(rows, config.block_m)
        launch_words, scale, unit = None, 1.0, 1.0
        if reduction != "none":
            programs = min(programs, MAX_PROGRAMS)
            if programs > 1:
                launch_words = words(out)
                scale, unit = fixed_point(triton.cdiv(tiles, programs) * config.block_m)
        (logits, mu, log_sigma), layout = _layout(logits, mu, log_sigma)
        y, stride_y = _vector(y)
        _gmm_logprob_fwd_kernel[(programs,)](
            logits,
            mu,
            log_sigma,
            y,
            out,
            launch_words,
            scale,
            unit,
            rows,
            **layout,
            STRIDE_Y=stride_y,
            REDUCTION=reduction,
            RESIDUAL=_residual(y),
            K=k,
            BLOCK_M=config.block_m,
            LOAD=config.load_n,
            HOLD=config.hold_n,
            LOOP=programs < tiles,
            num_warps=config.num_warps,
        )
    return out


def gmm_logprob_bwd(
    grad: torch.Tensor,
    logits: torch.Tensor,
    mu: torch.Tensor,
    log_sigma: torch.Tensor,
    y: torch.Tensor,
    reduction: str,
    needed: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of those of the four inputs that are `needed`, contiguous; None for the others. `grad` is the incoming
    gradient: [...] for "none", a scalar otherwise, any strides."""
    rows, k = y.numel(), logits.shape[-1]
    grads = tuple(
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if need else None
        for x, need in zip((logits, mu, log_sigma, y), needed, strict=True)
    )
    if rows == 0 or not any(needed):
        return grads
    with torch.cuda.device_of(y):
        capability, multiprocessors = _device(y)
        config = pick_bwd_config(rows, k, y.dtype, capability)
        (logits, mu, log_sigma), layout = _layout(logits, mu, log_sigma)
        y, stride_y = _vector(y)
        grad, stride_grad = _vector(grad)
        _gmm_logprob_bwd_kernel[(_programs(rows, config, multiprocessors),)](
            grad,
            logits,
            mu,
            log_sigma,
            y,
            *grads,
            rows,
            **layout,
            STRIDE_GRAD=stride_grad,
            STRIDE_Y=stride_y,
            REDUCTION=reduction,
            RESIDUAL=_residual(y),
            NEED_LOGITS=needed[0],
            NEED_MU=needed[1],
            NEED_LOG_SIGMA=needed[2],
            NEED_Y=needed[3],
            K=k,
            BLOCK_M=config.block_m,
            LOAD=config.load_n,
            HOLD=config.hold_n,
            STORE=config.store_n,
            num_warps=config.num_warps,
        )
    return grads


def _programs(rows: int, config: Config, multiprocessors: int) -> int:
    tiles = triton.cdiv(rows, config.block_m)
    return min(tiles, multiprocessors * config.programs_per_sm) if config.programs_per_sm else tiles


def _device(tensor: torch.Tensor) -> tuple[tuple[int, int], int]:
    """Compute capability and number of multiprocessors; the interpreter stands for a small sm_80."""
    if not tensor.is_cuda:
        return (8, 0), 2
    properties = torch.cuda.get_device_properties(tensor.device)
    return (properties.major, properties.minor), properties.multi_processor_count


def _residual(tensor: torch.Tensor) -> str:
    """How `mixture` corrects 1/sigma."""
    if tensor.dtype != torch.float32:
        return "none"
    return "fp64" if INTERPRETED else "fma"


def _layout(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], dict[str, int]]:
    """What the kernels take for logits, mu and log_sigma: a tensor to point at, STRIDE_* and SKIP_*.

    The strides are constants of the kernel, so that the compiler can prove how far rows are aligned and load more than
    one element at a time. For the same reason a view into a larger tensor (mu of a packed [rows, 3K]) is handed over as
    an address rounded down to 16 bytes and a constant number of elements to SKIP.
    """
    matrices = [_matrix(tensor) for tensor in tensors]
    layout: dict[str, int] = {}
    pointers = []
    for name, matrix in zip(("LOGITS", "MU", "LOG_SIGMA"), matrices, strict=True):
        skip = matrix.storage_offset() % (16 // matrix.element_size())
        pointers.append(matrix.as_strided((1,), (1,), matrix.storage_offset() - skip) if skip else matrix)
        layout[f"STRIDE_{name}"] = matrix.stride(0) if matrix.shape[0] > 1 else matrix.shape[1]
        layout[f"SKIP_{name}"] = int(skip)
    return pointers, layout


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """[rows, K] with unit inner stride: a view where the strides allow it, otherwise a copy."""
    tensor = tensor.reshape(-1, tensor.shape[-1])
    in_place = tensor.shape[1] == 1 or tensor.stride(1) == 1
    return tensor if in_place and tensor.stride(0) <= MAX_STRIDE else tensor.contiguous()


def _vector(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """[rows] and its stride: a view where the strides allow it, otherwise a copy."""
    tensor = tensor.reshape(-1)
    if tensor.stride(0) > MAX_STRIDE:
        tensor = tensor.contiguous()
    return tensor, tensor.stride(0) if tensor.shape[0] > 1 else 1

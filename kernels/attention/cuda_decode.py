"""The forward for few queries and many keys on Hopper in CUDA C++ (cuda_decode.cu): which problems it takes, and its
launch."""

from __future__ import annotations

import ctypes

import torch

from . import cuda_driver, dispatch
from .arrival import counters
from .cuda_driver import launch, tensor_map
from .cuda_forward import cuda_refuses
from .hopper import whole
from .problem import LOG2_E, Problem


class _Problem(ctypes.Structure):
    """As in cuda_decode.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "out", "lse")),
        *((f"{name}_{axis}", ctypes.c_int64) for name in ("q", "out") for axis in ("batch", "head", "row")),
        *((name, ctypes.c_void_p) for name in ("part", "statistics", "arrived")),
        ("scale_log2", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("heads", "group", "queries", "keys", "causal")),
        *((name, ctypes.c_int) for name in ("blocks", "share", "extra")),
    ]


def decode_refuses(problem: Problem) -> str | None:
    """Why the kernel cannot run a problem, or None."""
    rows = problem.queries * problem.group
    if rows > dispatch.DECODE_ROWS:
        return f"it takes {dispatch.DECODE_ROWS} queries at most, counting each head of a group, not {rows}"
    blocks = problem.all_kv_heads * (-(-problem.keys // dispatch.pick_decode_config(problem.dim, rows).block_n) + 1)
    if blocks >= 2**31:
        return "it counts blocks of keys in 32 bits"
    return cuda_refuses(problem)


def decode_fwd(problem: Problem, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Writes out and lse of a problem that `decode_refuses` does not."""
    k, v = whole(problem.k), whole(problem.v)
    dim, rows, heads = problem.dim, problem.queries * problem.group, problem.all_kv_heads
    config = dispatch.pick_decode_config(dim, rows)
    blocks = -(-problem.keys // config.block_n)
    # A block for each warp at least.
    ctas = max(1, min(problem.multiprocessors() * config.ctas, heads * blocks // config.warps))
    short = rows <= 8
    shared = shared_bytes(dim, short, config)
    with torch.cuda.device_of(out):
        sums = statistics = arrived = None
        if heads % ctas:  # else each CTA has whole heads
            sums = torch.empty(ctas, 2, rows, dim, dtype=torch.float32, device=out.device)
            statistics = torch.empty(ctas, 2, rows, 2, dtype=torch.float32, device=out.device)
            arrived = counters(ctas, sums)
        described = _Problem(
            problem.q.data_ptr(),
            out.data_ptr(),
            lse.data_ptr(),
            *problem.q.stride()[:3],
            *out.stride()[:3],
            *(None if x is None else x.data_ptr() for x in (sums, statistics, arrived)),
            problem.scale * LOG2_E,
            problem.k.shape[1],
            problem.group,
            problem.queries,
            problem.keys,
            int(problem.right == 0),
            blocks,
            *divmod(heads * blocks, ctas),
        )
        defines = (
            f"HEAD_DIM={dim}",
            f"FP16={int(out.dtype == torch.float16)}",
            f"SHORT={int(short)}",
            f"BLOCK_N={config.block_n}",
            f"STAGES={config.stages}",
            f"WARPS={config.warps}",
        )
        (kernel,) = cuda_driver.kernels(out.device.index, "cuda_decode.cu", ("attention_cuda_decode",), defines, shared)
        maps = [tensor_map(x, problem.keys, config.block_n) for x in (k, v)]
        launch(kernel, ctas, 32 * config.warps, shared, [*maps, described])


def shared_bytes(dim: int, short: bool, config: dispatch.DecodeConfig) -> int:
    """Of a CTA: rings of blocks and their barriers, the warps' sums, and whether it is the last of a head's."""
    ring = config.warps * config.stages * (4 * dim * config.block_n + 8)
    return ring + 4 * config.warps * (8 if short else 16) * (dim + 8 + 2) + 16

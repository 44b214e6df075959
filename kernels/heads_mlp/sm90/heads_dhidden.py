# A copy of parts/sm90/heads_dhidden.py, made by `nox -s vendor`: change it there.
"""The gradient of the hidden of heads in CUDA C++ (heads_dhidden.cu): its launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from ..activation import ACTIVATIONS
from ..configs import heads_backward as configs
from ..configs.heads_backward import BLOCK, CudaConfig
from ..configs.heads_forward import MAX_OUT
from ..heads_backward.operands import device_of
from . import cuda_driver
from .cuda_driver import address, tensor_map
from .heads import BLOCK_K, THREADS

Optional = torch.Tensor | None

DY_SLOTS = 4  # pipeline stages of dy, as in heads_dhidden.cu
# Tensor maps of w1, x and dpre, and heads_dhidden.cu's Hidden: dy and its strides; w2 and its strides; parts of dw2;
# rows, heads, hidden, dim_out, tiles of a part, whether dpre is written, number of parts that are added to, whether dw2
# has 16-bit elements.
_LAYOUT = "MMM(PqqqPqqqPiiiiiiii)"


def launch(
    start: int,
    rows: int,
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    dy_strides: tuple[int, ...],
    activation: str,
    config: CudaConfig,
    added: int,
) -> Callable[..., None]:
    """The launch for the `rows` rows of x from `start` on and the first `rows` rows of dy, given (dy, x, w1, w2, dpre,
    dw2) like these. Writes those of dpre and dw2 that are not None: dpre [rows, K, pitch], with zeros after each head's
    columns, and the parts of dw2, [parts, K, O, H] in fp32. The first `added` parts are added to. A single part may
    have the dtype of x instead. dy has the dtype of x. Requires that `heads.unsupported_reason` is None."""
    (heads, hidden, dim), dim_out, (_, sms) = w1.shape, w2.shape[1], device_of(x)
    pitch = configs.pick_pitch(hidden)
    defines = (
        f"ACTIVATION={ACTIVATIONS.index(activation)}",
        f"FP16={int(x.dtype == torch.float16)}",
        f"STEPS={-(-dim // BLOCK_K)}",
        f"STAGES={config.stages}",
        f"CLUSTER={config.cluster}",
    )
    shared = shared_bytes(config)
    with torch.cuda.device_of(x):
        (function,) = cuda_driver.kernels(x.device.index, "heads_dhidden.cu", ("heads_dhidden",), defines, shared)
    clusters = triton.cdiv(heads * triton.cdiv(hidden, BLOCK), config.cluster)  # of blocks of all heads
    units = clusters * triton.cdiv(triton.cdiv(rows, BLOCK), config.tiles)
    grid = config.cluster * min(sms // config.cluster, units)
    start_kernel = cuda_driver.Launch(x.device.index, function, grid, THREADS, shared, _LAYOUT)
    # As [1, K, rows, pitch]: a CTA's tile is 128 rows of 128 columns of a head.
    like_dpre = torch.empty((rows, heads, pitch), dtype=x.dtype, device="meta").transpose(0, 1)[None]
    w1_map = tensor_map(w1[None], hidden, BLOCK)
    x_map = tensor_map(x[None, None], rows, BLOCK // config.cluster)
    dpre_map = tensor_map(like_dpre, rows, BLOCK)
    first, sizes = start * x.stride(0) * x.element_size(), (rows, heads, hidden, dim_out, config.tiles)
    w2_strides = w2.stride()

    def run(
        dy: torch.Tensor, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, dpre: Optional, dw2: Optional
    ) -> None:
        from_w1, from_x = w1_map(w1.data_ptr()), x_map(x.data_ptr() + first)
        to_dpre = from_x if dpre is None else dpre_map(dpre.data_ptr())  # without dpre it is not read
        from_dy = dy.data_ptr(), *dy_strides, w2.data_ptr(), *w2_strides
        flags = int(dpre is not None), added, int(dw2 is not None and dw2.dtype == x.dtype)
        start_kernel(from_w1, from_x, to_dpre, *from_dy, address(dw2), *sizes, *flags)

    return run


def shared_bytes(config: CudaConfig) -> int:
    """Shared memory of a CTA: the pipeline stages of x and of dy with their barriers, then the tiles of dpre, aligned
    to 1024 bytes."""
    ring = config.stages * (BLOCK * BLOCK_K * 2 + 16) + DY_SLOTS * (BLOCK * MAX_OUT * 2 + 16)
    return -(-ring // 1024) * 1024 + BLOCK * BLOCK * 2

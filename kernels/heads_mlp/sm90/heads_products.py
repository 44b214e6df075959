# A copy of parts/sm90/heads_products.py, made by `nox -s vendor`: change it there.
"""The GEMMs that use the gradient of the hidden of heads, in CUDA C++ (heads_products.cu): their launch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..configs import heads_backward as configs
from ..configs.heads_backward import ProductsConfig
from ..heads_backward.operands import device_of
from . import cuda_driver
from .cuda_driver import address, tensor_map
from .heads import THREADS

Optional = torch.Tensor | None

BLOCK_K = 64  # of heads_products.cu: rows and columns of a box
STEP_BYTES = (configs.BLOCK + configs.BLOCK_N) * BLOCK_K * 2
# Tensor maps of dpre, w1 and x, and heads_products.cu's Products: parts, dx, sums, dw1; rows, heads, hidden, dim; heads
# of a part of dx, K of dw1, whether CTAs' tiles of dx are horizontally adjacent, units of dw1 that go first, whether
# sums are added to.
_LAYOUT = "MMM(PPPPiiiiiiiii)"


def launch(start: int, rows: int, x: torch.Tensor, w1: torch.Tensor, config: ProductsConfig) -> Callable[..., None]:
    """The launch for the `rows` rows of x from `start` on, given (dpre, x, w1, parts, dx, sums, dw1, add) like these:

    parts  partial sums of x's gradient, [parts, rows, D] in fp32, or None
    dx     these rows of x's gradient, written if parts is None
    sums   w1's gradient summed over the chunks, [K, H, D] in fp32, or None
    dw1    w1's gradient, or None: then the sums are written
    add    whether `sums` holds the sums of the chunks before, which are added

    A gradient that `config` leaves out is not written. D is a multiple of 8; parts, dx, sums and dw1 are contiguous.
    Requires that `heads.unsupported_reason` is None."""
    (heads, hidden, dim), (_, sms) = w1.shape, device_of(x)
    shared = shared_bytes(config)
    with torch.cuda.device_of(x):
        (function,) = cuda_driver.kernels(
            x.device.index, "heads_products.cu", ("heads_products",), defines(config, x.dtype), shared
        )
    units = sum(configs.products_units(rows, dim, heads, hidden, config))
    grid = config.cluster * min(sms // config.cluster, units)
    start_kernel = cuda_driver.Launch(x.device.index, function, grid, THREADS, shared, _LAYOUT)
    pitch = configs.pick_pitch(hidden)
    like_dpre = torch.empty((rows, heads, pitch), dtype=x.dtype, device="meta").transpose(0, 1)[None]
    dpre_map, w1_map = tensor_map(like_dpre, rows, BLOCK_K), tensor_map(w1[None], hidden, BLOCK_K)
    x_map, first = tensor_map(x[None, None], rows, BLOCK_K), start * x.stride(0) * x.element_size()
    terms = rows if config.dw1 else 0
    sizes = rows, heads, hidden, dim, config.dx_heads, terms, int(config.beside), config.ahead

    def run(
        dpre: torch.Tensor,
        x: torch.Tensor,
        w1: torch.Tensor,
        parts: Optional,
        dx: Optional,
        sums: Optional,
        dw1: Optional,
        add: bool,
    ) -> None:
        maps = dpre_map(dpre.data_ptr()), w1_map(w1.data_ptr()), x_map(x.data_ptr() + first)
        to = address(parts), address(dx), address(sums), address(dw1)
        start_kernel(*maps, *to, *sizes, int(add))

    return run


def defines(config: ProductsConfig, dtype: torch.dtype) -> tuple[str, ...]:
    return f"FP16={int(dtype == torch.float16)}", f"STAGES={config.stages}", f"CLUSTER={config.cluster}"


def shared_bytes(config: ProductsConfig) -> int:
    """Shared memory of a CTA: the pipeline stages and their barriers."""
    return config.stages * (STEP_BYTES + 16)

"""The forward of wide rows for Hopper in CUDA C++ (cluster.cu): which problems it supports, and its launch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import cuda_driver
from .configs import VECTOR, ClusterConfig
from .cuda_driver import address

WIDTHS = range(16385, 65537)  # narrower rows fit one CTA
_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # TYPE in cluster.cu
# Parameters: x, residual, weight, y, h, rstd; vectors of a row and of a CTA; strides of x and residual; 1 / dim, eps,
# weight_offset
_LAYOUT = "PPPPPPiiqqfff"


def unsupported_reason(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, capability: tuple[int, int]
) -> str | None:
    """Why cluster.cu cannot run on x and residual, [rows, dim] with a last stride of 1, and a contiguous weight; None
    if it can."""
    if capability != (9, 0):
        return "it needs a GPU of compute capability 9.0 (Hopper)"
    rows, dim = x.shape
    if dim not in WIDTHS:
        return f"it supports rows of {WIDTHS.start} to {WIDTHS.stop - 1} elements, not {dim}"
    if weight is not None and weight.dtype != x.dtype:
        return f"it requires a weight of x's dtype {x.dtype}, not {weight.dtype}"
    read = [t for t in (x, residual) if t is not None]
    starts = [t.data_ptr() for t in (*read, weight) if t is not None]
    # The row stride of a single row is arbitrary. y and h are contiguous, so their row stride is dim.
    strides = [dim, *(t.stride(0) for t in read if rows > 1)]
    if any(start % VECTOR for start in starts) or any(s * x.element_size() % VECTOR for s in strides):
        return "it requires rows on 16-byte boundaries"
    return cuda_driver.no_compiler()


def cluster_launch(
    config: ClusterConfig,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    save_rstd: bool,
    eps: float,
    weight_offset: float,
) -> Callable[..., None]:
    """The launch, a function of (x, residual, weight, y, h, rstd), for tensors with the signatures of these, for which
    `unsupported_reason` must be None. It writes y, h if there is a residual, and rstd unless it is None."""
    (rows, dim), per_vector = x.shape, VECTOR // x.element_size()
    vectors = dim // per_vector
    defines = (
        f"CLUSTER={config.ctas}",
        f"THREADS={config.threads}",
        f"VECTORS={config.vectors}",
        f"RESIDENT={config.resident}",
        f"EVEN={int(config.ctas * config.threads * config.vectors == vectors)}",
        f"TYPE={_TYPES[x.dtype]}",
        f"RESIDUAL={int(residual is not None)}",
        f"WEIGHT={int(weight is not None)}",
    )
    shared = 4 * max(32, config.ctas * config.threads // 32) + 8  # `Exchange` in cluster.cu
    device, added = x.device.index, residual is not None
    with torch.cuda.device_of(x):
        (kernel,) = cuda_driver.kernels(device, "cluster.cu", ("rmsnorm_cluster_fwd",), defines, shared)
    launch = cuda_driver.Launch(device, kernel, rows * config.ctas, config.threads, shared, _LAYOUT)
    stride = 0 if residual is None else residual.stride(0) // per_vector
    fixed = (vectors, config.slice, x.stride(0) // per_vector, stride, 1 / dim, eps, weight_offset)

    def run(
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        y: torch.Tensor,
        h: torch.Tensor,
        rstd: torch.Tensor | None,
    ) -> None:
        written = y.data_ptr(), h.data_ptr() if added else 0, address(rstd)
        launch(x.data_ptr(), address(residual), address(weight), *written, *fixed)

    return run

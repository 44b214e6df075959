"""The forward that also writes the gradient, for Hopper in CUDA C++ (cluster.cu): which problems it supports, and its
launch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import cuda_driver
from .configs import CLUSTER_THREADS, CLUSTER_VECTORS, ClusterConfig
from .cuda_driver import address
from .layout import Rows, Scratch, Vector, vector
from .loss import Loss

# Vectors of 16 bytes in a row, at least and at most: one more than a CTA holds, and as many as a cluster of 16 holds.
NARROWEST, WIDEST = CLUSTER_THREADS * CLUSTER_VECTORS + 1, 16 * CLUSTER_THREADS * CLUSTER_VECTORS
_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # TYPE and LOSS in cluster.cu
# logits, target, counts, loss, z-loss, lse, partial sums, gradient; rows, vocab, vectors of a CTA, number of counts;
# the strides of logits, target and gradient, ignore_index; smoothing, smoothing / vocab, z_loss
_LAYOUT = "PPPPPPPPiiiiqqqqfff"


def unsupported_reason(
    vocab: int, dtype: torch.dtype, layout: str, weighted: bool, softcap: bool, capability: tuple[int, int]
) -> str | None:
    """Why cluster.cu does not support such rows, or None. `layout` is the result of `layout.alignment`."""
    if capability != (9, 0):
        return "it needs a GPU of compute capability 9.0 (Hopper)"
    narrowest, widest = (vectors * 16 // dtype.itemsize for vectors in (NARROWEST, WIDEST))
    if not narrowest <= vocab <= widest:
        return f"it supports rows of {narrowest} to {widest} columns, not {vocab}"
    if layout != "aligned":
        return "it requires rows that begin and end on 16-byte boundaries"
    if weighted:
        return "it does not support class weights: they would take as many registers as the row itself"
    if softcap:
        return "it does not support softcap, with which the special function units are the limit, not memory"
    return cuda_driver.no_compiler()


def cluster_launch(
    config: ClusterConfig,
    logits: torch.Tensor,
    target: torch.Tensor,
    targets: Vector,
    at: Rows,
    to: Rows,
    loss: Loss,
    layout: Scratch,
) -> Callable[..., None]:
    """Returns a function of (logits, target, weight, sum of weights, loss, z-loss, lse, workspace, gradient), for
    tensors like these, for which `unsupported_reason` must be None. It writes the gradient, lse if requested, and the
    partial sums or the loss and z-loss of each row. `at` and `to`: how the rows of logits and gradient are
    addressed."""
    rows, vocab, per_vector = target.numel(), logits.shape[-1], vector(logits.dtype)
    defines = (
        f"CLUSTER={config.ctas}",
        f"THREADS={config.threads}",
        f"VECTORS={config.vectors}",
        f"RESIDENT={config.resident}",
        f"TYPE={_TYPES[logits.dtype]}",
        f"LOSS={_TYPES[loss.dtype]}",
        f"TARGET={8 * target.element_size()}",
        f"SMOOTH={int(loss.label_smoothing != 0)}",
        f"Z={int(loss.has_z)}",
    )
    device, smoothing = logits.device.index, loss.label_smoothing
    with torch.cuda.device_of(logits):
        (kernel,) = cuda_driver.kernels(device, "cluster.cu", ("cross_entropy_cluster_fwd_grad",), defines, 0)
    launch = cuda_driver.Launch(device, kernel, rows * config.ctas, config.threads, 0, _LAYOUT)
    strides = at.stride // per_vector, targets.stride, to.stride // per_vector
    numbers = smoothing, smoothing / vocab, loss.z_loss
    fixed = (rows, vocab, config.slice, layout.shares, *strides, loss.ignore_index, *numbers)
    sums, mean, partial_at = loss.reduction != "none", layout.shares > 0, 4 * layout.partial_at

    def run(
        logits: torch.Tensor,
        target: torch.Tensor,
        weight: None,
        weight_sum: None,
        out: torch.Tensor,
        z: torch.Tensor | None,
        lse: torch.Tensor | None,
        scratch: torch.Tensor | None,
        grad: torch.Tensor,
    ) -> None:
        start = address(scratch)
        counts, partial = start if mean else 0, start + partial_at if sums else 0
        written = out.data_ptr(), address(z), address(lse), partial, grad.data_ptr()
        launch(logits.data_ptr(), target.data_ptr(), counts, *written, *fixed)

    return run

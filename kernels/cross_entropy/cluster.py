"""The forward with the gradient for Hopper in CUDA C++ (cluster.cu): which problems it takes, and its launch."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from . import cuda_driver
from .configs import CLUSTER_THREADS, CLUSTER_VECTORS, ClusterConfig
from .cuda_driver import launch, pointer
from .layout import Rows, vector

if TYPE_CHECKING:
    from .kernel import Loss

# Vectors of 16 bytes: more than one CTA holds, and what those of the largest cluster do.
NARROWEST, WIDEST = CLUSTER_THREADS * CLUSTER_VECTORS + 1, 16 * CLUSTER_THREADS * CLUSTER_VECTORS
_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # TYPE and LOSS in cluster.cu


def cluster_refuses(
    vocab: int, dtype: torch.dtype, layout: str, weighted: bool, softcap: bool, capability: tuple[int, int]
) -> str | None:
    """Why no cluster of CTAs can take such rows, or None. `layout` as `layout.alignment` found it."""
    if capability != (9, 0):
        return "it needs a GPU of compute capability 9.0 (Hopper)"
    narrowest, widest = (vectors * 16 // dtype.itemsize for vectors in (NARROWEST, WIDEST))
    if not narrowest <= vocab <= widest:
        return f"it takes rows of {narrowest} to {widest} columns, not {vocab}"
    if layout != "aligned":
        return "it wants rows that begin and end on 16-byte boundaries"
    if weighted:
        return "it takes no weights of the classes: they would have to be held beside the row, in as many registers"
    if softcap:
        return "it takes no softcap, which the special function units bound and not memory"
    return cuda_driver.no_compiler()


def cluster_fwd_grad(
    config: ClusterConfig,
    matrix: Rows,
    target: torch.Tensor,
    stride_target: int,
    counts: torch.Tensor | None,
    out: torch.Tensor,
    z: torch.Tensor,
    lse: torch.Tensor,
    partial: torch.Tensor | None,
    grads: Rows,
    vocab: int,
    loss: Loss,
) -> None:
    """Writes the gradient, lse if it is not empty, and with `partial` a column of it for each row, else out and z, of
    rows that `cluster_refuses` does not. Their device is the current one."""
    logits, rows = matrix.pointer, target.numel()
    per_vector, smoothing = vector(logits), loss.label_smoothing
    defines = (
        f"CLUSTER={config.ctas}",
        f"THREADS={config.threads}",
        f"VECTORS={config.vectors}",
        f"RESIDENT={config.resident}",
        f"TYPE={_TYPES[logits.dtype]}",
        f"LOSS={_TYPES[loss.dtype]}",
        f"TARGET={8 * target.element_size()}",
        f"SMOOTH={int(smoothing != 0)}",
        f"Z={int(loss.has_z)}",
    )
    names = ("cross_entropy_cluster_fwd_grad",)
    (kernel,) = cuda_driver.kernels(logits.device.index, "cluster.cu", names, defines, 0)
    arguments = (
        *(pointer(t) for t in (logits, target, counts, out, z, lse, partial, grads.pointer)),
        ctypes.c_int(rows),
        ctypes.c_int(vocab),
        ctypes.c_int(config.slice),
        ctypes.c_int(0 if counts is None else counts.shape[1]),
        ctypes.c_longlong(matrix.stride // per_vector),
        ctypes.c_longlong(stride_target),
        ctypes.c_longlong(grads.stride // per_vector),
        ctypes.c_longlong(loss.ignore_index),
        ctypes.c_float(smoothing),
        ctypes.c_float(smoothing / vocab),
        ctypes.c_float(loss.z_loss),
    )
    launch(kernel, rows * config.ctas, config.threads, 0, arguments)

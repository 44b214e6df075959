"""What is wrong with each broken sparse_matmul, and the controls."""

from __future__ import annotations

from functools import partial

import torch

from harness.spec import Case

from . import Wrong, wrappers
from .plain_sparse_matmul import sparse_matmul

PLAIN, FUSED = "5x24x20-fp32", "5x24x20-fp32-bias-gelu_tanh"
EIGHT = "5x128x20-fp16-e5m2.e4m3-row-gelu_tanh"
DIMS = dict(m=5, k4=6, n=20)
CASES = (
    Case(PLAIN, DIMS, torch.float32, modes=("fwd",)),
    Case(FUSED, DIMS, torch.float32, dict(bias=True, activation="gelu_tanh")),
    Case(
        EIGHT,
        dict(m=5, k4=32, n=20),
        torch.float16,
        dict(scaling="row", formats="e5m2.e4m3", activation="gelu_tanh"),
        modes=("fwd",),
    ),
)
LONG_CASES: tuple[Case, ...] = ()
FUZZ = {"m": (0, 3), "k4": (1, 2), "n": (1, 3)}
LIMITS: dict[str, float] = {}


def _fault(name: str, case: str, check: str, cause: str, on_gpu: tuple[str, str] | None = None) -> Wrong:
    return Wrong(name, partial(sparse_matmul, fault=name), case, check, cause, on_gpu)


# What has a fault in its backward is tried on the second case; on the first one the forward alone, in half the time.
WRONG = (
    # In the metadata.
    _fault("rows 8 apart exchanged", PLAIN, "accuracy", "error"),
    _fault("metadata of the first 16 of k", PLAIN, "accuracy", "error"),
    _fault("positions exchanged", PLAIN, "accuracy", "error"),
    _fault("second position counted from the first", PLAIN, "accuracy", "error"),
    _fault("sparsity ignored", PLAIN, "accuracy", "error"),
    # In the product.
    _fault("last chunk dropped", PLAIN, "accuracy", "error"),
    _fault("products of zero skipped", PLAIN, "values", "nonfinite"),
    _fault("bias dropped", FUSED, "accuracy", "error"),
    _fault("exact gelu", FUSED, "accuracy", "error"),
    _fault("another order at each call", PLAIN, "repeat", "repeat"),
    # In 8 bits.
    _fault("order of 16 bits", EIGHT, "accuracy", "error"),
    _fault("rows and columns of a word exchanged", EIGHT, "accuracy", "error"),
    _fault("metadata of the first 64 of k", EIGHT, "accuracy", "error"),
    _fault("e5m2 read as e4m3", EIGHT, "accuracy", "error", on_gpu=("accuracy", "nonfinite")),
    _fault("scale of the weight dropped", EIGHT, "accuracy", "error"),
    _fault("scale of the row before", EIGHT, "accuracy", "error"),
    # In the backward.
    _fault("derivative of the activation dropped", FUSED, "accuracy", "error"),
    _fault("gradient of the first two of each chunk", FUSED, "accuracy", "error"),
    _fault("gradient of the bias a mean", FUSED, "accuracy", "error"),
    # Around the kernel.
    Wrong("lazy output", wrappers.lazy(sparse_matmul), PLAIN, "accuracy", "lazy"),
    _fault("no checks", PLAIN, "refusal", "accepted", on_gpu=("refusal", "message")),
)

# Tried by the check that it names alone: what other checks see of an unjoined stream is a matter of luck.
ON_A_GPU = (Wrong("side stream", wrappers.on_a_side_stream(wait=True)(sparse_matmul), PLAIN, "stream", "late"),)


CONTROLS = {"plain": sparse_matmul}

"""Weights in fp8, which are quantised once, and the GEMMs that read them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import ScalingType, scaled_mm

from kernels.fp8 import fp8
from kernels.fp8_matmul import fp8_matmul

UNIT = 16  # rows and columns of a weight are multiples of it
BACKENDS = ("auto", "cublas", "fp8_matmul")
FIRST_CAPABILITY = (9, 0)  # lowest compute capability of torch's scaled_mm with a scale per row


class FP8Weight(NamedTuple):
    """A weight [N, K] ≈ data · scale, as returned by `fp8_weight`."""

    data: torch.Tensor  # [N, K], float8_e4m3fn
    scale: torch.Tensor  # [N, 1], fp32


def fp8_weight(weight: torch.Tensor) -> FP8Weight:
    """Quantises a weight [N, K] to e4m3 with a scale per row, by `ridgeline.fp8`. The result is detached.

    Raises TypeError for a wrong dtype, ValueError for a shape other than [N, K] with multiples of 16, RuntimeError for
    a CPU tensor outside Triton's interpreter.
    """
    check_weight("fp8_weight", weight)
    data, scale = fp8(weight.detach(), granularity="row")
    return FP8Weight(data, scale)


def check_weight(function: str, weight: torch.Tensor) -> None:
    if weight.dim() != 2 or weight.shape[0] % UNIT or weight.shape[1] % UNIT:
        got = list(weight.shape)
        raise ValueError(f"{function}: weight must be [N, K] with both multiples of {UNIT}, got {got}")


def product(
    data: torch.Tensor, scale: torch.Tensor, weight: FP8Weight, dtype: torch.dtype, backend: str, fast: bool = True
) -> torch.Tensor:
    """Computes x · weightᵀ [..., N] in `dtype`, for x ≈ data · scale: data [..., K], scale [..., 1].

    fast: the tensor cores accumulate over all of K, with 14 bits on Hopper, where an operand has 4. Otherwise partial
    sums over 128 elements of K are added in fp32 (promotion).
    """
    rows, of_rows = data.flatten(0, -2), scale.flatten(0, -2)
    if pick_backend(backend, _library_reason(rows, dtype) is None) == "cublas":
        of = ScalingType.RowWise
        y = scaled_mm(rows, weight.data.t(), of_rows, of, weight.scale.t(), of, output_dtype=dtype, use_fast_accum=fast)
    else:
        y = fp8_matmul(rows, weight.data, of_rows, weight.scale, out_dtype=dtype, fast_accum=fast)
    return y.view(*data.shape[:-1], y.shape[-1])


def pick_backend(backend: str, possible: bool) -> str:
    """The version that runs; `possible`: cuBLAS can. Pure.

    Of sums without promotion and with scales of rows, as here, cuBLAS is a few per cent faster in fp8_matmul's records.
    """
    if backend == "auto":
        return "cublas" if possible else "fp8_matmul"
    return backend


def _library_reason(rows: torch.Tensor, dtype: torch.dtype) -> str | None:
    """Why torch's scaled_mm does not support these operands, or None."""
    if not rows.is_cuda or torch.cuda.get_device_capability(rows.device) < FIRST_CAPABILITY:
        return "it needs a GPU of compute capability {}.{} or later".format(*FIRST_CAPABILITY)
    if dtype != torch.bfloat16:
        return f"it supports bfloat16 results with per-row scales, not {dtype}"
    return None if rows.numel() else "it does not support x without rows"


def check_backend(backend: str, in_fp8: bool, x: torch.Tensor) -> None:
    """Raises ValueError for an unknown backend or if the GEMMs are not in fp8, RuntimeError if it cannot run."""
    if backend not in BACKENDS:
        raise ValueError(f"llama_layer: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend != "auto" and not in_fp8:
        raise ValueError(f"llama_layer: backend must be 'auto' unless the weights are fp8, got {backend!r}")
    if backend == "cublas" and (reason := _library_reason(x, x.dtype)):
        raise RuntimeError(f'llama_layer: backend="cublas" cannot run here: {reason}')

"""A linear layer whose three GEMMs are in fp8, with a scale per row of each operand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from kernels.fp8 import fp8

from .fp8_weights import UNIT, FP8Weight, check_weight, product


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """Computes x · weightᵀ, with all GEMMs of forward and backward in fp8.

        y = x · wᵀ        dx = dy · w        dw = dyᵀ · x

    Each operand is rounded to e4m3 by `ridgeline.fp8`, with one scale for the elements along K of a GEMM. So x, w and
    dy are quantised by rows for one GEMM and by columns for another, both in one call. Only the form of x that dw reads
    is saved, one byte per element. If the number of rows of x is not a multiple of 16, x is copied and padded with
    zeros.

    x        [..., K]
    weight   [N, K]
    backend  of the GEMMs, as in `llama_layer`

    Returns [..., N]. Raises as `fp8_weight`.

    Source: Micikevicius et al. 2022, arXiv:2209.05433.
    """
    check_weight("fp8_linear", weight)
    return _FP8Linear.apply(x, weight, backend)


class _FP8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, backend):
        need_dx, need_dw, _ = ctx.needs_input_grad
        data, scale, *columns = fp8(_rows(x, need_dw), transpose=need_dw)
        of_w, scale_w, *columns_w = fp8(weight, transpose=need_dx)
        ctx.save_for_backward(*(columns or (None, None)), *(columns_w or (None, None)))
        ctx.shape, ctx.backend = x.shape, backend
        y = product(data, scale, FP8Weight(of_w, scale_w), x.dtype, backend)
        rows = x.shape[:-1].numel()
        # Not a view: `self_attention` overwrites the result, which PyTorch forbids for a view that a Function returns.
        return torch.ops.aten._unsafe_view(y if len(y) == rows else y[:rows].clone(), (*x.shape[:-1], weight.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        of_x, scale_x, of_w, scale_w = ctx.saved_tensors
        need_dx, need_dw, _ = ctx.needs_input_grad
        data, scale, *columns = fp8(_rows(dy, need_dw), transpose=need_dw)
        dx = dw = None
        if need_dx:
            dx = product(data, scale, FP8Weight(of_w, _of_rows(scale_w)), dy.dtype, ctx.backend, fast=False)
            dx = dx[: ctx.shape[:-1].numel()].view(ctx.shape)
        if need_dw:
            of_dy, scale_dy = columns
            given = of_dy, _of_rows(scale_dy), FP8Weight(of_x, _of_rows(scale_x))
            dw = product(*given, dy.dtype, ctx.backend, fast=False)
        return dx, dw, None


def _rows(x: torch.Tensor, summed: bool) -> torch.Tensor:
    """x as [rows, columns]. If a GEMM sums over the rows, they are padded with zeros to a multiple of 16."""
    x = x.flatten(0, -2)
    missing = -x.shape[0] % UNIT if summed else 0
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def _of_rows(scale: torch.Tensor) -> torch.Tensor:
    """The scales of a transposed copy as the scales of its rows, [N, 1]."""
    return scale.reshape(-1, 1)

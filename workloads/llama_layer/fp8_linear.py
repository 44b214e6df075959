"""A linear layer whose three products are in fp8, with scales for each row of their operands."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from kernels.fp8 import fp8

from .fp8_weights import UNIT, FP8Weight, check_weight, product


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """x · weightᵀ [..., N] of x [..., K] and weight [N, K], and its gradients (Micikevicius et al. 2022,
    arXiv:2209.05433).

        y = x · wᵀ        dx = dy · w        dw = dyᵀ · x

    Each operand is rounded to e4m3 by `ridgeline.fp8`, with a scale for all elements that one sum takes: x, w and dy by
    rows for one product and by columns for another, both in one call. Of x only the form that dw reads is kept, a byte
    an element. Where the rows of x are no multiple of 16 they are copied, with zeros to make up for it.

    Raises as `fp8_weight`.
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
        # No view: a view that a Function returns must not be overwritten, as `self_attention` does.
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
    """[rows, columns]; where a product sums over rows, a multiple of 16 of them, the last of zeros."""
    x = x.flatten(0, -2)
    missing = -x.shape[0] % UNIT if summed else 0
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def _of_rows(scale: torch.Tensor) -> torch.Tensor:
    """The scales of a transposed copy as those of its rows, [N, 1]."""
    return scale.reshape(-1, 1)

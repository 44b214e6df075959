"""The embedding of the points: W₂ silu(W₁ f + b₁) + b₂. The first GEMM has K = x_dim + 2.

    f = (x, y, 1) of a context point, (x, 0, 0) of a target

A library's GEMM with K = 3 reads unaligned operands, its gradient has three columns, and concatenating the features
takes six launches. Here one kernel reads the points and writes the hidden. In the backward one kernel computes the
pre-activation again and sums the gradients of W₁ and of both biases, and another adds the partial sums. The second GEMM
and its gradients use the library.

Estimate, 36 096 rows of 512 in bf16: the hidden is 37 MB and is written once. The backward reads it with its gradient
and that of the result, 110 MB: 9 and 26 µs at 4254 GB/s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from .launch import Launch, Plans, lean, signature

_FORWARD, _BACKWARD = Plans(), Plans()


@dataclass(frozen=True)
class Config:
    """Rows and columns of a block, and the largest number of parts into which the rows of a sum are split."""

    block_r: int
    block_d: int
    parts: int


def pick_config(rows: int, width: int) -> Config:
    """Configuration of the kernels. Pure. 128 parts of four column blocks are four CTAs per SM for 132 SMs; 564 rows
    are 36 parts of 16."""
    return Config(block_r=16, block_d=min(128, triton.next_power_of_2(width)), parts=128)


def takes(
    first: torch.nn.Linear,
    second: torch.nn.Linear,
    x_context: torch.Tensor,
    y_context: torch.Tensor,
    x_target: torch.Tensor,
) -> bool:
    """Whether `embedded` supports this call: eager, plain tensors on a GPU or in Triton's interpreter, points in fp32
    without a gradient, no autocast, at least one point, and sizes that agree. PyTorch raises an error for others."""
    points = (x_context, y_context, x_target)
    plain = lean(*points, first.weight, first.bias, second.weight, second.bias)
    alike = all(t.device == first.weight.device and t.dtype == torch.float32 for t in points)
    differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in points)
    runs = x_context.is_cuda or triton.knobs.runtime.interpret
    fused = plain and runs and alike and not differentiated and not torch.is_autocast_enabled(x_context.device.type)
    return fused and _agree(first.weight.shape[1] - 2, *points)


def _agree(columns: int, x_context: torch.Tensor, y_context: torch.Tensor, x_target: torch.Tensor) -> bool:
    """Whether there is a point, and the sizes are those of [B, M, columns], [B, M] and [B, N, columns]."""
    if x_context.dim() != 3 or x_target.dim() != 3 or y_context.shape != x_context.shape[:2]:
        return False
    batch, targets = x_context.shape[0], x_target.shape[1]
    alike = x_context.shape[2] == columns and x_target.shape == (batch, targets, columns)
    return alike and batch * (x_context.shape[1] + targets) > 0


def embedded(
    x_context: torch.Tensor,
    y_context: torch.Tensor,
    x_target: torch.Tensor,
    first: torch.nn.Linear,
    second: torch.nn.Linear,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The embedding [B, M + N, d] in `dtype`, to which the fp32 points and the weights are rounded. Sums are fp32;
    those of the gradients have a fixed order. Differentiable once, in the parameters."""
    weights = [t.to(dtype) for t in (first.weight, first.bias, second.weight, second.bias)]
    points = (t.contiguous() for t in (x_context, y_context, x_target))
    return _Embedding.apply(*points, *weights)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_context, y_context, x_target, w1, b1, w2, b2):
        ctx.set_materialize_grads(False)
        (batch, context, _), targets = x_context.shape, x_target.shape[1]
        hidden = w1.new_empty(batch, context + targets, w1.shape[0])
        w1, b1 = w1.contiguous(), b1.contiguous()
        key = tuple(map(signature, (x_context, y_context, x_target, w1, b1)))
        plan = _FORWARD.find(key) or _FORWARD.keep(key, _forward_launch(x_context, x_target, w1))
        plan(x_context, y_context, x_target, w1, b1, hidden)
        ctx.save_for_backward(x_context, y_context, x_target, w1, b1, w2, hidden)
        return F.linear(hidden, w2, b2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        if dy is None:
            return (None,) * 7
        x_context, y_context, x_target, w1, b1, w2, hidden = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1]).contiguous()
        dhidden = rows @ w2
        key = tuple(map(signature, (x_context, y_context, x_target, w1, b1, rows)))
        plan = _BACKWARD.find(key) or _BACKWARD.keep(key, _Sums(x_context, x_target, w1, w2.shape[0]))
        dw1, db1, db2 = plan(x_context, y_context, x_target, w1, b1, dhidden, rows)
        dw2 = rows.mT @ hidden.reshape(-1, hidden.shape[-1]) if ctx.needs_input_grad[5] else None
        found = (dw1, db1, dw2, db2)
        return *[None] * 3, *(g if need else None for g, need in zip(found, ctx.needs_input_grad[3:], strict=True))


def _fixed(x_context: torch.Tensor, x_target: torch.Tensor) -> tuple[int, int, int]:
    """(rows in all, rows per sequence, context rows per sequence)."""
    batch, context, _ = x_context.shape
    points = context + x_target.shape[1]
    return batch * points, points, context


def _block_f(w1: torch.Tensor) -> int:
    """The number of features and the bias's 1, padded to the smallest K that a Triton dot supports."""
    return max(16, triton.next_power_of_2(w1.shape[1] + 1))


def _forward_launch(x_context: torch.Tensor, x_target: torch.Tensor, w1: torch.Tensor) -> Launch:
    fixed, width = _fixed(x_context, x_target), w1.shape[0]
    config = pick_config(fixed[0], width)
    grid = (triton.cdiv(fixed[0], config.block_r), triton.cdiv(width, config.block_d))
    return Launch(
        _transformer_np_embedding_kernel,
        grid,
        w1.device,
        (*fixed, width),
        X_DIM=x_context.shape[2],
        BLOCK_F=_block_f(w1),
        BLOCK_R=config.block_r,
        BLOCK_D=config.block_d,
        num_warps=4,
    )


class _Sums:
    """Computes the gradients of W₁, b₁ and b₂ from the points, W₁, b₁ and the gradients of hidden and result."""

    def __init__(self, x_context: torch.Tensor, x_target: torch.Tensor, w1: torch.Tensor, width: int) -> None:
        fixed, hidden, features = _fixed(x_context, x_target), *w1.shape
        config = pick_config(fixed[0], hidden)
        blocks = triton.cdiv(fixed[0], config.block_r)
        steps = triton.cdiv(blocks, config.parts)
        self._shape = triton.cdiv(blocks, steps), features + 2, max(hidden, width)
        columns = triton.cdiv(self._shape[2], config.block_d)
        self._sizes = hidden, width, features
        self._start = Launch(
            _transformer_np_embedding_sums_kernel,
            (self._shape[0], columns),
            w1.device,
            (*fixed, hidden, width, self._shape[2], steps * config.block_r),
            X_DIM=x_context.shape[2],
            BLOCK_F=_block_f(w1),
            BLOCK_R=config.block_r,
            BLOCK_D=config.block_d,
            num_warps=4,
        )
        self._add = Launch(
            _transformer_np_embedding_add_kernel,
            (columns, self._shape[1]),
            w1.device,
            (self._shape[0], hidden, width, features, self._shape[2]),
            BLOCK_P=16,
            BLOCK_D=config.block_d,
            num_warps=4,
        )

    def __call__(self, x_context, y_context, x_target, w1, b1, dhidden, dy) -> tuple[torch.Tensor, ...]:
        hidden, width, features = self._sizes
        parts = torch.empty(self._shape, dtype=torch.float32, device=w1.device)
        dw1, db1, db2 = w1.new_empty(hidden, features), w1.new_empty(hidden), w1.new_empty(width)
        self._start(x_context, y_context, x_target, w1, b1, dhidden, dy, parts)
        self._add(parts, dw1, db1, db2)
        return dw1, db1, db2


@triton.jit
def _features(
    x_context_ptr, y_context_ptr, x_target_ptr, row, rows, points, context,
    X_DIM: tl.constexpr, BLOCK_F: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """f of these rows, rounded to DTYPE, followed by a 1 for the bias; zeros in other columns and rows. In fp32."""
    sequence, i, k = row // points, row % points, tl.arange(0, BLOCK_F)[None, :]
    of_context, of_target = ((row < rows) & (i < context))[:, None], ((row < rows) & (i >= context))[:, None]
    at = sequence.to(tl.int64) * context + i
    target = sequence.to(tl.int64) * (points - context) + i - context
    f = tl.load(x_context_ptr + at[:, None] * X_DIM + k, mask=of_context & (k < X_DIM), other=0.0)
    f += tl.load(x_target_ptr + target[:, None] * X_DIM + k, mask=of_target & (k < X_DIM), other=0.0)
    f += tl.load(y_context_ptr + at[:, None] + 0 * k, mask=of_context & (k == X_DIM), other=0.0)
    f = tl.where(of_context & (k == X_DIM + 1), 1.0, f.to(DTYPE).to(tl.float32))
    return tl.where((row < rows)[:, None] & (k == X_DIM + 2), 1.0, f)


@triton.jit
def _weights(w1_ptr, b1_ptr, column, hidden, X_DIM: tl.constexpr, BLOCK_F: tl.constexpr):
    """[W₁, b₁]ᵀ of these columns, in fp32."""
    k, there = tl.arange(0, BLOCK_F)[:, None], (column < hidden)[None, :]
    at = column.to(tl.int64)[None, :]
    w = tl.load(w1_ptr + at * (X_DIM + 2) + k, mask=there & (k < X_DIM + 2), other=0.0)
    b = tl.load(b1_ptr + at + 0 * k, mask=there & (k == X_DIM + 2), other=0.0)
    return w.to(tl.float32) + b.to(tl.float32)


@triton.jit
def _transformer_np_embedding_kernel(
    x_context_ptr, y_context_ptr, x_target_ptr, w1_ptr, b1_ptr, hidden_ptr, rows, points, context, hidden,
    X_DIM: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes hidden = silu(W₁ f + b₁)."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    f = _features(
        x_context_ptr, y_context_ptr, x_target_ptr, row, rows, points, context,
        X_DIM, BLOCK_F, hidden_ptr.dtype.element_ty,
    )  # fmt: skip
    x = tl.dot(f, _weights(w1_ptr, b1_ptr, column, hidden, X_DIM, BLOCK_F), input_precision="ieee")
    y = (x * tl.sigmoid(x)).to(hidden_ptr.dtype.element_ty)
    at = row.to(tl.int64)[:, None] * hidden + column[None, :]
    tl.store(hidden_ptr + at, y, mask=(row < rows)[:, None] & (column < hidden)[None, :])


@triton.jit
def _transformer_np_embedding_sums_kernel(
    x_context_ptr, y_context_ptr, x_target_ptr, w1_ptr, b1_ptr, dhidden_ptr, dy_ptr, parts_ptr,
    rows, points, context, hidden, width, pitch, part,
    X_DIM: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes parts[p, k] = Σ dpre f_k over the `part` rows of part p. k = X_DIM + 2 is the bias; X_DIM + 3 is Σ dy."""
    first = tl.program_id(0) * part
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    end = tl.minimum(first + part, rows)
    w = _weights(w1_ptr, b1_ptr, column, hidden, X_DIM, BLOCK_F)
    sums, of_dy = tl.zeros([BLOCK_F, BLOCK_D], dtype=tl.float32), tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
    for start in tl.range(first, end, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        f = _features(
            x_context_ptr, y_context_ptr, x_target_ptr, row, end, points, context,
            X_DIM, BLOCK_F, dhidden_ptr.dtype.element_ty,
        )  # fmt: skip
        x = tl.dot(f, w, input_precision="ieee")
        at, inside = row.to(tl.int64)[:, None], (row < end)[:, None]
        dhidden = tl.load(
            dhidden_ptr + at * hidden + column[None, :], mask=inside & (column < hidden)[None, :], other=0.0
        )
        s = tl.sigmoid(x)
        dpre = dhidden.to(tl.float32) * (s * (1.0 + x * (1.0 - s)))
        sums = tl.dot(tl.trans(f), dpre, sums, input_precision="ieee")
        dy = tl.load(dy_ptr + at * width + column[None, :], mask=inside & (column < width)[None, :], other=0.0)
        of_dy += dy.to(tl.float32)
    k = tl.arange(0, BLOCK_F)[:, None]
    to = parts_ptr + tl.program_id(0).to(tl.int64) * (X_DIM + 4) * pitch
    tl.store(to + k * pitch + column[None, :], sums, mask=(k < X_DIM + 3) & (column < pitch)[None, :])
    tl.store(to + (X_DIM + 3) * pitch + column, tl.sum(of_dy, 0), mask=column < pitch)


@triton.jit
def _transformer_np_embedding_add_kernel(
    parts_ptr, dw1_ptr, db1_ptr, db2_ptr, parts, hidden, width, features, pitch,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds the parts of sum k and writes the result to the gradient that it belongs to."""
    column, k = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D), tl.program_id(1)
    sums = tl.zeros([BLOCK_P, BLOCK_D], dtype=tl.float32)
    for first in tl.range(0, parts, BLOCK_P):
        part = first + tl.arange(0, BLOCK_P)
        at = (part.to(tl.int64)[:, None] * (features + 2) + k) * pitch + column[None, :]
        sums += tl.load(parts_ptr + at, mask=(part < parts)[:, None] & (column < pitch)[None, :], other=0.0)
    whole, inside = tl.sum(sums, 0), column < hidden
    tl.store(dw1_ptr + column * features + k, whole.to(dw1_ptr.dtype.element_ty), mask=inside & (k < features))
    tl.store(db1_ptr + column, whole.to(db1_ptr.dtype.element_ty), mask=inside & (k == features))
    tl.store(db2_ptr + column, whole.to(db2_ptr.dtype.element_ty), mask=(column < width) & (k == features + 1))

"""Launch plans of heads_gmm: the part of a call that does not depend on the tensors' contents and addresses."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from . import configs
from .checks import INTERPRETED
from .configs import heads_forward
from .heads_backward.operands import device_of, whole_vectors
from .heads_backward.plan import Chunks, Optional, backward_plan, block_o, chunks_of, in_cuda, sum_launch
from .kernel import (
    _heads_gmm_fwd_kernel,
    _heads_gmm_incoming_kernel,
    _heads_gmm_loss_kernel,
    _heads_gmm_total_kernel,
)
from .launch import Launch
from .sm90 import forward
from .sm90 import heads as sm90_heads

REDUCTIONS = ("mean", "sum", "none")
BACKENDS = ("auto", "triton", "cuda")
TOTAL_BLOCK = 1024

Tensor = torch.Tensor
Needs = tuple[bool, bool, bool, bool, bool]  # the gradients of x, w1, w2, y and bias
Gradients = tuple[Optional, Optional, Optional, Optional, Optional]
#: Given (x, w1, w2, y, bias): the loss, and the parameters [rows, K, 3] in fp32 if they are saved, else None.
Forward = Callable[[Tensor, Tensor, Tensor, Tensor, Optional], tuple[Tensor, Optional]]
#: Given (dloss, x, w1, w2, y, bias, parameters): the gradients of x, w1, w2, y and bias.
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Optional, Optional], Gradients]


def fwd_plan(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    y: Tensor,
    bias: Optional,
    activation: str,
    reduction: str,
    keep: bool,
    backend: str,
) -> Forward:
    """The plan of the forward for tensors like these, which `op` has checked. RuntimeError if `backend` cannot run."""
    flat, flat_y, heads = _rows_of(x, 1), _rows_of(y, 0), w2.shape[0]
    rows, shape = flat.shape[0], y.shape if reduction == "none" else ()
    if not rows:
        return lambda x, *_: (_of_nothing(x, shape, reduction), x.new_empty((0, heads, 3), dtype=torch.float32))
    launch, groups = _statistics_launch(flat, w1, w2, flat_y, bias, activation, backend)
    block = configs.pick_loss_block(rows)
    ctas = triton.cdiv(rows, block)
    in_one = reduction == "none" or ctas == 1
    join = Launch(
        _heads_gmm_loss_kernel,
        (ctas,),
        x.device,
        (rows, groups),
        REDUCTION=reduction if in_one else "sum",
        BLOCK=block,
        num_warps=4 if block <= configs.LOSS_BLOCK else 8,
    )
    total = Launch(
        _heads_gmm_total_kernel,
        (1,),
        x.device,
        (ctas, rows),
        REDUCTION=reduction,
        BLOCK=TOTAL_BLOCK,
        num_warps=4,
    )

    def run(x: Tensor, w1: Tensor, w2: Tensor, y: Tensor, bias: Optional) -> tuple[Tensor, Optional]:
        loss = x.new_empty(shape, dtype=torch.float32)
        statistics = x.new_empty((groups, rows, 4), dtype=torch.float32)
        parameters = x.new_empty((rows, heads, 3), dtype=torch.float32) if keep else None
        launch(_rows_of(x, 1), w1, w2, bias, _rows_of(y, 0), statistics, parameters)
        if in_one:
            join(statistics, loss)
        else:
            parts = x.new_empty(ctas, dtype=torch.float32)
            join(statistics, parts)
            total(parts, loss)
        return loss, parameters

    return run


def _statistics_launch(
    x: Tensor, w1: Tensor, w2: Tensor, y: Tensor, bias: Optional, activation: str, backend: str
) -> tuple[Callable[..., None], int]:
    """The launch that writes statistics [groups, rows, 4] and parameters of all rows, given (x, w1, w2, bias, y,
    statistics, parameters or None); and the number of groups of heads."""
    rows, (heads, hidden, _) = x.shape[0], w1.shape
    reason = sm90_heads.unsupported_reason(x, w1, w2) if backend != "triton" else None
    if backend == "cuda" and reason:
        raise RuntimeError(f'heads_gmm: backend="cuda" cannot run here: {reason}')
    if configs.pick_backend(backend, rows, possible=reason is None) == "cuda":
        config = heads_forward.pick_cuda_config(rows, heads, hidden, device_of(x)[1])
        return forward.launch(x, w1, w2, y, bias, activation, config), triton.cdiv(heads, config.heads)
    portable = _fwd_config(x, w1, w2)
    launch = _fwd_launch(x, w1, w2, y, bias, activation, portable, 0, rows)
    return launch, triton.cdiv(heads, portable.heads)


def _of_nothing(x: Tensor, shape: tuple[int, ...], reduction: str) -> Tensor:
    """The loss without rows: a mean is NaN, as in PyTorch."""
    return x.new_full(shape, float("nan") if reduction == "mean" else 0.0, dtype=torch.float32)


def _fwd_config(x: Tensor, w1: Tensor, w2: Tensor) -> configs.FwdConfig:
    (rows, dim), (heads, _, hidden), (capability, sms) = x.shape, w2.shape, device_of(x)
    aligned = whole_vectors(x) and whole_vectors(w1)
    return configs.pick_fwd_config(rows, dim, heads, hidden, aligned, x.dtype, capability, sms)


def _fwd_launch(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    y: Tensor,
    bias: Optional,
    activation: str,
    config: configs.FwdConfig,
    start: int,
    rows: int,
) -> Launch:
    """Writes statistics and parameters of `rows` rows from `start` on, given (x, w1, w2, bias, y, statistics or None,
    parameters or None)."""
    dim, (heads, _, hidden) = x.shape[1], w2.shape
    return Launch(
        _heads_gmm_fwd_kernel,
        (triton.cdiv(rows, config.block_m) * triton.cdiv(heads, config.heads),),
        x.device,
        (
            *(start, rows, dim, heads, hidden, config.heads),
            *(*x.stride(), *w1.stride(), *w2.stride(), *_strides(bias), *y.stride()),
        ),
        ACTIVATION=activation,
        RESIDUAL=_residual(x),
        BLOCK_M=config.block_m,
        BLOCK_H=config.block_h,
        BLOCK_K=config.block_k,
        BLOCK_O=block_o(3),
        EVEN_K=dim % config.block_k == 0,
        num_warps=config.num_warps,
        num_stages=config.stages,
    )


def bwd_plan(
    dloss: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    y: Tensor,
    bias: Optional,
    parameters: Optional,
    activation: str,
    reduction: str,
    needs: Needs,
) -> Backward:
    """The plan of the backward for tensors like these. It takes (dloss, x, w1, w2, y, bias, parameters) and returns the
    gradients of x, w1, w2, y and bias, None where not needed.

    For each chunk of rows it recomputes the parameters, unless they were saved, then computes their gradients, and from
    these the gradients of x and the weights.
    """
    flat, heads, rows_y = _rows_of(x, 1), w2.shape[0], _rows_of(y, 0)
    (rows, shape), size = (
        (flat.shape[0], x.shape),
        configs.heads_backward.pick_chunk_rows(flat.shape[0], heads, w2.shape[2]),
    )
    chunks = chunks_of(rows, heads, w2.shape[2])
    again = _again_launches(flat, w1, w2, rows_y, bias, activation, chunks) if parameters is None else []
    flat_dloss = _rows_of(dloss, 0) if reduction == "none" else None
    incoming, parts = _incoming_launches(flat_dloss, x, rows_y, heads, reduction, chunks)
    of_bias = (bias, parts) if needs[4] and bias is not None else None
    asks = any(needs[:3]) and bool(rows and w2.numel())  # whether `products` calls `gradient`
    products = None
    if any(needs[:3]):
        also = of_bias if asks else None
        products = backward_plan(flat, (heads * 3, 3, 1), w1, w2, activation, needs[:3], also)
    total = sum_launch(of_bias) if of_bias is not None and not asks else None

    def run(
        dloss: Tensor, x: Tensor, w1: Tensor, w2: Tensor, y: Tensor, bias: Optional, parameters: Optional
    ) -> Gradients:
        flat, rows_y = _rows_of(x, 1), _rows_of(y, 0)
        rows_dloss = _rows_of(dloss, 0) if reduction == "none" else dloss
        dy = torch.empty_like(y, memory_format=torch.contiguous_format) if needs[3] else None
        dbias, parts_of_dbias, to_add = None, None, ()
        if of_bias is not None and bias is not None:
            dbias, parts_of_dbias = bias.new_empty((heads, 3)), x.new_empty((parts, heads, 3), dtype=torch.float32)
            to_add = (parts_of_dbias, dbias) if asks else ()
        dparameters = x.new_empty((size, heads, 3))
        made = x.new_empty((size, heads, 3), dtype=torch.float32) if again else None

        def gradient(start: int, count: int) -> Tensor:
            index, given = start // size, made
            if given is None:
                given = parameters[start : start + count]
            else:
                again[index](flat, w1, w2, bias, rows_y, None, given)
            incoming[index](rows_dloss, given, rows_y, dparameters, dy, parts_of_dbias)
            return dparameters

        dx, dw1, dw2 = products(gradient, flat, w1, w2, *to_add) if products is not None else (None, None, None)
        if not asks:
            for chunk in chunks:
                gradient(*chunk)
        if total is not None:
            total(parts_of_dbias, dbias, None, None)
        return dx.view(shape) if dx is not None else None, dw1, dw2, dy, dbias

    return run


def _again_launches(
    x: Tensor, w1: Tensor, w2: Tensor, y: Tensor, bias: Optional, activation: str, chunks: Chunks
) -> list[Callable[..., None]]:
    """For each chunk the launch that recomputes its parameters, given (x, w1, w2, bias, y, None, parameters): the
    forward without its statistics."""
    if chunks and in_cuda(x, w1, w2):
        (heads, hidden, _), (_, sms) = w1.shape, device_of(x)
        return [
            forward.launch(
                x[:rows], w1, w2, y, bias, activation, heads_forward.pick_cuda_config(rows, heads, hidden, sms), start
            )
            for start, rows in chunks
        ]
    config = _fwd_config(x, w1, w2)
    return [_fwd_launch(x, w1, w2, y, bias, activation, config, *chunk) for chunk in chunks]


def _incoming_launches(
    dloss: Optional, x: Tensor, y: Tensor, heads: int, reduction: str, chunks: Chunks
) -> tuple[list[Launch], int]:
    """For each chunk the launch that writes the gradients of its parameters, given (dloss, parameters, y, dparameters,
    dy or None, parts of the bias's gradient or None); and the number of parts. Here dloss is None if it is a scalar."""
    all_rows, block_m = y.shape[0], configs.pick_incoming_rows(heads)
    launches, parts = [], 0
    for start, rows in chunks:
        ctas = triton.cdiv(rows, block_m)
        launches.append(
            Launch(
                _heads_gmm_incoming_kernel,
                (ctas,),
                y.device,
                (start, parts, rows, all_rows, heads, dloss.stride(0) if dloss is not None else 0, y.stride(0)),
                REDUCTION=reduction,
                RESIDUAL=_residual(x),
                BLOCK_M=block_m,
                BLOCK_G=triton.next_power_of_2(heads),
                num_warps=8,
            )
        )
        parts += ctas
    return launches, parts


def _strides(bias: Optional) -> tuple[int, int]:
    return (bias.stride(0), bias.stride(1)) if bias is not None else (0, 0)


def _residual(x: Tensor) -> str:
    """How `_inverse_sigma` computes the residual: see there."""
    if x.dtype != torch.float32:
        return "none"
    return "fp64" if INTERPRETED else "fma"


def _rows_of(tensor: Tensor, last: int) -> Tensor:
    """The tensor with all but the `last` dimensions flattened to one; a copy if the strides require it."""
    if tensor.dim() == last + 1:
        return tensor
    rest = tensor.shape[tensor.dim() - last :]
    return tensor.reshape(tensor.shape[: tensor.dim() - last].numel(), *rest)

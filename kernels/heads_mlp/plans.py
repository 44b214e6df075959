"""Launch plans of heads_mlp: the part of a call that does not depend on the tensors' contents and addresses."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from . import configs
from .heads_backward.operands import device_of, whole_vectors
from .heads_backward.plan import Gradients, Needs, backward_plan, block_o
from .kernel import _heads_mlp_fwd_kernel
from .launch import Launch
from .sm90 import forward
from .sm90 import heads as sm90_heads

BACKENDS = ("auto", "triton", "cuda")

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Backward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Gradients]


def fwd_plan(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, activation: str, backend: str) -> Forward:
    """The plan of the forward for tensors like these, which `op` has checked. It takes (x, w1, w2) and returns y.
    RuntimeError if `backend` cannot run."""
    copied, flat = _flat(x, 1)
    shape = (*x.shape[:-1], *w2.shape[:2])
    launch = _fwd_launch(flat, w1, w2, activation, backend) if flat.shape[0] and w2.shape[0] and w2.shape[1] else None

    def run(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(shape)
        if launch is not None:
            launch(_flat(x, 1)[1] if copied else x, w1, w2, y)
        return y

    return run


def _fwd_launch(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, activation: str, backend: str
) -> Callable[..., None]:
    """Writes y, given (x, w1, w2, y)."""
    reason = sm90_heads.unsupported_reason(x, w1, w2) if backend != "triton" else None
    if backend == "cuda" and reason:
        raise RuntimeError(f'heads_mlp: backend="cuda" cannot run here: {reason}')
    if configs.pick_backend(backend, x.shape[0], possible=reason is None) == "cuda":
        return forward.launch(x, w1, w2, activation)
    (rows, dim), (heads, dim_out, hidden), (capability, sms) = x.shape, w2.shape, device_of(x)
    aligned = whole_vectors(x) and whole_vectors(w1)
    config = configs.pick_fwd_config(rows, dim, heads, hidden, aligned, x.dtype, capability, sms)
    return Launch(
        _heads_mlp_fwd_kernel,
        (triton.cdiv(rows, config.block_m) * triton.cdiv(heads, config.heads),),
        x.device,
        (rows, dim, heads, hidden, dim_out, config.heads, *x.stride(), *w1.stride(), *w2.stride()),
        ACTIVATION=activation,
        BLOCK_M=config.block_m,
        BLOCK_H=config.block_h,
        BLOCK_K=config.block_k,
        BLOCK_O=block_o(dim_out),
        EVEN_K=dim % config.block_k == 0,
        RESIDENT=config.resident,
        num_warps=config.num_warps,
        num_stages=config.stages,
    )


def bwd_plan(
    dy: torch.Tensor, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, activation: str, needs: Needs
) -> Backward:
    """The plan of the backward for tensors like these. It takes (dy, x, w1, w2) and returns the gradients of x, w1 and
    w2, None where not needed."""
    (_, flat), (_, dy_flat) = _flat(x, 1), _flat(dy, 2)
    shape, plan = x.shape, backward_plan(flat, dy_flat.stride(), w1, w2, activation, needs)

    def run(dy: torch.Tensor, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> Gradients:
        rows = _flat(dy, 2)[1]
        dx, dw1, dw2 = plan(lambda start, count: rows[start : start + count], _flat(x, 1)[1], w1, w2)
        return dx.view(shape) if dx is not None else None, dw1, dw2

    return run


def _flat(tensor: torch.Tensor, last: int) -> tuple[bool, torch.Tensor]:
    """Whether flattening all but the `last` dimensions to one copies the tensor, and the flattened tensor."""
    leading, rest = tensor.shape[:-last], tensor.shape[-last:]
    flat = tensor.reshape(leading.numel(), *rest)
    return flat.data_ptr() != tensor.data_ptr(), flat

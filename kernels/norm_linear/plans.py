"""Launch plans of norm_linear: all of a call that does not depend on the tensors' contents and addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton

from . import configs
from .kernel import (
    _norm_linear_bwd_kernel,
    _norm_linear_dact_kernel,
    _norm_linear_dpre_kernel,
    _norm_linear_fwd_kernel,
)
from .launch import Launch

ALIGNMENT = 16  # bytes
Optional = torch.Tensor | None


class Made(NamedTuple):
    """What a forward returns. y is after the activation; `pre`, before it, is None without one and unless it is kept.
    h is x itself without a residual. normed and rstd are None unless they are kept."""

    y: torch.Tensor
    h: torch.Tensor
    pre: Optional
    normed: Optional
    rstd: Optional


class Gradients(NamedTuple):
    """What a backward returns, each None unless it is needed. dgain is of norm_weight: summed, or partial sums [P, D]
    in fp32. dpre is dy without an activation."""

    dx: Optional
    dpre: Optional
    dgain: Optional
    dw: Optional


class Needs(NamedTuple):
    """Which gradients are needed."""

    x: bool
    gain: bool
    w: bool


Forward = Callable[..., Made]
Backward = Callable[..., Gradients]


def fwd_plan(
    x: torch.Tensor,
    gain: torch.Tensor,
    weight: torch.Tensor,
    residual: Optional,
    eps: float,
    activation: str | None,
    keep: bool,
) -> Forward:
    """A function of (x, gain, weight, residual, y=None, normed=None), tensors with the signatures of these, and of
    contiguous tensors for results, if any. `op` has checked the inputs."""
    device, dtype = x.device, x.dtype
    rows, (cols, depth) = x.shape[:-1].numel(), weight.shape
    y_shape, gain_copied = (*x.shape[:-1], cols), not gain.is_contiguous()
    x_copied, residual_copied, write = _copied(x), _copied(residual), None
    if rows:
        stride_r = 0 if residual is None else _rows(residual).stride(0)
        aligned = _aligned(_rows(x)) and _aligned(weight) and (residual is None or _aligned(_rows(residual)))
        config = configs.pick_fwd_config(rows, cols, depth, aligned, dtype, _capability(x))
        write = Launch(
            _norm_linear_fwd_kernel,
            (triton.cdiv(rows, config.block_m) * triton.cdiv(cols, config.block_n),),
            device,
            (rows, cols, depth, _rows(x).stride(0), stride_r, *weight.stride(), eps),
            ACTIVATION=activation or "",
            STATS_FIRST=config.stats_first,
            **_tile(config, depth),
        )

    def run(
        x: torch.Tensor,
        gain: torch.Tensor,
        weight: torch.Tensor,
        residual: Optional,
        y: Optional = None,
        normed: Optional = None,
    ) -> Made:
        y = torch.empty(y_shape, dtype=dtype, device=device) if y is None else y
        h = x if residual is None else torch.empty(x.shape, dtype=dtype, device=device)
        pre = rstd = None
        if keep:
            pre = None if activation is None else torch.empty(y_shape, dtype=dtype, device=device)
            normed = torch.empty(x.shape, dtype=dtype, device=device) if normed is None else normed
            rstd = torch.empty(rows, dtype=torch.float32, device=device)
        if write is not None:
            write(
                _rows(x) if x_copied else x,
                _rows(residual) if residual_copied else residual,
                gain.contiguous() if gain_copied else gain,
                weight,
                y if activation is None else pre,
                None if activation is None else y,
                None if residual is None else h,
                normed,
                rstd,
            )
        return Made(y, h, pre, normed, rstd)

    return run


def bwd_plan(
    dy: torch.Tensor,
    dh: Optional,
    pre: torch.Tensor,
    h: torch.Tensor,
    gain: torch.Tensor,
    weight: torch.Tensor,
    activation: str | None,
    needs: Needs,
    summed: bool = True,
    through: Optional = None,
) -> Backward:
    """A function of (dy, dh, pre, h, rstd, normed, gain, weight, dpre=None, through=None), tensors with the signatures
    of these; `pre` is y without an activation, dy the gradient of y · throughᵀ where that is given. normed is read for
    dw alone."""
    rows, (depth, cols) = h.shape[:-1].numel(), weight.shape
    if not rows:
        return lambda dy, dh, pre, h, rstd, normed, gain, weight, dpre=None, through=None: Gradients(
            torch.empty(h.shape, dtype=h.dtype, device=h.device) if needs.x else None,
            torch.empty_like(pre) if dpre is None else dpre,
            _no_gradient(gain, summed) if needs.gain else None,
            torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device) if needs.w else None,
        )
    device, dtype, product = h.device, h.dtype, needs.x or needs.gain
    parts, derive = _derivative(_rows(dy), through, depth, activation)
    partials, write = _bwd_launch(_rows(pre if parts else dy), dh, h, weight, parts, needs.x)
    dy_copied, dh_copied, h_copied, gain_copied = _copied(dy), _copied(dh), _copied(h), not gain.is_contiguous()

    def run(
        dy: torch.Tensor,
        dh: Optional,
        pre: torch.Tensor,
        h: torch.Tensor,
        rstd: torch.Tensor,
        normed: Optional,
        gain: torch.Tensor,
        weight: torch.Tensor,
        dpre: Optional = None,
        through: Optional = None,
    ) -> Gradients:
        dx = dgain = dw = dot = None
        dy = _rows(dy) if dy_copied else dy
        if derive is None:
            dpre = dy
        else:
            dpre = torch.empty_like(pre) if dpre is None else dpre
            dot = torch.empty((parts, rows), dtype=torch.float32, device=device)
            if through is None:
                derive(dy, pre, dpre, dot)
            else:
                derive(dy, through, pre, dpre, dot)
        if product:
            dx = torch.empty(h.shape, dtype=dtype, device=device) if needs.x else None
            dgain = torch.empty((partials, cols), dtype=torch.float32, device=device) if needs.gain else None
            rows_h, rows_dh = _rows(h) if h_copied else h, _rows(dh) if dh_copied else dh
            dense_gain = gain.contiguous() if gain_copied else gain
            write(dpre, pre, dot, weight, rows_h, rstd, dense_gain, rows_dh, dx, dgain)
            if dgain is not None and summed:
                dgain = dgain.sum(0).to(gain.dtype)
        if needs.w:
            assert normed is not None
            dw = torch.mm(dpre.reshape(rows, depth).t(), normed.view(rows, cols))
        return Gradients(dx, dpre, dgain, dw)

    return run


def _bwd_launch(
    dy: torch.Tensor, dh: Optional, h: torch.Tensor, weight: torch.Tensor, parts: int, need_x: bool
) -> tuple[int, Launch]:
    """The tiles of rows, each of which has a row of partial sums of dgain, and the launch of the product. `parts` of
    the sum of dy · y are given; without any the product sums."""
    rows, (depth, cols) = h.shape[:-1].numel(), weight.shape
    summed = need_x and not parts
    aligned = _aligned(dy) and _aligned(weight) and (not summed or depth * dy.itemsize % ALIGNMENT == 0)
    config = _bwd_config(h, weight, summed, aligned)
    tiles_m = triton.cdiv(rows, config.block_m)
    strides = _rows(dy).stride(0), *weight.stride(), _rows(h).stride(0), 0 if dh is None else _rows(dh).stride(0)
    return tiles_m, Launch(
        _norm_linear_bwd_kernel,
        (tiles_m * triton.cdiv(cols, config.block_n),),
        h.device,
        (rows, depth, cols, parts, *strides),
        WHOLE=cols <= config.block_n,
        MOST_PARTS=triton.next_power_of_2(max(1, parts)),
        **_tile(config, depth),
    )


def _derivative(dy: torch.Tensor, through: Optional, cols: int, activation: str | None) -> tuple[int, Launch | None]:
    """Where dpre is not dy, the launch that makes it, given (dy, through, pre, dpre, dot) or, without a layer that
    follows, (dy, pre, dpre, dot), and in how many parts the sums of dpre · pre are."""
    rows, depth = dy.shape
    if through is not None:
        aligned = _aligned(dy) and _aligned(through) and cols * dy.itemsize % ALIGNMENT == 0
        config = configs.pick_dpre_config(rows, cols, depth, aligned, dy.dtype, _capability(dy))
        parts = triton.cdiv(cols, config.block_n)
        return parts, Launch(
            _norm_linear_dpre_kernel,
            (triton.cdiv(rows, config.block_m) * parts,),
            dy.device,
            (rows, depth, cols, dy.stride(0), *through.stride()),
            ACTIVATION=activation or "",
            **_tile(config, depth),
        )
    if activation is None:
        return 0, None
    a_pass = configs.pick_dact_config(cols)
    return 1, Launch(
        _norm_linear_dact_kernel,
        (rows,),
        dy.device,
        (cols, dy.stride(0)),
        ACTIVATION=activation,
        BLOCK_N=a_pass.block_n,
        num_warps=a_pass.num_warps,
    )


def _bwd_config(h: torch.Tensor, weight: torch.Tensor, summed: bool, aligned: bool) -> configs.ProductConfig:
    rows, (depth, cols) = h.shape[:-1].numel(), weight.shape
    return configs.pick_bwd_config(rows, cols, depth, summed, aligned, h.dtype, _capability(h))


def partial_sums(h: torch.Tensor, weight: torch.Tensor, summed: bool) -> int:
    """How many partial sums of norm_weight's gradient the backward has: one for each tile of rows, whose height does
    not depend on the alignment, which a fake tensor has not."""
    rows = h.shape[:-1].numel()
    return triton.cdiv(rows, _bwd_config(h, weight, summed, True).block_m) if rows else 1


def _tile(config: configs.ProductConfig, depth: int) -> dict[str, int | bool]:
    return {
        "EVEN_K": depth % config.block_k == 0,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "num_warps": config.num_warps,
        "num_stages": config.stages,
    }


def _aligned(tensor: torch.Tensor) -> bool:
    """Whether rows, of either dimension, begin on 16-byte boundaries and have unit stride: loads are of 16 bytes."""
    strides = sorted(tensor.stride()[-2:])
    return tensor.data_ptr() % ALIGNMENT == 0 and strides[0] == 1 and strides[1] * tensor.itemsize % ALIGNMENT == 0


def _capability(tensor: torch.Tensor) -> tuple[int, int]:
    """In the interpreter, that of an sm_80."""
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else (8, 0)


def _no_gradient(gain: torch.Tensor, summed: bool) -> torch.Tensor:
    """dgain of no rows."""
    if summed:
        return torch.zeros(gain.shape, dtype=gain.dtype, device=gain.device)
    return torch.zeros((1, gain.shape[0]), dtype=torch.float32, device=gain.device)


def _rows(tensor):
    """[rows, columns] with unit inner stride: a view where the strides allow it, otherwise a copy. None for None."""
    if tensor is None:
        return None
    tensor = tensor.reshape(-1, tensor.shape[-1])
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] == 1 else tensor.contiguous()


def _copied(tensor: torch.Tensor | None) -> bool:
    """Whether `_rows` copies. Where it does not, a launch takes the tensor itself, of which only the address is
    used."""
    return tensor is not None and tensor.numel() > 0 and _rows(tensor).data_ptr() != tensor.data_ptr()

"""The public function clip_scale: the norm of all gradients, and the scale by which a step divides to clip them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import torch

from . import configs
from .arguments import check_grads, check_max_norm, check_scalar
from .launch import Launch, lean, signature
from .memory import packed
from .norm_kernel import _adamw_clip_kernel, _adamw_norm_kernel
from .tables import PointerTables, Tensors

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")


def clip_scale(
    grads: Sequence[torch.Tensor],
    max_norm: float,
    *,
    grad_scale: torch.Tensor | None = None,
    tables: PointerTables | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the 2-norm of all gradients together, and the scale by which to divide them so that it is at most
    max_norm.

        norm  = √(Σ g²) / grad_scale
        scale = grad_scale · max(1, (norm + 1e-6) / max_norm)

    as in `torch.nn.utils.clip_grad_norm_`, but the norm is not rounded to the gradients' dtype, and the gradients are
    not changed: `adamw(…, grad_scale=scale)` and GradScaler's protocol divide when they read the gradients anyway. Two
    launches and, for new addresses, a copy of their table to the device. The host does not synchronise, so the call can
    be captured in a CUDA graph, in which max_norm is a constant. Sums are in fp32 in an order that depends only on
    sizes and on alignment to 16 bytes: a repeated call gives the same bits. Not differentiable.

    grads       list of fp32, fp16 or bf16 tensors, any shapes and any mixture, at least one, all on one device; copied
                if not dense
    max_norm    a positive number; inf for the norm alone: scale is then grad_scale
    grad_scale  None or a fp32 tensor of one element by which the gradients were multiplied
    tables      a PointerTables that caches tables of addresses between calls; otherwise each call builds one

    Returns (norm, scale), fp32 scalars. For a finite max_norm both are nan if a gradient is nan, inf if Σ g² overflows.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, device or range, RuntimeError for CPU
    tensors outside Triton's interpreter.

    Source: Pascanu et al. 2013, arXiv:1211.5063, alg. 1.
    """
    check_grads(grads)
    check_max_norm(max_norm)
    if grad_scale is not None:
        check_scalar("grad_scale", grad_scale, grads[0].device, "clip_scale")
    if tables is not None and not isinstance(tables, PointerTables):
        raise TypeError(f"clip_scale: tables must be a PointerTables, got {type(tables).__name__}")
    with torch.no_grad():
        if lean(grads[0], *grads[1:], grad_scale):
            kept = PointerTables.of(0) if tables is None else tables
            return _clip(list(grads), float(max_norm), grad_scale, kept)
        return _clip_op(list(grads), float(max_norm), grad_scale, 0 if tables is None else tables.handle)


class _Clip:
    """The launches for gradients at given addresses, and the table of addresses that they read."""

    def __init__(self, grads: list[torch.Tensor], tables: PointerTables) -> None:
        self.device = grads[0].device
        config = configs.NORM
        given = Tensors(grads, grads, [], [], [], [], [0] * len(grads), stochastic=False)
        with torch.cuda.device_of(grads[0]):
            self.table = tables.build(given, config.block)
        self.ctas = len(self.table.cta_rows)
        self._norm = Launch(
            _adamw_norm_kernel,
            (self.ctas,),
            self.device,
            (),
            KINDS=self.table.kinds,
            BLOCK=config.block,
            SMALL=32 * config.num_warps,
            num_warps=config.num_warps,
        )
        self._clips: dict[Hashable, Launch] = {}

    def __call__(
        self, max_norm: float, grad_scale: torch.Tensor | None, tables: PointerTables
    ) -> tuple[torch.Tensor, torch.Tensor]:
        made = partial(torch.empty, dtype=torch.float32, device=self.device)
        sums, norm, scale = made(max(1, self.ctas)), made(()), made(())
        tables.use(self.table)
        if self.ctas:
            self._norm(self.table.rows, self.table.cta_rows, sums)
        key = signature(grad_scale)
        clip = self._clips.get(key)
        if clip is None:
            options: dict[str, Any] = dict(BLOCK=configs.SUMS_BLOCK, num_warps=8)
            clip = self._clips[key] = Launch(_adamw_clip_kernel, (1,), self.device, (self.ctas,), **options)
        clip(sums, grad_scale, norm, scale, max_norm)
        return norm, scale


def _clip(
    grads: list[torch.Tensor], max_norm: float, grad_scale: torch.Tensor | None, tables: PointerTables
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes (norm, scale) of checked gradients."""
    grads = [packed(grad) for grad in grads]
    key = ("norm", grads[0].device, *((g.data_ptr(), g.numel(), g.dtype) for g in grads))
    clip = tables.find(key)
    if clip is None:
        clip = _Clip(grads, tables)
        tables.keep(key, clip)
    return clip(max_norm, grad_scale, tables)


@torch.library.custom_op(f"{_NAMESPACE}::clip_scale", mutates_args=())
def _clip_op(
    grads: Sequence[torch.Tensor], max_norm: float, grad_scale: torch.Tensor | None, tables: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _clip(list(grads), max_norm, grad_scale, PointerTables.of(tables))


@_clip_op.register_fake
def _(grads, max_norm, grad_scale, tables):
    fp32 = {"dtype": torch.float32, "device": grads[0].device}
    return torch.empty((), **fp32), torch.empty((), **fp32)

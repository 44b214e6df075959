"""FSDP2's reduce-scatter, compressed: torch asks a module for its own by `FSDPModule.set_custom_reduce_scatter`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from .chunks import KINDS
from .exchange import reduce_scatter
from .transport import full_reduce_scatter


class CompressedReduceScatter:
    """A reduce-scatter that sends 8 or 4 bits an element, for one module of FSDP2.

        module.set_custom_reduce_scatter(CompressedReduceScatter("int8"))

    Each rank quantises what it has for every other one, in blocks of 256 as `gradient_compression` does, but once and
    not twice, and sums what it receives in fp32 in the order of the ranks. FSDP lays the shards of all parameters of a
    module one behind the other, so none is exempt for itself: modules of fewer than `min_numel` elements are reduced
    without compression.

    error_feedback keeps a residual of the whole gradient of the module, not of its shard: 2 bytes a parameter and rank,
    which is why it is off unless asked for. `residual` may be saved and set.

    Raises ValueError for an unknown kind, and for a reduction that is neither a sum nor a mean.
    """

    def __init__(self, kind: str = "int8", *, error_feedback: bool = False, min_numel: int = 2048) -> None:
        if kind not in KINDS:
            raise ValueError(f"CompressedReduceScatter: kind must be one of {', '.join(KINDS)}, got {kind!r}")
        self.kind, self.error_feedback, self.min_numel = kind, error_feedback, min_numel
        self.residual: torch.Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for input or output, as FSDP asks for it."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """On the current stream, which is FSDP's for this; nothing is left to wait for."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"CompressedReduceScatter: op must be SUM or AVG, got {op}")
        average = op == dist.ReduceOp.AVG
        if input_tensor.numel() < self.min_numel:
            full_reduce_scatter(output_tensor, input_tensor, group=group)
            if average:
                output_tensor.div_(group.size())
            return
        if self.error_feedback and (self.residual is None or self.residual.shape != input_tensor.shape):
            self.residual = torch.zeros_like(input_tensor, dtype=torch.bfloat16)
        residual = self.residual if self.error_feedback else None
        reduce_scatter(output_tensor, input_tensor, residual, group, self.kind, average)


def compress_fsdp(
    model: torch.nn.Module, kind: str = "int8", *, error_feedback: bool = False, min_numel: int = 2048
) -> dict[str, CompressedReduceScatter]:
    """Gives every FSDP module of `model` a CompressedReduceScatter of its own; returns them by the modules' names.

    Raises ValueError where `fully_shard` has been applied to none.
    """
    from torch.distributed.fsdp import FSDPModule

    made = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            made[name] = CompressedReduceScatter(kind, error_feedback=error_feedback, min_numel=min_numel)
            # Its base class there is private; what is asked of it are the two methods.
            module.set_custom_reduce_scatter(cast(Any, made[name]))
    if not made:
        raise ValueError("compress_fsdp: model must have a module that fully_shard has been applied to, got none")
    return made

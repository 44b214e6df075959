"""A compressed reduce-scatter for FSDP2, set by `FSDPModule.set_custom_reduce_scatter`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from .chunks import KINDS
from .exchange import reduce_scatter
from .transport import full_reduce_scatter


class CompressedReduceScatter:
    """A reduce-scatter that sends 8 or 4 bits per element, for one module of FSDP2.

        module.set_custom_reduce_scatter(CompressedReduceScatter("int8"))

    Each rank quantises the chunk for every other rank, in blocks of 256 as `gradient_compression` does, but only once.
    It sums the chunks that it receives in fp32 in the order of the ranks. FSDP concatenates the shards of a module's
    parameters, so no single parameter is exempt: modules of fewer than `min_numel` elements are reduced without
    compression.

    error_feedback keeps a residual of the module's entire gradient, not of its shard: 2 bytes per parameter and rank.
    It is therefore off by default. `residual` may be saved and set. FSDP passes the gradients of the parameters that
    have one, and not which these are. So with error_feedback always the same parameters of a module must have one: if
    others of the same total size have, the errors of the former are added to their gradients. If the size changes, the
    residual begins at zero again.

    Raises ValueError for an unknown kind, and for a reduction that is neither a sum nor a mean.
    """

    def __init__(self, kind: str = "int8", *, error_feedback: bool = False, min_numel: int = 2048) -> None:
        if kind not in KINDS:
            raise ValueError(f"CompressedReduceScatter: kind must be one of {', '.join(KINDS)}, got {kind!r}")
        self.kind, self.error_feedback, self.min_numel = kind, error_feedback, min_numel
        self.residual: torch.Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocates memory for the input or output. FSDP calls this."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Runs the reduce-scatter on the current stream, which is FSDP's stream for it. Returns no work handle."""
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
    """Sets a separate CompressedReduceScatter on every FSDP module of `model`. Arguments are those of that class.

    Returns a dict of them by the modules' names.

    Raises ValueError if `fully_shard` has been applied to no module, and as CompressedReduceScatter.
    """
    from torch.distributed.fsdp import FSDPModule

    made = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            made[name] = CompressedReduceScatter(kind, error_feedback=error_feedback, min_numel=min_numel)
            # The base class in torch is private; only its two methods are required.
            module.set_custom_reduce_scatter(cast(Any, made[name]))
    if not made:
        raise ValueError("compress_fsdp: model must have a module that fully_shard has been applied to, got none")
    return made

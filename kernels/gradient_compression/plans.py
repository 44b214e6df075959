"""Launch plans: what of an exchange does not change with the tensors' contents and addresses."""

from __future__ import annotations

import torch
import triton

from . import configs
from .checks import INTERPRETED
from .chunks import Chunks
from .configs import BLOCK
from .kernel import (
    _gradient_compression_dequantize_kernel,
    _gradient_compression_quantize_kernel,
    _gradient_compression_reduce_kernel,
)
from .launch import Launch


def readable(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """As the kernels read it: bf16 as its bits in Triton's interpreter, which rounds to bf16 wrongly."""
    if INTERPRETED and tensor is not None and tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16)
    return tensor


class Stages:
    """The three launches over flat tensors of `chunks.numel` elements on `device`, of rank `rank`.

    `offset` is where this rank's chunk begins in each rank's quantised tensor where `peers` are read in place by the
    table of their addresses; without peers the parts lie one behind the other, as collectives deliver them. `scatter`:
    the reduced chunk is stored as numbers and not quantised again.
    """

    def __init__(
        self, chunks: Chunks, rank: int, device: torch.device, average: bool, peers: bool = False, scatter: bool = False
    ) -> None:
        # The interpreter stands for an sm_80.
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
        config = configs.pick_config(chunks.blocks, capability)
        options = {
            "KIND": chunks.kind,
            "NATIVE": capability >= (8, 9),
            "BLOCK": BLOCK,
            "ROWS": config.rows,
            "num_warps": config.num_warps,
            # Each result is rounded as PyTorch rounds it, so that all GPUs and the reference agree to the bit.
            "enable_fp_fusion": False,
        }
        ctas = triton.cdiv(chunks.blocks, config.rows)
        begin = rank * chunks.elements
        own = max(0, min(chunks.elements, chunks.numel - begin))
        place = (chunks.blocks, chunks.scales_at)
        self.chunks = chunks
        self._quantize = Launch(
            _gradient_compression_quantize_kernel,
            (ctas, chunks.world),
            device,
            (chunks.numel, chunks.elements, *place, chunks.bytes),
            **options,
        )
        self._reduce = Launch(
            _gradient_compression_reduce_kernel,
            (ctas,),
            device,
            (own, chunks.bytes, begin // chunks.elements * chunks.bytes if peers else 0, *place, begin),
            REQUANTIZE=not scatter,
            AVERAGE=average,
            WORLD=chunks.world,
            **options,
        )
        self._dequantize = Launch(
            _gradient_compression_dequantize_kernel,
            (ctas, chunks.world),
            device,
            (chunks.numel, chunks.elements, chunks.bytes, 0, *place),
            **options,
        )

    def quantize(self, x: torch.Tensor, residual: torch.Tensor | None, wire: torch.Tensor) -> None:
        """x + residual into `wire`, a chunk for each rank; the residual becomes what that loses."""
        self._quantize(readable(x), readable(residual), wire)

    def reduce(
        self, source: torch.Tensor, table: torch.Tensor | None, residual: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """This rank's chunk of every rank, from `source` or from the addresses in `table`, into `out`."""
        self._reduce(source, table, readable(residual), readable(out))

    def dequantize(self, source: torch.Tensor, table: torch.Tensor | None, x: torch.Tensor) -> None:
        """The reduced chunks, from `source` or from the addresses in `table`, into x."""
        self._dequantize(source, table, readable(x))

"""Launch plans: everything about an exchange that does not depend on the tensors' contents and addresses."""

from __future__ import annotations

from typing import Any

import torch
import triton

from . import configs
from .checks import INTERPRETED
from .chunks import Chunks
from .configs import BLOCK
from .kernel import (
    _gradient_compression_alone_kernel,
    _gradient_compression_dequantize_kernel,
    _gradient_compression_quantize_kernel,
    _gradient_compression_reduce_kernel,
)
from .launch import Launch


def readable(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor as the kernels read it. In Triton's interpreter, which rounds to bf16 wrongly, bf16 is viewed as its
    bits."""
    if INTERPRETED and tensor is not None and tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16)
    return tensor


def _options(config: configs.Config, kind: str, capability: tuple[int, int]) -> dict[str, Any]:
    """The options that all kernels have."""
    return {
        "KIND": kind,
        "NATIVE": capability >= (8, 9),
        "BLOCK": BLOCK,
        "ROWS": config.rows,
        "num_warps": config.num_warps,
        # Each result is rounded as in PyTorch, so that all GPUs and the reference agree bit for bit.
        "enable_fp_fusion": False,
    }


def _capability(device: torch.device) -> tuple[int, int]:
    # The interpreter is treated as an sm_80 GPU.
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


class Alone:
    """The one launch of a single rank over flat tensors of `numel` elements on `device`."""

    def __init__(self, numel: int, kind: str, device: torch.device) -> None:
        blocks, capability = triton.cdiv(numel, BLOCK), _capability(device)
        config = configs.pick_config(blocks, capability)
        grid = (triton.cdiv(blocks, config.rows),)
        options = _options(config, kind, capability)
        self._launch = Launch(_gradient_compression_alone_kernel, grid, device, (numel,), **options)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Quantises and dequantises x + residual twice, into x. The residual becomes the error."""
        self._launch(readable(x), readable(residual))


class Stages:
    """The three launches of rank `rank` over flat tensors of `chunks.numel` elements on `device`.

    peers    the ranks write into each other's memory, through tables of addresses; otherwise parts are consecutive, as
             collectives require and deliver them
    scatter  the reduced chunk is stored as floating point and not quantised again
    """

    def __init__(
        self, chunks: Chunks, rank: int, device: torch.device, average: bool, peers: bool = False, scatter: bool = False
    ) -> None:
        capability = _capability(device)
        config = configs.pick_config(chunks.blocks, capability)
        options = {**_options(config, chunks.kind, capability), "WORLD": chunks.world}
        ctas = triton.cdiv(chunks.blocks, config.rows)
        begin = rank * chunks.elements
        own = max(0, min(chunks.elements, chunks.numel - begin))
        sizes = (chunks.numel, chunks.elements)
        parts = (chunks.blocks, chunks.scales_at, chunks.bytes, rank)
        read = chunks.world - 1 if peers else chunks.world
        self.chunks = chunks
        self._quantize = Launch(
            _gradient_compression_quantize_kernel, (ctas * chunks.world,), device, (*sizes, *parts), **options
        )
        self._reduce = Launch(
            _gradient_compression_reduce_kernel,
            (ctas,),
            device,
            (own, begin, *parts),
            REQUANTIZE=not scatter,
            AVERAGE=average,
            **options,
        )
        self._dequantize = Launch(
            _gradient_compression_dequantize_kernel,
            (ctas * read,),
            device,
            (*sizes, *parts),
            OTHERS=peers,
            **options,
        )

    def quantize(
        self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, table: torch.Tensor | None = None
    ) -> None:
        """Quantises x + residual into one chunk per rank: consecutively into `out` or, if `table` has each rank's
        address, to that address in this rank's slot. The residual becomes the quantisation error."""
        self._quantize(readable(x), readable(residual), out, table)

    def reduce(
        self,
        source: torch.Tensor,
        residual: torch.Tensor | None,
        out: torch.Tensor,
        table: torch.Tensor | None = None,
        x: torch.Tensor | None = None,
    ) -> None:
        """Reduces all ranks' versions of this rank's chunk, in `source`, into `out` or, if `table` has each rank's
        address, to that address in this rank's slot, and into this rank's chunk of x."""
        self._reduce(source, readable(residual), readable(out), table, readable(x))

    def dequantize(self, source: torch.Tensor, x: torch.Tensor) -> None:
        """Dequantises the reduced chunks in `source` into x; with peers, only those of the other ranks."""
        self._dequantize(source, readable(x))

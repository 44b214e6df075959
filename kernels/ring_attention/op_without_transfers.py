"""Ring attention that moves nothing, for measuring what its transfers take.

Copies in the place of transfers would run on SMs, behind kernels that are persistent: they would take longer than the
transfers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
import torch.distributed as dist

from .blocks import Ring
from .op import _agreed, _RingAttention
from .transport import Messages, Pending, Piece, Transport


class _Done:
    def wait(self) -> None:
        pass


class NoTransfers(Messages):
    """Kernels compute on what lies in the receive buffers, which is most of the time what another call left there."""

    def fetch(
        self, partner: int, pieces: Sequence[tuple[Piece, torch.Tensor]], to: int, sends: Sequence[Piece]
    ) -> Pending:
        return _Done()

    def give(
        self,
        slot: int,
        owner: int,
        given: Sequence[torch.Tensor],
        source: int,
        into: Sequence[torch.Tensor],
    ) -> Pending:
        return _Done()


class _Ring(Ring):
    def transport(
        self, lengths: Sequence[int], block: Sequence[torch.Tensor], given: Sequence[Sequence[int]] = ()
    ) -> Transport:
        return NoTransfers(self.group, block[0].device)


def ring_attention_without_transfers(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "zigzag",
    q_lengths: Sequence[int] | None = None,
    k_lengths: Sequence[int] | None = None,
    rotate: str = "auto",
) -> torch.Tensor:
    """`ring_attention` of more than one rank without its checks: the same kernels on the same shapes, forward and
    backward. Its results are wrong."""
    told = [None if lengths is None else tuple(lengths) for lengths in (q_lengths, k_lengths)]
    ring = _agreed(q, k, v, group, (causal, scale, layout, rotate, "messages"), *told)
    still = _Ring(**{field.name: getattr(ring, field.name) for field in fields(ring)})
    return _RingAttention.apply(q, k, v, still)[0]

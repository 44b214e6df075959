"""Moves blocks between ranks while kernels run: by messages of the process group here, by reads of peers' memory in
`peer_reads`.

Both have the same calls, which every rank makes in the same order; they return at once and order themselves after what
the current stream has been given.

    publish(tensors)                   this rank's block, whose first dimension is rows
    fetch(partner, pieces, to, sends)  reads pieces of the partner's block; rank `to` reads `sends` of this rank's
    staging(slot, shapes)              fp32 tensors for what belongs to another rank
    give(slot, owner, given, source, into)    hands `given`, from staging(slot), to its owner; `source` has `into` ours
    close()                            nobody reads this rank's memory any more, from here on in the stream

A slot may be filled again once the `give` after its own has been waited for: two slots in use, and a third to fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
import torch.distributed as dist

from .rows import copied

SLOTS = 3


@dataclass(frozen=True)
class Piece:
    """Rows start:stop of tensor `index` of a published block."""

    index: int
    start: int
    stop: int


class Pending(Protocol):
    def wait(self) -> None:
        """What the current stream is given from now on runs after the transfer."""


class Transport(Protocol):
    def publish(self, tensors: Sequence[torch.Tensor]) -> None: ...

    def fetch(
        self, partner: int, pieces: Sequence[tuple[Piece, torch.Tensor]], to: int, sends: Sequence[Piece]
    ) -> Pending: ...

    def staging(self, slot: int, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]: ...

    def give(
        self,
        slot: int,
        owner: int,
        given: Sequence[torch.Tensor],
        source: int,
        into: Sequence[torch.Tensor],
    ) -> Pending: ...

    def close(self) -> None: ...


class Messages:
    """Sends and receives of the process group: of NCCL on a stream of its own, of gloo by its threads."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group, self.device = group, device
        self.block: list[torch.Tensor] = []
        self.slots: dict[int, torch.Tensor] = {}

    def publish(self, tensors: Sequence[torch.Tensor]) -> None:
        self.block = [t if t.is_contiguous() else copied(t) for t in tensors]

    def fetch(
        self, partner: int, pieces: Sequence[tuple[Piece, torch.Tensor]], to: int, sends: Sequence[Piece]
    ) -> Pending:
        out = [self.block[piece.index][piece.start : piece.stop] for piece in sends]
        return self._exchange(out, to, [tensor for _, tensor in pieces], partner)

    def staging(self, slot: int, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        numbers = sum(map(prod, shapes))
        if slot not in self.slots or self.slots[slot].numel() < numbers:
            self.slots[slot] = torch.empty(numbers, dtype=torch.float32, device=self.device)
        flat = self.slots[slot][:numbers].split([prod(shape) for shape in shapes])
        return [part.view(*shape) for part, shape in zip(flat, shapes, strict=True)]

    def give(
        self,
        slot: int,
        owner: int,
        given: Sequence[torch.Tensor],
        source: int,
        into: Sequence[torch.Tensor],
    ) -> Pending:
        return self._exchange(given, owner, into, source)

    def close(self) -> None:
        self.block, self.slots = [], {}

    def _exchange(
        self, sent: Sequence[torch.Tensor], to: int, received: Sequence[torch.Tensor], source: int
    ) -> Pending:
        both = [(dist.isend, tensor, to) for tensor in sent] + [(dist.irecv, tensor, source) for tensor in received]
        ops = [dist.P2POp(op, t, group=self.group, group_peer=peer) for op, t, peer in both if t.numel()]
        return _Works(dist.batch_isend_irecv(ops) if ops else [], [*sent, *received])


@dataclass
class _Works:
    works: list
    tensors: list[torch.Tensor]  # kept until they have been sent and received

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works, self.tensors = [], []


class LocalCopies(Messages):
    """Sends nothing: where a block should arrive, as much of this rank's own is copied, on a stream of its own. Results
    are wrong; what a run with transfers takes longer is what they do not overlap with."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        super().__init__(group, device)
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def fetch(
        self, partner: int, pieces: Sequence[tuple[Piece, torch.Tensor]], to: int, sends: Sequence[Piece]
    ) -> Pending:
        own = [self.block[piece.index][: piece.stop - piece.start] for piece, _ in pieces]
        return self._copy(own, [tensor for _, tensor in pieces])

    def give(
        self,
        slot: int,
        owner: int,
        given: Sequence[torch.Tensor],
        source: int,
        into: Sequence[torch.Tensor],
    ) -> Pending:
        return self._copy(given, into)

    def _copy(self, sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> Pending:
        if self.side:
            self.side.wait_stream(torch.cuda.current_stream(self.side.device))
        with torch.cuda.stream(self.side):
            for mine, copy in zip(sources, into, strict=True):
                count = min(mine.numel(), copy.numel())
                copy.view(-1)[:count] = mine.reshape(-1)[:count]
        return Event(self.side.record_event(), self.side.device) if self.side else _Works([], [])


@dataclass
class Event:
    event: torch.cuda.Event
    device: torch.device

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)


def members(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group itself, or that of all ranks."""
    chosen = group or dist.group.WORLD
    assert chosen is not None
    return chosen

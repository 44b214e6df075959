"""Moves blocks between ranks while kernels run: by messages of the process group here, by writes into the memory of
peers in `peer_writes`.

All transports have the same methods, which every rank calls in the same order. They are asynchronous, and ordered after
the work on the current stream. A room is a receive buffer. Tensors are [B, H, rows, …].

    sendable(x)                                     x, or a copy of it whose rows can be sent
    room(index, blocks, rank)                       tensors in room `index` of `rank`, where transfers to it arrive
    exchange(kind, sent, to, places, into, source)  sends to rank `to`, into its `places`; receives from `source`, in
                                                    `into`
    follow(stream)                                  later transfers also wait for the work so far on this stream
    close()                                         ends a call: later work on the current stream runs after its
                                                    transfers

All work that reads a room must be enqueued, on the current stream or on one passed to `follow`, before the next
`exchange` into it. `kind` is BLOCKS or SUMS. Transfers of one kind run in order. With peer writes, transfers of one
kind do not wait for those of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist

from .rows import copied

ALIGNMENT = 256
BLOCKS, SUMS = KINDS = 0, 1  # input blocks of kernels, and contributions to the sums of another rank

Block = tuple[tuple[int, ...], torch.dtype]  # the shape and dtype of a tensor that moves


class Pending(Protocol):
    def wait(self) -> None:
        """Makes later work on the current stream run after the transfer."""


class Transport(Protocol):
    def sendable(self, x: torch.Tensor) -> torch.Tensor: ...

    def room(self, index: int, blocks: Sequence[Block], rank: int | None = None) -> list[torch.Tensor]: ...

    def exchange(
        self,
        kind: int,
        sent: Sequence[torch.Tensor],
        to: int,
        places: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        source: int,
    ) -> Pending: ...

    def follow(self, stream: torch.cuda.Stream) -> None: ...

    def close(self) -> None: ...


class Messages:
    """The transport by send and receive of the process group: NCCL on its own stream, gloo in its threads."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, rooms: Sequence[Sequence[Block]]) -> None:
        self.group, self.device = group, device
        self.sizes = [room_bytes(blocks) for blocks in rooms]
        self.rooms: dict[int, torch.Tensor] = {}

    def sendable(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def room(self, index: int, blocks: Sequence[Block], rank: int | None = None) -> list[torch.Tensor]:
        """Returns this rank's room for any `rank`, as nothing is written into the rooms of others."""
        if index not in self.rooms:
            self.rooms[index] = torch.empty(self.sizes[index], dtype=torch.uint8, device=self.device)
        return placed(self.rooms[index], blocks)

    def exchange(
        self,
        kind: int,
        sent: Sequence[torch.Tensor],
        to: int,
        places: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        source: int,
    ) -> Pending:
        out = [(dist.isend, t if t.is_contiguous() else copied(t), to) for t in sent]
        arriving = [(t, t if t.is_contiguous() else torch.empty_like(t, memory_format=CONTIGUOUS)) for t in into]
        both = out + [(dist.irecv, landed, source) for _, landed in arriving]
        ops = [dist.P2POp(op, t, group=self.group, group_peer=peer) for op, t, peer in both if t.numel()]
        copies = [(t, landed) for t, landed in arriving if t is not landed]
        return _Works(dist.batch_isend_irecv(ops) if ops else [], [t for _, t, _ in both], copies)

    def follow(self, stream: torch.cuda.Stream) -> None:
        torch.cuda.current_stream(self.device).wait_stream(stream)

    def close(self) -> None:
        self.rooms = {}


CONTIGUOUS = torch.contiguous_format


@dataclass
class _Works:
    works: list = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)  # kept alive until they have been sent and received
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # (destination, received)

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        for into, landed in self.copies:
            into.copy_(landed)
        self.works, self.tensors, self.copies = [], [], []


class Nothing(Messages):
    """Sends nothing, so results are wrong. The time that a call with transfers takes longer is not overlapped. Copies
    within a GPU instead would run on its SMs, after persistent kernels, and take longer than transfers. Rooms hold
    random values, because kernels are faster on zeros and slower on NaN."""

    kept: ClassVar[dict[tuple[torch.device, int], torch.Tensor]] = {}

    def room(self, index: int, blocks: Sequence[Block], rank: int | None = None) -> list[torch.Tensor]:
        memory = self.kept.get((self.device, index))
        if memory is None or memory.numel() < self.sizes[index]:
            numbers = torch.randn(-(-self.sizes[index] // 2), device=self.device)
            memory = self.kept[self.device, index] = numbers.to(torch.bfloat16).view(torch.uint8)
        return placed(memory, blocks)

    def exchange(
        self,
        kind: int,
        sent: Sequence[torch.Tensor],
        to: int,
        places: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        source: int,
    ) -> Pending:
        return _Works()

    def follow(self, stream: torch.cuda.Stream) -> None:
        """Does nothing, as nothing is sent."""


def room_bytes(blocks: Sequence[Block]) -> int:
    """Returns the bytes of a room for these blocks."""
    return sum(aligned(prod(shape) * dtype.itemsize) for shape, dtype in blocks)


def placed(memory: torch.Tensor, blocks: Sequence[Block], first: int = 0) -> list[torch.Tensor]:
    """Returns tensors placed one after another in `memory`, from byte `first` on."""
    found = []
    for shape, dtype in blocks:
        size = prod(shape) * dtype.itemsize
        found.append(memory.narrow(0, first, size).view(dtype).view(shape))
        first += aligned(size)
    return found


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def members(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Returns the group itself, or the default group."""
    chosen = group or dist.group.WORLD
    assert chosen is not None
    return chosen

"""Moves blocks between ranks while kernels run: reads of peers' memory, or messages through the process group.

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

import socket
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
import torch.distributed as dist

from .rows import copied

SLOTS = 3
_ALIGNMENT = 256
_ARENAS_KEPT = 4


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


class PeerReads:
    """Copies from the peers' memory by the copy engines, on a stream of its own (torch's symmetric memory).

    A rank's block and its slots lie in memory that the others can read. Barriers on that stream, which take one warp
    for an instant, say when a block has been written and when all have read it. No multicast is used.

    lengths     rows of every rank's block, for their places in the peers' memory
    rows        shape and dtype of a row of each tensor of the block
    slot_bytes  what a contribution takes at most (`slot_bytes`)
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        lengths: Sequence[int],
        rows: Sequence[tuple[torch.Size, torch.dtype]],
        slot_bytes: int,
    ) -> None:
        self.lengths, self.rows, self.slot_bytes = lengths, rows, slot_bytes
        self.block_bytes = max(self._places(rank)[-1] for rank in range(len(lengths)))
        self.arena = _arena(members(group), device, self.block_bytes + SLOTS * self.slot_bytes)
        self.side = self.arena.stream

    def publish(self, tensors: Sequence[torch.Tensor]) -> None:
        self.side.wait_stream(torch.cuda.current_stream(self.side.device))
        with torch.cuda.stream(self.side):
            for index, tensor in enumerate(tensors):
                copied(tensor, self._peer(self.arena.handle.rank, index))
            self.arena.handle.barrier()
        # A persistent kernel would take every SM before the barrier has one, and no fetch would begin until its end.
        torch.cuda.current_stream(self.side.device).wait_stream(self.side)

    def fetch(
        self, partner: int, pieces: Sequence[tuple[Piece, torch.Tensor]], to: int, sends: Sequence[Piece]
    ) -> Pending:
        def read() -> None:
            for piece, destination in pieces:
                destination.copy_(self._peer(partner, piece.index)[piece.start : piece.stop])

        return self._beside(read)

    def staging(self, slot: int, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        return self._slot(self.arena.handle.rank, slot, shapes)

    def give(
        self,
        slot: int,
        owner: int,
        given: Sequence[torch.Tensor],
        source: int,
        into: Sequence[torch.Tensor],
    ) -> Pending:
        def read() -> None:
            self.arena.handle.barrier()
            for theirs, mine in zip(self._slot(source, slot, [t.shape for t in into]), into, strict=True):
                mine.copy_(theirs)

        return self._beside(read)

    def close(self) -> None:
        with torch.cuda.stream(self.side):
            self.arena.handle.barrier()

    def _beside(self, work: Callable[[], None]) -> Pending:
        self.side.wait_stream(torch.cuda.current_stream(self.side.device))
        with torch.cuda.stream(self.side):
            work()
        return _Event(self.side.record_event(), self.side.device)

    def _places(self, rank: int) -> list[int]:
        """Where the tensors of a rank's block begin, in bytes, and where the block ends."""
        places = [0]
        for shape, dtype in self.rows:
            places.append(places[-1] + _aligned(self.lengths[rank] * prod(shape) * dtype.itemsize))
        return places

    def _peer(self, rank: int, index: int) -> torch.Tensor:
        shape, dtype = self.rows[index]
        return self.arena.view(rank, self._places(rank)[index], (self.lengths[rank], *shape), dtype)

    def _slot(self, rank: int, slot: int, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        first, found = self.block_bytes + slot * self.slot_bytes, []
        for shape in shapes:
            found.append(self.arena.view(rank, first, tuple(shape), torch.float32))
            first += _aligned(4 * prod(shape))
        return found


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
        return _Event(self.side.record_event(), self.side.device) if self.side else _Works([], [])


def slot_bytes(shapes: Sequence[Sequence[int]]) -> int:
    """What a slot takes for tensors of these shapes."""
    return sum(_aligned(4 * prod(shape)) for shape in shapes)


@dataclass
class _Event:
    event: torch.cuda.Event
    device: torch.device

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)


class _Arena:
    """Memory of one rank that its group can read, and the stream on which all transfers of the group run."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, size: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.memory = symmetric.empty(size, dtype=torch.uint8, device=device)
        self.handle = symmetric.rendezvous(self.memory, group.group_name)
        # The memory may lie anywhere in a pool's segment, which `get_remote_tensor` knows and `get_buffer` does not.
        self.parts = [
            self.memory if rank == self.handle.rank else self.handle.get_remote_tensor(rank, (size,), torch.uint8)
            for rank in range(self.handle.world_size)
        ]
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.size, self.group = size, group  # the group is kept, so that no other has its id

    def view(self, rank: int, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.parts[rank].narrow(0, first, prod(shape) * dtype.itemsize).view(dtype).view(shape)


_ARENAS: OrderedDict[tuple[int, torch.device], _Arena] = OrderedDict()


def _arena(group: dist.ProcessGroup, device: torch.device, size: int) -> _Arena:
    """The group's arena, a new one where that is too small. All ranks ask for the same sizes in the same order, so all
    take the same way here: to make one is a collective call."""
    key = id(group), device
    found = _ARENAS.pop(key, None)
    if found is None or found.size < size:
        if found is not None:
            found.stream.synchronize()  # behind the last barrier: nobody reads it
            del found
        found = _Arena(group, device, size)
    _ARENAS[key] = found
    while len(_ARENAS) > _ARENAS_KEPT:
        _, oldest = _ARENAS.popitem(last=False)
        oldest.stream.synchronize()
    return found


def release() -> None:
    """Frees the memory that transfers keep between calls. Every rank of a group must do so at the same place."""
    for arena in _ARENAS.values():
        arena.stream.synchronize()
    _ARENAS.clear()


def peer_reads_reason(devices: Sequence[tuple[str, str, int]]) -> str | None:
    """Why peers cannot read each other's memory, or None. `devices` has host, backend and GPU index of each rank."""
    hosts, backends = {host for host, _, _ in devices}, {backend for _, backend, _ in devices}
    if backends != {"nccl"}:
        return f"the group's backend is {', '.join(sorted(backends))}, not nccl"
    if len(hosts) > 1:
        return "the ranks are on several hosts"
    indices = [index for _, _, index in devices]
    if len(set(indices)) < len(indices):
        return "ranks share a GPU"
    if max(indices) >= torch.cuda.device_count():
        return "this process does not see the GPUs of all ranks"
    if not all(torch.cuda.can_device_access_peer(a, b) for a in indices for b in indices if a != b):
        return "a GPU cannot read another's memory"
    return None


def where(group: dist.ProcessGroup | None, device: torch.device) -> tuple[str, str, int]:
    """Host, backend for that device and GPU index of this rank: what `peer_reads_reason` takes. RuntimeError where the
    group has no backend for the device."""
    backend = members(group)._get_backend(device).name()
    return socket.gethostname(), backend, device.index or 0


def members(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group itself, or that of all ranks."""
    chosen = group or dist.group.WORLD
    assert chosen is not None
    return chosen


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT

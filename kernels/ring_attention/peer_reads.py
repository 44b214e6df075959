"""Reads of peers' memory by copy engines, through torch's symmetric memory."""

from __future__ import annotations

import socket
from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import prod

import torch
import torch.distributed as dist

from .rows import copied
from .transport import SLOTS, Event, Pending, Piece, members

_ALIGNMENT = 256
_ARENAS_KEPT = 4


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
        self.arena = _arena(members(group), device, max(_ALIGNMENT, self.block_bytes + SLOTS * self.slot_bytes))
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
        return Event(self.side.record_event(), self.side.device)

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


def slot_bytes(shapes: Sequence[Sequence[int]]) -> int:
    """What a slot takes for tensors of these shapes."""
    return sum(_aligned(4 * prod(shape)) for shape in shapes)


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


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
